"""Snapshot <-> bytes. The format, version 5, all integers little-endian:

A snapshot is one sealed manifest and one blob per block of layers; most codecs take every layer alone.

    sealed manifest = 32 bytes seal, then UTF-8 JSON
        seal: HMAC-SHA256 of the JSON under the store's key, or plain SHA-256 where no key is configured
        JSON: the fields of `Manifest`, no others
    blob: `precis.blob`
    one more blob where the policy's selections are nested: a level per entry (`core.Ranks`), for `precis.tighten` only

Blobs are in layer order, so that layer 0 can be used while the rest is on its way. There is no pickle, and nothing in a
manifest names code: `codec` selects among the known ones. An xxh3-64 per blob finds damage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from precis import blob as blob_format
from precis.blob import Block, layout_of
from precis.codecs import Codec, Layout, block_layers, header_of, tuned
from precis.codecs.int8 import Int8
from precis.codecs.kivi import Kivi
from precis.codecs.raw16 import Raw16
from precis.codecs.tc import TransformCodec
from precis.codecs.think import Think
from precis.core import Snapshot
from precis.families import Model, Rotary
from precis.fingerprint import FORMAT_VERSION
from precis.manifest import Manifest, seal_of

_KIVI = (
    Kivi("int4", 4),
    Kivi("int4-hadamard", 4, rotated=True),
    Kivi("int3", 3),
    Kivi("int2", 2, 32),
    Kivi("minikv", 2, 16, window=128),
)
CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw16(), Think(), Int8(), *_KIVI)}


def codecs_of(model: Model) -> Mapping[str, Codec]:
    """What this model's snapshots can be read with: `tc` where its transform is known."""
    return CODECS if model.transform is None else {**CODECS, "tc": TransformCodec(model.transform)}


@dataclass(frozen=True, slots=True)
class Packed:
    """A snapshot as bytes: one sealed manifest, a blob per block of layers, and the levels where there are some."""

    manifest: bytes
    blobs: tuple[bytes, ...]

    @property
    def n_bytes(self) -> int:
        """All bytes to be stored."""
        return len(self.manifest) + sum(map(len, self.blobs))


def pack(snapshot: Snapshot, codec: Codec, rotary: Rotary, key: bytes = b"") -> Packed:
    """Encode a snapshot.

    Args:
        snapshot: on any device.
        codec: one of `codecs_of` a model.
        rotary: of the model; used by codecs that work on keys before RoPE.
        key: seals the manifest, if not empty.

    Raises:
        ValueError: if the codec cannot carry an entry.
    """
    blocks = blocks_of(snapshot, codec, rotary)
    told = layouts_of(snapshot, blocks)
    codec = tuned(codec, [(block.keys, block.values, layout) for block, layout in zip(blocks, told, strict=True)])
    return packed(snapshot, blocks, codec, key)


def layouts_of(snapshot: Snapshot, blocks: Iterable[Block]) -> list[Layout]:
    """What a codec is told of each block."""
    n_sink, dim = snapshot.header.n_sink, snapshot.geometry.head_dim
    return [layout_of(block.heads, n_sink, dim, index) for index, block in enumerate(blocks)]


def blocks_of(snapshot: Snapshot, codec: Codec, rotary: Rotary) -> list[Block]:
    """The entries of all layers as a codec takes them.

    Raises:
        ValueError: if its blocks do not divide the layers.
    """
    n_layers, size = snapshot.geometry.n_layers, block_layers(codec)
    if n_layers % size:
        raise ValueError(f"the codec {codec.name} takes {size} layers at a time, the model has {n_layers}")
    return [block_of(snapshot, range(start, start + size), codec, rotary) for start in range(0, n_layers, size)]


def block_of(snapshot: Snapshot, layers: range, codec: Codec, rotary: Rotary) -> Block:
    """The entries of some layers as a codec takes them."""
    n_kv_heads = snapshot.geometry.n_kv_heads
    start, stop = snapshot.bounds(layers[0], 0)[0], snapshot.bounds(layers[-1], n_kv_heads - 1)[1]
    heads, keys = [], []
    for layer in layers:
        bounds = [snapshot.bounds(layer, head) for head in range(n_kv_heads)]
        heads += [snapshot.positions[a:b].cpu().numpy() for a, b in bounds]
        inside = slice(bounds[0][0], bounds[-1][1])
        key = snapshot.keys[inside]
        keys.append(rotary.undo(layer, key, snapshot.positions[inside]) if codec.pre_rope else key)
    bias = None if snapshot.bias is None else snapshot.bias[start:stop]
    return Block(heads, torch.cat(keys), snapshot.values[start:stop], bias)


def packed(snapshot: Snapshot, blocks: list[Block], codec: Codec, key: bytes) -> Packed:
    """Blocks as a codec takes them, coded and sealed.

    Args:
        snapshot: tells counts, header and levels; its keys and values are not looked at.
        blocks: of all layers.
        codec: tuned to them, if it is one that has to be.
        key: seals the manifest, if not empty.
    """
    header = snapshot.header
    written = [blob_format.write(block, i, codec, header.n_tokens, header.n_sink) for i, block in enumerate(blocks)]
    return sealed(snapshot, codec, written, key)


def sealed(snapshot: Snapshot, codec: Codec, blobs: list[bytes], key: bytes) -> Packed:
    """Blobs with a manifest, and the levels of the entries where there are some."""
    g, ranks = snapshot.geometry, snapshot.ranks
    counts = (snapshot.offsets[1:] - snapshot.offsets[:-1]).reshape(g.n_layers, g.n_kv_heads).tolist()
    levels = b"" if ranks is None else ranks.levels.cpu().numpy().tobytes()
    sums = [xxhash.xxh3_64_hexdigest(blob) for blob in (*blobs, levels)]
    body = msgspec.json.encode(manifest_of(snapshot, codec, counts, [len(blob) for blob in blobs], sums))
    return Packed(seal_of(body, key) + body, (*blobs, levels) if levels else tuple(blobs))


def manifest_of(
    snapshot: Snapshot, codec: Codec, counts: list[list[int]], sizes: list[int], sums: list[str]
) -> Manifest:
    """What a snapshot says of itself, given the lengths of its layers' blobs and the sums of all."""
    g, header = snapshot.geometry, snapshot.header
    return Manifest(
        version=FORMAT_VERSION,
        fingerprint=header.fingerprint,
        codec=codec.name,
        codec_header=header_of(codec),
        block_layers=block_layers(codec),
        n_layers=g.n_layers,
        n_kv_heads=g.n_kv_heads,
        head_dim=g.head_dim,
        n_tokens=header.n_tokens,
        next_position=header.next_position,
        n_sink=header.n_sink,
        policy=header.policy,
        counts=counts,
        blob_bytes=sizes,
        blob_sums=sums[: len(sizes)],
        ranked=snapshot.ranks.across if snapshot.ranks else "",  # type: ignore[arg-type]
        ranks_sum=sums[-1] if snapshot.ranks else "",
        biased=snapshot.bias is not None,
    )
