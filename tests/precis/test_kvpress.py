"""Our methods keep what kvpress keeps, on the same model and tokens (golden vectors by golden/make_kvpress.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from precis.budgets import Allocator
from precis.budgets.adaptive import Adaptive
from precis.budgets.uniform import Uniform
from precis.core import Prefill
from precis.prefill import Document, prefill, repeat_context
from precis.scorers import Needs
from precis.scorers.snapkv import SnapKV
from precis.selectors import Selector
from precis.selectors.topk import TopK
from precis.selectors.two_stage import TwoStage
from tests.golden.constants import CHUNK, KERNEL, N_TOKENS, N_WINDOW, REPEAT_FIRST, REPEAT_NEXT, SUFFIX
from tests.precis.build import attached

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "kvpress.npz")


@pytest.fixture(scope="module")
def full() -> Prefill:
    token_ids = torch.from_numpy(GOLDEN["token_ids"])
    return prefill(attached(), Document(token_ids, (0, N_TOKENS)), Needs(n_window=N_WINDOW, output_norms=True))


def kvpress_scores(full: Prefill) -> Tensor:
    """SnapKV scores with the window at the maximum instead of protected, as kvpress has them."""
    scores = SnapKV(N_WINDOW, KERNEL).score(full)
    for layer in scores:
        layer[:, -N_WINDOW:] = layer.max()
    return scores


@pytest.mark.parametrize(
    ("name", "allocator", "selector"),
    [
        ("snapkv", Uniform(), TopK()),
        ("criticalkv", Uniform(), TwoStage()),
        ("critical-adakv", Adaptive(), TwoStage()),
    ],
)
def test_kept_sets_equal_kvpress(full: Prefill, name: str, allocator: Allocator, selector: Selector) -> None:
    scores, nothing = kvpress_scores(full), torch.zeros(N_TOKENS, dtype=torch.bool)
    budgets = allocator.allocate(scores, nothing, N_TOKENS // 2)
    keep = selector.select(full, scores, budgets, nothing)
    expected = torch.from_numpy(GOLDEN[name])
    assert int(expected.sum()) == int(keep.sum())
    assert (keep != expected).sum() == 0


def test_protecting_the_window_equals_kvpress_snapkv(full: Prefill) -> None:
    scores = SnapKV(N_WINDOW, KERNEL).score(full)
    window = torch.arange(N_TOKENS) >= N_TOKENS - N_WINDOW
    keep = TopK().select(full, scores, Uniform().allocate(scores, window, N_TOKENS // 2), window)
    assert torch.equal(keep, torch.from_numpy(GOLDEN["snapkv"]))


def test_kvzip_scores_equal_kvpress_over_several_chunks() -> None:
    model = attached()
    token_ids = torch.from_numpy(GOLDEN["token_ids"])
    document = Document(token_ids, (0, N_TOKENS), (), REPEAT_FIRST + SUFFIX, (REPEAT_NEXT, SUFFIX))
    full = prefill(model, document, Needs())
    found = repeat_context(model, document, full, chunk=CHUNK)
    torch.testing.assert_close(found, torch.from_numpy(GOLDEN["kvzip"]), atol=2e-5, rtol=1e-4)


def test_repeating_in_small_steps_changes_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached()
    token_ids = torch.from_numpy(GOLDEN["token_ids"])
    document = Document(token_ids, (0, N_TOKENS), (), REPEAT_FIRST + SUFFIX, (REPEAT_NEXT, SUFFIX))
    full = prefill(model, document, Needs())
    before = full.keys.clone()
    whole = repeat_context(model, document, full, chunk=CHUNK)
    monkeypatch.setattr("precis.prefill._REPEAT_FORWARD", 13)
    monkeypatch.setattr("precis.prefill._REPEAT_ROWS", 5)
    told: list[int] = []
    steps = repeat_context(model, document, full, lambda _, done, __: told.append(done), chunk=CHUNK)
    torch.testing.assert_close(steps, whole, atol=1e-6, rtol=1e-5)
    assert torch.equal(full.keys, before)
    assert told == sorted(told)
    assert told[-1] == N_TOKENS
