"""What a number of bytes, a ratio or a divergence asks for: the budget or the step is searched for."""

from __future__ import annotations

from collections.abc import Callable

from precis.attempt import Attempt, Compressed
from precis.errors import BoundNotReached, BudgetTooSmall, SnapshotStale
from precis.full_cache import Between
from precis.rates import Coding, classes_of
from precis.sizes import packed_bytes
from precis.wire.presets import DEFAULT_RATIO

_OCTAVES, _RESOLUTION = 6.0, 1 / 8
_ROOM = 4096  # bytes for the coefficients of the shortest documents


def within_bytes(attempt: Attempt, lowest: int, highest: int, limit: int, between: Between) -> Compressed:
    """The largest budget whose snapshot takes at most `limit` bytes.

    Raises:
        BudgetTooSmall: naming the bytes of the smallest snapshot there is.
    """
    codec = attempt.codec

    def fits(per_head: int) -> bool:
        between("search", 0, 1)
        return packed_bytes(attempt.cut(per_head), codec) <= limit

    if not fits(lowest):
        smallest = packed_bytes(attempt.cut(lowest), codec)
        raise BudgetTooSmall(
            f"max_bytes {limit} is too small: the tokens that are always kept take {smallest} bytes with the codec "
            f"{codec.name}: allow more, or use a smaller codec",
            n_bytes=smallest,
        )
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        lowest, highest = (middle, highest) if fits(middle) else (lowest, middle - 1)
    between("encode", 0, 1)
    return attempt.at(lowest)


def within_kl(attempt: Attempt, lowest: int, highest: int, limit: float, between: Between) -> Compressed:
    """The smallest budget found whose measured divergence stays within `limit`.

    Divergence need not fall evenly with the budget: what is returned was measured and is within the limit, but a
    smaller budget that happens to be as well can be missed. The search stops at 1 % of the context.

    Raises:
        BoundNotReached: if even the whole cache, through the codec, is further off.
    """
    between("search", 0, 1)
    best = attempt.at(highest)
    if best.fidelity.kl > limit:
        raise BoundNotReached(
            f"with everything kept, the codec {attempt.how.codec} alone diverges by {best.fidelity.kl:.2g} nats per "
            f"token, above max_kl {limit:g}: allow more, or use a finer codec",
            kl=best.fidelity.kl,
        )
    resolution = max(1, attempt.document.n_tokens // 100)
    while highest - lowest > resolution:
        between("search", 0, 1)
        middle = (lowest + highest) // 2
        found = attempt.at(middle)
        if found.fidelity.kl <= limit:
            best, highest = found, middle
        else:
            lowest = middle
    return best


def transformed(attempt: Attempt, per_head: int, between: Between) -> Compressed:
    """What is kept, through `tc`, in the step that a ratio, a number of bytes or a divergence asks for.

    Of short documents, positions, sinks and tables are most: they are not made as small as a ratio says, but get half
    of that for their coefficients.

    Raises:
        SnapshotStale, BudgetTooSmall, BoundNotReached: see `compress`.
    """
    model, how = attempt.model, attempt.how
    if model.transform is None or how.transform != model.transform.fingerprint:
        raise SnapshotStale("the transform that this compression names is not the model's")
    between("encode", 0, 1)
    kept = attempt.cut(per_head)
    classes = classes_of(attempt.full, model.transform.block_layers)
    coding = Coding.of(kept, model.transform, classes, attempt.rotary, attempt.key)
    raw_bytes = model.geometry.raw_bytes(attempt.document.n_tokens)
    if how.max_bytes is not None:
        return attempt.made(coding.within(how.max_bytes), kept, classes)
    if how.max_kl is None:
        limit = int(raw_bytes / (how.ratio or DEFAULT_RATIO))
        return attempt.made(coding.within(limit, max(limit // 2, _ROOM)), kept, classes)

    def at(step: float) -> Compressed:
        between("search", 0, 1)
        return attempt.made(coding.at(step), kept, classes)

    return coarsest(at, coding.step_near(int(raw_bytes / DEFAULT_RATIO)), how.max_kl)


def coarsest(at: Callable[[float], Compressed], step: float, limit: float) -> Compressed:
    """The coarsest step found whose measured divergence stays within `limit`, to an eighth of an octave.

    Args:
        at: codes in a step, and measures.
        step: in the middle of what is searched, six octaves to either side.
        limit: nats per token.

    Raises:
        BoundNotReached: if not even the finest step is within the limit.
    """
    low, high, octave = -_OCTAVES, _OCTAVES, 0.0
    best, least = None, 0.0
    while high - low > _RESOLUTION:
        found = at(step * 2.0**octave)
        if found.fidelity.kl <= limit:
            best, low = found, octave
        else:
            least, high = found.fidelity.kl, octave
        octave = (low + high) / 2
    if best is None:
        raise BoundNotReached(
            f"the codec tc diverges by {least:.2g} nats per token however fine its step, above max_kl {limit:g}: allow "
            "more, keep more, or use another codec",
            kl=least,
        )
    return best
