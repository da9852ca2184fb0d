"""The reference backend equals one softmax over the concatenation, however it is cut into segments."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precis.attention.dense import causal_attention
from precis.attention.torch_ref import Segment, attend


@given(
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    window=st.sampled_from([None, 1, 7]),
    softcap=st.sampled_from([None, 3.0]),
    with_sinks=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_segments_merge_to_one_softmax(
    seed: int, cuts: list[int], window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, keys, values = (torch.randn(n, 8, generator=generator) for n in (5, 30, 30))
    row_positions = torch.arange(25, 30)
    sinks = torch.randn(5, generator=generator) if with_sinks else None
    logits = queries @ keys.T * 0.3
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    columns = torch.arange(30)
    visible = columns[None] <= row_positions[:, None]
    if window is not None:
        visible &= columns[None] > row_positions[:, None] - window
    logits = logits.masked_fill(~visible, float("-inf"))
    extra = torch.full((5, 1), float("-inf")) if sinks is None else sinks[:, None]
    weights = torch.cat([logits, extra], 1).softmax(-1)[:, :-1]
    edges = [0, *sorted(cuts), 30]
    segments = [
        Segment(keys[a:b], values[a:b], columns[a:b].int(), rows=(0, 5), causal=True) for a, b in pairwise(edges)
    ]
    found = attend(queries, row_positions, segments, scaling=0.3, softcap=softcap, window=window, sinks=sinks)
    torch.testing.assert_close(found, weights @ values, atol=1e-5, rtol=1e-4)


def test_a_row_that_sees_nothing_gets_zeros() -> None:
    empty = Segment(torch.empty(0, 4), torch.empty(0, 4), torch.empty(0, dtype=torch.int32), (0, 2), causal=False)
    assert attend(torch.randn(2, 4), torch.tensor([0, 1]), [empty], scaling=1.0).tolist() == [[0.0] * 4] * 2


def test_rows_of_different_segments_do_not_mix() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(n, 4, generator=generator) for n in (2, 6, 6))
    positions = torch.arange(3, dtype=torch.int32)
    parts = [
        Segment(keys[:3], values[:3], positions, (0, 1), causal=False),
        Segment(keys[3:], values[3:], positions, (1, 2), causal=False),
    ]
    found = attend(queries, torch.tensor([9, 9]), parts, scaling=1.0)
    torch.testing.assert_close(found[0], (queries[0] @ keys[:3].T).softmax(-1) @ values[:3])
    torch.testing.assert_close(found[1], (queries[1] @ keys[3:].T).softmax(-1) @ values[3:])


@given(n=st.integers(1, 12), past=st.integers(0, 20), window=st.sampled_from([None, 1, 5]), softcap=st.booleans())
@settings(max_examples=60, deadline=None)
def test_dense_attention_equals_the_naive_form(n: int, past: int, window: int | None, softcap: bool) -> None:
    generator = torch.Generator().manual_seed(n * 100 + past)
    m = n + past
    query = torch.randn(4, n, 8, generator=generator)
    key, value = torch.randn(2, m, 8, generator=generator), torch.randn(2, m, 8, generator=generator)
    cap = 2.0 if softcap else None
    rows, columns = torch.arange(past, m)[:, None], torch.arange(m)[None]
    hidden = columns > rows
    if window is not None:
        hidden = hidden | (columns <= rows - window)
    logits = query @ key.repeat_interleave(2, 0).transpose(-1, -2) * 0.5
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ value.repeat_interleave(2, 0)
    found = causal_attention(query, key, value, scaling=0.5, softcap=cap, window=window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
