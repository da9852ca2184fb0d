"""From quantised coefficients to entries, in C++ where that was compiled; `Transform.backward` is the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis.coefficients import Levels
from precis.native import library
from precis.transform import Transform

_NO_MEMORY = 2
Rows = Sequence[NDArray[np.int32]]


def synthesize(
    transform: Transform, block: int, levels: Levels, rows: Rows, starts: Sequence[int], keys: Tensor, values: Tensor
) -> None:
    """Write the entries of a block's heads, but for sinks, which stand before them.

    Args:
        transform: of the model.
        block: index.
        levels: of n tokens.
        rows: per layer and kv head, which of the n tokens it keeps.
        starts: per layer and kv head, where its entries go.
        keys: [N, D] float32, written to, before RoPE.
        values: [N, D] float32, written to.

    Raises:
        ValueError: if a row or an entry is not there.
    """
    if transform.synthesis.device.type != "cpu" or library() is None:
        dense = levels.dense().to(transform.synthesis.device)
        heads = transform.backward(block, dense).transpose(2, 3).flatten(1, 2).to(keys.device)
        for head, (start, own) in enumerate(zip(starts, rows, strict=True)):
            inside = slice(start, start + len(own))
            keys[inside], values[inside] = heads[torch.from_numpy(own).long().to(keys.device), head].unbind(1)
        return
    g = transform.block_layers
    n_kv_heads, dim = transform.mean.shape[2:]
    n_axes, width = transform.synthesis.shape[2:]
    sizes = np.array([len(own) for own in rows], np.int64)
    fits = (
        len(rows) == len(starts) == g * n_kv_heads
        and keys.shape == values.shape == (len(keys), dim)
        and keys.dtype == values.dtype == torch.float32
        and keys.is_contiguous()
        and values.is_contiguous()
        and all(0 <= start <= len(keys) - size for start, size in zip(starts, sizes, strict=True))
    )
    if not fits:
        raise ValueError("heads and entries do not fit together")
    mean = torch.nn.functional.pad(transform.mean[block * g : (block + 1) * g], (0, width - dim)).contiguous()
    every = np.ascontiguousarray(np.concatenate(rows), np.int32)
    firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    places = np.array(starts, np.int64)
    n, r = levels.symbols.shape
    pointer = ctypes.c_void_p
    failed = library().precis_synthesize(  # type: ignore[union-attr]
        *(pointer(part.ctypes.data) for part in (np.ascontiguousarray(levels.symbols), levels.escapes)),
        ctypes.c_int64(len(levels.escapes)),
        pointer(levels.steps.ctypes.data),
        *map(ctypes.c_int, (n, r)),
        *(pointer(part.data_ptr()) for part in (transform.synthesis[block], mean)),
        *map(ctypes.c_int, (n_axes, width, dim, g, n_kv_heads)),
        *(pointer(part.ctypes.data) for part in (every, firsts, places)),
        *(pointer(part.data_ptr()) for part in (keys, values)),
        ctypes.c_int(torch.get_num_threads()),
    )
    if failed == _NO_MEMORY:
        raise MemoryError("there is no memory for the coefficients of a snapshot")
    if failed:
        raise ValueError("coefficients and heads do not fit together")
