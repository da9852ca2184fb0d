"""Documents that are longer than the model reads: split into contexts, all of which are asked for the surest answer."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec

from precis.errors import ContextTooLong
from precis.text import Prompter
from precis.wire.messages import Message, ModelCard
from precis.wire.records import ContextRecord, Source
from service.contexts import prepare
from service.schemas import ContextIn
from service.state import State

_MOST_PARTS = 64
_SPARE = 16  # tokens by which a piece may grow when it is tokenized alone


async def prepare_all(
    state: State, wanted: ContextIn, tenant: str, source: Source | None
) -> list[tuple[ContextRecord, bytes]]:
    """What an upload becomes: one context, or, if it asks for that and is too long, several; the first names the rest.

    Raises:
        ContextTooLong: if it may not be split, or not even so.
        PrecisError: as `prepare` does.
    """
    try:
        return [await prepare(state, wanted, tenant, source)]
    except ContextTooLong:
        if wanted.overflow != "split" or wanted.text is None:
            raise
    card = await state.fleet.card(wanted.model)
    prompter = await state.fleet.prompter(card)
    pieces = await asyncio.to_thread(_pieces, prompter, card, wanted)
    made = [await prepare(state, wanted.model_copy(update={"text": piece}), tenant, source) for piece in pieces]
    (first, tokens), rest = made[0], made[1:]
    head = msgspec.structs.replace(first, beginning="", parts=[record.id for record, _ in rest])
    others = [(msgspec.structs.replace(record, beginning="", part_of=head.id), ids) for record, ids in rest]
    return [(head, tokens), *others]


def _pieces(prompter: Prompter, card: ModelCard, wanted: ContextIn) -> list[str]:
    text = wanted.text or ""
    system = [Message("system", wanted.instructions)] if wanted.instructions else []
    around = [] if wanted.template == "raw" else prompter.context_part([*system, Message("user", "")]).token_ids
    pieces = prompter.pieces(text, card.max_context - len(around) - _SPARE)
    if len(pieces) > _MOST_PARTS:
        raise ContextTooLong(
            f"the document would become {len(pieces)} contexts, {_MOST_PARTS} are the limit: split it yourself",
            limit=_MOST_PARTS * card.max_context,
        )
    return pieces


def surest(context_id: str, found: list[dict[str, Any]], *, with_logprobs: bool) -> dict[str, Any]:
    """Of the answers of all parts, the one whose tokens were likeliest on average; usage is that of all.

    Args:
        context_id: of the whole.
        found: answers, with log-probabilities.
        with_logprobs: whether they are to be shown.
    """
    sure = [_mean([each["logprob"] for each in answer["logprobs"]]) for answer in found]
    best = dict(found[max(range(len(found)), key=lambda index: sure[index])])
    told = [
        {"context": answer["context"], "mean_logprob": None if math.isinf(mean) else round(mean, 4)}
        for answer, mean in zip(found, sure, strict=True)
    ]
    if not with_logprobs:
        best.pop("logprobs")
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage = {name: sum(answer["usage"][name] for answer in found) for name in names}
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in found)
    whole_usage = {**usage, "prompt_tokens_details": {"cached_tokens": cached}}
    return {**best, "context": context_id, "part": best["context"], "parts": told, "usage": whole_usage}


def _mean(logprobs: list[float]) -> float:
    """An answer that ended at once says nothing."""
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
