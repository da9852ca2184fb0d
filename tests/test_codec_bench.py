"""The codec bench counts every byte, and compares with what the full cache says."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.baselines import kvtc_like
from benchmarks.codec import rows_of, table, transform_of
from benchmarks.quality.corpus import Question, Text
from precis.axes import measure
from workers.models import Served, serve


@pytest.fixture(scope="module")
def served(tiny_folder: Path) -> Served:
    return serve("tiny", str(tiny_folder), torch.device("cpu"), torch.float32)


def words(n_bytes: int, seed: int) -> str:
    """A text of so many bytes; the tiny model's tokens are bytes."""
    chance = random.Random(seed)
    found = " ".join(chance.choice(("sea", "harbour", "mill", "stone", "winter", "the", "of")) for _ in range(n_bytes))
    return found[:n_bytes]


def test_ways_are_compared_at_the_bytes_they_take(served: Served, tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text(words(250, seed=index))
    arguments = Namespace(
        calibration=tmp_path,
        differentiated=1,
        block_layers=2,
        rank=96,
        ratios="3,5",
        policies="kvzip",
        cachegen=True,
    )
    file = tmp_path / "made" / "t.safetensors"
    transform = transform_of(served, file, arguments, measure)
    again = transform_of(served, file, arguments, measure)  # from its file
    assert torch.equal(again.scales, transform.scales)
    kvtc = transform_of(served, tmp_path / "kvtc.safetensors", arguments, kvtc_like)
    axes = kvtc.axes[..., :10]
    leading = axes.reshape(axes.shape[0], 2, 2, -1, 10).square().sum((1, 3))  # block, kind, axis
    assert float(leading.min(1).values.max()) < 1e-3  # of keys or of values, never of both
    question = Question("q", "fact", "Which?", "It is", ("seven",))
    text = Text("a", words(300, seed=9), words(40, seed=10), (question,))
    rows = list(rows_of(served, text, {"tc": again, "KVTC-like": kvtc}, arguments))
    assert json.loads(json.dumps(rows)) == rows
    by_way = {(row["way"], row["target"]): row for row in rows}
    assert len(by_way) == len(rows) == 15
    for target in (3.0, 5.0):
        for way in ("tc, 2 layers", "KVTC-like, 2 layers"):
            assert target <= by_way[way, target]["ratio"] < 1.03 * target
    for kind in ("continuation", "recall", "answers"):
        assert 0 <= by_way["int8", 0.0][f"{kind}_kl"] < by_way["int4", 0.0][f"{kind}_kl"]
    assert by_way["tc, 2 layers", 3.0]["continuation_kl"] < by_way["tc, 2 layers", 5.0]["continuation_kl"]
    assert len(table(rows).splitlines()) == 17
