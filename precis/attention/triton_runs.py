"""The Triton backend of `attention.torch_ref`, on a GPU: the same tables of runs as `attention.ragged` reads.

Runs are cut into units of a bounded number of entries and rows, so that a few long heads occupy the whole device and
skewed lengths leave no program waiting; tables of all layers go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis.attention.ragged import New, Table

try:  # comes with torch's CUDA wheels for Linux
    from precis.attention import kernels
except ImportError:
    kernels = None  # type: ignore[assignment]

_ENTRIES = 512  # of a unit
_ROWS = 16  # of a unit: the least that matrix products take
_TILE_BYTES = 16 << 10  # of keys per product: three are in flight, and the smallest devices have 99 KiB to share


def usable(like: Tensor) -> bool:
    """Whether there is Triton, and entries such as these lie where it computes."""
    return kernels is not None and like.is_cuda and like.dtype in (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Units:
    """What one layer reads.

    Attributes:
        table: [U, 8] int64 on the device, sorted by kv head.
        heads: [K + 1] int32 on the device: units of each kv head.
        places: [n, K, 3] int64 on the device, or None: new entries are in their tails already.
    """

    table: Tensor
    heads: Tensor
    places: Tensor | None = None


def units_of(
    layers: Sequence[Table] | Table,
    rows_per_head: int,
    n_kv_heads: int,
    entry_bytes: int,
    device: torch.device,
    places: Table | None = None,
) -> list[Units]:
    """Cut every layer's runs.

    Args:
        layers: per layer, runs [runs, 8].
        rows_per_head: rows are numbered [K][token][G].
        n_kv_heads: K.
        entry_bytes: from one key of a run to the next.
        device: where the tables go.
        places: [L, n, K, 3], where new entries go, see `attention.ragged.New`, or None: nowhere.
    """
    cut = [_cut(runs, entry_bytes) for runs in layers]
    edges = np.cumsum([0, *(len(table) for table in cut)])
    heads = np.stack([np.searchsorted(table[:, 5], np.arange(n_kv_heads + 1) * rows_per_head) for table in cut])
    tables = torch.from_numpy(np.concatenate(cut)).to(device)
    on_device = torch.from_numpy(heads.astype(np.int32)).to(device)
    targets = None if places is None else torch.from_numpy(places).to(device)
    return [
        Units(tables[a:b], on_device[layer], None if targets is None else targets[layer])
        for layer, (a, b) in enumerate(pairwise(edges))
    ]


def _cut(runs: Table, entry_bytes: int) -> Table:
    """Runs cut into units of at most `_ENTRIES` entries and `_ROWS` rows, sorted by their first row."""
    units = _pieces(runs[(runs[:, 4] > 0) & (runs[:, 6] > 0)], 6, _ROWS)
    units[0][:, 5] += units[1] * _ROWS
    units = _pieces(units[0], 4, _ENTRIES)
    table, index = units
    skipped = index * _ENTRIES
    table[:, 0] += skipped * entry_bytes
    table[:, 1] += skipped * entry_bytes
    for column in (2, 3):
        table[:, column] += np.where(table[:, column] != 0, skipped * 4, 0)
    return table[np.argsort(table[:, 5], kind="stable")]


def _pieces(table: Table, column: int, limit: int) -> tuple[Table, NDArray[np.int64]]:
    """Each row as often as its number in `column` needs pieces of at most `limit`, and the number of the piece."""
    n_pieces = -(-table[:, column] // limit)
    index = np.arange(int(n_pieces.sum())) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
    pieces = np.repeat(table, n_pieces, 0)
    pieces[:, column] = np.minimum(limit, pieces[:, column] - index * limit)
    return pieces, index


def block_of(width: int, item_bytes: int) -> int:
    """Entries per product, for heads padded to `width` numbers: 16 to 64."""
    return max(16, min(64, _TILE_BYTES // (width * item_bytes)))


def attend(
    new: New,
    units: Units,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `attention.ragged.attend`; entries and `new` are of one dtype, float32, bfloat16 or float16.

    Returns:
        [H, n, D], a view of [n, H, D]; a row that sees nothing gets zeros.
    """
    n_heads, n, head_dim = new.query.shape
    n_kv_heads, group = new.key.shape[0], n_heads // new.key.shape[0]
    width = max(16, 1 << (head_dim - 1).bit_length())
    if units.places is not None:
        kernels.place[(n, n_kv_heads)](
            new.key,
            new.value,
            new.positions,
            units.places,
            *new.key.stride()[:2],
            *new.value.stride()[:2],
            n_kv_heads,
            D=head_dim,
            WIDTH=width,
        )
    n_units = units.table.shape[0]
    sums = new.query.new_empty(n_units * _ROWS, width, dtype=torch.float32)
    tops, totals = sums.new_empty(2, n_units * _ROWS)
    if n_units:
        kernels.read[(n_units,)](
            new.query,
            new.positions,
            units.table,
            sums,
            tops,
            totals,
            *new.query.stride()[:2],
            n,
            group,
            scaling,
            softcap or 0.0,
            window or 0,
            D=head_dim,
            WIDTH=width,
            ROWS=_ROWS,
            BLOCK=block_of(width, new.key.element_size()),
        )
    out = new.query.new_empty(n, n_heads, head_dim)
    kernels.merge[(n_heads * n,)](
        units.table,
        units.heads,
        sums,
        tops,
        totals,
        sums if sinks is None else sinks.float().contiguous(),
        out,
        n,
        group,
        n_heads,
        HAS_SINKS=sinks is not None,
        D=head_dim,
        WIDTH=width,
        ROWS=_ROWS,
    )
    return out.transpose(0, 1)
