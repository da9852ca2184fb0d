"""Snapshot <-> bytes. The format, version 3, all integers little-endian:

A snapshot is one sealed manifest and one blob per layer.

    sealed manifest = 32 bytes seal, then UTF-8 JSON
        seal: HMAC-SHA256 of the JSON under the store's key, or plain SHA-256 where no key is configured
        JSON: the fields of `Manifest`, no others
    blob of layer l = K mode bytes, the K heads' positions (precis.positions), zeros up to a multiple of 16, then the
        codec's parts in the order of `Codec.shapes`, each row-major and padded with zeros to a multiple of 16 bytes;
        then, where entries were merged (`biased`), a float16 bias per entry, padded likewise

    one more blob where the policy's selections are nested: a level per entry (`core.Ranks`), for `precis.tighten` only

Every length follows from the counts in the manifest, the mode bytes and the codec; a blob with another length is
refused. Blobs are in layer order, so that layer 0 can be used while the rest is on its way. There is no pickle, and
nothing in a manifest names code: `codec` selects among the known ones. An xxh3-64 per blob finds damage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from precis import positions as position_codes
from precis.codecs import Codec, Layout, Shape
from precis.codecs.int4 import Int4
from precis.codecs.int8 import Int8
from precis.codecs.raw16 import Raw16
from precis.core import Geometry, Snapshot, SnapshotHeader
from precis.errors import SnapshotCorrupt, SnapshotStale
from precis.families import Rotary
from precis.fingerprint import FORMAT_VERSION
from precis.manifest import Manifest, seal_of

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw16(), Int8(), Int4())}
ALIGN = 16


@dataclass(frozen=True, slots=True)
class Packed:
    """A snapshot as bytes: one sealed manifest and L blobs."""

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
        codec: one of `CODECS`.
        rotary: of the model; used by codecs that work on keys before RoPE.
        key: seals the manifest, if not empty.

    Raises:
        ValueError: if the codec cannot carry an entry.
    """
    g = snapshot.geometry
    counts = (snapshot.offsets[1:] - snapshot.offsets[:-1]).reshape(g.n_layers, g.n_kv_heads).tolist()
    blobs = [_pack_layer(snapshot, layer, counts[layer], codec, rotary) for layer in range(g.n_layers)]
    return sealed(snapshot, codec, blobs, key)


def sealed(snapshot: Snapshot, codec: Codec, blobs: list[bytes], key: bytes) -> Packed:
    """Blobs of all layers with a manifest, and the levels of the entries where there are some."""
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
        n_layers=g.n_layers,
        n_kv_heads=g.n_kv_heads,
        head_dim=g.head_dim,
        n_tokens=header.n_tokens,
        next_position=header.next_position,
        n_sink=header.n_sink,
        policy=header.policy,
        counts=counts,
        blob_bytes=sizes,
        blob_sums=sums[: g.n_layers],
        ranked=snapshot.ranks.across if snapshot.ranks else "",  # type: ignore[arg-type]
        ranks_sum=sums[-1] if snapshot.ranks else "",
        biased=snapshot.bias is not None,
    )


def _pack_layer(snapshot: Snapshot, layer: int, counts: list[int], codec: Codec, rotary: Rotary) -> bytes:
    start, stop = snapshot.bounds(layer, 0)[0], snapshot.bounds(layer, len(counts) - 1)[1]
    positions = snapshot.positions[start:stop]
    heads = np.split(positions.cpu().numpy(), np.cumsum(counts)[:-1])
    keys = snapshot.keys[start:stop]
    if codec.pre_rope:
        keys = rotary.undo(layer, keys, positions)
    blob = write_layer(heads, keys, snapshot.values[start:stop], codec, snapshot.header)
    if snapshot.bias is None:
        return blob
    return blob + _padded(_to_bytes(snapshot.bias[start:stop].to(torch.float16)))


def write_layer(
    heads: Sequence[position_codes.Positions], keys: Tensor, values: Tensor, codec: Codec, header: SnapshotHeader
) -> bytes:
    """The blob of a layer.

    Args:
        heads: per kv head, positions of its entries.
        keys: [n, D] of all heads, before RoPE if the codec works there.
        values: [n, D].
        codec: encodes them.
        header: of the snapshot.
    """
    coded = [position_codes.encode(head, header.n_tokens) for head in heads]
    layout = Layout(tuple(map(len, heads)), count_sinks(heads, header.n_sink), keys.shape[1])
    parts = codec.encode(keys, values, layout)
    pieces = [_padded(bytes(mode for mode, _ in coded) + b"".join(data for _, data in coded))]
    pieces += [_padded(_to_bytes(parts[name])) for name in codec.shapes(layout)]
    return b"".join(pieces)


