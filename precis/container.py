"""Snapshot <-> bytes. The format, version 4, all integers little-endian:

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
import numpy as np
import torch
import xxhash

from precis import blob as blob_format
from precis.blob import Block, layout_of
from precis.codecs import Codec, Layout, block_layers, header_of, reading, tuned
from precis.codecs.int8 import Int8
from precis.codecs.kivi import Kivi
from precis.codecs.raw16 import Raw16
from precis.codecs.tc import TransformCodec
from precis.core import Geometry, Snapshot, SnapshotHeader
from precis.errors import SnapshotCorrupt, SnapshotStale
from precis.families import Model, Rotary
from precis.fingerprint import FORMAT_VERSION
from precis.manifest import Manifest, open_manifest, seal_of

_KIVI = (Kivi("int4", 4), Kivi("int4-hadamard", 4, rotated=True), Kivi("int3", 3), Kivi("int2", 2, 32))
CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw16(), Int8(), *_KIVI)}


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


def load(model: Model, rotary: Rotary, packed: Packed, fingerprint: str, key: bytes = b"") -> Snapshot:
    """Bytes -> snapshot on the model's device.

    Raises:
        SnapshotCorrupt: if a byte is wrong.
        SnapshotStale: if it is another snapshot than `fingerprint` asks for.
    """
    manifest = open_manifest(packed.manifest, key)
    check_manifest(manifest, model.geometry, fingerprint, codecs_of(model))
    return unpack(manifest, packed.blobs, model.geometry, rotary, model.device, model.dtype, codecs_of(model))


def check_manifest(
    manifest: Manifest, geometry: Geometry, fingerprint: str, codecs: Mapping[str, Codec] = CODECS
) -> None:
    """Check that a snapshot is the one that is wanted, and that its claims fit the model and a known codec.

    Raises:
        SnapshotStale: if it was made of other weights, other tokens or by another policy.
        SnapshotCorrupt: if its shape does not fit the model.
    """
    if manifest.fingerprint != fingerprint:
        raise SnapshotStale("the snapshot was made with other weights, tokens or settings than asked for")
    g, m = geometry, manifest
    heads_fit = len(m.counts) == g.n_layers and all(len(layer) == g.n_kv_heads for layer in m.counts)
    counts_fit = heads_fit and all(0 <= count <= m.n_tokens for layer in m.counts for count in layer)
    fits = (
        (m.n_layers, m.n_kv_heads, m.head_dim) == (g.n_layers, g.n_kv_heads, g.head_dim)
        and counts_fit
        and m.codec in codecs
        and m.block_layers == block_layers(codecs[m.codec])
        and g.n_layers % m.block_layers == 0
        and 0 < m.n_tokens <= g.max_length
        and m.next_position == m.n_tokens
        and 0 <= m.n_sink <= m.n_tokens
        and len(m.blob_bytes) == len(m.blob_sums) == g.n_layers // m.block_layers
    )
    if not fits:
        raise SnapshotCorrupt("the snapshot's manifest does not fit the model")


def unpack(
    manifest: Manifest,
    blobs: Iterable[bytes],
    geometry: Geometry,
    rotary: Rotary,
    device: torch.device,
    dtype: torch.dtype,
    codecs: Mapping[str, Codec] = CODECS,
) -> Snapshot:
    """Decode a snapshot whose manifest was opened and checked.

    Args:
        manifest: from `open_manifest`, passed by `check_manifest`.
        blobs: in layer order; may be lazy.
        geometry: of the model.
        rotary: of the model.
        device: where the entries go.
        dtype: of the entries: the model's.
        codecs: by name.

    Raises:
        SnapshotCorrupt: if a blob is missing, damaged or of a wrong length.
    """
    counts = torch.tensor(manifest.counts, dtype=torch.int64).reshape(-1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts, 0)])
    keys, values = torch.empty(2, int(offsets[-1]), geometry.head_dim, dtype=dtype, device=device)
    positions, biases, at = [], [], 0
    received, codec = iter(blobs), reader_of(manifest, codecs)
    for index in range(len(manifest.blob_bytes)):
        block = read_block(manifest, index, next(received, b""), codec, device)
        found = torch.from_numpy(np.concatenate(block.heads)).to(device)
        stop = at + len(found)
        values[at:stop] = block.values
        layers = range(index * manifest.block_layers, (index + 1) * manifest.block_layers)
        sizes = [sum(manifest.counts[layer]) for layer in layers]
        parts = zip(layers, block.keys.split(sizes), found.split(sizes), strict=True)  # type: ignore[no-untyped-call]
        for layer, part, places in parts:
            keys[at : at + len(part)] = rotary.redo(layer, part, places) if codec.pre_rope else part
            at += len(part)
        positions.append(found)
        biases += [] if block.bias is None else [block.bias]
    header = SnapshotHeader(
        manifest.fingerprint, manifest.n_tokens, manifest.next_position, manifest.n_sink, manifest.policy
    )
    bias = torch.cat(biases) if biases else None
    return Snapshot(geometry, header, keys, values, torch.cat(positions), offsets, bias=bias)


def reader_of(manifest: Manifest, codecs: Mapping[str, Codec] = CODECS) -> Codec:
    """The codec that wrote a snapshot.

    Raises:
        SnapshotCorrupt: if its header cannot be read.
    """
    try:
        return reading(codecs[manifest.codec], manifest.codec_header)
    except ValueError as error:
        raise SnapshotCorrupt(f"the snapshot's codec cannot be set up: {error}") from error


def read_block(manifest: Manifest, index: int, blob: bytes, codec: Codec, device: torch.device) -> Block:
    """Check and decode a blob.

    Raises:
        SnapshotCorrupt: if it is missing, damaged or of a wrong length.
    """
    m, first = manifest, index * manifest.block_layers
    if len(blob) != m.blob_bytes[index] or xxhash.xxh3_64_hexdigest(blob) != m.blob_sums[index]:
        raise SnapshotCorrupt(f"layer {first} of the snapshot is missing or damaged")
    counts = [count for layer in m.counts[first : first + m.block_layers] for count in layer]
    try:
        return blob_format.read(
            blob, counts, index, codec, m.n_tokens, m.n_sink, m.head_dim, biased=m.biased, device=device
        )
    except (ValueError, IndexError) as error:
        raise SnapshotCorrupt(f"layer {first} of the snapshot cannot be decoded: {error}") from error
