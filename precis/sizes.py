"""How many bytes a snapshot takes in a codec, told without encoding it."""

from __future__ import annotations

from math import prod

import msgspec

from precis import positions as position_codes
from precis.blob import ALIGN, layout_of
from precis.codecs import Codec
from precis.container import manifest_of
from precis.core import Snapshot
from precis.manifest import SEAL_BYTES


def packed_bytes(snapshot: Snapshot, codec: Codec) -> int:
    """Bytes that `pack` would give, without encoding a number; the manifest's to within a few digits."""
    g, header = snapshot.geometry, snapshot.header
    counts = (snapshot.offsets[1:] - snapshot.offsets[:-1]).reshape(g.n_layers, g.n_kv_heads).tolist()
    blobs = 0
    for layer in range(g.n_layers):
        heads = [snapshot.positions[slice(*snapshot.bounds(layer, head))].cpu().numpy() for head in range(g.n_kv_heads)]
        coded = sum(1 + len(position_codes.encode(head, header.n_tokens)[1]) for head in heads)
        layout = layout_of(heads, header.n_sink, g.head_dim, layer)
        parts = [prod(sizes) * dtype.itemsize for dtype, sizes in codec.shapes(layout).values()]
        biases = [] if snapshot.bias is None else [2 * sum(counts[layer])]
        blobs += sum(size + -size % ALIGN for size in [coded, *parts, *biases])
    manifest = manifest_of(snapshot, codec, counts, [blobs // g.n_layers] * g.n_layers, ["0" * 16] * (g.n_layers + 1))
    blobs += 0 if snapshot.ranks is None else snapshot.ranks.levels.shape[0]
    return blobs + SEAL_BYTES + len(msgspec.json.encode(manifest))


def head_bytes(snapshot: Snapshot, codec: Codec) -> list[list[int]]:
    """[L][K] bytes that each kv head's entries and positions take, without padding."""
    g, n_tokens = snapshot.geometry, snapshot.header.n_tokens
    sizes = []
    for layer in range(g.n_layers):
        row = []
        for kv_head in range(g.n_kv_heads):
            start, stop = snapshot.bounds(layer, kv_head)
            head = snapshot.positions[start:stop].cpu().numpy()
            layout = layout_of([head], snapshot.header.n_sink, g.head_dim, layer)
            parts = sum(prod(sizes) * dtype.itemsize for dtype, sizes in codec.shapes(layout).values())
            bias = 0 if snapshot.bias is None else 2 * (stop - start)
            row.append(1 + len(position_codes.encode(head, n_tokens)[1]) + parts + bias)
        sizes.append(row)
    return sizes
