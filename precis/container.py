"""Snapshot <-> bytes. The format, version 1, all integers little-endian:

A snapshot is one sealed manifest and one blob per layer.

    sealed manifest = 32 bytes seal, then UTF-8 JSON
        seal: HMAC-SHA256 of the JSON under the store's key, or plain SHA-256 where no key is configured
        JSON: the fields of `Manifest`, no others
    blob of layer l = K mode bytes, the K heads' positions (precis.positions), zeros up to a multiple of 16, then the
        codec's parts in the order of `Codec.shapes`, each row-major and padded with zeros to a multiple of 16 bytes

Every length follows from the counts in the manifest, the mode bytes and the codec; a blob with another length is
refused. Blobs are in layer order, so that layer 0 can be used while the rest is on its way. There is no pickle, and
nothing in a manifest names code: `codec` selects among the known ones. An xxh3-64 per blob finds damage.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
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

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw16(), Int8(), Int4())}
SEAL_BYTES = 32
ALIGN = 16


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stored snapshot says of itself.

    Attributes:
        counts: [L][K] kept entries.
        blob_bytes: [L] length of each blob.
        blob_sums: [L] xxh3-64 of each blob, hex.
    """

    version: int
    fingerprint: str
    codec: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_tokens: int
    next_position: int
    n_sink: int
    policy: dict[str, str | int | float]
    counts: list[list[int]]
    blob_bytes: list[int]
    blob_sums: list[str]


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
    blobs = tuple(_pack_layer(snapshot, layer, counts[layer], codec, rotary) for layer in range(g.n_layers))
    sums = [xxhash.xxh3_64_hexdigest(blob) for blob in blobs]
    body = msgspec.json.encode(manifest_of(snapshot, codec, counts, [len(blob) for blob in blobs], sums))
    return Packed(_seal(body, key) + body, blobs)


def manifest_of(
    snapshot: Snapshot, codec: Codec, counts: list[list[int]], sizes: list[int], sums: list[str]
) -> Manifest:
    """What a snapshot says of itself, given the lengths and sums of its blobs."""
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
        blob_sums=sums,
    )


def _pack_layer(snapshot: Snapshot, layer: int, counts: list[int], codec: Codec, rotary: Rotary) -> bytes:
    start, stop = snapshot.bounds(layer, 0)[0], snapshot.bounds(layer, len(counts) - 1)[1]
    positions = snapshot.positions[start:stop]
    heads = np.split(positions.cpu().numpy(), np.cumsum(counts)[:-1])
    coded = [position_codes.encode(head, snapshot.header.n_tokens) for head in heads]
    layout = Layout(tuple(counts), count_sinks(heads, snapshot.header.n_sink), snapshot.geometry.head_dim)
    keys = snapshot.keys[start:stop]
    if codec.pre_rope:
        keys = rotary.undo(layer, keys, positions)
    parts = codec.encode(keys, snapshot.values[start:stop], layout)
    pieces = [_padded(bytes(mode for mode, _ in coded) + b"".join(data for _, data in coded))]
    pieces += [_padded(_to_bytes(parts[name])) for name in codec.shapes(layout)]
    return b"".join(pieces)


def open_manifest(sealed: bytes, key: bytes = b"") -> Manifest:
    """Check the seal and read the manifest.

    Raises:
        SnapshotCorrupt: if the seal does not fit, or a field is missing, unknown or of a wrong type.
        SnapshotStale: if it has another format version.
    """
    seal, body = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(body, key)):
        raise SnapshotCorrupt("the snapshot's manifest does not match its seal")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise SnapshotCorrupt(f"the snapshot's manifest cannot be read: {error}") from error
    if manifest.version != FORMAT_VERSION:
        raise SnapshotStale(f"the snapshot has format version {manifest.version}, this program reads {FORMAT_VERSION}")
    return manifest


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
    keys, values, positions = [], [], []
    received = iter(blobs)
    for layer in range(manifest.n_layers):
        blob = next(received, b"")
        if len(blob) != manifest.blob_bytes[layer] or xxhash.xxh3_64_hexdigest(blob) != manifest.blob_sums[layer]:
            raise SnapshotCorrupt(f"layer {layer} of the snapshot is missing or damaged")
        try:
            found, key, value = _unpack_layer(manifest, layer, blob, rotary, device)
        except (ValueError, IndexError) as error:
            raise SnapshotCorrupt(f"layer {layer} of the snapshot cannot be decoded: {error}") from error
        keys.append(key.to(dtype))
        values.append(value.to(dtype))
        positions.append(found)
    counts = torch.tensor(manifest.counts, dtype=torch.int64).reshape(-1)
    header = SnapshotHeader(
        manifest.fingerprint, manifest.n_tokens, manifest.next_position, manifest.n_sink, manifest.policy
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts, 0)])
    return Snapshot(geometry, header, torch.cat(keys), torch.cat(values), torch.cat(positions), offsets)


def _unpack_layer(
    manifest: Manifest, layer: int, blob: bytes, rotary: Rotary, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
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
    if at != len(blob):
        raise ValueError(f"{len(blob)} bytes where {at} were expected")
    keys, values = codec.decode(parts, layout)
    positions = torch.from_numpy(np.concatenate(heads)).to(device)
    if codec.pre_rope:
        keys = rotary.redo(layer, keys, positions)
    return positions, keys, values


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


def _seal(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, body, "sha256") if key else hashlib.sha256(body).digest()
