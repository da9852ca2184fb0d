"""Codecs: error bounds, ragged groups, awkward heads; packing; positions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precis import positions
from precis.codecs import Codec, Layout
from precis.codecs.kivi import Kivi
from precis.codecs.think import Think
from precis.container import CODECS
from precis.quantize import channel_group, pack, packed_size, quantize, rotate, sink_rows, token_groups, unpack


def decoded(codec: Codec, keys: Tensor, values: Tensor, layout: Layout) -> Tensor:
    """What comes back of keys and values."""
    found = torch.full((2, layout.n_entries, layout.head_dim), 7.0, dtype=keys.dtype)
    codec.decode(codec.encode(keys, values, layout), layout, *found)
    return found


COUNTS = [(0,), (1,), (64, 65, 63), (5, 0, 200), (1, 1, 1)]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("counts", COUNTS)
def test_round_trip_is_within_half_a_step(codec: Codec, counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    layout = Layout(counts, tuple(min(4, count) for count in counts), 64)
    keys, values = (3 * torch.randn(sum(counts), 64, generator=generator) for _ in range(2))
    if codec.name == "think":
        keys = keys * (torch.arange(64) >= 25)  # what is pruned would come back as 0
    parts = codec.encode(keys, values, layout)
    for name, (dtype, shape) in codec.shapes(layout).items():
        assert parts[name].dtype == dtype
        assert tuple(parts[name].shape) == shape
    found = decoded(codec, keys, values, layout)
    widest = 24.0  # of a group: normal numbers of deviation 3
    steps = {
        "raw16": 2400,
        "think": 2400,
        "int8": 255,
        "int4": 15,
        "int4-hadamard": 5,
        "int3": 7,
        "int2": 3,
        "minikv": 3,
    }
    bound = widest / steps[codec.name] * 0.51 + 0.01  # a rotation adds up to the root of 64 such errors, by chance few
    for expected, got in zip((keys, values), found, strict=True):
        assert got.shape == expected.shape
        assert not expected.numel() or float((got.float() - expected).abs().max()) < bound


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_constant_and_tiny_groups_do_not_divide_by_zero(codec: Codec) -> None:
    layout = Layout((3,), (0,), 8)
    for keys in (torch.full((3, 8), 2.0), torch.full((3, 8), 1e-7) * torch.arange(8), torch.zeros(3, 8)):
        found, _ = decoded(codec, keys, keys, layout)
        assert bool(torch.isfinite(found).all())
        torch.testing.assert_close(found.float(), keys, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(codec: Codec, bad: float) -> None:
    keys = torch.ones(2, 8)
    keys[1, 3] = bad
    with pytest.raises(ValueError, match="finite"):
        codec.encode(keys, torch.ones(2, 8), Layout((2,), (0,), 8))


def test_raw16_of_a_bfloat16_model_is_lossless() -> None:
    keys = torch.randn(10, 8).bfloat16()
    layout = Layout((10,), (4,), 8)
    found, _ = decoded(CODECS["raw16"], keys, keys, layout)
    assert torch.equal(found, keys)


def test_raw16_of_large_float32_numbers_does_not_overflow() -> None:
    keys = torch.full((2, 8), 1e6)
    layout = Layout((2,), (0,), 8)
    found, _ = decoded(CODECS["raw16"], keys, keys, layout)
    torch.testing.assert_close(found.float(), keys, rtol=0.01, atol=0)


def test_sinks_of_int4_are_kept_at_eight_bits() -> None:
    keys = torch.randn(100, 64) * 0.1
    keys[:4] *= 300  # sink keys are outliers
    found, _ = decoded(CODECS["int4"], keys, keys, Layout((100,), (4,), 64))
    assert float((found[4:] - keys[4:]).abs().max()) < 0.05
    assert float((found[:4] - keys[:4]).abs().max()) < 1.0


@pytest.mark.parametrize("name", ["int4", "int4-hadamard", "int3", "int2", "minikv"])
@pytest.mark.parametrize("dim", [7, 12, 80])
def test_any_head_dim_will_do(name: str, dim: int) -> None:
    codec, layout = CODECS[name], Layout((2,), (0,), dim)
    exact = torch.linspace(-1, 1, 2)[:, None].expand(2, dim).contiguous()  # groups of two numbers are exact
    keys, _ = decoded(codec, exact, exact, layout)
    torch.testing.assert_close(keys, exact, atol=3e-3, rtol=0)


def test_rotating_heads_with_an_outlying_channel_brings_them_nearer() -> None:
    values = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    values[:, 5] *= 30
    layout, errors = Layout((200,), (0,), 64), []
    for name in ("int4", "int4-hadamard"):
        _, found = decoded(CODECS[name], values, values, layout)
        errors.append(float((found - values).square().mean()))
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("window", [0, 40])
def test_groups_and_windows_cost_what_they_should(group: int, window: int) -> None:
    counts = (300, 0, 20, 129)
    layout = Layout(counts, tuple(min(4, count) for count in counts), 64)
    keys = torch.randn(sum(counts), 64, generator=torch.Generator().manual_seed(4))
    codec = Kivi("int3", 3, group, window=window)
    found = decoded(codec, keys, keys, layout)
    edges = sink_rows(counts, layout.sinks, keys.device, window)
    assert int(edges.sum()) == (12 if window == 0 else 44 + 20 + 44)
    for got in found:
        assert float((got - keys)[edges].abs().max()) < 0.02
        assert 0.1 < float((got - keys)[~edges].abs().max()) < 0.6
    n_groups = sum(
        -(-max(0, count - n_sink - window) // group) for count, n_sink in zip(counts, layout.sinks, strict=True)
    )
    assert codec.shapes(layout)["key_scale"][1] == (n_groups, 64)
    assert codec.shapes(layout)["value_scale"][1] == (int((~edges).sum()), 64 // min(group, 64))


def test_think_drops_the_channels_that_add_least_to_logits() -> None:
    counts, n_sinks = (100, 50, 3), (4, 4, 3)
    layout = Layout(counts, n_sinks, 10, index=1)
    generator = torch.Generator().manual_seed(6)
    keys, values = (torch.randn(sum(counts), 10, generator=generator).half().float() for _ in range(2))
    queries = torch.rand(2, 3, 10, generator=generator)
    got_keys, got_values = decoded(Think(queries=queries), keys, values, layout)
    assert torch.equal(got_values, values)
    for head, (own, got, n_sink) in enumerate(
        zip(torch.split(keys, list(counts)), torch.split(got_keys, list(counts)), n_sinks, strict=True)
    ):
        losses = [float(own[:, c].square().mean() * queries[1, head, c]) for c in range(10)]
        dropped = sorted(range(10), key=losses.__getitem__)[:4]
        middle = slice(n_sink, max(n_sink, len(own) - 32))
        assert bool((got[middle][:, dropped] == 0).all())
        expected = own.clone()
        expected[middle, dropped] = 0
        assert torch.equal(got, expected)


def test_think_refuses_a_mask_with_another_number_of_channels() -> None:
    layout = Layout((50,), (4,), 10)
    keys = torch.randn(50, 10)
    parts = Think().encode(keys, keys, layout)
    parts["channels"] = torch.full_like(parts["channels"], 3)
    with pytest.raises(ValueError, match="channels"):
        Think().decode(parts, layout, keys.clone(), keys.clone())


@pytest.mark.parametrize("dim", [1, 7, 12, 64, 80])
def test_a_rotation_keeps_lengths_and_is_its_own_inverse(dim: int) -> None:
    x = torch.randn(5, dim)
    torch.testing.assert_close(rotate(x).norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close(rotate(rotate(x)), x)


@given(st.lists(st.integers(0, 130), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_token_groups_cover_each_token_once_and_never_cross_heads(counts: list[int]) -> None:
    members, group = token_groups(tuple(counts), torch.device("cpu"))
    assert len(group) == sum(counts)
    for token in range(sum(counts)):
        assert token in members[group[token]].tolist()
    heads = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    assert all(len(set(heads[row].tolist())) == 1 for row in members)


@given(st.integers(0, 40), st.integers(1, 41), st.sampled_from([1, 2, 3, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_packing_is_lossless(n: int, dim: int, n_bits: int) -> None:
    codes = torch.randint(0, 2**n_bits, (n, dim), dtype=torch.uint8)
    packed = pack(codes, n_bits)
    assert packed.shape == (n, packed_size(dim, n_bits))
    assert torch.equal(unpack(packed, n_bits, dim), codes)


def test_channel_groups_divide_the_head_dim() -> None:
    assert [channel_group(d) for d in (64, 128, 80, 12, 256)] == [64, 64, 40, 12, 64]


def test_encoder_and_decoder_agree_on_the_rounded_scale() -> None:
    x = torch.tensor([[0.1, 0.7, 1234.5]])
    codes, scale, low = quantize(x, 4, 1)
    back = codes.float() * scale.float()[:, None] + low.float()[:, None]
    assert float((back - x).abs().max()) <= float(scale) * 0.51 + 0.5


@given(st.integers(1, 3000), st.data())
@settings(max_examples=120, deadline=None)
def test_positions_round_trip_in_the_size_they_claim(n_tokens: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, n_tokens - 1), max_size=60))
    expected = np.array(sorted(chosen), np.int32)
    mode, packed = positions.encode(expected, n_tokens)
    assert len(packed) == positions.size(mode, len(expected), n_tokens)
    assert positions.decode(mode, packed, len(expected), n_tokens).tolist() == expected.tolist()


@pytest.mark.parametrize("mode", [positions.RUN, positions.BITMAP, positions.GAPS])
@given(data=st.binary(min_size=8, max_size=8))
@settings(max_examples=60, deadline=None)
def test_positions_from_any_bytes_are_refused_or_ascending(mode: int, data: bytes) -> None:
    try:
        found = positions.decode(mode, data[: positions.size(mode, 4, 64)], 4, 64)
    except ValueError:
        return
    assert len(found) == 4
    assert all(0 <= a < b < 64 for a, b in pairwise(found))
