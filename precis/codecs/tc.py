"""tc, transform coding: a token's keys and values in a block of layers become a few independent numbers.

No paper; see `precis.transform` and `precis.coefficients`. KVTC (Staniszewski and Lancucki 2025, arXiv:2511.01815) is a
relative. Here keys and values share their axes, errors count by their Fisher information, and tokens that a repetition
of the document reads are quantised more finely. Sinks are unlike everything the transform was fitted to, and are kept
at 8 bits. Where some heads of a block kept a token and others did not, the others' places are filled with the mean,
which costs little, and are not read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from precis.codecs import VARIABLE, Layout, Shape
from precis.coefficients import Coded, Rows, decode, encode, read_tables
from precis.errors import SnapshotStale
from precis.positions import Positions
from precis.quantize import check_encodable, quantize, sink_rows
from precis.transform import Transform

_MARK_BYTES = 16  # of the fingerprint of a transform


@dataclass(frozen=True, slots=True)
class TransformCodec:
    """As many bytes as the step allows.

    Attributes:
        transform: of the model.
        step: of a token of class 0; needed for encoding.
        classes: [B, T] int, per block and token, -8 to 8, or None for all 0; needed for encoding.
    """

    transform: Transform
    step: float = 1.0
    classes: Tensor | None = None
    name: str = "tc"
    pre_rope: bool = True
    coded: Coded = field(default_factory=lambda: Coded(b"", ()))

    @property
    def block_layers(self) -> int:
        return self.transform.block_layers

    @property
    def header(self) -> bytes:
        """The transform's fingerprint, step and tables."""
        return self._mark + self.coded.tables

    def tuned(self, blocks: Sequence[tuple[Tensor, Tensor, Layout]]) -> TransformCodec:
        """With the tables and streams of one snapshot.

        Raises:
            ValueError: if an entry is not finite, or too large for the step.
        """
        return replace(self, coded=encode([self.rows(*block) for block in blocks], self.step))

    def reading(self, header: bytes) -> TransformCodec:
        """With the tables of a stored snapshot.

        Raises:
            SnapshotStale: if another transform was used.
            ValueError: if they cannot be right.
        """
        mark, tables = header[:_MARK_BYTES], header[_MARK_BYTES:]
        step, _ = read_tables(tables)
        if mark != self._mark:
            raise SnapshotStale("the snapshot was made with another transform than this model has now")
        return replace(self, step=step, coded=Coded(tables, ()))

    def rows(self, keys: Tensor, values: Tensor, layout: Layout) -> Rows:
        """The coefficients of a block's tokens."""
        tokens, places, is_sink = _places(layout, keys.device)
        mean = self._mean(layout).to(keys.device)
        entries = mean.expand(len(tokens), *mean.shape).clone()
        entries[places[0], :, places[1]] = torch.stack([keys, values], 1).float()[~is_sink]
        entries = entries.view(len(tokens), 2, self.block_layers, -1, layout.head_dim).transpose(1, 2)
        coefficients = self.transform.forward(layout.index, entries.to(self.transform.axes.device)).cpu()
        if self.classes is None:
            classes = torch.zeros(len(tokens), dtype=torch.int64)
        else:
            classes = self.classes[layout.index].cpu()[torch.from_numpy(tokens).long()]
        return Rows(coefficients, classes, self.transform.scales[layout.index])

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Sinks as int4 has them, then the stream."""
        n_sink = sum(layout.sinks)
        return {
            "sink_scale": (torch.float16, (2, n_sink)),
            "sink_low": (torch.float16, (2, n_sink)),
            "sinks": (torch.uint8, (2, n_sink, layout.head_dim)),
            "stream": (torch.uint8, VARIABLE),
        }

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Sinks at 8 bits, and the stream that `tuned` made.

        Raises:
            ValueError: if a sink is not finite or beyond float16.
        """
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device)
        both = torch.stack([keys[is_sink], values[is_sink]]).float()
        check_encodable(both)
        sinks, scale, low = quantize(both, 8, 2)
        stream = torch.from_numpy(np.frombuffer(self.coded.blocks[layout.index], np.uint8).copy())
        return {"sink_scale": scale, "sink_low": low, "sinks": sinks, "stream": stream}

    def decode(self, parts: Mapping[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
        """Within about half a step of each coefficient.

        Raises:
            ValueError: if the stream cannot be right.
        """
        device = parts["stream"].device
        tokens, places, is_sink = _places(layout, device)
        scales = self.transform.scales[layout.index]
        coefficients = decode(self.coded.tables, parts["stream"].cpu().numpy().tobytes(), len(tokens), scales)
        entries = self.transform.backward(layout.index, coefficients.to(self.transform.axes.device)).to(device)
        flat = entries.transpose(2, 3).reshape(len(tokens), -1, 2, layout.head_dim)
        found = torch.empty(2, layout.n_entries, layout.head_dim, device=device)
        sinks = parts["sinks"].float() * parts["sink_scale"].float()[..., None] + parts["sink_low"].float()[..., None]
        found[:, is_sink] = sinks
        found[:, ~is_sink] = flat[places[0], places[1]].transpose(0, 1)
        return found[0], found[1]

    @property
    def _mark(self) -> bytes:
        return bytes.fromhex(self.transform.fingerprint)[:_MARK_BYTES].ljust(_MARK_BYTES, b"\0")

    def _mean(self, layout: Layout) -> Tensor:
        """[2, g * K, D] of a block: what stands for entries that were not kept."""
        first = layout.index * self.block_layers
        return self.transform.mean[first : first + self.block_layers].transpose(0, 1).flatten(1, 2)


def _places(layout: Layout, device: torch.device) -> tuple[Positions, tuple[Tensor, Tensor], Tensor]:
    """Tokens that some head kept, besides sinks; row and head of each other entry; which entries are sinks."""
    later = [head[n_sink:] for head, n_sink in zip(layout.heads, layout.sinks, strict=True)]
    tokens = np.unique(np.concatenate(later))
    rows = torch.from_numpy(np.concatenate([np.searchsorted(tokens, head) for head in later])).to(device)
    sizes = torch.tensor([len(head) for head in later])
    heads = torch.repeat_interleave(torch.arange(len(later)), sizes).to(device)
    return tokens, (rows, heads), sink_rows(layout.counts, layout.sinks, device)
