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
from numpy.typing import NDArray
from torch import Tensor

from precis.codecs import VARIABLE, Layout, Shape
from precis.coefficients import Coded, Rows, decode, encode, read_tables
from precis.errors import SnapshotStale
from precis.positions import Positions
from precis.quantize import check_encodable, decode_sinks, encode_sinks, sink_rows, sink_shapes
from precis.synthesis import synthesize
from precis.transform import Transform

_NONE = np.zeros((0, 0), np.uint16)
_MARK_BYTES = 16  # of the fingerprint of a transform


@dataclass(frozen=True, slots=True)
class TransformCodec:
    """As many bytes as the step allows.

    Attributes:
        transform: of the model.
        step: of a token of class 0; needed for encoding.
        classes: [B, T] int, per block and token, -8 to 8, or None for all 0; needed for encoding.
        coded: one snapshot's streams.
        tables: step and frequencies of a stored snapshot.
    """

    transform: Transform
    step: float = 1.0
    classes: Tensor | None = None
    name: str = "tc"
    pre_rope: bool = True
    coded: Coded = field(default_factory=lambda: Coded(b"", ()))
    tables: tuple[float, NDArray[np.uint16]] = (1.0, _NONE)

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
        read = read_tables(tables)
        if mark != self._mark:
            raise SnapshotStale("the snapshot was made with another transform than this model has now")
        return replace(self, step=read[0], coded=Coded(tables, ()), tables=read)

    def rows(self, keys: Tensor, values: Tensor, layout: Layout) -> Rows:
        """The coefficients of a block's tokens."""
        tokens, kept = _tokens(layout)
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device)
        mean = self._mean(layout).to(keys.device)
        entries = mean.expand(len(tokens), *mean.shape).clone()
        rows = torch.from_numpy(np.concatenate(kept)).long().to(keys.device)
        heads = torch.repeat_interleave(torch.arange(len(kept)), torch.tensor([len(own) for own in kept]))
        entries[rows, :, heads.to(keys.device)] = torch.stack([keys, values], 1).float()[~is_sink]
        entries = entries.view(len(tokens), 2, self.block_layers, -1, layout.head_dim).transpose(1, 2)
        coefficients = self.transform.forward(layout.index, entries.to(self.transform.axes.device)).cpu()
        if self.classes is None:
            classes = torch.zeros(len(tokens), dtype=torch.int64)
        else:
            classes = self.classes[layout.index].cpu()[torch.from_numpy(tokens).long()]
        return Rows(coefficients, classes, self._scales(layout))

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Sinks as int4 has them, then the stream."""
        return {**sink_shapes(sum(layout.sinks), layout.head_dim), "stream": (torch.uint8, VARIABLE)}

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Sinks at 8 bits, and the stream that `tuned` made.

        Raises:
            ValueError: if a sink is not finite or beyond float16.
        """
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device)
        check_encodable(keys[is_sink])
        check_encodable(values[is_sink])
        stream = torch.from_numpy(np.frombuffer(self.coded.blocks[layout.index], np.uint8).copy())
        return {**encode_sinks(keys[is_sink].float(), values[is_sink].float()), "stream": stream}

    def decode(self, parts: Mapping[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
        """Within about half a step of each coefficient.

        Raises:
            ValueError: if the stream cannot be right.
        """
        device = parts["stream"].device
        tokens, rows = _tokens(layout)
        levels = decode(*self.tables, parts["stream"].cpu().numpy().tobytes(), len(tokens), self._scales(layout))
        keys, values = torch.empty(2, layout.n_entries, layout.head_dim, device=device)
        ends = np.cumsum(layout.counts).tolist()
        starts = [end - len(own) for end, own in zip(ends, rows, strict=True)]
        synthesize(self.transform, layout.index, levels, rows, starts, keys, values)
        is_sink = sink_rows(layout.counts, layout.sinks, device)
        keys[is_sink], values[is_sink] = decode_sinks(parts)
        return keys, values

    def _scales(self, layout: Layout) -> Tensor:
        return self.transform.scales[layout.index]

    @property
    def _mark(self) -> bytes:
        return bytes.fromhex(self.transform.fingerprint)[:_MARK_BYTES].ljust(_MARK_BYTES, b"\0")

    def _mean(self, layout: Layout) -> Tensor:
        """[2, g * K, D] of a block: what stands for entries that were not kept."""
        first = layout.index * self.block_layers
        return self.transform.mean[first : first + self.block_layers].transpose(0, 1).flatten(1, 2)


def _tokens(layout: Layout) -> tuple[Positions, list[NDArray[np.int32]]]:
    """Tokens that some head kept, besides sinks; per head, which of them it keeps."""
    later = [head[n_sink:] for head, n_sink in zip(layout.heads, layout.sinks, strict=True)]
    tokens = np.unique(np.concatenate(later))
    return tokens, [np.searchsorted(tokens, head).astype(np.int32) for head in later]
