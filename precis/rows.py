"""Numbers per token -> whole numbers per token: one step for everything, a finer one for tokens that matter.

A token of class k is quantised with step / 2^(k / 2). What a number is expected to be, in half octaves of the step, is
its context: the coefficient's scale, the token's class and its gain, which says how much larger than usual the token's
coefficients are. All are integers, so that every machine finds the same contexts.

Numbers that are small against the step are not rounded to the nearest. Attention averages over tokens: errors that
differ from token to token cancel, what all tokens lose does not. A dead zone, the best trade of squared errors for
bits, shrinks all small numbers towards 0 and nearly doubles the divergence at equal bytes. So a number becomes 1 from
the threshold on at which, of normal numbers of the expected size, what is decoded has the true slope on what was:
E[x^2] = E[x q(x)]. Where numbers are expected to be yet smaller, that would take too many bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis.rans import Bytes

MAX_CLASS, MAX_GAIN = 16, 8
N_CONTEXTS, _MIDDLE = 40, 12  # half octaves; a coefficient as large as the step is in the middle one
_REACH = MAX_CLASS + MAX_GAIN
_GAIN_COLUMNS = 16  # whose energy is summed up
# From which size on a number is not 0, by context from _MIDDLE - 7 on.
_THRESHOLDS = (0.5, 0.307, 0.381, 0.451, 0.483, 0.5)
_LARGEST = 2.0**24  # of whole numbers that float32 tells apart
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Rows:
    """The coefficients of a block.

    Attributes:
        coefficients: [n, r] float32.
        classes: [n] int, -16 to 16: twice the binary logarithm of how much finer than the step a token is quantised.
        scales: [r] int8, from the transform.
        energies: [n, ceil(r / 16)] float32: sums of squares of the first 16, 32, ... coefficients, each in its scale.
    """

    coefficients: Tensor
    classes: Tensor
    scales: Tensor
    energies: Tensor

    @staticmethod
    def of(coefficients: Tensor, classes: Tensor, scales: Tensor) -> Rows:
        """With the energies."""
        squares = (coefficients * torch.exp2(scales.float() / -2)).square()
        padded = torch.nn.functional.pad(squares, (0, -squares.shape[1] % _GAIN_COLUMNS))
        sums = padded.view(len(padded), padded.shape[1] // _GAIN_COLUMNS, _GAIN_COLUMNS).sum(2)
        return Rows(coefficients, classes, scales, sums.cumsum(1))

    def every(self, apart: int) -> Rows:
        """Evenly spaced rows."""
        return Rows(self.coefficients[::apart], self.classes[::apart], self.scales, self.energies[::apart])


def half_octaves(step: float) -> int:
    """Twice the step's binary logarithm, from its bits: the same on every machine."""
    mantissa, exponent = np.frexp(np.float32(step))
    return 2 * int(exponent) - (1 if float(mantissa) < 0.75 else 0)


def quantise(rows: Rows, step: float) -> tuple[Tensor, Bytes, NDArray[np.int64]]:
    """[n, r'] whole numbers in float32; their contexts; [n] gains.

    Columns after the last that is not all 0 are left out.

    Raises:
        ValueError: if a coefficient is not finite, or beyond 2^24 steps.
    """
    scaled = rows.coefficients * (torch.exp2(rows.classes.float() / 2) / step)[:, None]
    sizes = scaled.abs()
    if not bool((sizes < _LARGEST).all()):  # not a number fails, too
        raise ValueError("a coefficient is not finite, or too large for the step")
    shift = half_octaves(step)
    gains = _gains(rows, shift)
    offsets = rows.classes.cpu().numpy() + gains
    expected = np.clip(_sizes(rows.scales, shift) - _MIDDLE + 7, 0, len(_THRESHOLDS) - 1)
    thresholds = torch.from_numpy(np.array(_THRESHOLDS, np.float32)[expected])[offsets + _REACH]
    levels = (sizes + 0.5).floor_().clamp_min_(1.0)
    levels.masked_fill_(sizes < thresholds, 0.0)
    used = levels.any(0).nonzero()
    n_axes = int(used[-1]) + 1 if len(used) else 0
    contexts = contexts_of(offsets, rows.scales[:n_axes], shift)
    return levels[:, :n_axes] * scaled[:, :n_axes].sign(), contexts.reshape(-1), gains


def _gains(rows: Rows, shift: int) -> NDArray[np.int64]:
    """[n]: how much larger than usual a token's coefficients are, in half octaves, by those that are not all 0."""
    n, n_sums = rows.energies.shape
    if n_sums == 0:
        return np.zeros(n, np.int64)
    order = rows.scales.float().neg()
    n_columns = torch.searchsorted(order.cummax(0).values, rows.classes.float() - (shift - 3), right=True)
    at = (n_columns // _GAIN_COLUMNS - 1).clamp(0, n_sums - 1)
    mean = rows.energies.gather(1, at[:, None])[:, 0] / ((at + 1) * _GAIN_COLUMNS).clamp_max(len(rows.scales))
    found = torch.log2(mean.clamp_min(_TINY)).round().clamp(-MAX_GAIN, MAX_GAIN)
    gains: NDArray[np.int64] = found.to(torch.int64).cpu().numpy()
    return gains


def contexts_of(offsets: NDArray[np.int64], scales: Tensor, shift: int) -> Bytes:
    """[n, r'] contexts of tokens whose classes and gains add up to `offsets`."""
    found: Bytes = np.clip(_sizes(scales, shift), 0, N_CONTEXTS - 1).astype(np.uint8)[offsets + _REACH]
    return found


def _sizes(scales: Tensor, shift: int) -> NDArray[np.int64]:
    """[offsets, r'] expected sizes in half octaves, those of the step being `_MIDDLE`."""
    sizes: NDArray[np.int64] = scales.cpu().numpy().astype(np.int64) - shift + _MIDDLE
    return sizes[None] + np.arange(-_REACH, _REACH + 1)[:, None]
