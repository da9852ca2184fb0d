"""Keys and values of a block of layers as few independent numbers: a linear map that is fitted to a model once.

Keys (before RoPE) and values of all heads of `g` layers are one vector x per token. It is centred, each head is
multiplied with the square root of its Fisher matrix F = E[g g^T], g the gradient of the log-probability of a sampled
token with respect to the key or value, so that a unit of error costs as much everywhere, and rotated into the principal
axes of what is left: y = U^T F^(1/2) (x - m).

No paper. KVTC (Staniszewski and Lancucki 2025, arXiv:2511.01815) takes principal axes across layers, of keys and of
values apart, and counts every error alike. Keys and values of one token come from the same hidden states: axes of both
together halve the divergence at equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 0.02  # share of a Fisher matrix's mean eigenvalue that is added to all
LOWEST = 1e-6  # share of the mean level below which no head's falls
_TINY = 1e-30
_ROUNDS = 3  # each squares what is left of the error


@dataclass(frozen=True, slots=True)
class Transform:
    """A fitted map. B = L / g blocks, R = g * 2 * K * D numbers of a token in a block, r <= R axes kept.

    Attributes:
        mean: [L, 2, K, D] float32 of keys before RoPE and of values.
        root: [L, 2, K, D, D] float32, symmetric square roots of the Fisher matrices.
        inverse: [L, 2, K, D, D] float32, their inverses.
        axes: [B, R, r] float32, orthonormal columns, by falling variance.
        scales: [B, r] int8, on the CPU: twice the binary logarithm of a coefficient's standard deviation, rounded.
        fingerprint: of the artifact that it came from: what was coded by one transform is not decoded by another.
    """

    mean: Tensor
    root: Tensor
    inverse: Tensor
    axes: Tensor
    scales: Tensor
    fingerprint: str = ""

    @property
    def block_layers(self) -> int:
        """g."""
        return self.mean.shape[0] // self.axes.shape[0]

    def forward(self, block: int, entries: Tensor) -> Tensor:
        """Entries [n, g, 2, K, D] of a block -> coefficients [n, r] float32."""
        layers = self._layers(block)
        whitened = torch.einsum("nlckd,lckde->nlcke", entries.float() - self.mean[layers], self.root[layers])
        return whitened.reshape(entries.shape[0], -1) @ self.axes[block]

    def backward(self, block: int, coefficients: Tensor) -> Tensor:
        """The first coefficients [n, r' <= r] of a block -> entries [n, g, 2, K, D] float32."""
        layers, (_, _, n_heads, dim) = self._layers(block), self.mean.shape
        whitened = coefficients @ self.axes[block, :, : coefficients.shape[1]].T
        whitened = whitened.view(-1, self.block_layers, 2, n_heads, dim)
        return torch.einsum("nlckd,lckde->nlcke", whitened, self.inverse[layers]) + self.mean[layers]

    def _layers(self, block: int) -> slice:
        return slice(block * self.block_layers, (block + 1) * self.block_layers)

    def tables(self) -> dict[str, Tensor]:
        """What an artifact holds of it: axes in 8 bits, since nearly the same axes, made orthonormal, are as good."""
        largest = self.axes.abs().amax(1, keepdim=True).clamp_min(_TINY)
        axes = (self.axes / largest * 127).round().to(torch.int8)
        return {"mean": self.mean, "root": self.root, "axes": axes, "scales": self.scales}

    @staticmethod
    def of(tables: Mapping[str, Tensor], device: torch.device | None = None, fingerprint: str = "") -> Transform:
        """From an artifact's tables."""
        mean, root, axes = (tables[name].to(device).float() for name in ("mean", "root", "axes"))
        inverse = torch.linalg.inv(root)
        return Transform(mean, root, inverse, _orthonormal(axes), tables["scales"].cpu(), fingerprint)


def fit(mean: Tensor, covariance: Tensor, fisher: Tensor, rank: int) -> Transform:
    """The map of a model.

    Args:
        mean: [L, 2, K, D] of keys before RoPE and of values.
        covariance: [B, R, R] of the blocks, around that mean.
        fisher: [L, 2, K, D, D].
        rank: axes to keep per block, at most R.
    """
    root = _root(fisher)
    n_blocks = covariance.shape[0]
    axes, scales = [], []
    for block in range(n_blocks):
        parts = root.reshape(n_blocks, -1, *root.shape[-2:])[block]
        whole: Tensor = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
        whitened = whole @ covariance[block] @ whole
        variances, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
        axes.append(vectors.flip(1)[:, :rank])
        scales.append(torch.log2(variances.flip(0)[:rank].clamp_min(_TINY)).round().clamp(-127, 127))
    return Transform(mean, root, torch.linalg.inv(root), torch.stack(axes), torch.stack(scales).to(torch.int8))


def _orthonormal(axes: Tensor) -> Tensor:
    """The orthonormal columns nearest to [B, R, r] ones that nearly are, by Newton and Schulz."""
    axes = axes / axes.norm(dim=1, keepdim=True).clamp_min(_TINY)
    for _ in range(_ROUNDS):
        axes = 1.5 * axes - 0.5 * axes @ (axes.transpose(1, 2) @ axes)
    return axes


def _root(fisher: Tensor) -> Tensor:
    """Symmetric square roots, kept away from 0 so that they can be inverted."""
    size = fisher.shape[-1]
    symmetric = (fisher + fisher.transpose(-1, -2)).double() / 2
    level = symmetric.diagonal(dim1=-1, dim2=-2).mean(-1)
    level = level.clamp_min(max(_TINY, LOWEST * float(level.mean())))  # of a head that nothing depends on
    symmetric = symmetric + RIDGE * level[..., None, None] * torch.eye(size, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(symmetric)
    roots = values.clamp_min(_TINY).sqrt()
    found: Tensor = (vectors * roots[..., None, :]) @ vectors.transpose(-1, -2)
    return found.float()
