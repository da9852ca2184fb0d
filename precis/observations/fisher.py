"""How much the model's predictions would change if a cached value changed, and what attention it was paid.

While the model repeats its context, a token is sampled from each prediction and its log-probability is differentiated;
the mean square of that gradient with respect to a cached value is its Fisher information. The gradient of a value is
the attention-weighted sum of the gradients of the attention outputs. The backward pass of attention is spelled out
here, so that one recomputation of the weights serves it, the Fisher information and the maxima of KVzip alike, and so
that nothing of the size of the cache is saved per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precis.attention.dense import Maxima, attention_weights
from precis.core import Geometry, Prefill
from precis.families import Model
from precis.full_cache import overlay_attention
from precis.observations import Afterwards, Reading
from precis.observations.repeat import CHUNK, SINKS, repetitions

FORWARD = 256  # tokens per forward and backward: bounds the memory for activations
_LOGITS = 1 << 21  # attention weights per block of the backward pass


@dataclass(frozen=True, slots=True)
class RepeatGradients:
    """Attention and value Fisher information of a repetition: [L, H + 2 K, T] float32.

    The first H rows are the maxima of `RepeatAttention`, the next K rows the mean squared gradient of sampled
    log-probabilities with respect to each value, the last K rows the squares of `RepeatAttention`. 0 outside of the
    document's body, and in layers that do not evict. Costs a forward and a backward over the repeated document,
    without gradients of weights.

    Attributes:
        seed: of the sampling.
        chunk: tokens repeated at a time.
    """

    seed: int = 0
    chunk: int = CHUNK

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self)


@dataclass(slots=True)
class _Observer(Afterwards):
    what: RepeatGradients

    def finish(self, reading: Reading) -> Tensor:
        full, g = reading.full, reading.full.geometry
        found = torch.zeros(g.n_layers, 2 * g.n_heads + g.n_kv_heads, full.n_tokens, device=full.keys.device)
        start, stop = reading.document.body
        n_rows = differentiate(
            reading, self.what.seed, self.what.chunk, lambda chunk: GradientStore(full, chunk, found)
        )
        maxima, information, squares = found.tensor_split([g.n_heads, g.n_heads + g.n_kv_heads], 1)
        information[..., :start] = 0
        information[..., stop:] = 0
        information /= max(1, n_rows)
        return torch.cat([maxima, information, g.grouped(squares).sum(2)], 1)


@dataclass(slots=True)
class GradientStore:
    """As an overlay, but attention can be differentiated with respect to the new tokens, and notes what it finds."""

    full: Prefill
    chunk: tuple[int, int]
    found: Tensor
    wants_keys: bool = False
    tail: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def run(self, model: Model, token_ids: Tensor, offset: int, generator: torch.Generator) -> None:
        """Forward and backward of some tokens; the earlier ones of the chunk are constants."""
        positions = torch.arange(offset, offset + token_ids.shape[0], device=self.full.keys.device)
        with torch.enable_grad():
            embedded = model.hf.get_input_embeddings()(token_ids.to(model.device)).detach().requires_grad_()
            out = model.hf(  # the whole model: some scale or cap their logits
                inputs_embeds=embedded[None],
                position_ids=(self.full.n_tokens + positions)[None],
                use_cache=False,
                kv_store=self,
            )
            logs = out.logits[0].float().log_softmax(-1)
            logs.gather(1, draw(logs.detach(), generator)).sum().backward()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Append k and v to the tail, attend over cache and tail."""
        before = self.tail.get(layer, (key[:, :0].detach(), value[:, :0].detach()))
        self.tail[layer] = (torch.cat([before[0], key.detach()], 1), torch.cat([before[1], value.detach()], 1))
        out: Tensor = _Attention.apply(query, key, value, self, layer, sinks)  # type: ignore[no-untyped-call]
        return out

    def whole(self, layer: int, n_tail: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, m, D] of the cache and the first `n_tail` tokens of the tail."""
        keys, values = self.tail[layer]
        return (
            torch.cat([self.full.keys[layer], keys[:, :n_tail]], 1),
            torch.cat([self.full.values[layer], values[:, :n_tail]], 1),
        )

    def maxima(self, layer: int) -> Maxima | None:
        """What to record of the attention in this layer; None where it does not evict."""
        g, n_tokens = self.full.geometry, self.full.n_tokens
        if not g.evicts(layer, n_tokens):
            return None
        inside = self.found[layer, :, self.chunk[0] : self.chunk[1]]
        return Maxima(self.chunk, SINKS, n_tokens, inside[: g.n_heads], None, inside[-g.n_heads :])

    def note_gradient(self, layer: int, of_keys: Tensor, of_values: Tensor) -> None:
        """Take the gradients [K, T, D] of one forward with respect to the cached values, and keys if it wants them."""
        g = self.full.geometry
        if not g.evicts(layer, self.full.n_tokens):
            return
        self.found[layer, g.n_heads : g.n_heads + g.n_kv_heads] += of_values.square().sum(-1)


def differentiate(reading: Reading, seed: int, chunk: int, store_of: Callable[[tuple[int, int]], GradientStore]) -> int:
    """Repeat a document, a chunk and its store at a time, and differentiate each forward; the rows differentiated.

    Args:
        reading: of the document.
        seed: of the sampling.
        chunk: tokens repeated at a time.
        store_of: given start and stop of a chunk, what notes its gradients.
    """
    generator = torch.Generator(reading.full.keys.device).manual_seed(seed)
    start, stop = reading.document.body
    n_rows = 0
    for at, last, said in repetitions(reading.document, reading.full.geometry, chunk):
        store = store_of((at, last))
        for offset in range(0, said.shape[0], FORWARD):
            reading.between("score", at - start + min(offset, last - at), stop - start)
            part = said[offset : offset + FORWARD]
            store.run(reading.model, part, offset, generator)
            n_rows += part.shape[0]
    reading.between("score", stop - start, stop - start)
    return n_rows


def draw(logs: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row of log-probabilities [n, vocabulary]: [n, 1] int64, by one uniform number per row."""
    sums = logs.exp().cumsum(-1)
    uniform = torch.rand(logs.shape[0], 1, generator=generator, device=logs.device)
    return torch.searchsorted(sums, uniform * sums[:, -1:]).clamp_max(logs.shape[1] - 1)


