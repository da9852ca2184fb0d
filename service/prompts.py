"""What a chat is answered on: the longest stored context that its messages begin with, or nothing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

from precis.errors import ContextNotFound, InvalidRequest, SnapshotCorrupt
from precis.wire import keys
from precis.wire.messages import Message, ModelCard
from precis.wire.records import ContextRecord
from service.access import Caller
from service.asking import together
from service.auto import Mode, noticed, renew
from service.beginnings import digest_of_tokens, digests_of
from service.contexts import int32_bytes
from service.models import model_of
from service.records import expired
from service.state import State
from service.tools import Tools


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to be answered, on top of a context or alone.

    Attributes:
        record: of the context, or None.
        token_ids: what follows it, at least one.
        also: further contexts, read behind the first.
        note: what is said in `x-cache` besides.
    """

    card: ModelCard
    record: ContextRecord | None
    token_ids: list[int]
    also: tuple[ContextRecord, ...] = ()
    note: str = ""

    @property
    def context_id(self) -> str:
        """Empty where there is none."""
        return "" if self.record is None else self.record.id

    @property
    def n_context(self) -> int:
        """Tokens of the contexts.

        Raises:
            ContextTooLong: if they are too long together.
        """
        return 0 if self.record is None else together(self.card, [self.record, *self.also])


@dataclass(frozen=True, slots=True)
class Chat:
    """What is asked.

    Attributes:
        model: its name; "" where only one is served.
        context_ids: the messages follow these contexts; None: look for one that they begin with.
        messages: at least one.
        cache: whether long beginnings that come twice are stored; None: as the settings say.
        tools: that the answer may call.
    """

    model: str
    context_ids: list[str] | None
    messages: list[Message]
    cache: Mode | None = None
    tools: Tools = field(default_factory=lambda: Tools([], None))


async def prompt_of(state: State, caller: Caller, chat: Chat) -> Prompt:
    """The prompt of a chat.

    Raises:
        InvalidRequest: if the context is of another model, or takes no chat.
        ContextNotFound, ContextNotReady, ContextExpired, ContextFailed: of a context that was named.
    """
    model, messages = chat.model, chat.messages
    if chat.context_ids is None:
        found = await _found(state, caller, await state.fleet.card(model or None), chat)
        if found.record is not None:
            await renew(state, found.record)
        elif (chat.cache or ("auto" if state.settings.auto_cache else "off")) == "auto":
            digests = digests_of(messages)[:-1]
            note = await noticed(state, caller, found.card, messages, digests, len(found.token_ids))
            return replace(found, note=note)
        return found
    record, *also = await state.ready_contexts(chat.context_ids, caller.tenant)
    if model and model != record.model:
        raise InvalidRequest(f"the context was made with {record.model}, not with {model}", param="model")
    if record.parts:
        raise InvalidRequest("this document was split: use its queries route, which asks all parts", param="context")
    if record.template == "raw":
        raise InvalidRequest("a raw context takes no chat: use its queries route", param="context")
    card, prompter = await model_of(state, record)
    roles = tuple((also[-1] if also else record).roles)
    return Prompt(card, record, prompter.query_part(roles, chat.tools.told(messages)), tuple(also))


async def _found(state: State, caller: Caller, card: ModelCard, chat: Chat) -> Prompt:
    """On the context with the most messages that these begin with; the newest of equals."""
    prompter, messages, told = await state.fleet.prompter(card), chat.messages, chat.tools.told
    digests = digests_of(messages)[:-1]  # at least one message is the question
    places = [keys.beginning(caller.tenant, card.name, digest) for digest in reversed(digests)]
    async with state.stores.queue.pipeline(transaction=False) as pipe:
        for place in places:
            pipe.smembers(place)
        ids = await pipe.execute() if places else []
    for n, members in zip(range(len(digests), 0, -1), ids, strict=True):
        records = [await state.records.find(raw.decode()) for raw in members]
        if usable := [record for record in records if record is not None and _usable(record, card)]:
            record = max(usable, key=lambda each: each.created_at)
            return Prompt(card, record, prompter.query_part(tuple(record.roles), told(messages[n:])))
    return Prompt(card, None, prompter.whole(told(messages)))


async def raw_prompt_of(state: State, caller: Caller, model: str, context_ids: list[str] | None, text: str) -> Prompt:
    """The prompt of a text completion, on raw contexts that are named, or on the longest whose tokens it begins with.

    Raises:
        InvalidRequest: if the context takes chats, or nothing follows it.
        ContextNotFound, ContextNotReady, ContextExpired, ContextFailed: of a context that was named.
    """
    if context_ids is not None:
        record, *also = await state.ready_contexts(context_ids, caller.tenant)
        if record.template != "raw":
            raise InvalidRequest("text completions need a context with the raw template", param="context")
        card, prompter = await model_of(state, record)
        return Prompt(card, record, prompter.raw(text, begins=False), tuple(also))
    card = await state.fleet.card(model or None)
    tokens = (await state.fleet.prompter(card)).raw(text, begins=True)
    if (mark := digest_of_tokens(tokens)) is not None:
        members = await state.stores.queue.smembers(keys.beginning(caller.tenant, card.name, mark))
        records = [await state.records.find(raw.decode()) for raw in members]
        usable = [record for record in records if record is not None and _usable(record, card)]
        for record in sorted(usable, key=lambda each: -each.n_tokens):
            n = record.n_tokens
            with contextlib.suppress(ContextNotFound, SnapshotCorrupt):  # gone meanwhile, and nobody named it
                if n < len(tokens) and int32_bytes(tokens[:n]) == await state.records.tokens(record):
                    return Prompt(card, record, tokens[n:])
    return Prompt(card, None, tokens)


def _usable(record: ContextRecord, card: ModelCard) -> bool:
    ready = record.status == "ready" and not expired(record) and not record.parts
    return ready and record.tokenizer_digest == card.tokenizer_digest
