"""The fitted transform is that of all entries put together, and a real cache goes through it."""

from __future__ import annotations

import pytest
import torch

from precis.axes import entries_of, measure
from precis.families import Rotary
from precis.full_cache import Document
from precis.observations.metric import RepeatMetric
from precis.prefill import prefill
from precis.transform import fit
from tests.precis.build import attached, document, tokens


def documents() -> list[Document]:
    return [document(tokens(n, seed)) for n, seed in ((80, 1), (70, 2), (90, 3))]


def test_it_equals_a_fit_to_all_entries_at_once() -> None:
    model = attached()
    g, rotary = model.geometry, Rotary(model, 512)
    told: list[int] = []
    found = measure(model, rotary, documents(), 2, 20, 2, lambda _stage, done, _total: told.append(done))
    assert told == [0, 1, 2, 3]
    read = [prefill(model, rotary, one, [RepeatMetric()]) for one in documents()]
    entries = torch.cat([entries_of(rotary, full.keys, full.values)[4:] for full in read])
    size = 2 * 2 * g.n_kv_heads * g.head_dim
    blocks = (entries - entries.mean(0)).reshape(-1, 2, size).transpose(0, 1)
    fisher = sum(full.seen(RepeatMetric()) * (full.n_tokens - 4) for full in read[:2])
    assert isinstance(fisher, torch.Tensor)
    expected = fit(entries.mean(0), blocks.transpose(1, 2) @ blocks / len(entries), fisher, 20)
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.root, expected.root, atol=1e-6, rtol=1e-3)
    assert int((found.scales - expected.scales).abs().max()) <= 1
    one, other = (
        made.backward(1, made.forward(1, entries[:50, 2:])) for made in (found, expected)
    )  # axes of equal variance can differ, what they span cannot
    scale = float(entries[:50, 2:].std())
    assert float((one - other).square().mean().sqrt()) < 0.05 * scale


def test_entries_are_keys_before_rope_and_values() -> None:
    model = attached()
    rotary = Rotary(model, 512)
    full = prefill(model, rotary, document(tokens(30)))
    entries = entries_of(rotary, full.keys, full.values)
    assert entries.shape == (30, 4, 2, 2, 12)
    torch.testing.assert_close(entries[:, 3, 1, 1], full.values[3, 1])
    again = rotary.redo(2, entries[:, 2, 0, 1], torch.arange(30))
    torch.testing.assert_close(again, full.keys[2, 1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2"])
def test_a_cache_of_another_document_comes_back_through_all_axes(family: str) -> None:
    model = attached(family)
    rotary = Rotary(model, 512)
    transform = measure(model, rotary, documents(), 2, 999, 1)
    full = prefill(model, rotary, document(tokens(60, 9)))
    entries = entries_of(rotary, full.keys, full.values)[4:, :2]
    found = transform.backward(0, transform.forward(0, entries))
    torch.testing.assert_close(found, entries, atol=1e-3, rtol=1e-2)


def test_what_cannot_be_measured_is_refused() -> None:
    model = attached()
    rotary = Rotary(model, 512)
    with pytest.raises(ValueError, match="blocks of 3"):
        measure(model, rotary, documents(), 3, 10, 1)
    with pytest.raises(ValueError, match="too short"):
        measure(model, rotary, [], 2, 10, 1)
