"""Run a document through the model once, in chunks, and observe what the policy's parts asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from precis.attention.dense import attention_weights, causal_attention
from precis.core import Geometry, Prefill
from precis.families import Model, output_projection
from precis.scorers import Needs

Between = Callable[[str, int, int], None]  # stage, done, total: called between chunks; may raise to stop the work
CHUNK = 512
REPEAT_CHUNK = 2048  # as in kvpress; the paper says about 2,000
_REPEAT_FORWARD = 256  # tokens of a repetition per forward
_REPEAT_ROWS = 128
_REPEAT_SINKS = 4
_REPEAT_OVERLAP = 8


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
    """

    token_ids: Tensor
    body: tuple[int, int]
    protected: tuple[tuple[int, int], ...] = ()
    repeat_first: tuple[int, ...] = ()
    repeat_next: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def n_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])


@dataclass(slots=True)
class DenseCache:
    """The growing full cache of one prefill; also keeps the queries of the last `n_window` tokens."""

    geometry: Geometry
    keys: Tensor
    values: Tensor
    n_window: int
    length: int = 0
    queries: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def empty(model: Model, capacity: int, n_window: int) -> DenseCache:
        """Room for `capacity` tokens."""
        g = model.geometry
        shape = (g.n_layers, g.n_kv_heads, capacity, g.head_dim)
        keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        return DenseCache(g, keys, torch.empty_like(keys), n_window)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Append k and v, keep the last queries, attend over all so far."""
        stop = self.length + key.shape[1]
        self.keys[layer, :, self.length : stop] = key
        self.values[layer, :, self.length : stop] = value
        if self.n_window:
            earlier = self.queries.get(layer, query[:, :0])
            self.queries[layer] = torch.cat([earlier, query], 1)[:, -self.n_window :].clone()
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
        chunk: span of the context whose attention is recorded.
        scores: if given, [L, K, T] float32, raised to the attention that the new tokens pay to `chunk`, where the
            softmax is over the first tokens, the chunk and the new tokens themselves.
        tail: per layer, keys and values [K, n, D] of the new tokens so far.
    """

    prefill: Prefill
    chunk: tuple[int, int] = (0, 0)
    scores: Tensor | None = None
    tail: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Append k and v to the tail, record if asked to, attend over cache and tail."""
        g = self.prefill.geometry
        if layer in self.tail:
            key = torch.cat([self.tail[layer][0], key], 1)
            value = torch.cat([self.tail[layer][1], value], 1)
        self.tail[layer] = (key, value)
        if self.scores is not None and g.evicts(layer, self.prefill.n_tokens):
            self._record(layer, query, key, sinks)
        return causal_attention(
            query,
            torch.cat([self.prefill.keys[layer], key], 1),
            torch.cat([self.prefill.values[layer], value], 1),
            scaling=g.scaling[layer],
            softcap=g.softcap[layer],
            window=g.windows[layer],
            sinks=sinks,
        )

    def _record(self, layer: int, query: Tensor, tail: Tensor, sinks: Tensor | None) -> None:
        g, n_tokens = self.prefill.geometry, self.prefill.n_tokens
        start, stop = self.chunk
        n_first = min(_REPEAT_SINKS, start)
        every = torch.arange(n_tokens + tail.shape[1], device=tail.device)
        columns = torch.cat([every[:n_first], every[start:stop], every[n_tokens:]])[None]
        keys = torch.cat([self.prefill.keys[layer][:, columns[0, : n_first + stop - start]], tail], 1)
        best = self.scores[layer, :, start:stop]  # type: ignore[index]
        rows = every[-query.shape[1] :, None]
        for row in range(0, query.shape[1], _REPEAT_ROWS):
            n_keys = keys.shape[1] - max(0, query.shape[1] - row - _REPEAT_ROWS)  # later new tokens are hidden anyway
            weights = attention_weights(
                query[:, row : row + _REPEAT_ROWS],
                keys[:, :n_keys],
                rows[row : row + _REPEAT_ROWS],
                columns[:, :n_keys],
                scaling=g.scaling[layer],
                softcap=g.softcap[layer],
                sinks=sinks,
            )
            highest = weights[..., n_first : n_first + stop - start].flatten(1, 2).amax(1)
            torch.maximum(best, highest, out=best)


@torch.inference_mode()
def prefill(model: Model, document: Document, needs: Needs, between: Between = silent, chunk: int = CHUNK) -> Prefill:
    """Run the document through the model.

    Args:
        model: from `attention.plug.attach`.
        document: T tokens, at least one.
        needs: observations wanted.
        between: called between chunks with ("prefill" | "score", done, total) in tokens.
        chunk: tokens per forward; bounds memory, changes nothing else.

    Returns:
        The full cache and the observations.
    """
    n_tokens = document.n_tokens
    cache = DenseCache.empty(model, n_tokens, min(needs.n_window, n_tokens))
    for start in range(0, n_tokens, chunk):
        between("prefill", start, n_tokens)
        stop = min(n_tokens, start + chunk)
        forward_tokens(model, document.token_ids[start:stop], start, cache)
        cache.length = stop
    between("prefill", n_tokens, n_tokens)
    full = Prefill(model.geometry, cache.keys, cache.values)
    return Prefill(
        model.geometry,
        cache.keys,
        cache.values,
        queries=torch.stack([q for _, q in sorted(cache.queries.items())]) if cache.queries else None,
        output_norms=output_norms(model, full) if needs.output_norms else None,
        repeat_attention=repeat_context(model, document, full, between) if needs.repeat else None,
    )


def forward_tokens(model: Model, token_ids: Tensor, start: int, store: DenseCache | Overlay) -> Tensor:
    """One forward of the decoder at positions from `start` on; hidden states [n, hidden]."""
    positions = torch.arange(start, start + token_ids.shape[0], device=model.device)
    out = model.decoder(
        input_ids=token_ids[None].to(model.device), position_ids=positions[None], use_cache=False, kv_store=store
    )
    return out.last_hidden_state[0]  # type: ignore[no-any-return]


def output_norms(model: Model, full: Prefill, block: int = 4096) -> Tensor:
    """||v W_o||_1 of every entry, averaged over its query group: [L, K, T] float32 (arXiv:2502.03805)."""
    g = full.geometry
    norms = torch.zeros(g.n_layers, g.n_kv_heads, full.n_tokens, device=full.keys.device)
    for layer, attention in enumerate(model.attentions):
        projection = output_projection(attention)
        weight = projection.weight.T.reshape(g.n_kv_heads, g.group_size, g.head_dim, -1)  # type: ignore[union-attr]
        for start in range(0, full.n_tokens, block):
            values = full.values[layer, :, start : start + block]
            for member in range(g.group_size):
                norms[layer, :, start : start + block] += (values @ weight[:, member]).float().abs().sum(-1)
    return norms / g.group_size


@torch.inference_mode()
def repeat_context(
    model: Model, document: Document, full: Prefill, between: Between = silent, chunk: int = REPEAT_CHUNK
) -> Tensor:
    """Ask the model to repeat the document, teacher-forced, and record the largest attention to each entry.

    Returns:
        [L, K, T] float32; 0 outside of the document's body and in layers that do not evict. The cache is only read.
    """
    g = full.geometry
    scores = torch.zeros(g.n_layers, g.n_kv_heads, full.n_tokens, device=full.keys.device)
    start, stop = document.body
    overhead = max(len(document.repeat_first), sum(map(len, document.repeat_next)) + _REPEAT_OVERLAP)
    size = max(64, min(chunk, g.max_length - full.n_tokens - overhead))
    for at in range(start, stop, size):
        part = document.token_ids[at : min(stop, at + size)]
        if at == start:
            asked = torch.tensor(document.repeat_first, dtype=torch.int64)
        else:
            opening, closing = (torch.tensor(part, dtype=torch.int64) for part in document.repeat_next)
            asked = torch.cat([opening, document.token_ids[max(start, at - _REPEAT_OVERLAP) : at], closing])
        overlay = Overlay(full, (at, at + part.shape[0]), scores)
        said = torch.cat([asked, part])
        for offset in range(0, said.shape[0], _REPEAT_FORWARD):  # in small steps, so that other work can go on
            between("score", at - start + min(offset, part.shape[0]), stop - start)
            forward_tokens(model, said[offset : offset + _REPEAT_FORWARD], full.n_tokens + offset, overlay)
    between("score", stop - start, stop - start)
    return scores
