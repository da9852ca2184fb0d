"""How far each key stands out from the others (statistical leverage, as in Compactor)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Geometry
from precis.observations import Afterwards, Reading

_RIDGE = 1e-2
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Leverage:
    """Leverage scores of the keys before RoPE, centred and sketched to fewer dimensions: [L, K, T] float32 in [0, 1].

    Attributes:
        sketch: dimensions of the Gaussian sketch.
        seed: of the sketch, so that one document always gives one selection.
        n_first: first tokens, left out.
        n_last: last tokens, left out.
    """

    sketch: int = 48
    seed: int = 0
    n_first: int = 8
    n_last: int = 4

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self)


@dataclass(slots=True)
class _Observer(Afterwards):
    what: Leverage

    def finish(self, reading: Reading) -> Tensor:
        full, g = reading.full, reading.full.geometry
        scores = torch.zeros(g.n_layers, g.n_kv_heads, full.n_tokens, device=full.keys.device)
        first, last = self.what.n_first, full.n_tokens - self.what.n_last
        if last <= first:
            return scores
        positions = torch.arange(first, last, device=scores.device)
        generator = torch.Generator().manual_seed(self.what.seed)
        for layer in range(g.n_layers):
            sketch = torch.randn(g.head_dim, self.what.sketch, generator=generator).to(scores.device)
            for head in range(g.n_kv_heads):
                keys = reading.rotary.undo(layer, full.keys[layer, head, first:last], positions)
                scores[layer, head, first:last] = leverage((keys - keys.mean(0)) @ sketch / self.what.sketch**0.5)
        return scores


def leverage(rows: Tensor) -> Tensor:
    """diag(X (X^T X + ridge)^-1 X^T) of rows [n, k], at least 0; the ridge grows until the matrix can be factored."""
    gram = rows.T @ rows
    unit = torch.eye(gram.shape[0], device=gram.device)
    ridge = _RIDGE
    for _ in range(_TRIES):
        factor, info = torch.linalg.cholesky_ex(gram + ridge * unit)
        if int(info) == 0:
            break
        ridge *= 10
    return (rows * torch.cholesky_solve(rows.T, factor).T).sum(-1).clamp_min(0)
