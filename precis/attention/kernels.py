"""The kernels of `attention.triton_runs`, in Triton: what one program reads, and how their results become one softmax.

A unit is a row of a table of int64 as in `attention.ragged`: addresses of keys, values, positions and bias (0: none),
length, first row, number of rows, and whether some row may come before some entry.
"""

# mypy: ignore-errors
# ruff: noqa: N803, PLR0913 — Triton's way: pointers and constants are arguments, constants in capitals

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(
    key, value, positions, places, k_head, k_token, v_head, v_token, n_kv_heads, D: tl.constexpr, WIDTH: tl.constexpr
):
    """One token's entry of one kv head goes to where `places` [n, K, 3] says."""
    token, head = tl.program_id(0), tl.program_id(1)
    at = places + (token * n_kv_heads + head) * 3
    pointer = tl.pointer_type(key.dtype.element_ty)
    d = tl.arange(0, WIDTH)
    inside = d < D
    row = tl.load(key + head * k_head + token * k_token + d, mask=inside, other=0.0)
    tl.store(tl.load(at).to(pointer) + d, row, mask=inside)
    row = tl.load(value + head * v_head + token * v_token + d, mask=inside, other=0.0)
    tl.store(tl.load(at + 1).to(pointer) + d, row, mask=inside)
    tl.store(tl.load(at + 2).to(tl.pointer_type(tl.int32)), tl.load(positions + token))


@triton.jit
def read(
    query,
    row_positions,
    units,
    sums,
    tops,
    totals,
    q_head,
    q_token,
    n_tokens,
    group,
    scaling,
    softcap,
    window,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of one unit read its entries: weighted values, largest logit and sum of weights, in float32."""
    unit = tl.program_id(0)
    table = units + unit * 8
    pointer = tl.pointer_type(query.dtype.element_ty)
    keys, values = tl.load(table).to(pointer), tl.load(table + 1).to(pointer)
    at_positions, at_bias = tl.load(table + 2), tl.load(table + 3)
    length, first = tl.load(table + 4).to(tl.int32), tl.load(table + 5).to(tl.int32)
    n_rows = tl.load(table + 6).to(tl.int32)
    masked = (tl.load(table + 7) != 0) | (window > 0)
    r = first + tl.arange(0, ROWS)
    real = tl.arange(0, ROWS) < n_rows
    token, head = r % (n_tokens * group) // group, r // (n_tokens * group) * group + r % group
    d = tl.arange(0, WIDTH)
    inside = d < D
    q = tl.load(
        query + head[:, None] * q_head + token[:, None] * q_token + d[None],
        mask=real[:, None] & inside[None],
        other=0.0,
    )
    now = tl.load(row_positions + token, mask=real, other=0)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, length, BLOCK):
        n = start + tl.arange(0, BLOCK)
        there = n < length
        seen = real[:, None] & there[None]
        k = tl.load(keys + n[:, None] * D + d[None], mask=there[:, None] & inside[None], other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if softcap > 0:
            logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)
        if at_bias != 0:
            logits += tl.load(at_bias.to(tl.pointer_type(tl.float32)) + n, mask=there, other=0.0)[None]
        if masked:
            when = tl.load(at_positions.to(tl.pointer_type(tl.int32)) + n, mask=there, other=0)
            seen &= when[None] <= now[:, None]
            if window > 0:
                seen &= when[None] > now[:, None] - window
        logits = tl.where(seen, logits, -1e30)
        higher = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp(top - higher)
        weights = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
        v = tl.load(values + n[:, None] * D + d[None], mask=there[:, None] & inside[None], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    slot = unit * ROWS + tl.arange(0, ROWS)
    tl.store(tops + slot, top)
    tl.store(totals + slot, total)
    tl.store(sums + slot[:, None] * WIDTH + d[None], acc)


@triton.jit
def merge(
    units,
    heads,
    sums,
    tops,
    totals,
    sinks,
    out,
    n_tokens,
    group,
    n_heads,
    HAS_SINKS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One row's results from all units of its kv head that name it, as one softmax."""
    row = tl.program_id(0)
    kv_head, token = row // (n_tokens * group), row % (n_tokens * group) // group
    head = kv_head * group + row % group
    d = tl.arange(0, WIDTH)
    top, total = -1e30, 0.0
    if HAS_SINKS:
        top, total = tl.load(sinks + head), 1.0
    acc = tl.zeros([WIDTH], tl.float32)
    for unit in range(tl.load(heads + kv_head), tl.load(heads + kv_head + 1)):
        nth = row - tl.load(units + unit * 8 + 5).to(tl.int32)
        if (nth >= 0) & (nth < tl.load(units + unit * 8 + 6)):
            slot = unit * ROWS + nth
            other = tl.load(tops + slot)
            higher = tl.maximum(top, other)
            mine, theirs = tl.exp(top - higher), tl.exp(other - higher)
            total = total * mine + tl.load(totals + slot) * theirs
            acc = acc * mine + tl.load(sums + slot * WIDTH + d) * theirs
            top = higher
    result = acc / tl.maximum(total, 1e-30)
    tl.store(out + (token * n_heads + head) * D + d, result.to(out.dtype.element_ty), mask=d < D)
