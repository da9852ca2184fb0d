"""tc, transform coding: a token's keys and values in a block of layers become a few independent numbers.

No paper; see `precis.transform` and `precis.coefficients`. KVTC (Staniszewski and Lancucki 2025, arXiv:2511.01815) is a
relative. Here keys and values share their axes, errors count by their Fisher information, and tokens that a repetition
of the document reads are quantised more finely. Sinks are unlike everything the transform was fitted to, and are kept
at 8 bits. Where some heads of a block kept a token and others did not, the others' places are filled with what is
expected given those that were kept, and are not read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis.codecs import VARIABLE, Layout, Shape
from precis.coefficients import Coded, Levels, decode, encode, read_tables
from precis.errors import SnapshotStale
from precis.positions import Positions
from precis.quantize import check_encodable, decode_sinks, encode_sinks, sink_rows, sink_shapes
from precis.rows import Rows
from precis.synthesis import Target, synthesize
from precis.transform import Transform

_NONE = np.zeros((0, 0), np.uint16)
_ARRAYS = ("symbols", "escapes", "steps", "used", "n_escapes")  # of Levels
_MARK_BYTES = 16  # of the fingerprint of a transform


@dataclass(frozen=True, slots=True)
class TransformCodec:
    """As many bytes as the step allows.

    Attributes:
        transform: of the model.
        step: of a token of class 0; needed for encoding.
        classes: [B, T] int, per block and token, -16 to 16, or None for all 0; needed for encoding.
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
        tokens, places = _tokens(layout)
        mean = self.transform.mean_of(layout.index).transpose(0, 1).flatten(1, 2).to(keys.device)
        entries = mean.expand(len(tokens), *mean.shape).clone()  # it stands for entries that were not kept
        kept = torch.from_numpy(places).to(keys.device)
        heads, rows = (kept >= 0).nonzero(as_tuple=True)
        entries[rows, :, heads] = torch.stack([keys, values], 1)[kept[heads, rows].long()].float()
        entries = entries.view(len(tokens), 2, self.block_layers, -1, layout.head_dim).transpose(1, 2)
        missing = (kept < 0).T.view(len(tokens), self.block_layers, 1, -1, 1)
        entries = self.transform.completed(layout.index, entries.to(self.transform.axes.device), missing)
        coefficients = self.transform.forward(layout.index, entries).cpu()
        at = torch.from_numpy(tokens).long()
        classes = torch.zeros_like(at) if self.classes is None else self.classes[layout.index].cpu()[at]
        return Rows.of(coefficients, classes, self.transform.scales[layout.index])

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Sinks as int4 has them, then the stream."""
        return {**sink_shapes(sum(layout.sinks), layout.head_dim), "stream": (torch.uint8, VARIABLE)}

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Sinks at 8 bits, and the stream that `tuned` made.

        Raises:
            ValueError: if a sink is not finite or beyond float16.
        """
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device)
        sinks = keys[is_sink].float(), values[is_sink].float()
        check_encodable(torch.cat(sinks))
        stream = torch.from_numpy(np.frombuffer(self.coded.blocks[layout.index], np.uint8).copy())
        return {**encode_sinks(*sinks), "stream": stream}

    def unravel(self, parts: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
        """Levels and places instead of the stream.

        Raises:
            ValueError: if the stream cannot be right.
        """
        tokens, places = _tokens(layout)
        stream, scales = parts["stream"].cpu().numpy().tobytes(), self.transform.scales[layout.index]
        found = decode(*self.tables, stream, len(tokens), scales)
        arrays = {name: torch.from_numpy(getattr(found, name)) for name in _ARRAYS}
        return {**parts, **arrays, "places": torch.from_numpy(places)}

    def decode(self, parts: Mapping[str, Tensor], layout: Layout, keys: Tensor, values: Tensor) -> None:
        """Within about half a step of each coefficient."""
        levels = Levels(**{name: parts[name].numpy() for name in _ARRAYS})
        synthesize(self.transform, layout.index, levels, Target(parts["places"].numpy(), keys, values))
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device)
        keys[is_sink], values[is_sink] = decode_sinks(parts).to(keys.dtype)

    @property
    def _mark(self) -> bytes:
        return bytes.fromhex(self.transform.fingerprint)[:_MARK_BYTES].ljust(_MARK_BYTES, b"\0")


def _tokens(layout: Layout) -> tuple[Positions, NDArray[np.int32]]:
    """Tokens that some head kept, besides sinks; [heads, tokens] int32, which entry each head keeps of each, or -1."""
    later = [head[n_sink:] for head, n_sink in zip(layout.heads, layout.sinks, strict=True)]
    starts = np.cumsum([0, *layout.counts])[:-1] + np.array(layout.sinks)
    if all(np.array_equal(head, later[0]) for head in later[1:]):
        return later[0], (starts[:, None] + np.arange(len(later[0]))[None]).astype(np.int32)
    tokens = np.unique(np.concatenate(later))
    places = np.full((len(later), len(tokens)), -1, np.int32)
    for own, start, head in zip(places, starts, later, strict=True):
        own[np.searchsorted(tokens, head)] = start + np.arange(len(head))
    return tokens, places
