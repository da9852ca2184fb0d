"""How much the model's predictions would change if a value changed: the Fisher information of cached values.

While the model repeats its context, a token is sampled from each prediction and its log-probability is differentiated;
the mean square of that gradient with respect to a cached value is its Fisher information. The gradient of a value is
the attention-weighted sum of the gradients of the attention outputs, so only those pass through autograd.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from precis.attention.dense import attention_weights, causal_attention
from precis.core import Geometry, Prefill
from precis.families import Model
from precis.observations import Afterwards, Reading
from precis.observations.repeat import CHUNK, repetitions

FORWARD = 256
"""Tokens per forward and backward: bounds the memory for activations."""


@dataclass(frozen=True, slots=True)
class ValueFisher:
    """Mean squared gradient of sampled log-probabilities with respect to each value: [L, K, T] float32.

    0 outside of the document's body. Costs a forward, its recomputation and a backward over the repeated document.

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
    what: ValueFisher

    def finish(self, reading: Reading) -> Tensor:
        full, g = reading.full, reading.full.geometry
        fisher = torch.zeros(g.n_layers, g.n_kv_heads, full.n_tokens, device=full.keys.device)
        generator = torch.Generator(full.keys.device).manual_seed(self.what.seed)
        start, stop = reading.document.body
        n_rows = 0
        for at, last, said in repetitions(reading.document, g, self.what.chunk):
            store = _GradientStore(full, fisher)
            for offset in range(0, said.shape[0], FORWARD):
                reading.between("score", at - start + min(offset, last - at), stop - start)
                part = said[offset : offset + FORWARD]
                store.run(reading.model, part, offset, generator)
                n_rows += part.shape[0]
        reading.between("score", stop - start, stop - start)
        fisher[..., :start] = 0
        fisher[..., stop:] = 0
        return fisher / max(1, n_rows)


@dataclass(slots=True)
class _GradientStore:
    """As an overlay, but its attention can be differentiated, and gradients of outputs become those of values."""

    full: Prefill
    fisher: Tensor
    tail: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    new: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def run(self, model: Model, token_ids: Tensor, offset: int, generator: torch.Generator) -> None:
        """Forward and backward of some tokens; the earlier ones of the chunk are constants."""
        positions = torch.arange(offset, offset + token_ids.shape[0], device=self.full.keys.device)
        with torch.enable_grad():
            embedded = model.hf.get_input_embeddings()(token_ids.to(model.device)).detach().requires_grad_()
            out = model.decoder(
                inputs_embeds=embedded[None],
                position_ids=(self.full.n_tokens + positions)[None],
                use_cache=False,
                kv_store=self,
            )
            logs = model.hf.get_output_embeddings()(out.last_hidden_state[0]).float().log_softmax(-1)
            sampled = torch.multinomial(logs.detach().exp(), 1, generator=generator)
            logs.gather(1, sampled).sum().backward()
        for layer, (key, value) in self.new.items():
            before = self.tail.get(layer)
            if before is not None:
                key, value = torch.cat([before[0], key], 1), torch.cat([before[1], value], 1)
            self.tail[layer] = (key, value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        g = self.full.geometry
        self.new[layer] = (key.detach(), value.detach())
        before = self.tail.get(layer)
        keys = [self.full.keys[layer], *([before[0]] if before else []), key]
        values = [self.full.values[layer], *([before[1]] if before else []), value]

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return causal_attention(
                query,
                torch.cat([*keys[:-1], key], 1),
                torch.cat([*values[:-1], value], 1),
                scaling=g.scaling[layer],
                softcap=g.softcap[layer],
                window=g.windows[layer],
                sinks=sinks,
            )

        out: Tensor = checkpoint(run, query, key, value, use_reentrant=False)
        if g.evicts(layer, self.full.n_tokens):
            seen = torch.cat([*keys[:-1], key.detach()], 1)
            out.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._add(layer, query.detach(), seen, gradient)
            )
        return out

    def _add(self, layer: int, query: Tensor, keys: Tensor, gradient: Tensor) -> None:
        g, n_tokens = self.full.geometry, self.full.n_tokens
        positions = torch.arange(keys.shape[1], device=keys.device)
        weights = attention_weights(
            query,
            keys,
            positions[-query.shape[1] :, None],
            positions[None],
            scaling=g.scaling[layer],
            softcap=g.softcap[layer],
            window=g.windows[layer],
        )[..., :n_tokens]
        rows = gradient.float().reshape(g.n_kv_heads, -1, g.head_dim)
        of_values = weights.reshape(g.n_kv_heads, -1, n_tokens).transpose(1, 2) @ rows
        self.fisher[layer] += of_values.square().sum(-1)
