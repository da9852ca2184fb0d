"""The reference backend: attention of packed query rows over ragged segments, in plain torch.

Segments are merged exactly, by log-sum-exp with one shared maximum per row: a row's result is that of one softmax over
all entries it sees, wherever they lie. Computed in float32, whatever the model's dtype.
Every faster backend has this one function's signature and is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NOTHING = -1e30  # below every logit: the maximum of a row that sees nothing, and finite
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of keys and values, and the run of query rows that reads it.

    Attributes:
        keys: [n, D].
        values: [n, D].
        positions: [n] int32.
        rows: start and stop of the query rows.
        causal: whether some row may come before some entry; False where every entry precedes every row.
        bias: [n] float32, added to the entries' logits, or None.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    rows: tuple[int, int]
    causal: bool
    bias: Tensor | None = None


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
    out = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
    for parts in _disjoint(segments):
        start, stop = min(part.rows[0] for part in parts), max(part.rows[1] for part in parts)
        logits = [_logits(queries, row_positions, part, scaling, softcap, window) for part in parts]
        top = torch.full((stop - start,), _NOTHING, device=queries.device)
        if sinks is not None:
            top = torch.maximum(top, sinks[start:stop].float())
        for part, seen in zip(parts, logits, strict=True):
            rows = slice(part.rows[0] - start, part.rows[1] - start)
            top[rows] = torch.maximum(top[rows], seen.amax(-1))
        total = torch.zeros_like(top) if sinks is None else torch.exp(sinks[start:stop].float() - top)
        for part, seen in zip(parts, logits, strict=True):
            rows = slice(part.rows[0] - start, part.rows[1] - start)
            weights = seen.sub_(top[rows, None]).exp_()
            total[rows] += weights.sum(-1)
            out[part.rows[0] : part.rows[1]] += weights @ part.values.float()
        out[start:stop] /= total.clamp_min_(_TINY)[:, None]
    return out.to(queries.dtype)


def _disjoint(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments in groups that share no row, so that the logits of one kv head are held at a time."""
    groups: list[list[Segment]] = []
    reach = -1
    for part in sorted(segments, key=lambda segment: segment.rows):
        if part.keys.shape[0] == 0 or part.rows[0] == part.rows[1]:
            continue
        if part.rows[0] >= reach:
            groups.append([])
        groups[-1].append(part)
        reach = max(reach, part.rows[1])
    return groups


def _logits(
    queries: Tensor, row_positions: Tensor, segment: Segment, scaling: float, softcap: float | None, window: int | None
) -> Tensor:
    """[rows, n] float32, minus infinity where a row does not see an entry."""
    start, stop = segment.rows
    logits = (queries[start:stop].float() * scaling) @ segment.keys.float().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if segment.bias is not None:
        logits += segment.bias
    hidden = _hidden(row_positions[start:stop], segment, window)
    return logits if hidden is None else logits.masked_fill_(hidden, float("-inf"))


def _hidden(row_positions: Tensor, segment: Segment, window: int | None) -> Tensor | None:
    """Mask [r, n], True = not visible; None where everything is visible."""
    hidden = segment.positions[None] > row_positions[:, None] if segment.causal else None
    if window is not None:
        gone = segment.positions[None] <= row_positions[:, None] - window
        hidden = gone if hidden is None else hidden | gone
    return hidden
