"""The attention that representative questions, and the model's own answers to them, pay to the context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.attention.dense import Maxima
from precis.core import Geometry
from precis.full_cache import Overlay, forward_tokens
from precis.observations import Afterwards, Reading

_FORWARD = 256


@dataclass(frozen=True, slots=True)
class ProbeAttention:
    """The largest attention that any row of the probes paid to each entry: [L, H, T] float32, per query head.

    The probes are `Document.probes`, each asked on its own on top of the full cache and answered greedily, so that the
    rows that look the answer up count, too. 0 without probes, and in layers that do not evict.

    Attributes:
        n_answer: tokens answered per probe.
    """

    n_answer: int = 24

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self)


@dataclass(slots=True)
class _Observer(Afterwards):
    what: ProbeAttention

    def finish(self, reading: Reading) -> Tensor:
        full, g = reading.full, reading.full.geometry
        scores = torch.zeros(g.n_layers, g.n_heads, full.n_tokens, device=full.keys.device)

        def maxima(layer: int) -> Maxima | None:
            if not g.evicts(layer, full.n_tokens):
                return None
            return Maxima((0, full.n_tokens), 0, full.n_tokens, scores[layer])

        probes = reading.document.probes
        for index, probe in enumerate(probes):
            reading.between("score", index, len(probes))
            self._ask(reading, Overlay(full, maxima), torch.tensor(probe, dtype=torch.int64))
        return scores

    def _ask(self, reading: Reading, overlay: Overlay, probe: Tensor) -> None:
        model, at = reading.model, reading.full.n_tokens
        room = model.geometry.max_length - at
        for part in torch.split(probe[:room], _FORWARD):
            hidden = forward_tokens(model, part, at, overlay)
            at += part.shape[0]
        for _ in range(min(self.what.n_answer, model.geometry.max_length - at)):
            token = model.hf.get_output_embeddings()(hidden[-1:]).argmax(-1)
            hidden = forward_tokens(model, token, at, overlay)
            at += 1
