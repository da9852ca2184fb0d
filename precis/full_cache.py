"""The full cache of one context: how a document is read into it, and how probes read it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from precis.attention import native
from precis.attention.dense import Maxima, causal_attention, recording_attention
from precis.core import Geometry, Prefill
from precis.families import Model

Between = Callable[[str, int, int], None]  # stage, done, total: called between chunks; may raise to stop the work


def silent(stage: str, done: int, total: int) -> None:
    """The `Between` of callers who do not care."""


@dataclass(frozen=True, slots=True)
class Document:
    """A context's tokens.

    Attributes:
        token_ids: [T] int64.
        body: start and stop of the document itself inside the template.
        protected: further spans that are always kept.
        repeat_first: tokens that ask for a repetition, up to the answer's start.
        repeat_next: the same for the second chunk on: tokens before and after the eight tokens it starts with.
        probes: per representative question, its tokens, up to the answer's start.
    """

    token_ids: Tensor
    body: tuple[int, int]
    protected: tuple[tuple[int, int], ...] = ()
    repeat_first: tuple[int, ...] = ()
    repeat_next: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    probes: tuple[tuple[int, ...], ...] = ()

    @property
    def n_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])


class Watcher(Protocol):
    """Sees every forward of a prefill."""

    def see(self, layer: int, query: Tensor, keys: Tensor, start: int) -> None:
        """Take queries [H, n, D] of the tokens from `start` on, and all keys [K, start + n, D] so far."""
        ...


@dataclass(slots=True)
class DenseCache:
    """The growing full cache of one prefill."""

    geometry: Geometry
    keys: Tensor
    values: Tensor
    watchers: Sequence[Watcher] = ()
    length: int = 0

    @staticmethod
    def empty(model: Model, capacity: int, watchers: Sequence[Watcher] = ()) -> DenseCache:
        """Room for `capacity` tokens."""
        g = model.geometry
        shape = (g.n_layers, g.n_kv_heads, capacity, g.head_dim)
        keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        return DenseCache(g, keys, torch.empty_like(keys), watchers)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Append k and v, let the watchers see, attend over all so far."""
        stop = self.length + key.shape[1]
        self.keys[layer, :, self.length : stop] = key
        self.values[layer, :, self.length : stop] = value
        for watcher in self.watchers:
            watcher.see(layer, query, self.keys[layer, :, :stop], self.length)
        g = self.geometry
        return causal_attention(
            query,
            self.keys[layer, :, :stop],
            self.values[layer, :, :stop],
            scaling=g.scaling[layer],
            softcap=g.softcap[layer],
            window=g.windows[layer],
            sinks=sinks,
        )


@dataclass(slots=True)
class Overlay:
    """A read-only full cache with a tail of new tokens on top, for probes. The tail goes with this object.

    Attributes:
        maxima: if given, per layer what to record of the attention that the new tokens pay; None for layers that do
            not evict.
        tail: per layer, keys and values [K, n, D] of the new tokens so far.
    """

    prefill: Prefill
    maxima: Callable[[int], Maxima | None] | None = None
    tail: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Append k and v to the tail, attend over cache and tail, record if asked to."""
        g = self.prefill.geometry
        if layer in self.tail:
            key = torch.cat([self.tail[layer][0], key], 1)
            value = torch.cat([self.tail[layer][1], value], 1)
        self.tail[layer] = (key, value)
        keys = torch.cat([self.prefill.keys[layer], key], 1)
        values = torch.cat([self.prefill.values[layer], value], 1)
        maxima = self.maxima(layer) if self.maxima else None
        return overlay_attention(g, layer, query, keys, values, maxima, sinks)


def overlay_attention(
    geometry: Geometry,
    layer: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    maxima: Maxima | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention [H, n, D] of new tokens over a cache and themselves, recorded if asked to, by the best backend."""
    scaling, softcap, window = geometry.scaling[layer], geometry.softcap[layer], geometry.windows[layer]
    if maxima is None:
        return causal_attention(query, keys, values, scaling=scaling, softcap=softcap, window=window, sinks=sinks)
    record = native.recording_attention if native.usable(query) else recording_attention
    return record(query, keys, values, maxima, scaling=scaling, softcap=softcap, window=window, sinks=sinks)


def forward_tokens(model: Model, token_ids: Tensor, start: int, store: DenseCache | Overlay) -> Tensor:
    """One forward of the decoder at positions from `start` on; hidden states [n, hidden]."""
    positions = torch.arange(start, start + token_ids.shape[0], device=model.device)
    out = model.decoder(
        input_ids=token_ids[None].to(model.device), position_ids=positions[None], use_cache=False, kv_store=store
    )
    return out.last_hidden_state[0]  # type: ignore[no-any-return]
