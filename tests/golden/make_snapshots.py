"""Write `snapshots.safetensors`: one small snapshot through every codec, with the entries that went in.

    python -m tests.golden.make_snapshots

Run it when the format version changes, and keep the file of the version before: a later reader then proves that it
refuses what it cannot read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from precis.container import Packed, codecs_of, pack
from precis.families import Rotary
from precis.fingerprint import FORMAT_VERSION
from precis.rates import Coding
from tests.precis.build import attached, cut, read, tokens

FILE = Path(__file__).parent / f"snapshots-v{FORMAT_VERSION}.safetensors"
N_TOKENS, LIMIT = 260, 45_000


def main() -> None:
    """Write the file."""
    model = attached()
    rotary = Rotary(model, 512)
    keep = torch.rand(4, 2, N_TOKENS, generator=torch.Generator().manual_seed(0)) < 0.6
    snapshot = cut(read(model, tokens(N_TOKENS)), keep)
    transform = model.transform
    assert transform is not None
    parts: dict[str, Tensor] = {"keys": snapshot.keys, "values": snapshot.values, "positions": snapshot.positions}
    parts |= {f"transform.{name}": table for name, table in transform.tables().items()}
    for name, codec in codecs_of(model).items():
        if name == "tc":
            packed = Coding.of(snapshot, transform, torch.zeros(4, N_TOKENS), rotary).within(LIMIT)
        else:
            packed = pack(snapshot, codec, rotary)
        parts |= {f"{name}.{piece}": found for piece, found in pieces_of(packed).items()}
    safetensors.torch.save_file({name: part.contiguous() for name, part in parts.items()}, FILE)


def pieces_of(packed: Packed) -> dict[str, Tensor]:
    """Manifest and blobs as bytes."""
    every = {"manifest": packed.manifest, **{str(index): blob for index, blob in enumerate(packed.blobs)}}
    return {name: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for name, data in every.items()}


if __name__ == "__main__":
    main()
