"""Scores in packed forwards equal scores one by one."""

from __future__ import annotations

import numpy as np
import pytest

from precis.engine import step
from precis.session import Feed, Session
from precis.text import Prompter
from precis.wire.messages import ScoreItem, ScoreJob
from tests.precis.build import attached, cut, read, tokens
from tests.words import card
from workers.models import Served
from workers.score import packs, score


def packed(values: list[int]) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def test_packed_scores_equal_each_item_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.score.PACK_TOKENS", 20)
    model = attached()
    snapshot = cut(read(model, tokens(100)))
    served = Served(model, None, Prompter(card()), card(), "w", None)  # type: ignore[arg-type]
    pairs = [(tokens(3 + i, seed=i).tolist(), tokens(2 + i, seed=50 + i).tolist()) for i in range(5)]
    calls: list[int] = []
    items = [ScoreItem(packed(p), packed(c)) for p, c in pairs]
    found = score(served, snapshot, ScoreJob("s", "c", items, "a", 0.0), lambda: calls.append(1))
    assert 1 < len(calls) < 5
    for (prompt, continuation), result in zip(pairs, found, strict=True):
        logits = step(model, [Feed(Session.on(snapshot), [*prompt, *continuation], all_logits=True)])[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected = [float(rows[i, token]) for i, token in enumerate(continuation)]
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
        assert result.greedy == [int(rows[i].argmax()) == token for i, token in enumerate(continuation)]


def test_packs_keep_order_and_limits() -> None:
    items = [([1] * n, [1]) for n in (3, 3, 30, 1)]
    assert [[len(p) for p, _ in run] for run in packs(items, 8)] == [[3, 3], [30], [1]]
