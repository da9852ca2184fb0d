"""The reference backend: attention of packed query rows over ragged segments, merged by log-sum-exp, in plain torch.

Every faster backend has this one function's signature and is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of keys and values, and the run of query rows that reads it.

    Attributes:
        keys: [n, D].
        values: [n, D].
        positions: [n] int32.
        rows: start and stop of the query rows.
        causal: whether some row may come before some entry; False where every entry precedes every row.
        visible: [rows, n] bool, further limits (a query-time view), or None.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    rows: tuple[int, int]
    causal: bool
    visible: Tensor | None = None


def attend(
    queries: Tensor,
    row_positions: Tensor,
    segments: Sequence[Segment],
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each row over the union of the segments that name it.

    Args:
        queries: [R, D].
        row_positions: [R] int, the position of each row's token.
        segments: any number of them per row; empty ones count for nothing.
        scaling: factor on q·k.
        softcap: tanh soft-capping of the logits, or None.
        window: a row sees entries at positions > its own - window, or all if None.
        sinks: [R] logits of a value-less entry in each row's softmax (gpt-oss), or None.

    Returns:
        [R, D] in the dtype of `queries`; a row that sees nothing gets zeros.
    """
    n_rows, head_dim = queries.shape
    out = torch.zeros(n_rows, head_dim, dtype=torch.float32, device=queries.device)
    lse = torch.full((n_rows,), float("-inf"), device=queries.device)
    if sinks is not None:
        lse = sinks.float().clone()
    for segment in segments:
        start, stop = segment.rows
        if segment.keys.shape[0] == 0 or start == stop:
            continue
        part, part_lse = _softmax_part(
            queries[start:stop], row_positions[start:stop], segment, scaling, softcap, window
        )
        total = torch.logaddexp(lse[start:stop], part_lse)
        safe = total.masked_fill(total == float("-inf"), 0.0)
        kept = torch.exp(lse[start:stop] - safe)[:, None]
        added = torch.exp(part_lse - safe)[:, None]
        out[start:stop] = out[start:stop] * kept + part * added
        lse[start:stop] = total
    return out.to(queries.dtype)


def _softmax_part(
    queries: Tensor, row_positions: Tensor, segment: Segment, scaling: float, softcap: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output [r, D] and log-sum-exp [r] of one segment alone."""
    logits = (queries @ segment.keys.to(queries.dtype).T).float() * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    hidden = _hidden(row_positions, segment, window)
    if hidden is not None:
        logits = logits.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0)[:, None])
    return (weights.to(queries.dtype) @ segment.values.to(queries.dtype)).float(), lse


def _hidden(row_positions: Tensor, segment: Segment, window: int | None) -> Tensor | None:
    """Mask [r, n], True = not visible; None where everything is visible."""
    hidden = None if segment.visible is None else ~segment.visible
    if segment.causal:
        later = segment.positions[None] > row_positions[:, None]
        hidden = later if hidden is None else hidden | later
    if window is not None:
        gone = segment.positions[None] <= row_positions[:, None] - window
        hidden = gone if hidden is None else hidden | gone
    return hidden
