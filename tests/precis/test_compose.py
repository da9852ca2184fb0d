"""Several snapshots as one: each entry where it belongs, and nothing lost but what is read again."""

from __future__ import annotations

import pytest
import torch

from precis.compose import Part, compose, fingerprint_of
from precis.core import Snapshot
from precis.engine import step
from precis.errors import ContextTooLong, UnsupportedModel
from precis.families import Model, Rotary
from precis.pipeline import compress
from precis.session import Feed, Session
from tests.precis.build import asked, attached, document, tokens

A, B, C = tokens(90, 1), tokens(70, 2), tokens(50, 3)
QUESTION = [5, 9, 17]


def part(model: Model, rotary: Rotary, ids: torch.Tensor, policy: str = "full", ratio: float = 1.0) -> Part:
    made = compress(model, rotary, document(ids), asked(model, policy, ratio, "raw16"))
    return Part(made.snapshot, ids.tolist())


def logits(model: Model, snapshot: Snapshot, ids: list[int] = QUESTION) -> torch.Tensor:
    return step(model, [Feed(Session.on(snapshot), ids, last=True)])[0][-1].log_softmax(-1)


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.exp() * (one - other)).sum())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_read_again_as_a_whole_it_is_the_documents_read_together(family: str) -> None:
    model = attached(family)
    rotary = Rotary(model, 1024)
    parts = [part(model, rotary, ids) for ids in (A, B, C)]
    together = part(model, rotary, torch.cat([A, B, C]))
    found = compose(model, rotary, parts, n_again=90)
    assert found.header.next_position == found.header.n_tokens == 210
    assert torch.allclose(logits(model, found), logits(model, together.snapshot), atol=0.02)


def test_each_entry_is_turned_to_its_place(model: Model, rotary: Rotary) -> None:
    one, two = part(model, rotary, A), part(model, rotary, B)
    found = compose(model, rotary, [one, two], n_again=0)
    for layer in range(4):
        for head in range(2):
            keys, values, positions, _ = found.entries(layer, head)
            assert positions.tolist() == list(range(160))
            mine = two.snapshot.entries(layer, head)
            assert torch.equal(values[90:], mine[1])
            back = rotary.undo(layer, keys[90:], positions[90:])
            assert torch.allclose(back, rotary.undo(layer, mine[0], mine[2]), atol=2e-3)
            assert torch.equal(keys[:90], one.snapshot.entries(layer, head)[0])


def test_a_few_tokens_read_again_bring_it_nearer(model: Model, rotary: Rotary) -> None:
    parts = [part(model, rotary, A), part(model, rotary, B)]
    want = logits(model, part(model, rotary, torch.cat([A, B])).snapshot)
    errors = [divergence(want, logits(model, compose(model, rotary, parts, n_again=n))) for n in (0, 35, 70)]
    assert errors[2] < 1e-3
    assert errors[2] <= errors[1] <= errors[0] * 1.5


@pytest.mark.parametrize("policy", ["kvzip", "expected-adakv", "kvmerger"])
def test_compressed_documents_keep_their_entries_and_biases(model: Model, rotary: Rotary, policy: str) -> None:
    parts = [part(model, rotary, ids, policy, 0.5) for ids in (A, B)]
    found = compose(model, rotary, parts, n_again=0)
    assert (found.bias is not None) is (parts[0].snapshot.bias is not None)
    assert found.keys.shape[0] == sum(each.snapshot.keys.shape[0] for each in parts)
    assert torch.isfinite(logits(model, found)).all()
    again = compose(model, rotary, parts, n_again=16)
    for layer in range(4):
        for head in range(2):
            positions = again.entries(layer, head)[2].tolist()
            assert positions == sorted(set(positions))
            assert set(range(90, 106)) <= set(positions)


def test_what_does_not_fit_in_a_row_or_cannot_be_turned_is_refused(model: Model) -> None:
    short = attached(max_position_embeddings=128)
    rotary = Rotary(short, 128)
    parts = [part(short, rotary, ids) for ids in (A, B)]
    with pytest.raises(ContextTooLong, match="longer together"):
        compose(short, rotary, parts)
    unknown = Rotary(model, 512)
    unknown._apply = None
    with pytest.raises(UnsupportedModel, match="cannot be turned"):
        compose(model, unknown, [part(model, Rotary(model, 512), ids) for ids in (A, B)])


def test_one_document_is_itself_and_order_counts(model: Model, rotary: Rotary) -> None:
    one, two = part(model, rotary, A), part(model, rotary, B)
    assert compose(model, rotary, [one]) is one.snapshot
    assert fingerprint_of(["a", "b"]) != fingerprint_of(["b", "a"])
    assert fingerprint_of(["a", "b"]) != fingerprint_of(["a,b"])
    before = one.snapshot.keys.clone()
    compose(model, rotary, [one, two])
    assert torch.equal(one.snapshot.keys, before)
