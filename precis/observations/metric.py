"""What an error of a cached key or value costs: Fisher matrices per layer and kv head, from a repetition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Geometry
from precis.families import Rotary
from precis.observations import Afterwards, Reading
from precis.observations.fisher import GradientStore, differentiate
from precis.observations.repeat import CHUNK, SINKS


@dataclass(frozen=True, slots=True)
class RepeatMetric:
    """Mean outer products of gradients: [L, 2, K, D, D] float32, of keys before RoPE and of values.

    Gradients are those of log-probabilities of tokens sampled from each prediction of a repetition. The first tokens,
    whose entries are unlike all others, do not count.

    Attributes:
        seed: of the sampling.
    """

    seed: int = 0

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self)


@dataclass(slots=True)
class _Observer(Afterwards):
    what: RepeatMetric

    def finish(self, reading: Reading) -> Tensor:
        full, g = reading.full, reading.full.geometry
        device = full.keys.device
        products = torch.zeros(g.n_layers, 2, g.n_kv_heads, g.head_dim, g.head_dim, device=device)
        nothing = torch.zeros(0, device=device)  # attention itself is not recorded
        n_rows = differentiate(
            reading,
            self.what.seed,
            CHUNK,
            lambda chunk: _MetricStore(full, chunk, nothing, True, rotary=reading.rotary, products=products),
        )
        return products / max(1, n_rows * (full.n_tokens - SINKS))


@dataclass(slots=True, kw_only=True)
class _MetricStore(GradientStore):
    """Sums outer products of gradients."""

    rotary: Rotary
    products: Tensor

    def maxima(self, layer: int) -> None:
        """Nothing is recorded."""
        return

    def note_gradient(self, layer: int, of_keys: Tensor, of_values: Tensor) -> None:
        """Take the gradients [K, T, D] of one forward."""
        n_kv_heads, n_tokens, dim = of_keys.shape
        positions = torch.arange(n_tokens, device=of_keys.device).repeat(n_kv_heads)
        before = self.rotary.pull_back(layer, of_keys.reshape(-1, dim), positions).view(of_keys.shape)
        for kind, gradient in enumerate((before, of_values)):
            later = gradient[:, SINKS:]
            self.products[layer, kind] += later.transpose(1, 2) @ later
