"""RoPE in place, in C++ where that was compiled."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from precis.native import library

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def turn_halves(keys: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Turn channel d with channel d + W / 2, as most models do.

    Args:
        keys: [n, D], written to.
        positions: [n] int32.
        cos: [P, W] float32, W <= D; channels from W on stay.
        sin: [P, W] float32.

    Returns:
        False, having done nothing, where no kernel takes these tensors.

    Raises:
        IndexError: if a position is not in the tables.
    """
    tables_fit = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    narrow = keys.dtype == torch.bfloat16
    takes = (
        library() is not None
        and all(part.device.type == "cpu" for part in (keys, positions, cos, sin))
        and (narrow or keys.dtype == torch.float32)
        and positions.dtype == torch.int32
        and positions.is_contiguous()
        and keys.is_contiguous()
        and tables_fit
        and cos.shape == sin.shape
        and keys.shape[0] == positions.shape[0]
        and cos.shape[1] % 2 == 0
        and 0 < cos.shape[1] <= keys.shape[1]
    )
    if not takes:
        return False
    failed = library().precis_rope(  # type: ignore[union-attr]
        _POINTER(keys.data_ptr()),
        _INT(narrow),
        _POINTER(positions.data_ptr()),
        _LONG(keys.shape[0]),
        _INT(keys.shape[1]),
        *(_POINTER(part.data_ptr()) for part in (cos, sin)),
        _LONG(cos.shape[0]),
        _INT(cos.shape[1]),
        _INT(torch.get_num_threads()),
    )
    if failed:
        raise IndexError("a key has a position that the model does not reach")
    return True
