"""How many bytes a snapshot takes in a codec, told without encoding it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from precis import positions as position_codes
from precis.blob import ALIGN, layout_of
from precis.codecs import VARIABLE, Codec, block_layers
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


def head_bytes(snapshot: Snapshot, codec: Codec, blobs: Sequence[bytes]) -> list[list[int]]:
    """[L][K] bytes that each kv head's entries and positions take, without padding.

    What a codec stores of a block's heads together is shared out by their entries.
    """
    g, n_tokens, size = snapshot.geometry, snapshot.header.n_tokens, block_layers(codec)
    sizes, counts, together = [], [], False
    for layer in range(g.n_layers):
        for kv_head in range(g.n_kv_heads):
            start, stop = snapshot.bounds(layer, kv_head)
            head = snapshot.positions[start:stop].cpu().numpy()
            shapes = codec.shapes(layout_of([head], snapshot.header.n_sink, g.head_dim, layer // size)).values()
            parts = sum(prod(known) * dtype.itemsize for dtype, known in shapes if known != VARIABLE)
            together = any(known == VARIABLE for _, known in shapes)
            bias = 0 if snapshot.bias is None else 2 * (stop - start)
            sizes.append(1 + len(position_codes.encode(head, n_tokens)[1]) + parts + bias)
            counts.append(stop - start)
    per_block = size * g.n_kv_heads
    for block in range(g.n_layers // size if together else 0):
        own = range(block * per_block, (block + 1) * per_block)
        rest, kept = len(blobs[block]) - sum(sizes[i] for i in own), sum(counts[i] for i in own)
        for i in own:
            sizes[i] += rest * counts[i] // max(1, kept)
    return [sizes[start : start + g.n_kv_heads] for start in range(0, len(sizes), g.n_kv_heads)]


def layer_bytes(heads: Sequence[Sequence[int]], codec: Codec, blobs: Sequence[bytes]) -> list[int]:
    """[L] stored bytes of each layer; a block's are shared out by what its layers' heads take (`head_bytes`)."""
    size, found = block_layers(codec), []
    for layer, own in enumerate(heads):
        block = layer // size
        together = sum(map(sum, heads[block * size : (block + 1) * size]))
        found.append(len(blobs[block]) * sum(own) // max(1, together))
    return found
