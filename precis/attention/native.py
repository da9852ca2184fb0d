"""The C++ backend of `attention.dense`, on the CPU, in float32."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from precis.attention.dense import Maxima
from precis.native import library

_NO_MEMORY = 2
_INT, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_float, ctypes.c_void_p


def usable(query: Tensor) -> bool:
    """Whether there is a compiled file, and the tensor is where it computes."""
    return query.device.type == "cpu" and library() is not None


def recording_attention(  # noqa: PLR0913 — what a softmax over a cache depends on
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maxima: Maxima,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `attention.dense.recording_attention`; computed in float32, whatever the dtype."""
    n_heads, n, head_dim = query.shape
    n_kv_heads, m, _ = key.shape
    rows, keys, values = (part.float().contiguous() for part in (query, key, value))
    out, best = torch.empty_like(rows), maxima.best.float().contiguous()
    squares = None if maxima.squares is None else maxima.squares.float().contiguous()
    weights = None if maxima.row_weights is None else maxima.row_weights.float().contiguous()
    logits = None if sinks is None else sinks.float().contiguous()
    function = library().precis_recording_attention  # type: ignore[union-attr]
    failed = function(
        *(_POINTER(part.data_ptr()) for part in (rows, keys, values, out)),
        *map(_INT, (n_heads, n_kv_heads, n, m, head_dim)),
        _FLOAT(scaling),
        _FLOAT(softcap or 0.0),
        _INT(window or 0),
        _POINTER(None if logits is None else logits.data_ptr()),
        _POINTER(best.data_ptr()),
        *map(_INT, (*maxima.chunk, maxima.n_first, maxima.n_context)),
        _POINTER(None if weights is None else weights.data_ptr()),
        _POINTER(None if squares is None else squares.data_ptr()),
        _INT(torch.get_num_threads()),
    )
    if failed == _NO_MEMORY:
        raise MemoryError("there is no memory for the attention of a repetition")
    if failed:
        raise ValueError(
            f"queries {tuple(query.shape)}, keys {tuple(key.shape)} and {maxima.chunk} do not fit together"
        )
    maxima.best.copy_(best)
    if maxima.squares is not None and squares is not None:
        maxima.squares.copy_(squares)
    return out.to(query.dtype)
