"""What an answer forgets of itself: the attention a trim sees, what each one keeps, and the engine on what is left."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from precis.attention.plug import attach
from precis.engine import step
from precis.policies import TRIMS
from precis.session import Feed, Session
from precis.trims import Trim
from precis.trims.corm import Corm
from precis.trims.gkv import GKV
from precis.trims.slide import Slide
from precis.views.sage import SageView
from precis.wire.presets import TRIM_NAMES
from tests.precis.build import N_CONTEXT, attached, cut, read, tokens
from tests.tiny import tiny

QUESTION, ANSWER = 6, 40


@dataclass
class Spy:
    """Keeps everything and notes what it was shown."""

    every: int = 10
    n_window: int = 8
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def keep(self, weights: Tensor, rows: Tensor, keys: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append((weights.clone(), rows.clone()))
        return torch.ones(memory.shape, dtype=torch.bool), memory


def decoded(session: Session, token_ids: Tensor) -> Iterator[Tensor]:
    """Logits after the question and after each token of the answer."""
    model = attached()
    yield step(model, [Feed(session, token_ids[:QUESTION].tolist(), last=True)])[0]
    for token in token_ids[QUESTION:].tolist():
        yield step(model, [Feed(session, [token])])[0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral-window"])
def test_a_trim_sees_the_attention_that_was_paid(family: str) -> None:
    token_ids = tokens(60 + QUESTION + 20)
    plain = tiny(family)
    model = attach(deepcopy(plain))  # gpt_oss draws its sinks anew every time
    spy = Spy()
    session = Session.on(cut(read(model, token_ids[:60])), trim=spy)
    step(model, [Feed(session, token_ids[60 : 60 + QUESTION].tolist(), last=True)])
    for token in token_ids[60 + QUESTION :].tolist():
        step(model, [Feed(session, [token])])
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = plain(input_ids=token_ids[None], output_attentions=True).attentions
    g = model.geometry
    assert len(spy.seen) == 2 * g.n_layers * g.n_kv_heads
    for index, (weights, rows) in enumerate(spy.seen):
        layer, head = divmod(index % (g.n_layers * g.n_kv_heads), g.n_kv_heads)
        heads = slice(head * g.group_size, (head + 1) * g.group_size)
        first = 60 + QUESTION
        expected = attentions[layer][0, heads, rows, first : first + weights.shape[-1]]
        assert sorted(rows.tolist()) == list(range(int(rows.max()) - 7, int(rows.max()) + 1))
        torch.testing.assert_close(weights, expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("trim", [GKV(100), Corm(100), Slide(100)], ids=lambda trim: type(trim).__name__)
def test_a_short_answer_is_not_touched(trim: Trim) -> None:
    full, answer = read(attached(), tokens(N_CONTEXT)), tokens(QUESTION + ANSWER, 3)
    whole = list(decoded(Session.on(cut(full)), answer))
    for found, expected in zip(decoded(Session.on(cut(full), trim=trim), answer), whole, strict=True):
        torch.testing.assert_close(found, expected)


_SMALL = [GKV(12, every=8, n_window=4), Corm(8, threshold=1.5, every=4), Slide(10)]


@pytest.mark.parametrize("trim", _SMALL, ids=lambda trim: type(trim).__name__)
def test_decoding_goes_on_over_exactly_what_was_kept(trim: Trim) -> None:
    full, answer = read(attached(), tokens(N_CONTEXT)), tokens(QUESTION + ANSWER, 3)
    session, plain = Session.on(cut(full), trim=trim), Session.on(cut(full))
    steps = decoded(session, answer)
    torch.testing.assert_close(next(steps), next(decoded(plain, answer)))
    model, dropped = attached(), 0
    for token, found in zip(answer[QUESTION:].tolist(), steps, strict=True):
        expected = step(model, [Feed(plain, [token])])[0]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        for layer in range(4):
            for head in range(2):
                kept = set(session.tail.entries(layer, head)[2].tolist())
                assert set(range(N_CONTEXT, N_CONTEXT + QUESTION)) <= kept
                positions = plain.tail.entries(layer, head)[2]
                keep = torch.tensor([int(p) in kept for p in positions])
                dropped += int((~keep).sum())
                plain.tail.keep(layer, head, keep)
                assert sorted(kept) == plain.tail.entries(layer, head)[2].tolist()
    assert dropped > 50
    assert session.position == plain.position == N_CONTEXT + QUESTION + ANSWER


def test_sliding_keeps_the_question_and_the_last_tokens() -> None:
    session = Session.on(cut(read(attached(), tokens(N_CONTEXT))), trim=Slide(10))
    list(decoded(session, tokens(QUESTION + ANSWER, 3)))
    end = N_CONTEXT + QUESTION + ANSWER
    for head in range(2):
        positions = session.tail.entries(3, head)[2].tolist()
        assert positions == [*range(N_CONTEXT, N_CONTEXT + QUESTION), *range(end - 10, end)]


def test_a_sliding_sage_view_keeps_its_size() -> None:
    full, answer = read(attached(), tokens(N_CONTEXT)), tokens(QUESTION + ANSWER, 3)
    view = SageView(budget=40, slides=True)  # 4 sinks, 20 by logit, 16 recent
    session, plain = Session.on(cut(full), view), Session.on(cut(full), SageView(budget=40))
    steps = decoded(session, answer)
    torch.testing.assert_close(next(steps), next(decoded(plain, answer)))
    model, chosen = attached(), dict(session.seen)
    for number, (token, found) in enumerate(zip(answer[QUESTION:].tolist(), steps, strict=True), 1):
        for key, (keys, values, positions, bias) in chosen.items():
            left = torch.ones(40, dtype=torch.bool)
            left[24 : 24 + min(16, number)] = False
            plain.seen[key] = (keys[left], values[left], positions[left], bias)
            tail = plain.tail.entries(*key)[2]
            plain.tail.keep(*key, (tail < N_CONTEXT + QUESTION) | (tail > int(tail.max()) - 16))
        expected = step(model, [Feed(plain, [token])])[0]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    for layer, head in chosen:
        assert session.tail.counts[layer][head] == QUESTION + 16


def test_gkv_keeps_what_was_attended_once_and_drops_what_repeats() -> None:
    generator = torch.Generator().manual_seed(2)
    keys, trim = torch.randn(30, 8, generator=generator), GKV(10, n_window=4)
    keys[3], keys[17] = keys[21] * 2, keys[21] * 3
    weights = torch.rand(2, 4, 30, generator=generator)
    memory = torch.cat([torch.rand(20, generator=generator), torch.zeros(10)])
    kept, after = trim.keep(weights, torch.arange(4), keys, memory)
    scores = []
    cosines = torch.nn.functional.cosine_similarity(keys[:, None], keys[None], dim=-1)
    means = []
    for i in range(30):
        alike = [float(cosines[i, j]) if j != i and cosines[i, j] >= 0.5 else 0.0 for j in range(30)]
        means.append(sum(alike) / 30 if any(alike[i + 1 :]) else 0.0)
    local = [float(weights[:, :, i].mean()) for i in range(30)]
    for i in range(30):
        attended = max(0.8 * float(memory[i]), local[i] / max(local))
        assert float(after[i]) == pytest.approx(attended, rel=1e-5)
        scores.append(0.5 * attended - 0.5 * means[i] / max(means))
    best = sorted(range(26), key=lambda i: (-scores[i], -i))[:6]
    assert kept.nonzero()[:, 0].tolist() == sorted([*best, *range(26, 30)])
    assert means[3] > 0
    assert means[21] == 0 or any(cosines[21, j] >= 0.5 for j in range(22, 30))


def test_corm_drops_only_what_is_minor_to_every_recent_query_of_the_group() -> None:
    weights = torch.full((2, 3, 12), 0.001)
    weights[1, 2, 4] = 1 / 50  # just enough for the row at position 49
    weights[0, 0, 5] = 1 / 50  # not enough for the row at position 29
    kept, _ = Corm(3).keep(weights, torch.tensor([29, 39, 49]), torch.zeros(12, 8), torch.zeros(12))
    assert kept.nonzero()[:, 0].tolist() == [4, 9, 10, 11]


def test_names_and_bounds() -> None:
    assert tuple(TRIMS) == TRIM_NAMES
    with pytest.raises(ValueError, match="at least 16"):
        GKV(15)
