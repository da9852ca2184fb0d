"""Which tokens every head keeps, and whether a budget has room for them. No torch: the API answers 422 with it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from precis.errors import BudgetTooSmall, InvalidRequest
from precis.wire.presets import PRESETS, Compression


def budget_per_head(n_tokens: int, compression: Compression) -> int:
    """Mean entries per kv head: the kept share of T, rounded, at least 1."""
    return max(1, round(n_tokens * compression.keep_ratio))


def protected_spans(
    n_tokens: int, policy: str, per_head: int, spans: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Spans of tokens that are always kept: sinks, the last window, and the caller's, clipped to the context.

    Args:
        n_tokens: T.
        policy: its name.
        per_head: mean entries per kv head, of which some policies give a share to the last tokens.
        spans: the caller's.
    """
    preset = PRESETS[policy]
    n_window = preset.n_window
    if preset.window_cap < 1:
        n_window = min(n_window, int(preset.window_cap * per_head))
    if preset.window_share:
        n_window = max(0, int(preset.window_share * per_head) - preset.n_sink)
    every = [(0, preset.n_sink), (n_tokens - n_window, n_tokens), *spans]
    clipped = [(max(0, start), min(n_tokens, stop)) for start, stop in every]
    return [(start, stop) for start, stop in clipped if start < stop]


def count_protected(n_tokens: int, policy: str, per_head: int, spans: Iterable[tuple[int, int]]) -> int:
    """Tokens that are always kept."""
    covered: set[int] = set()
    for start, stop in protected_spans(n_tokens, policy, per_head, spans):
        covered.update(range(start, stop))
    return len(covered)


def check_budget(n_tokens: int, compression: Compression, spans: Iterable[tuple[int, int]]) -> int:
    """Mean entries per kv head, if the protected tokens fit into it.

    Raises:
        BudgetTooSmall: naming both numbers and the ratio that would do.
    """
    per_head = budget_per_head(n_tokens, compression)
    n_protected = count_protected(n_tokens, compression.policy, per_head, spans)
    if n_protected > per_head:
        raise BudgetTooSmall(
            f"keep_ratio {compression.keep_ratio:g} keeps {per_head} of {n_tokens} tokens per head, but {n_protected} "
            f"are always kept (first and last tokens, template): use a keep_ratio of at least "
            f"{min(1.0, (n_protected + 1) / n_tokens):.2f}, or the policy full",
            n_tokens=n_tokens,
            n_protected=n_protected,
        )
    return per_head


def tighter(
    how: Compression, keep_ratio: float, n_tokens: int, kept_ratio: float, spans: Iterable[tuple[int, int]]
) -> Compression:
    """The compression of a context that is to keep less than it does.

    Args:
        how: what it was compressed by.
        keep_ratio: what it is to keep.
        n_tokens: T.
        kept_ratio: what it keeps now.
        spans: protected besides the policy's own.

    Raises:
        InvalidRequest: if the policy cannot be tightened, or nothing would be dropped.
        BudgetTooSmall: if the protected tokens do not fit.
    """
    spans = list(spans)
    fewer = msgspec.structs.replace(how, keep_ratio=keep_ratio)
    if how.searches:
        fewer = msgspec.structs.replace(fewer, max_bytes=None, max_kl=None)
    if not PRESETS[how.policy].nested:
        raise InvalidRequest(f"snapshots of the policy {how.policy} cannot be tightened: upload the document again")
    per_head, now = budget_per_head(n_tokens, fewer), round(kept_ratio * n_tokens)
    if per_head >= now:
        raise InvalidRequest(f"the context keeps {kept_ratio:g} already: tighten it to less, or upload it again")
    check_budget(n_tokens, fewer, spans)
    if protected_spans(n_tokens, how.policy, per_head, spans) != protected_spans(n_tokens, how.policy, now, spans):
        raise InvalidRequest(
            f"at keep_ratio {keep_ratio:g} the policy {how.policy} protects fewer of the last tokens than this "
            "snapshot does, so that it cannot be cut down to that: upload the document again"
        )
    return fewer
