"""The attention that the model pays to its context when it repeats it (KVzip, arXiv:2505.23416).

The context is repeated teacher-forced, a chunk at a time, on top of the full cache, and the largest attention to each
entry is recorded from the same logits that the forward computes anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precis.attention.dense import Maxima
from precis.core import Geometry
from precis.full_cache import Document, Overlay, forward_tokens
from precis.observations import Afterwards, Reading

CHUNK = 2048  # tokens repeated at a time, as in kvpress; the paper says about 2,000
FORWARD = 512  # tokens per forward, as in the prefill
SINKS = 4
_OVERLAP = 8


@dataclass(frozen=True, slots=True)
class RepeatAttention:
    """What the rows of a repetition paid to each entry: [L, H + K, T] float32.

    The first H rows are the largest attention of any row, per query head; the last K rows the sum of all rows' squared
    attention over the group, per kv head. 0 outside of the document's body and in layers that do not evict. The softmax
    is over the first tokens, the repeated chunk and the repetition itself, so that chunks are comparable.

    Attributes:
        per_residual: divide each row by the norm of the attention's input (KVzip+).
        chunk: tokens repeated at a time.
    """

    per_residual: bool = False
    chunk: int = CHUNK

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self)


@dataclass(slots=True)
class _Observer(Afterwards):
    what: RepeatAttention
    norms: dict[int, Tensor] = field(default_factory=dict)

    def finish(self, reading: Reading) -> Tensor:
        full, g = reading.full, reading.full.geometry
        scores = torch.zeros(2, g.n_layers, g.n_heads, full.n_tokens, device=full.keys.device)
        body_start, body_stop = reading.document.body
        with self._residuals(reading.model.attentions):
            for at, stop, said in repetitions(reading.document, g, self.what.chunk):
                overlay = Overlay(full, lambda layer, span=(at, stop): self._maxima(layer, span, scores, g))  # type: ignore[misc]
                for offset in range(0, said.shape[0], FORWARD):  # in small steps, so that other work can go on
                    done = at - body_start + min(offset, stop - at)
                    reading.between("score", done, body_stop - body_start)
                    part = said[offset : offset + FORWARD]
                    forward_tokens(reading.model, part, full.n_tokens + offset, overlay)
        reading.between("score", body_stop - body_start, body_stop - body_start)
        return torch.cat([scores[0], g.grouped(scores[1]).sum(2)], 1)

    def _maxima(self, layer: int, span: tuple[int, int], scores: Tensor, geometry: Geometry) -> Maxima | None:
        n_tokens = scores.shape[3]
        if not geometry.evicts(layer, n_tokens):
            return None
        weights = 1 / self.norms[layer] if self.what.per_residual else None
        best, squares = scores[:, layer, :, span[0] : span[1]]
        return Maxima(span, SINKS, n_tokens, best, weights, squares)

    @contextmanager
    def _residuals(self, attentions: tuple[Any, ...]) -> Iterator[None]:
        """Note the norm of every attention's input while the context is open, if asked to."""

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self.norms[module.layer_idx] = hidden[0].float().norm(dim=-1)

        noted = attentions if self.what.per_residual else ()
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in noted]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def repetitions(document: Document, geometry: Geometry, chunk: int = CHUNK) -> Iterator[tuple[int, int, Tensor]]:
    """Start and stop of each chunk, and the tokens that ask for it and repeat it.

    The chunk shrinks where the model's length leaves no room for it after the context.
    """
    start, stop = document.body
    overhead = max(len(document.repeat_first), sum(map(len, document.repeat_next)) + _OVERLAP)
    size = max(64, min(chunk, geometry.max_length - document.n_tokens - overhead))
    for at in range(start, stop, size):
        part = document.token_ids[at : min(stop, at + size)]
        if at == start:
            asked = torch.tensor(document.repeat_first, dtype=torch.int64)
        else:
            opening, closing = (torch.tensor(part, dtype=torch.int64) for part in document.repeat_next)
            asked = torch.cat([opening, document.token_ids[max(start, at - _OVERLAP) : at], closing])
        yield at, at + part.shape[0], torch.cat([asked, part])
