"""The C++ backend of `attention.torch_ref`, on the CPU: new entries go to their tails, and rows read runs of entries.

A run is a row of a table of int64: addresses of keys, values, positions and bias (0: none), length, first row, number
of rows, and whether some row may come before some entry. `precis/native/ragged.cpp` reads it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis.attention.torch_ref import Segment
from precis.native import library

Table = NDArray[np.int64]
COLUMNS, ADDRESSES = 8, 5  # of a run; of what is known of entries whoever reads them
_LARGEST_HEAD = 1000
_NO_MEMORY = 2
_INT, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_float, ctypes.c_void_p


def usable(like: Tensor) -> bool:
    """Whether there is a compiled file, and entries such as these [..., D] lie where it computes."""
    known = like.dtype in (torch.float32, torch.bfloat16) and like.shape[-1] <= _LARGEST_HEAD
    return known and like.device.type == "cpu" and library() is not None


@dataclass(frozen=True, slots=True)
class New:
    """Tokens of a step in one layer.

    Attributes:
        query: [H, n, D].
        key, value: [K, n, D].
        positions: [n] int32.
        places: [n, K, 3] int64, where each key, value and position goes; None: nowhere.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    places: Table | None = None


def attend(
    new: New,
    runs: Table,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each row over the union of the runs that name it; rows are numbered [K][token][G].

    The caller keeps alive what the addresses are of.

    Args:
        new: all contiguous in D, of the entries' dtype: float32 or bfloat16.
        runs: [runs, 8].
        scaling: factor on q·k.
        softcap: tanh soft-capping of the logits, or None.
        window: a row sees entries at positions > its own - window, or all if None.
        sinks: [H] logits of a value-less entry, or None.

    Returns:
        [H, n, D], a view of [n, H, D]; a row that sees nothing gets zeros.
    """
    n_heads, n, head_dim = new.query.shape
    n_kv_heads = new.key.shape[0]
    out = torch.empty(n, n_heads, head_dim, dtype=new.query.dtype)
    parts = (new.query, new.key, new.value)
    strides = (ctypes.c_int64 * 6)(*(stride for part in parts for stride in part.stride()[:2]))
    logits = None if sinks is None else sinks.float().contiguous()
    failed = library().precis_ragged_attention(  # type: ignore[union-attr]
        *(_POINTER(part.data_ptr()) for part in parts),
        strides,
        _POINTER(out.data_ptr()),
        _INT(out.dtype == torch.bfloat16),
        _POINTER(runs.ctypes.data),
        _INT(len(runs)),
        _POINTER(None if new.places is None else new.places.ctypes.data),
        _POINTER(new.positions.data_ptr()),
        *map(_INT, (n, n_kv_heads, n_heads // n_kv_heads, head_dim)),
        _FLOAT(scaling),
        _FLOAT(softcap or 0.0),
        _INT(window or 0),
        _POINTER(None if logits is None else logits.data_ptr()),
        _INT(torch.get_num_threads()),
    )
    if failed == _NO_MEMORY:
        raise MemoryError("there is no memory for attention")
    if failed:
        raise ValueError(f"queries {tuple(new.query.shape)}, keys {tuple(new.key.shape)} and runs do not fit together")
    return out.transpose(0, 1)


def runs_of(segments: Sequence[Segment]) -> Table:
    """The table of segments, whose tensors must outlive it."""
    found = np.zeros((len(segments), COLUMNS), np.int64)
    for row, part in zip(found, segments, strict=True):
        start, stop = part.rows
        row[:] = (*addresses(part.keys, part.values, part.positions, part.bias), start, stop - start, part.causal)
    return found


def addresses(keys: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Of entries keys [n, D], values [n, D], positions [n] int32, bias [n] float32: the first five columns."""
    if not (keys.is_contiguous() and values.is_contiguous() and positions.is_contiguous()):
        raise ValueError("entries must be contiguous")
    at_bias = 0 if bias is None else bias.data_ptr()
    return keys.data_ptr(), values.data_ptr(), positions.data_ptr(), at_bias, keys.shape[0]
