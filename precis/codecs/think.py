"""think: entries in 16 bits, without the key channels that matter least to queries.

Xu et al. 2024, "ThinK: Thinner Key Cache by Query-Driven Pruning", arXiv:2407.21018.
As in the paper: a channel counts by the mean square of the last queries times that of the keys, per kv head after
RoPE, queries of a group together; the last 32 entries of a head keep all channels. Differs from the paper: so do the
sinks. Where no queries were seen (tightening a stored snapshot), keys alone decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from precis.codecs import Layout, Shape
from precis.core import Prefill
from precis.observations import Observation
from precis.observations.window import WindowQueries
from precis.quantize import from_words, pack, packed_size, sink_rows, to_words, unpack, word_shapes

_QUERIES = WindowQueries(32)


@dataclass(frozen=True, slots=True)
class Think:
    """Four fifths of the bytes of 16 bits, with the paper's share.

    Attributes:
        pruned: share of key channels that are dropped.
        window: last entries of each head that keep all channels.
        queries: [L, K, D] mean squares of the last queries, or None.
    """

    name: str = "think"
    pruned: float = 0.4
    window: int = 32
    queries: Tensor | None = None
    pre_rope: bool = False

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({_QUERIES})

    def informed(self, full: Prefill) -> Think:
        """For a document whose last queries were seen."""
        squares = full.seen(_QUERIES).float().square().mean(2)
        return replace(self, queries=full.geometry.grouped(squares).mean(2))

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Which channels each head keeps; whole keys of sinks and of the last entries; values; the others' keys."""
        dim, n_edge = layout.head_dim, int(self._edges(layout, torch.device("cpu")).sum())
        raw = word_shapes(layout.n_entries, dim)
        channels = (torch.uint8, (len(layout.counts), packed_size(dim, 1)))
        whole = (torch.int16, (n_edge, dim))
        thin = (torch.int16, (layout.n_entries - n_edge, self._n_channels(dim)))
        return {"channels": channels, **raw, "keys": whole, "thin": thin}

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Choose channels, and round to 16 bits if need be.

        Raises:
            ValueError: if an entry is not finite.
        """
        parts, edges = to_words(keys, values), self._edges(layout, keys.device)
        kept = torch.stack(
            [self._kept(own, layout, head) for head, own in enumerate(torch.split(keys, list(layout.counts)))]
        )
        thin = parts["keys"][~edges]
        mine = kept[self._heads(layout, keys.device)[~edges]]
        thin = thin[mine].reshape(len(thin), self._n_channels(layout.head_dim))
        channels = pack(kept.to(torch.uint8), 1)
        return {**parts, "channels": channels, "keys": parts["keys"][edges], "thin": thin}

    def decode(self, parts: Mapping[str, Tensor], layout: Layout, keys: Tensor, values: Tensor) -> None:
        """The same numbers, 0 in pruned channels.

        Raises:
            ValueError: if a head does not keep as many channels as all do.
        """
        dim, edges = layout.head_dim, self._edges(layout, keys.device)
        kept = unpack(parts["channels"], 1, dim).bool()
        if bool((kept.sum(1) != self._n_channels(dim)).any()):
            raise ValueError("a head keeps another number of channels than it should")
        words = torch.zeros(layout.n_entries, dim, dtype=torch.int16, device=keys.device)
        words[edges] = parts["keys"]
        mine = kept[self._heads(layout, keys.device)] & ~edges[:, None]
        words[mine] = parts["thin"].flatten()
        keys[:], values[:] = from_words({**parts, "keys": words})

    def _kept(self, keys: Tensor, layout: Layout, head: int) -> Tensor:
        """[D] bool, of the keys [n, D] of one head."""
        energy = keys.float().square().mean(0) if len(keys) else torch.zeros(layout.head_dim, device=keys.device)
        if self.queries is not None:
            of_layer = self.queries[layout.index]
            energy = energy * of_layer[head].to(keys.device)
        kept = torch.zeros_like(energy, dtype=torch.bool)
        kept[energy.argsort(descending=True, stable=True)[: self._n_channels(layout.head_dim)]] = True
        return kept

    def _n_channels(self, head_dim: int) -> int:
        return head_dim - int(head_dim * self.pruned)

    def _edges(self, layout: Layout, device: torch.device) -> Tensor:
        return sink_rows(layout.counts, layout.sinks, device, self.window)

    def _heads(self, layout: Layout, device: torch.device) -> Tensor:
        """[n], the head of each entry."""
        return torch.repeat_interleave(torch.arange(len(layout.counts)), torch.tensor(layout.counts)).to(device)
