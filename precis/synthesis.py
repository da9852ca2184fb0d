"""From quantised coefficients to entries: `Transform.backward` in C++, or by products in bfloat16.

In float32, most of whose products would be with 0, only the other coefficients are summed up. Where entries are wanted
in bfloat16, machines multiply whole matrices in it faster than they skip zeros. Coefficients in units of their steps
are small whole numbers, exact in bfloat16; axes and products are rounded, which errs as much as the rounding of the
entries.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis.coefficients import Levels
from precis.native import library
from precis.transform import Transform

_NO_MEMORY = 2
_UNFIT = "coefficients, heads and entries do not fit together"
_TOKENS, _ROWS = 4096, 1024  # whose products are in memory at once, and of one product
_FEW_ROWS, _FEW_AXES = 128, 64  # steps in which products differ in size
_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Target:
    """Where entries go.

    Attributes:
        places: [heads, n] int32: per layer and kv head of a block, the entry that each of n tokens becomes, or -1.
        keys: [N, D] of a floating dtype, written to, before RoPE.
        values: [N, D], likewise.
    """

    places: NDArray[np.int32]
    keys: Tensor
    values: Tensor


def synthesize(transform: Transform, block: int, levels: Levels, target: Target) -> None:
    """Write the entries of a block's heads.

    Raises:
        ValueError: if levels, transform and target do not fit together.
    """
    _check(transform, levels, target)
    dtype = target.keys.dtype
    if dtype not in {torch.float32, torch.bfloat16}:
        wide = replace(target, keys=target.keys.float(), values=target.values.float())
        synthesize(transform, block, levels, wide)
        target.keys.copy_(wide.keys)
        target.values.copy_(wide.values)
        return
    narrow = dtype == torch.bfloat16
    if transform.synthesis.device.type != "cpu" or library() is None:
        _plainly(transform, block, levels, target, narrow=narrow)
    elif narrow:
        _by_products(transform, block, levels, target)
    else:
        _by_sums(transform, block, levels, target)


def prepare(transform: Transform) -> None:
    """Have the products of `synthesize` in bfloat16 compiled, in every size that they may have."""
    axes = transform.products[0]
    n_axes = axes.shape[0]
    products = torch.empty(_ROWS, axes.shape[1], dtype=torch.bfloat16)
    for k in {min(n_axes, _rounded(k, _FEW_AXES)) for k in range(1, n_axes + 1)}:
        for m in range(_FEW_ROWS, _ROWS + 1, _FEW_ROWS):
            torch.mm(torch.zeros(m, k, dtype=torch.bfloat16), axes[:k], out=products[:m])


def _plainly(transform: Transform, block: int, levels: Levels, target: Target, *, narrow: bool) -> None:
    device = transform.synthesis.device
    if narrow:
        rows, steps = levels.whole().to(device, torch.bfloat16), torch.from_numpy(levels.steps).to(device)
        products = (rows @ transform.products[block, : rows.shape[1]]).float() * steps[:, None]
        mean = transform.mean_of(block)
        entries = products.view(len(rows), *mean.shape) + mean
    else:
        entries = transform.backward(block, levels.dense().to(device))
    heads = entries.transpose(2, 3).flatten(1, 2).to(target.keys.device)
    for head, places in enumerate(torch.from_numpy(target.places).to(target.keys.device)):
        kept = places >= 0
        found = heads[kept, head].to(target.keys.dtype)
        target.keys[places[kept].long()], target.values[places[kept].long()] = found.unbind(1)


def _by_sums(transform: Transform, block: int, levels: Levels, target: Target) -> None:
    g, (n_kv_heads, dim) = transform.block_layers, transform.mean.shape[2:]
    n_axes, width = transform.synthesis.shape[2:]
    mean = torch.nn.functional.pad(transform.mean_of(block), (0, width - dim)).contiguous()
    places = np.ascontiguousarray(target.places)
    n, r = levels.symbols.shape
    failed = library().precis_synthesize(  # type: ignore[union-attr]
        *(_POINTER(part.ctypes.data) for part in (levels.symbols, levels.escapes)),
        _LONG(len(levels.escapes)),
        _POINTER(levels.steps.ctypes.data),
        *map(_INT, (n, r)),
        *(_POINTER(part.data_ptr()) for part in (transform.synthesis[block], mean)),
        *map(_INT, (n_axes, width, dim, g, n_kv_heads)),
        _POINTER(places.ctypes.data),
        _LONG(len(target.keys)),
        *(_POINTER(part.data_ptr()) for part in (target.keys, target.values)),
        _INT(torch.get_num_threads()),
    )
    if failed == _NO_MEMORY:
        raise MemoryError("there is no memory for the coefficients of a snapshot")
    if failed:
        raise ValueError(_UNFIT)


def _by_products(transform: Transform, block: int, levels: Levels, target: Target) -> None:
    """Of some tokens at a time, those with many coefficients first, so that the products of the others are short."""
    g, (n_kv_heads, dim) = transform.block_layers, transform.mean.shape[2:]
    axes, mean, places = transform.products[block], transform.mean_of(block), np.ascontiguousarray(target.places)
    (n, r), n_threads = levels.symbols.shape, torch.get_num_threads()
    firsts = np.concatenate([[0], np.cumsum(levels.n_escapes, dtype=np.int64)])
    rows = torch.zeros((min(n, _ROWS) + _FEW_ROWS) * r, dtype=torch.bfloat16)
    products = torch.empty(min(n, _TOKENS) + _FEW_ROWS, axes.shape[1], dtype=torch.bfloat16)
    for first in range(0, n, _TOKENS):
        order = np.argsort(-levels.used[first : first + _TOKENS], kind="stable").astype(np.int32)
        for start in range(0, len(order), _ROWS):
            own = first + order[start : start + _ROWS]
            k = min(r, _rounded(int(levels.used[own[0]]), _FEW_AXES))
            failed = library().precis_rows(  # type: ignore[union-attr]
                *(_POINTER(part.ctypes.data) for part in (levels.symbols, levels.escapes, firsts)),
                *map(_INT, (n, r)),
                _POINTER(own.ctypes.data),
                *map(_INT, (len(own), k)),
                _POINTER(rows.data_ptr()),
                _INT(n_threads),
            )
            if failed:
                raise ValueError(_UNFIT)
            m = _rounded(len(own), _FEW_ROWS)
            torch.mm(rows[: m * k].view(m, k), axes[:k], out=products[start : start + m])
        back = np.argsort(order).astype(np.int32)
        failed = library().precis_place(  # type: ignore[union-attr]
            *(_POINTER(part.data_ptr()) for part in (products, mean)),
            _POINTER(levels.steps.ctypes.data + first * levels.steps.itemsize),
            _POINTER(back.ctypes.data),
            *map(_INT, (len(order), n)),
            _POINTER(places.ctypes.data + first * places.itemsize),
            _LONG(len(target.keys)),
            *map(_INT, (dim, g, n_kv_heads)),
            *(_POINTER(part.data_ptr()) for part in (target.keys, target.values)),
            _INT(n_threads),
        )
        if failed:
            raise ValueError(_UNFIT)


def _rounded(n: int, step: int) -> int:
    """Up: libraries compile a product of another size when they first see it, which takes longer than the product."""
    return -(-n // step) * step


def _check(transform: Transform, levels: Levels, target: Target) -> None:
    keys, values, places = target.keys, target.values, target.places
    n, r = levels.symbols.shape
    fits = (
        places.shape == (transform.block_layers * transform.mean.shape[2], n)
        and places.dtype == np.int32
        and int(places.max(initial=-1)) < len(keys)
        and keys.shape == values.shape == (len(keys), transform.mean.shape[3])
        and keys.dtype == values.dtype
        and keys.is_floating_point()
        and keys.is_contiguous()
        and values.is_contiguous()
        and r <= transform.synthesis.shape[2]
    )
    if not fits:
        raise ValueError(_UNFIT)
