"""Codecs: how the kept entries of one layer become few bytes, and back. One codec, one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations import Observation
from precis.positions import Positions

Shape = tuple[torch.dtype, tuple[int, ...]]
VARIABLE = (-1,)  # sizes of a part whose length is stored with it


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of a block of layers before its bytes are read, and what the sizes of most parts follow from.

    Attributes:
        counts: per layer and kv head, kept entries.
        sinks: per layer and kv head, how many of the first kept entries are sinks.
        head_dim: D.
        index: of the block.
        heads: per layer and kv head, positions of the kept entries; for codecs that code a token's entries together.
    """

    counts: tuple[int, ...]
    sinks: tuple[int, ...]
    head_dim: int
    index: int = 0
    heads: tuple[Positions, ...] = ()

    @property
    def n_entries(self) -> int:
        """Entries of the block."""
        return sum(self.counts)


class Codec(Protocol):
    """A pair of inverse verbs.

    Attributes:
        name: stored in the container.
        pre_rope: whether keys come before RoPE.
    """

    @property
    def name(self) -> str: ...

    @property
    def pre_rope(self) -> bool: ...

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Dtype and shape of every part, in the order in which they are stored."""
        ...

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Entries [n, D] of one block -> parts as in `shapes`.

        Raises:
            ValueError: if an entry is not finite, or too large for the codec.
        """
        ...

    def decode(self, parts: Mapping[str, Tensor], layout: Layout, keys: Tensor, values: Tensor) -> None:
        """Write what the parts say into keys and values [n, D], of any floating dtype."""
        ...


@runtime_checkable
class TunedCodec(Codec, Protocol):
    """A codec that looks at a whole snapshot first, and codes several layers together.

    Attributes:
        block_layers: layers that make one blob.
        header: what `reading` needs of a snapshot beside its blobs.
    """

    @property
    def block_layers(self) -> int: ...

    @property
    def header(self) -> bytes: ...

    def tuned(self, blocks: Sequence[tuple[Tensor, Tensor, Layout]]) -> Codec:
        """The codec for one snapshot, from the keys and values of all of its blocks."""
        ...

    def reading(self, header: bytes) -> Codec:
        """The codec that wrote a snapshot with this header.

        Raises:
            ValueError: if no codec wrote it.
        """
        ...


@runtime_checkable
class EntropyCodec(Codec, Protocol):
    """A codec with a stage of decoding that one thread does, for several blocks at once."""

    def unravel(self, parts: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
        """Stored parts -> those that `decode` takes.

        Raises:
            ValueError: if a byte cannot be right.
        """
        ...


@runtime_checkable
class InformedCodec(Codec, Protocol):
    """A codec that looks at what was observed of the document while it was read.

    Attributes:
        needs: observations.
    """

    @property
    def needs(self) -> frozenset[Observation]: ...

    def informed(self, full: Prefill) -> Codec:
        """The codec for one document."""
        ...


def unraveled(codec: Codec, parts: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
    """What the codec's `decode` takes."""
    return codec.unravel(parts, layout) if isinstance(codec, EntropyCodec) else parts


def block_layers(codec: Codec) -> int:
    """Layers that make one blob."""
    return codec.block_layers if isinstance(codec, TunedCodec) else 1


def header_of(codec: Codec) -> bytes:
    """What a snapshot must hold beside its blobs."""
    return codec.header if isinstance(codec, TunedCodec) else b""


def needs(codec: Codec) -> frozenset[Observation]:
    """Observations that the codec looks at."""
    return codec.needs if isinstance(codec, InformedCodec) else frozenset()


def informed(codec: Codec, full: Prefill) -> Codec:
    """The codec for one document."""
    return codec.informed(full) if isinstance(codec, InformedCodec) else codec


def tuned(codec: Codec, blocks: Sequence[tuple[Tensor, Tensor, Layout]]) -> Codec:
    """The codec for one snapshot."""
    return codec.tuned(blocks) if isinstance(codec, TunedCodec) else codec


def reading(codec: Codec, header: bytes) -> Codec:
    """The codec that wrote a snapshot with this header.

    Raises:
        ValueError: if no codec wrote it.
    """
    if isinstance(codec, TunedCodec):
        return codec.reading(header)
    if header:
        raise ValueError(f"the codec {codec.name} knows no header")
    return codec