class _Attention(torch.autograd.Function):
    """Attention of new tokens over cache and tail. Only queries, and the new tokens' keys and values, get gradients."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, _key: Tensor, _value: Tensor, store: GradientStore, layer: int, sinks: Tensor | None
    ) -> Tensor:
        g = store.full.geometry
        n_tail = store.tail[layer][0].shape[1]
        keys, values = store.whole(layer, n_tail)
        out = overlay_attention(g, layer, query, keys, values, store.maxima(layer), sinks)
        ctx.save_for_backward(query, out)
        ctx.store, ctx.layer, ctx.n_tail, ctx.sinks = store, layer, n_tail, sinks
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, out = ctx.saved_tensors
        store, layer = ctx.store, ctx.layer
        g, n_tokens = store.full.geometry, store.full.n_tokens
        keys, values = (part.float() for part in store.whole(layer, ctx.n_tail))
        n_kv_heads, m, dim = keys.shape
        n, size = query.shape[1], max(16, _LOGITS // (g.n_heads * m))
        positions = torch.arange(m, device=keys.device)
        of_query = torch.zeros_like(query, dtype=torch.float32)
        n_old = 0 if store.wants_keys else m - n
        of_keys, of_values = torch.zeros_like(keys[:, n_old:]), torch.zeros_like(values)
        for start in range(0, n, size):
            stop = min(n, start + size)
            rows = query[:, start:stop]
            weights = attention_weights(
                rows,
                keys,
                positions[m - n + start : m - n + stop, None],
                positions[None],
                scaling=g.scaling[layer],
                softcap=g.softcap[layer],
                window=g.windows[layer],
                sinks=ctx.sinks,
            )
            flat = weights.flatten(1, 2)
            gradient = gradients[0][:, start:stop].float().reshape(n_kv_heads, -1, dim)
            of_values += flat.transpose(1, 2) @ gradient
            along = (gradient * out[:, start:stop].float().reshape(gradient.shape)).sum(-1, keepdim=True)
            of_logits = (gradient @ values.transpose(1, 2)).sub_(along).mul_(flat)
            grouped = rows.float().reshape(n_kv_heads, -1, dim)
            if g.softcap[layer] is not None:  # d/dx of c tanh(x / c) is 1 - tanh(x / c)^2
                logits = (grouped @ keys.transpose(1, 2)).mul_(g.scaling[layer] / g.softcap[layer])
                of_logits.mul_(1 - torch.tanh(logits).square())
            of_query[:, start:stop] = (of_logits @ keys).mul_(g.scaling[layer]).view(rows.shape)
            of_keys += (of_logits[..., n_old:].transpose(1, 2) @ grouped).mul_(g.scaling[layer])
        store.note_gradient(layer, of_keys[:, :n_tokens], of_values[:, :n_tokens])
        dtype = query.dtype
        return of_query.to(dtype), of_keys[:, -n:].to(dtype), of_values[:, -n:].to(dtype), None, None, None