def check_manifest(manifest: Manifest, geometry: Geometry, fingerprint: str) -> None:
    """Check that a snapshot is the one that is wanted, and that its claims fit the model.

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
        and m.codec in CODECS
        and 0 < m.n_tokens <= g.max_length
        and m.next_position == m.n_tokens
        and 0 <= m.n_sink <= m.n_tokens
        and len(m.blob_bytes) == len(m.blob_sums) == g.n_layers
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
) -> Snapshot:
    """Decode a snapshot whose manifest was opened and checked.

    Args:
        manifest: from `open_manifest`, passed by `check_manifest`.
        blobs: L blobs in layer order; may be lazy.
        geometry: of the model.
        rotary: of the model.
        device: where the entries go.
        dtype: of the entries: the model's.

    Raises:
        SnapshotCorrupt: if a blob is missing, damaged or of a wrong length.
    """
    keys, values, positions, biases = [], [], [], []
    received = iter(blobs)
    for layer in range(manifest.n_layers):
        heads, key, value, bias = read_layer(manifest, layer, next(received, b""), device)
        found = torch.from_numpy(np.concatenate(heads)).to(device)
        if CODECS[manifest.codec].pre_rope:
            key = rotary.redo(layer, key, found)
        keys.append(key.to(dtype))
        values.append(value.to(dtype))
        positions.append(found)
        biases += [] if bias is None else [bias]
    counts = torch.tensor(manifest.counts, dtype=torch.int64).reshape(-1)
    header = SnapshotHeader(
        manifest.fingerprint, manifest.n_tokens, manifest.next_position, manifest.n_sink, manifest.policy
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts, 0)])
    bias = torch.cat(biases) if biases else None
    return Snapshot(geometry, header, torch.cat(keys), torch.cat(values), torch.cat(positions), offsets, bias=bias)


Layer = tuple[list[position_codes.Positions], Tensor, Tensor, Tensor | None]


def read_layer(manifest: Manifest, layer: int, blob: bytes, device: torch.device) -> Layer:
    """Check and decode the blob of a layer: per kv head positions, then keys and values [n, D] as the codec has them,
    and float32 bias [n] or None.

    Raises:
        SnapshotCorrupt: if it is missing, damaged or of a wrong length.
    """
    if len(blob) != manifest.blob_bytes[layer] or xxhash.xxh3_64_hexdigest(blob) != manifest.blob_sums[layer]:
        raise SnapshotCorrupt(f"layer {layer} of the snapshot is missing or damaged")
    try:
        return _decode_layer(manifest, layer, blob, device)
    except (ValueError, IndexError) as error:
        raise SnapshotCorrupt(f"layer {layer} of the snapshot cannot be decoded: {error}") from error


def _decode_layer(manifest: Manifest, layer: int, blob: bytes, device: torch.device) -> Layer:
    counts, n_tokens = manifest.counts[layer], manifest.n_tokens
    at, heads = len(counts), []
    for mode, count in zip(blob[: len(counts)], counts, strict=True):
        length = position_codes.size(mode, count, n_tokens)
        heads.append(position_codes.decode(mode, blob[at : at + length], count, n_tokens))
        at += length
    layout = Layout(tuple(counts), count_sinks(heads, manifest.n_sink), manifest.head_dim)
    codec = CODECS[manifest.codec]
    parts = {}
    at += -at % ALIGN
    for name, shape in codec.shapes(layout).items():
        parts[name], at = _read_part(blob, at, shape, device)
    bias = None
    if manifest.biased:
        half, at = _read_part(blob, at, (torch.float16, (sum(counts),)), device)
        bias = half.float()
        if not bool(torch.isfinite(bias).all()):
            raise ValueError("a bias is not a number")
    if at != len(blob):
        raise ValueError(f"{len(blob)} bytes where {at} were expected")
    return heads, *codec.decode(parts, layout), bias


def _read_part(blob: bytes, at: int, shape: Shape, device: torch.device) -> tuple[Tensor, int]:
    dtype, sizes = shape
    n_bytes = prod(sizes) * dtype.itemsize
    if at + n_bytes > len(blob):
        raise ValueError("the blob ends early")
    if n_bytes == 0:
        return torch.empty(sizes, dtype=dtype, device=device), at
    raw = np.frombuffer(blob, np.uint8, n_bytes, at).copy()
    return torch.from_numpy(raw).view(dtype).reshape(sizes).to(device), at + n_bytes + -n_bytes % ALIGN


def count_sinks(heads: Iterable[position_codes.Positions], n_sink: int) -> tuple[int, ...]:
    """Per head, how many of its kept entries are among the first `n_sink` tokens."""
    return tuple(int(np.searchsorted(head, n_sink)) for head in heads)


def _to_bytes(part: Tensor) -> bytes:
    if part.numel() == 0:
        return b""
    return part.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGN)
