"""Bytes -> snapshot: the format is `precis.container`'s. In any doubt nothing is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from math import prod

import numpy as np
import torch
import xxhash
from torch import Tensor

from precis import blob as blob_format
from precis.blob import Block, Opened
from precis.codecs import Codec, block_layers, reading
from precis.container import CODECS, Packed, codecs_of
from precis.core import Geometry, Snapshot, SnapshotHeader
from precis.errors import SnapshotCorrupt, SnapshotStale
from precis.families import Model, Rotary
from precis.manifest import Manifest, open_manifest

_AHEAD = 4  # blobs per thread that are taken apart together


def load(model: Model, rotary: Rotary, packed: Packed, fingerprint: str, key: bytes = b"") -> Snapshot:
    """Bytes -> snapshot on the model's device.

    Raises:
        SnapshotCorrupt: if a byte is wrong.
        SnapshotStale: if it is another snapshot than `fingerprint` asks for.
    """
    manifest = open_manifest(packed.manifest, key)
    check_manifest(manifest, model.geometry, fingerprint, codecs_of(model))
    return unpack(manifest, packed.blobs, model, rotary, codecs_of(model))


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
    model: Model,
    rotary: Rotary,
    codecs: Mapping[str, Codec] = CODECS,
    take: Callable[[int], Tensor] | None = None,
) -> Snapshot:
    """Decode a snapshot whose manifest was opened and checked.

    Args:
        manifest: from `open_manifest`, passed by `check_manifest`.
        blobs: in layer order; may be lazy.
        model: whose device and dtype the entries take.
        rotary: of the model.
        codecs: by name.
        take: gives so many bytes of memory on that device, or None for new memory.

    Raises:
        SnapshotCorrupt: if a blob is missing, damaged or of a wrong length.
    """
    counts = torch.tensor(manifest.counts, dtype=torch.int64).reshape(-1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts, 0)])
    geometry, device, dtype = model.geometry, model.device, model.dtype
    shape = (2, int(offsets[-1]), geometry.head_dim)
    if take is None:
        keys, values = torch.empty(shape, dtype=dtype, device=device)
    else:
        keys, values = take(prod(shape) * dtype.itemsize).view(dtype).view(shape)
    positions, biases, at = [], [], 0
    codec = reader_of(manifest, codecs)
    for index, opened in enumerate(_opened(manifest, blobs, codec, device)):
        inside = slice(at, at + opened.layout.n_entries)
        decode_block(opened, codec, keys[inside], values[inside])
        found = torch.from_numpy(np.concatenate(opened.layout.heads)).to(device)
        if codec.pre_rope:
            layers = range(index * manifest.block_layers, (index + 1) * manifest.block_layers)
            rotary.redo_in_place(layers, keys[inside], found, [sum(manifest.counts[layer]) for layer in layers])
        positions.append(found)
        biases += [] if opened.bias is None else [opened.bias]
        at = inside.stop
    header = SnapshotHeader(
        manifest.fingerprint, manifest.n_tokens, manifest.next_position, manifest.n_sink, manifest.policy
    )
    bias = torch.cat(biases) if biases else None
    return Snapshot(geometry, header, keys, values, torch.cat(positions), offsets, bias=bias)


def _opened(manifest: Manifest, blobs: Iterable[bytes], codec: Codec, device: torch.device) -> Iterator[Opened]:
    """Blobs taken apart: several on a thread each, before any of them is decoded on all threads."""
    received, n_blobs, n_threads = iter(blobs), len(manifest.blob_bytes), torch.get_num_threads()
    with ThreadPoolExecutor(n_threads) as pool:
        for start in range(0, n_blobs, _AHEAD * n_threads):
            some = range(start, min(n_blobs, start + _AHEAD * n_threads))
            at_work = [pool.submit(open_block, manifest, i, next(received, b""), codec, device) for i in some]
            wait(at_work)
            for done in at_work:
                yield done.result()


def reader_of(manifest: Manifest, codecs: Mapping[str, Codec] = CODECS) -> Codec:
    """The codec that wrote a snapshot.

    Raises:
        SnapshotCorrupt: if its header cannot be read.
    """
    try:
        return reading(codecs[manifest.codec], manifest.codec_header)
    except ValueError as error:
        raise SnapshotCorrupt(f"the snapshot's codec cannot be set up: {error}") from error


def open_block(manifest: Manifest, index: int, blob: bytes, codec: Codec, device: torch.device) -> Opened:
    """Check a blob and take it apart.

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


def levels_in(manifest: Manifest, blobs: Sequence[bytes]) -> bytes:
    """The levels that lie after the blobs of a ranked snapshot, a byte per entry.

    Raises:
        SnapshotCorrupt: if they are missing or damaged.
    """
    n = len(manifest.blob_bytes)
    raw = blobs[n] if len(blobs) > n else b""
    if len(raw) != sum(map(sum, manifest.counts)) or xxhash.xxh3_64_hexdigest(raw) != manifest.ranks_sum:
        raise SnapshotCorrupt("the levels of the snapshot are missing or damaged")
    return raw


def decode_block(opened: Opened, codec: Codec, keys: Tensor, values: Tensor) -> None:
    """Write a block's entries into keys and values [n, D].

    Raises:
        SnapshotCorrupt: if they cannot be right.
    """
    try:
        codec.decode(opened.parts, opened.layout, keys, values)
    except (ValueError, IndexError) as error:
        raise SnapshotCorrupt(f"block {opened.layout.index} of the snapshot cannot be decoded: {error}") from error


def read_block(manifest: Manifest, index: int, blob: bytes, codec: Codec) -> Block:
    """Check and decode a blob, to float32 on the CPU.

    Raises:
        SnapshotCorrupt: if it is missing, damaged or of a wrong length.
    """
    opened = open_block(manifest, index, blob, codec, torch.device("cpu"))
    keys, values = torch.empty(2, opened.layout.n_entries, manifest.head_dim)
    decode_block(opened, codec, keys, values)
    return Block(opened.layout.heads, keys, values, opened.bias)
