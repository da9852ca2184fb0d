"""The queries of the last tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from precis.attention.dense import attention_weights
from precis.core import Geometry, Prefill
from precis.observations import Reading


@dataclass(frozen=True, slots=True)
class WindowQueries:
    """Queries after RoPE of the last `n_window` tokens: [L, H, W, D] in the model's dtype, W <= n_window.

    Attributes:
        n_window: tokens.
    """

    n_window: int

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self.n_window)


@dataclass(slots=True)
class _Observer:
    n_window: int
    queries: dict[int, Tensor] = field(default_factory=dict)

    def see(self, layer: int, query: Tensor, keys: Tensor, start: int) -> None:
        earlier = self.queries.get(layer, query[:, :0])
        self.queries[layer] = torch.cat([earlier, query], 1)[:, -self.n_window :].clone()

    def finish(self, reading: Reading) -> Tensor:
        return torch.stack([queries for _, queries in sorted(self.queries.items())])


def window_attention(prefill: Prefill, n_window: int, n_read: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Attention of the last `n_read` tokens (all of the window by default) to the tokens before them.

    Args:
        prefill: with WindowQueries(n_window).
        n_window: W.
        n_read: rows, at most W.

    Yields:
        Layer, and weights [K, G, n_read, T - n_read] float32 of a softmax over all T tokens; nothing where T <= n_read.
    """
    g, n_tokens = prefill.geometry, prefill.n_tokens
    n_rows = n_read or n_window
    n_seen = n_tokens - n_rows
    if n_seen <= 0:
        return
    queries = prefill.seen(WindowQueries(n_window))[:, :, -n_rows:]
    columns = torch.arange(n_tokens, device=queries.device)[None]
    for layer in range(g.n_layers):
        weights = attention_weights(
            queries[layer],
            prefill.keys[layer],
            columns[:, n_seen:].T,
            columns,
            scaling=g.scaling[layer],
            softcap=g.softcap[layer],
        )
        yield layer, weights[..., :n_seen]
