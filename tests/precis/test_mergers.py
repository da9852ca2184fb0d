"""Mergers and the bias of merged entries, against laws and brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from precis.attention.torch_ref import Segment, attend
from precis.budgets.uniform import Uniform
from precis.container import CODECS, pack
from precis.core import Prefill
from precis.engine import step
from precis.errors import SnapshotCorrupt
from precis.families import Model, Rotary
from precis.manifest import open_manifest
from precis.mergers.folding import Folding
from precis.mergers.kvmerger import KVMerger
from precis.policies import Policy
from precis.ranking import rank_per_head
from precis.reader import check_manifest, read_block, reader_of, unpack
from precis.scorers.h2o import H2O
from precis.selection import merge, protected_mask
from precis.selectors.topk import TopK
from precis.session import Feed, Session
from precis.sizes import head_bytes, packed_bytes
from tests.precis.build import N_CONTEXT, attached, cut, read, tokens

PROTECTED = protected_mask(N_CONTEXT, [(0, 4), (N_CONTEXT - 10, N_CONTEXT)], torch.device("cpu"))


@pytest.fixture(scope="module")
def full(model: Model) -> Prefill:
    return read(model, tokens(N_CONTEXT), *H2O().needs)


def test_a_bias_of_log_n_stands_for_n_equal_entries() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(n, 8, generator=generator) for n in (6, 5, 5))
    counts = torch.tensor([1, 3, 1, 2, 1])
    rows, places = torch.full((6,), 9), torch.arange(5, dtype=torch.int32)
    biased = Segment(keys, values, places, rows=(0, 6), causal=False, bias=counts.float().log())
    spelled = Segment(
        keys.repeat_interleave(counts, 0),
        values.repeat_interleave(counts, 0),
        places.repeat_interleave(counts),
        rows=(0, 6),
        causal=False,
    )
    for softcap in (None, 5.0):
        found = attend(queries, rows, [biased], scaling=0.3, softcap=softcap)
        torch.testing.assert_close(found, attend(queries, rows, [spelled], scaling=0.3, softcap=softcap))


def brute_force_sets(keys: Tensor, scores: Tensor, fixed: list[int], n_places: int) -> list[list[int]]:
    """Sets of one head: the loosest links cut until there are as many sets as places."""
    n = keys.shape[0]
    free = [t not in fixed for t in range(n)]
    links = {
        t: float(torch.nn.functional.cosine_similarity(keys[t], keys[t + 1], dim=0))
        for t in range(n - 1)
        if free[t] and free[t + 1]
    }
    n_sets = n - len(links)
    cut_links = sorted(links, key=lambda t: (links[t], -t))[: max(0, n_places - n_sets)]
    sets = [[0]]
    for t in range(1, n):
        if t - 1 in links and t - 1 not in cut_links:
            sets[-1].append(t)
        else:
            sets.append([t])
    return sorted(sets, key=lambda s: (s[0] not in fixed, -max(float(scores[t]) for t in s)))[:n_places]


@pytest.mark.parametrize("budget", [30, 60, 100, N_CONTEXT])
def test_kvmerger_equals_its_definition(model: Model, full: Prefill, budget: int) -> None:
    merger, scores, rotary = KVMerger(), H2O().score(full), Rotary(model, 512)
    keep = merger.select(full, scores, torch.full((4, 2), budget), PROTECTED)
    assert keep.sum(-1).eq(budget).all()
    snapshot = merge(cut(full, keep.clone()), full, scores, merger, PROTECTED, rotary)
    heavy = rank_per_head(scores, PROTECTED) < int((budget - 14) * 0.25)
    for layer, head in ((0, 0), (3, 1)):
        fixed = (PROTECTED | heavy[layer, head]).nonzero()[:, 0].tolist()
        keys, values = full.keys[layer, head], full.values[layer, head]
        places = torch.arange(N_CONTEXT)
        plain = rotary.undo(layer, keys, places)
        found_keys, found_values, positions, bias = snapshot.entries(layer, head)
        assert bias is not None
        sets = brute_force_sets(keys, scores[layer, head], fixed, budget)
        expected = {}
        for members in sets:
            pivot = max(members, key=lambda t: (float(scores[layer, head, t]), t))
            distance = (plain[members] - plain[pivot]).norm(dim=-1)
            sigma = float(distance.sum()) / (2**0.5 * len(members))
            weights = torch.exp(-((distance / max(sigma, 1e-12)) ** 2) / 2)
            weights = weights / weights.sum()
            key = rotary.redo(layer, (weights[:, None] * plain[members]).sum(0)[None], torch.tensor([pivot]))[0]
            expected[pivot] = (key, (weights[:, None] * values[members]).sum(0), torch.tensor(len(members)).log())
        assert positions.tolist() == sorted(expected)
        wanted = [expected[t] for t in sorted(expected)]
        torch.testing.assert_close(found_keys, torch.stack([k for k, _, _ in wanted]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found_values, torch.stack([v for _, v, _ in wanted]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(bias, torch.stack([b for _, _, b in wanted]))


def test_identical_keys_are_merged_evenly(model: Model, full: Prefill) -> None:
    same = replace(full, keys=full.keys[:, :, :1].expand_as(full.keys).contiguous())
    scores = H2O().score(full)
    keep = KVMerger().select(same, scores, torch.full((4, 2), 40), PROTECTED)
    merged = KVMerger().merge(same, same.keys, scores, keep, PROTECTED)
    assert bool(torch.isfinite(merged.keys).all())  # type: ignore[arg-type]
    torch.testing.assert_close(merged.keys[keep], same.keys[keep])  # type: ignore[index]


def test_merging_leaves_protected_entries_and_full_windows_alone(model: Model) -> None:
    sliding = attached("mistral-window")
    full = read(sliding, tokens(N_CONTEXT), *H2O().needs)
    evicting = full.geometry.evicting_layers(N_CONTEXT)
    scores = H2O().score(full.of_layers(evicting))
    whole = cut(full)
    merged = merge(whole, full, scores, Folding(), PROTECTED, Rotary(sliding, 512))
    assert torch.equal(merged.values, whole.values)
    assert merged.bias is None


def test_a_stored_bias_comes_back_and_is_counted(model: Model, full: Prefill) -> None:
    merger, scores, rotary = KVMerger(), H2O().score(full), Rotary(model, 512)
    keep = merger.select(full, scores, torch.full((4, 2), 40), PROTECTED)
    snapshot = merge(cut(full, keep), full, scores, merger, PROTECTED, rotary)
    assert snapshot.bias is not None
    for codec in CODECS.values():
        packed = pack(snapshot, codec, rotary)
        assert abs(packed.n_bytes - packed_bytes(snapshot, codec)) < 40
        assert sum(map(sum, head_bytes(snapshot, codec, packed.blobs))) <= packed.n_bytes
        manifest = open_manifest(packed.manifest)
        check_manifest(manifest, model.geometry, "f")
        again = unpack(manifest, packed.blobs, model, rotary)
        torch.testing.assert_close(again.bias, snapshot.bias, atol=2e-3, rtol=1e-3)
    query = tokens(5, 7).tolist()
    with_bias = step(model, [Feed(Session.on(snapshot), query)])[0]
    without = step(model, [Feed(Session.on(replace(snapshot, bias=None)), query)])[0]
    assert not torch.allclose(with_bias, without, atol=1e-4)


def test_a_bias_that_is_no_number_is_refused(model: Model, full: Prefill) -> None:
    snapshot = cut(full)
    bias = torch.zeros(snapshot.positions.shape[0])
    bias[3] = float("nan")
    packed = pack(replace(snapshot, bias=bias), CODECS["raw16"], Rotary(model, 512))
    manifest = open_manifest(packed.manifest)
    with pytest.raises(SnapshotCorrupt, match="bias"):
        read_block(manifest, 0, packed.blobs[0], reader_of(manifest))


def test_merged_selections_do_not_nest() -> None:
    assert Policy(H2O(), Uniform(), TopK()).nested == "head"
    assert Policy(H2O(), Uniform(), TopK(), Folding()).nested is None
