"""The sealed manifest of a stored snapshot: what it says of itself, before any of its blobs is read."""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

from precis.errors import SnapshotCorrupt, SnapshotStale
from precis.fingerprint import FORMAT_VERSION

SEAL_BYTES = 32


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stored snapshot says of itself.

    Attributes:
        codec_header: what the codec needs beside the blobs.
        block_layers: g, layers per blob.
        counts: [L][K] kept entries.
        blob_bytes: [L / g] length of each blob.
        blob_sums: [L / g] xxh3-64 of each blob, hex.
        ranked: across what the levels compare, or empty if there are none.
        ranks_sum: xxh3-64 of the levels, hex.
        biased: whether entries carry a bias, because some stand for several tokens.
    """

    version: int
    fingerprint: str
    codec: str
    codec_header: bytes
    block_layers: int
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
    ranked: Literal["", "head", "layer", "global"]
    ranks_sum: str
    biased: bool


def open_manifest(sealed: bytes, key: bytes = b"") -> Manifest:
    """Check the seal and read the manifest.

    Raises:
        SnapshotCorrupt: if the seal does not fit, or a field is missing, unknown or of a wrong type.
        SnapshotStale: if it has another format version.
    """
    seal, body = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
    if not hmac.compare_digest(seal, seal_of(body, key)):
        raise SnapshotCorrupt("the snapshot's manifest does not match its seal")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise SnapshotCorrupt(f"the snapshot's manifest cannot be read: {error}") from error
    if manifest.version != FORMAT_VERSION:
        raise SnapshotStale(f"the snapshot has format version {manifest.version}, this program reads {FORMAT_VERSION}")
    return manifest


def seal_of(body: bytes, key: bytes) -> bytes:
    """HMAC-SHA256 of a manifest's JSON under the store's key, or its SHA-256 where there is no key."""
    return hmac.digest(key, body, "sha256") if key else hashlib.sha256(body).digest()
