"""Snapshots that were written once are still read, or refused in words: never read wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from precis.container import CODECS, Packed, codecs_of
from precis.core import Snapshot
from precis.errors import SnapshotStale
from precis.families import Model, Rotary
from precis.fingerprint import FORMAT_VERSION
from precis.reader import load
from precis.transform import Transform
from tests.precis.build import attached

FILES = sorted((Path(__file__).parents[1] / "golden").glob("snapshots-v*.safetensors"))
FAR = {"raw16": 0.01, "think": 1.0, "int8": 0.02, "int4": 0.2, "int4-hadamard": 0.2, "int3": 0.35, "int2": 0.8}
FAR |= {"minikv": 0.8, "tc": 0.3}
NEWER = ("think", "minikv")  # than version 4


def stored(file: Path, codec: str) -> tuple[Model, Packed, dict[str, Tensor]]:
    """The model that reads it, one codec's bytes, and what is known of them."""
    parts = safetensors.torch.load_file(file)
    tables = {name.removeprefix("transform."): part for name, part in parts.items() if name.startswith("transform.")}
    model = replace(attached(), transform=Transform.of(tables, fingerprint="c0de"))
    blobs = [parts[f"{codec}.{index}"] for index in range(len(parts)) if f"{codec}.{index}" in parts]
    manifest = parts[f"{codec}.manifest"].numpy().tobytes()
    return model, Packed(manifest, tuple(blob.numpy().tobytes() for blob in blobs)), parts


def read(model: Model, packed: Packed) -> Snapshot:
    return load(model, Rotary(model, 512), packed, "f")


def test_the_present_version_has_a_file_with_every_codec() -> None:
    assert any(f"-v{FORMAT_VERSION}." in file.name for file in FILES)
    assert set(FAR) == set(codecs_of(attached())) == {*CODECS, "tc"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("codec", FAR)
def test_what_was_written_once_is_read_or_refused(file: Path, codec: str) -> None:
    old = f"-v{FORMAT_VERSION}." not in file.name
    if old and codec in NEWER:
        pytest.skip("there was no such codec")
    model, packed, parts = stored(file, codec)
    if old:
        with pytest.raises(SnapshotStale, match="format version"):
            read(model, packed)
        return
    found = read(model, packed)
    assert torch.equal(found.positions, parts["positions"])
    for got, expected in ((found.keys, parts["keys"]), (found.values, parts["values"])):
        assert float((got - expected).abs().max()) < FAR[codec] * float(expected.abs().max())
        assert float((got - expected).norm() / expected.norm()) < FAR[codec] / 2
