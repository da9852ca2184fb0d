"""Transforms invert, and what is coded comes back within its dead zone, in the bytes that entropy allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precis.coefficients import Coded, decode, encode, estimated_bytes, read_tables
from precis.rows import Rows, half_octaves, quantise
from precis.transform import Transform, fit

L, G, K, D = 4, 2, 3, 8
SIZE = G * 2 * K * D


def samples(n: int = 3000, seed: int = 0) -> Tensor:
    """[n, L, 2, K, D] with means, and with what layers, heads, keys and values have in common."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, 20, generator=generator)
    mixing = torch.randn(20, L * 2 * K * D, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(n, L * 2 * K * D, generator=generator)
    return (hidden @ mixing + 0.1 * noise + 3).view(n, L, 2, K, D)


def fisher() -> Tensor:
    gradients = torch.randn(L, 2, K, 50, D, generator=torch.Generator().manual_seed(4)) * torch.linspace(1e-4, 1e-2, D)
    return gradients.transpose(-1, -2) @ gradients


def fitted(rank: int = SIZE) -> Transform:
    entries = samples()
    mean = entries.mean(0)
    blocks = (entries - mean).reshape(-1, L // G, SIZE).transpose(0, 1)
    return fit(mean, blocks.transpose(1, 2) @ blocks / len(entries), fisher(), rank)


def of_block(entries: Tensor, block: int) -> Tensor:
    return entries[:, block * G : (block + 1) * G]


@pytest.mark.parametrize("block", [0, 1])
def test_a_transform_of_full_rank_is_inverted(block: int) -> None:
    transform, entries = fitted(), of_block(samples(40, 1), block)
    assert transform.block_layers == G
    found = transform.backward(block, transform.forward(block, entries))
    torch.testing.assert_close(found, entries, atol=1e-3, rtol=1e-3)


def test_an_error_costs_what_the_fisher_matrix_says_and_axes_are_independent() -> None:
    transform, entries = fitted(), of_block(samples(), 0)
    coefficients = transform.forward(0, entries)
    moved = entries + 0.1 * torch.randn(entries.shape, generator=torch.Generator().manual_seed(2))
    difference = moved - entries
    metric = transform.root[:G] @ transform.root[:G]
    cost = torch.einsum("nlckd,lckde,nlcke->n", difference, metric, difference)
    torch.testing.assert_close((transform.forward(0, moved) - coefficients).square().sum(-1), cost, rtol=1e-3, atol=0)
    covariance = coefficients.T @ coefficients / len(coefficients)
    spread = covariance.diagonal()
    assert float((covariance - spread.diag()).abs().max()) < 1e-3 * float(spread.max())
    assert bool((spread[:19] >= spread[1:20] * 0.99).all())
    assert float((spread[:30].log2() - transform.scales[0, :30]).abs().max()) < 0.6


def test_fewer_axes_lose_what_the_others_carried() -> None:
    transform, few, entries = fitted(), fitted(20), of_block(samples(), 1)
    everything = transform.forward(1, entries)
    torch.testing.assert_close(few.forward(1, entries).abs(), everything[:, :20].abs(), atol=1e-4, rtol=1e-2)
    lost = transform.forward(1, few.backward(1, few.forward(1, entries))) - everything
    torch.testing.assert_close(lost.square().sum(), everything[:, 20:].square().sum(), rtol=1e-2, atol=0)


def test_axes_of_an_artifact_are_in_eight_bits_and_still_orthonormal() -> None:
    transform, entries = fitted(), of_block(samples(40, 1), 0)
    tables = transform.tables()
    assert (tables["leading"].dtype, tables["leading"].shape[2]) == (torch.float16, 64)
    assert tables["axes"].dtype == torch.int8
    again = Transform.of(tables, fingerprint="ab")
    products = again.axes.transpose(1, 2) @ again.axes
    torch.testing.assert_close(products, torch.eye(SIZE).expand_as(products), atol=1e-5, rtol=0)
    assert float((again.axes * transform.axes).sum(1).min()) > 0.999
    torch.testing.assert_close(again.backward(0, again.forward(0, entries)), entries, atol=1e-4, rtol=1e-3)
    assert torch.equal(again.scales, transform.scales)
    assert again.fingerprint == "ab"


def rows(n: int = 500, seed: int = 0, r: int = 40) -> list[Rows]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        deviations = 2.0 ** torch.linspace(3, -6, r)
        classes = torch.randint(-6, 7, (n,), generator=generator)
        coefficients = torch.randn(n, r, generator=generator) * deviations
        found.append(Rows.of(coefficients, classes, (2 * deviations.log2()).round().to(torch.int8)))
    return found


def restored(coded: Coded, blocks: list[Rows]) -> list[Tensor]:
    made = []
    for stream, block in zip(coded.blocks, blocks, strict=True):
        found = decode(*read_tables(coded.tables), stream, len(block.classes), block.scales).dense()
        made.append(torch.nn.functional.pad(found, (0, block.coefficients.shape[1] - found.shape[1])))
    return made


@pytest.mark.parametrize("step", [1e-4, 0.1, 0.7, 5.0, 300.0])
@pytest.mark.parametrize("n", [0, 1, 33, 500])
def test_every_coefficient_comes_back_within_its_tokens_step(step: float, n: int) -> None:
    blocks = rows(n)
    for block, found in zip(blocks, restored(encode(blocks, step), blocks), strict=True):
        steps = step * torch.exp2(-block.classes.float() / 2)[:, None]
        far = (found - block.coefficients).abs() - 1e-6
        assert bool((far <= 0.7 * steps * 1.001).all())
        large = torch.exp2(block.scales.float() / 2)[None] > 16 * steps
        assert bool((far <= 0.501 * steps)[large].all())


@pytest.mark.parametrize("scale", [-4, -3, -2, 0, 5])
def test_small_numbers_are_not_shrunk(scale: int) -> None:
    deviation = 2.0 ** (scale / 2)
    numbers = deviation * torch.randn(20_000, 16, generator=torch.Generator().manual_seed(3))
    classes, scales = torch.zeros(20_000, dtype=torch.int64), torch.full((16,), scale, dtype=torch.int8)
    levels, _, gains = quantise(Rows(numbers, classes, scales, torch.full((20_000, 1), 16.0)), 1.0)
    assert not gains.any()
    assert float((levels * numbers).mean() / numbers.square().mean()) == pytest.approx(1.0, abs=0.04)


def test_a_gain_is_how_much_larger_than_usual_a_token_is() -> None:
    (block, _), step = rows(400, r=64), 0.05
    usual = quantise(block, step)[2]
    factors = 2.0 ** torch.randint(-4, 5, (400,), generator=torch.Generator().manual_seed(5))
    moved = Rows.of(block.coefficients * factors[:, None], block.classes, block.scales)
    found = quantise(moved, step)[2]
    assert abs(float(usual.mean())) < 0.5
    expected = np.clip(usual + (2 * factors.log2()).numpy(), -8, 8)
    assert float(np.abs(found - expected).max()) <= 1
    plain = Rows(moved.coefficients, moved.classes, moved.scales, block.energies)  # gains of another token's size
    assert encode([moved], step).n_bytes < 0.97 * encode([plain], step).n_bytes


def test_steps_are_told_apart_by_half_octaves() -> None:
    assert [half_octaves(step) for step in (0.5, 0.74, 0.76, 1.0, 1.49, 1.51, 2.0)] == [-1, -1, 0, 1, 1, 2, 3]


def test_the_bytes_are_the_entropy_of_classes_gains_and_symbols() -> None:
    blocks = rows(6000)
    for step in (0.02, 0.5, 4.0):
        coded, told = encode(blocks, step), estimated_bytes(blocks, step)
        told += sum(len(block.classes) for block in blocks) * np.log2(13) / 8
        gains = np.bincount(np.concatenate([quantise(block, step)[2] for block in blocks]) + 8)
        share = gains[gains > 0] / gains.sum()
        told -= gains.sum() * float((share * np.log2(share)).sum()) / 8
        assert told < coded.n_bytes < 1.01 * told + len(coded.tables) + 600


def test_a_larger_step_takes_fewer_bytes_and_drops_whole_axes() -> None:
    blocks = rows()
    sizes = [encode(blocks, step).n_bytes for step in (0.1, 1.0, 10.0)]
    assert sizes[0] > 1.5 * sizes[1] > 2 * sizes[2]
    coarse = encode(blocks, 50.0)
    assert decode(*read_tables(coarse.tables), coarse.blocks[0], 500, blocks[0].scales).symbols.shape[1] < 15


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_what_cannot_be_coded_is_refused(bad: float) -> None:
    blocks = rows(3)
    blocks[1].coefficients[2, 5] = bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        encode(blocks, 0.1)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_refused_or_gives_numbers_of_the_right_shape(data: st.DataObject) -> None:
    blocks = rows(60)
    coded = encode(blocks, data.draw(st.sampled_from([0.001, 0.5])))

    def hurt(what: bytes) -> bytes:
        at = data.draw(st.integers(0, len(what) - 1))
        kinds: list[Any] = [what[:at], what + b"\0", what[:at] + bytes([what[at] ^ 0x41]) + what[at + 1 :]]
        return bytes(data.draw(st.sampled_from(kinds)))

    tables, stream = coded.tables, coded.blocks[0]
    if data.draw(st.booleans()):
        tables = hurt(tables)
    else:
        stream = hurt(stream)
    try:
        found = decode(*read_tables(tables), stream, 60, blocks[0].scales).dense()
    except ValueError:
        return
    assert found.shape[0] == 60
    assert found.shape[1] <= 40


def test_a_table_that_unpacks_to_too_much_is_refused() -> None:
    import zlib  # noqa: PLC0415

    blocks = rows(5)
    coded = encode(blocks, 0.5)
    bomb = coded.tables[:4] + zlib.compress(bytes(50_000_000), 9)
    with pytest.raises(ValueError, match="wrong length"):
        read_tables(bomb)
