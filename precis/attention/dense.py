"""Attention over a dense cache, for prefill and probes: every query sees all earlier tokens of one context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = 128  # query rows per block on the path that forms logits: bounds memory to G * 128 x keys
_LOGITS = 1 << 20  # logits per block of the recording path: 4 MiB
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Maxima:
    """What to record of the attention that new tokens pay to a span of the cache.

    Attributes:
        chunk: start and stop of the span.
        n_first: first entries that count in the softmax besides the span and the new tokens; all others do not.
        n_context: entries of the cache; later ones are new tokens.
        best: [H, stop - start] float32, raised in place to the largest attention of any row.
        row_weights: [n] float32, factor on each row's attention, or None.
        squares: [H, stop - start] float32, to which every row's squared attention is added in place, or None.
    """

    chunk: tuple[int, int]
    n_first: int
    n_context: int
    best: Tensor
    row_weights: Tensor | None = None
    squares: Tensor | None = None


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last n tokens over all m tokens so far.

    Args:
        query: [H, n, D].
        key: [K, m, D], m >= n; the last n entries belong to the query tokens.
        value: [K, m, D].
        scaling: factor on q·k.
        softcap: tanh soft-capping, or None.
        window: tokens a query sees counting itself, or None for all.
        sinks: [H] logits of a value-less entry, or None.

    Returns:
        [H, n, D] in the dtype of `query`.
    """
    n, m = query.shape[1], key.shape[1]
    if window is not None and m - n - window + 1 > 0:  # no query can see entries before this one
        key, value = key[:, m - n - window + 1 :], value[:, m - n - window + 1 :]
        m = key.shape[1]
    rows = torch.arange(m - n, m, device=query.device)[:, None]
    columns = torch.arange(m, device=query.device)[None]
    if softcap is None and sinks is None:
        group = query.shape[0] // key.shape[0]
        keys, values = key.repeat_interleave(group, 0)[None], value.repeat_interleave(group, 0)[None]
        if n == m and (window is None or window >= m):
            return functional.scaled_dot_product_attention(query[None], keys, values, is_causal=True, scale=scaling)[0]
        mask = columns <= rows
        if window is not None:
            mask &= columns > rows - window
        return functional.scaled_dot_product_attention(query[None], keys, values, attn_mask=mask, scale=scaling)[0]
    out = torch.empty_like(query)
    for start in range(0, n, _ROWS):
        stop = min(n, start + _ROWS)
        weights = attention_weights(
            query[:, start:stop],
            key,
            rows[start:stop],
            columns,
            scaling=scaling,
            softcap=softcap,
            window=window,
            sinks=sinks,
        )
        paid = torch.bmm(weights.to(value.dtype).flatten(1, 2), value)
        out[:, start:stop] = paid.view(query.shape[0], stop - start, -1)
    return out


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
    """As `causal_attention`, and raise `maxima.best` to the attention paid, from the same logits.

    Returns:
        [H, n, D] in the dtype of `query`.
    """
    n, m = query.shape[1], key.shape[1]
    positions = torch.arange(m, device=query.device)
    out = torch.empty_like(query)
    size = max(16, _LOGITS // (query.shape[0] * m))
    for start in range(0, n, size):
        stop = min(n, start + size)
        seen = m - n + stop  # later new tokens are hidden from all rows of the block
        weights = attention_weights(
            query[:, start:stop],
            key[:, :seen],
            positions[m - n + start : seen, None],
            positions[None, :seen],
            scaling=scaling,
            softcap=softcap,
            window=window,
            sinks=sinks,
        )
        paid = torch.bmm(weights.to(value.dtype).flatten(1, 2), value[:, :seen])
        out[:, start:stop] = paid.view(query.shape[0], stop - start, -1)
        raise_maxima(maxima, weights, None if maxima.row_weights is None else maxima.row_weights[start:stop])
    return out


def raise_maxima(maxima: Maxima, weights: Tensor, row_weights: Tensor | None) -> None:
    """Raise `maxima.best` to the attention that some rows paid.

    Args:
        maxima: what to record.
        weights: [K, G, r, m] of a softmax over everything; changed in place.
        row_weights: [r] of these rows, or None.
    """
    (start, stop), n_first = maxima.chunk, min(maxima.n_first, maxima.chunk[0])
    inside = weights[..., start:stop]
    if (start, stop) != (0, maxima.n_context):  # the softmax over fewer entries is the same one, divided by their sum
        total = inside.sum(-1, keepdim=True) + weights[..., maxima.n_context :].sum(-1, keepdim=True)
        total += weights[..., :n_first].sum(-1, keepdim=True)
        inside.div_(total.clamp_min_(_TINY))
    if row_weights is not None:
        inside.mul_(row_weights[:, None])
    torch.maximum(maxima.best, inside.amax(2).flatten(0, 1), out=maxima.best)
    if maxima.squares is not None:
        maxima.squares.add_(inside.square_().sum(2).flatten(0, 1))


def attention_weights(  # noqa: PLR0913 — what a softmax over a cache depends on
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    columns: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax weights of query rows over keys, by position.

    Args:
        query: [H, r, D].
        key: [K, m, D].
        rows: [r, 1] positions of the query tokens.
        columns: [1, m] positions of the keys, ascending.
        scaling: factor on q·k.
        softcap: tanh soft-capping, or None.
        window: tokens a query sees counting itself, or None for all.
        sinks: [H] logits of a value-less entry, or None.

    Returns:
        [K, G, r, m] float32; rows sum to 1 (less with sinks).
    """
    n_kv_heads, n_keys, head_dim = key.shape
    grouped = (query.float() * scaling).reshape(n_kv_heads, -1, head_dim)  # the group's rows under one another
    logits = torch.bmm(grouped, key.float().transpose(1, 2)).view(n_kv_heads, -1, query.shape[1], n_keys)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if window is not None:
        logits.masked_fill_((columns > rows) | (columns <= rows - window), float("-inf"))
    else:  # columns ascend: those up to the first row's position need no mask
        n_open = int((columns <= rows.min()).sum())
        logits[..., n_open:].masked_fill_(columns[:, n_open:] > rows, float("-inf"))
    if sinks is None:
        return torch.softmax(logits, -1)
    extra = sinks.float().reshape(n_kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, extra], -1), -1)[..., :-1]
