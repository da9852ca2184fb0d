"""What a chat is answered on: the longest stored context that its messages begin with, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from precis.errors import InvalidRequest
from precis.wire import keys
from precis.wire.messages import Message, ModelCard
from precis.wire.records import ContextRecord
from service.access import Caller
from service.beginnings import digests_of
from service.models import model_of
from service.records import expired
from service.state import State


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to be answered, on top of a context or alone.

    Attributes:
        record: of the context, or None.
        token_ids: what follows it, at least one.
    """

    card: ModelCard
    record: ContextRecord | None
    token_ids: list[int]

    @property
    def context_id(self) -> str:
        """Empty where there is none."""
        return "" if self.record is None else self.record.id

    @property
    def n_context(self) -> int:
        """Tokens of the context."""
        return 0 if self.record is None else self.record.n_tokens


async def prompt_of(
    state: State, caller: Caller, model: str, context_id: str | None, messages: list[Message]
) -> Prompt:
    """The prompt of a chat.

    Args:
        state: of the API.
        caller: whose contexts count.
        model: its name; "" where only one is served.
        context_id: the messages follow this context; None: look for one that they begin with.
        messages: at least one.

    Raises:
        InvalidRequest: if the context is of another model, or takes no chat.
        ContextNotFound, ContextNotReady, ContextExpired, ContextFailed: of a context that was named.
    """
    if context_id is None:
        return await _found(state, caller, await state.fleet.card(model or None), messages)
    record = await state.ready_context(context_id, caller.tenant)
    if model and model != record.model:
        raise InvalidRequest(f"the context was made with {record.model}, not with {model}", param="model")
    if record.template == "raw":
        raise InvalidRequest("a raw context takes no chat: use its queries route", param="context")
    card, prompter = await model_of(state, record)
    return Prompt(card, record, prompter.query_part(tuple(record.roles), messages))


async def _found(state: State, caller: Caller, card: ModelCard, messages: list[Message]) -> Prompt:
    """On the context with the most messages that these begin with; the newest of equals."""
    prompter = await state.fleet.prompter(card)
    digests = digests_of(messages)[:-1]  # at least one message is the question
    places = [keys.beginning(caller.tenant, card.name, digest) for digest in reversed(digests)]
    async with state.stores.queue.pipeline(transaction=False) as pipe:
        for place in places:
            pipe.smembers(place)
        ids = await pipe.execute() if places else []
    for n, members in zip(range(len(digests), 0, -1), ids, strict=True):
        records = [await state.records.find(raw.decode()) for raw in members]
        usable = [
            record
            for record in records
            if record is not None
            and record.status == "ready"
            and not expired(record)
            and record.tokenizer_digest == card.tokenizer_digest
        ]
        if usable:
            record = max(usable, key=lambda each: each.created_at)
            return Prompt(card, record, prompter.query_part(tuple(record.roles), messages[n:]))
    return Prompt(card, None, prompter.whole(messages))
