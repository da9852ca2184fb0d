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
from precis.families import Rotary
from precis.full_cache import Document
from precis.mergers.folding import Folding
from precis.observations.leverage import Leverage
from precis.observations.local import LocalAttention
from precis.observations.norms import OutputNorms
from precis.observations.window import WindowQueries
from precis.prefill import prefill
from precis.scorers import Scorer
from precis.scorers.compactor import Compactor
from precis.scorers.expected import Expected
from precis.scorers.finch import Finch
from precis.scorers.h2o import H2O
from precis.scorers.keydiff import KeyDiff
from precis.scorers.knorm import Knorm
from precis.scorers.kvzip import KVzip
from precis.scorers.lagkv import LagKV
from precis.scorers.snapkv import SnapKV
from precis.scorers.tova import Tova
from precis.selectors import Selector
from precis.selectors.topk import TopK
from precis.selectors.two_stage import TwoStage
from tests.golden.constants import (
    CHUNK,
    KERNEL,
    LAG,
    LOCAL_CHUNK,
    N_TOKENS,
    N_WINDOW,
    RATIO,
    REPEAT_FIRST,
    REPEAT_NEXT,
    SEED,
    SKETCH,
    SUFFIX,
)
from tests.precis.build import attached, read

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "kvpress.npz")


@pytest.fixture(scope="module")
def full() -> Prefill:
    token_ids = torch.from_numpy(GOLDEN["token_ids"])
    return read(attached(), token_ids, WindowQueries(N_WINDOW), OutputNorms())


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
        ("adakv", Adaptive(), TopK()),
    ],
)
def test_kept_sets_equal_kvpress(full: Prefill, name: str, allocator: Allocator, selector: Selector) -> None:
    scores, nothing = kvpress_scores(full), torch.zeros(N_TOKENS, dtype=torch.bool)
    budgets = allocator.allocate(full, scores, nothing, N_TOKENS // 2)
    keep = selector.select(full, scores, budgets, nothing)
    expected = torch.from_numpy(GOLDEN[name])
    assert int(expected.sum()) == int(keep.sum())
    assert (keep != expected).sum() == 0


def test_protecting_the_window_equals_kvpress_snapkv(full: Prefill) -> None:
    scores = SnapKV(N_WINDOW, KERNEL).score(full)
    window = torch.arange(N_TOKENS) >= N_TOKENS - N_WINDOW
    keep = TopK().select(full, scores, Uniform().allocate(full, scores, window, N_TOKENS // 2), window)
    assert torch.equal(keep, torch.from_numpy(GOLDEN["snapkv"]))


_SINKS, _ENDS = slice(4, None), slice(8, N_TOKENS - 4)  # where kvpress fills nothing in
_LOCAL = LocalAttention(chunk=LOCAL_CHUNK, scaled=False)


@pytest.mark.parametrize(
    ("name", "scorer", "scored"),
    [
        ("keydiff", KeyDiff(), slice(None)),
        ("knorm", Knorm(), slice(None)),
        ("lagkv", LagKV(lag=LAG), slice(None)),
        ("tova", Tova(), slice(0, -1)),
        ("finch", Finch(N_WINDOW), slice(0, -N_WINDOW)),
        ("expected", Expected(), _SINKS),
        ("expected-plain", Expected(value_norm=False), _SINKS),
        ("compactor", Compactor(leverage=Leverage(SKETCH, SEED), attention=_LOCAL), _ENDS),
        ("h2o", H2O(), slice(0, -1)),
    ],
)
def test_scores_equal_kvpress(name: str, scorer: Scorer, scored: slice) -> None:
    model = attached(max_position_embeddings=1024)
    full = read(model, torch.from_numpy(GOLDEN["token_ids"]), *scorer.needs)
    found, expected = scorer.score(full)[..., scored], torch.from_numpy(GOLDEN[name])[..., scored]
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=2e-4)


def test_folded_values_equal_kvpress() -> None:
    full = read(attached(max_position_embeddings=1024), torch.from_numpy(GOLDEN["token_ids"]))
    scores, nothing = Knorm().score(full), torch.zeros(N_TOKENS, dtype=torch.bool)
    budgets = torch.full((4, 2), N_TOKENS - int(N_TOKENS * RATIO))
    keep = TopK().select(full, scores, budgets, nothing)
    folded = Folding().merge(full, full.keys, scores, keep, nothing)
    assert 0 < int(folded.changed.sum()) < int(keep.sum())
    expected = torch.from_numpy(GOLDEN["folding"])
    torch.testing.assert_close(folded.values * keep[..., None], expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(folded.values[keep & ~folded.changed], full.values[keep & ~folded.changed])


@pytest.mark.parametrize("plus", [False, True])
def test_kvzip_scores_equal_kvpress_over_several_chunks(plus: bool) -> None:
    model = attached()
    token_ids = torch.from_numpy(GOLDEN["token_ids"])
    document = Document(token_ids, (0, N_TOKENS), (), REPEAT_FIRST + SUFFIX, (REPEAT_NEXT, SUFFIX))
    scorer = KVzip(plus, CHUNK)
    found = scorer.score(prefill(model, Rotary(model, 1024), document, scorer.needs))
    torch.testing.assert_close(found, torch.from_numpy(GOLDEN["kvzip-plus" if plus else "kvzip"]), atol=2e-5, rtol=1e-4)


def test_repeating_in_small_steps_changes_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rotary = attached(), Rotary(attached(), 1024)
    token_ids = torch.from_numpy(GOLDEN["token_ids"])
    document = Document(token_ids, (0, N_TOKENS), (), REPEAT_FIRST + SUFFIX, (REPEAT_NEXT, SUFFIX))
    needs = KVzip(chunk=CHUNK).needs
    (whole,) = prefill(model, rotary, document, needs).observed.values()
    monkeypatch.setattr("precis.observations.repeat.FORWARD", 13)
    monkeypatch.setattr("precis.attention.dense._LOGITS", 1)
    told: list[tuple[str, int]] = []
    full = prefill(model, rotary, document, needs, lambda stage, done, _: told.append((stage, done)))
    (steps,) = full.observed.values()
    torch.testing.assert_close(steps, whole, atol=1e-6, rtol=1e-5)
    assert torch.equal(full.keys, prefill(model, rotary, document).keys)
    scored = [done for stage, done in told if stage == "score"]
    assert scored == sorted(scored)
    assert scored[-1] == N_TOKENS
