"""What OpenAI's routes share: sampling as they ask for it, and several choices of one prompt in one stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from precis.errors import InvalidRequest, PrecisError
from precis.wire.messages import AnswerJob, DoneEvent, Sampling, TokenEvent
from service.asking import Asked, Collected, begin, check_room, collect, usage
from service.contexts import int32_bytes
from service.openai_schemas import OpenAiIn
from service.prompts import Prompt
from service.state import State

_DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Choices:
    """Answers to one prompt, all of them taken up by workers.

    Attributes:
        id: of the request.
        created: Unix time.
        cache: what is said in the header `x-cache`.
    """

    id: str
    created: int
    model: str
    cache: str
    asked: list[Asked]

    async def close(self) -> None:
        """Stop following; what has not ended is cancelled."""
        await asyncio.gather(*(each.close() for each in self.asked))

    async def collect(self, request: Request) -> list[Collected]:
        """All answers, or nothing of them if the client goes."""
        tasks = [asyncio.create_task(collect(request, each)) for each in self.asked]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
            raise

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent | DoneEvent]]:
        """Events with the number of their choice, as they come, until all are done.

        Raises:
            PrecisError: if a worker failed.
        """
        arrived: asyncio.Queue[tuple[int, TokenEvent | DoneEvent | PrecisError]] = asyncio.Queue()

        async def read(index: int, asked: Asked) -> None:
            try:
                async for event in asked.rest():
                    await arrived.put((index, event))
            except PrecisError as error:
                await arrived.put((index, error))

        tasks = [asyncio.create_task(read(index, each)) for index, each in enumerate(self.asked)]
        n_open = len(tasks)
        try:
            while n_open:
                index, event = await arrived.get()
                if isinstance(event, PrecisError):
                    raise event
                n_open -= isinstance(event, DoneEvent)
                yield index, event
        finally:
            for task in tasks:
                task.cancel()


async def choose(state: State, request: Request, prompt: Prompt, wanted: OpenAiIn, *, schema: str = "") -> Choices:
    """Hand a prompt to workers, as often as choices are wanted.

    Raises:
        QueryTooLong, QueueFull, NoWorker: if it cannot be answered.
    """
    now, request_id = time.time(), uuid.uuid4().hex[:20]
    max_tokens = check_room(
        prompt.card, prompt.n_context, len(prompt.token_ids), wanted.most_tokens or _DEFAULT_MAX_TOKENS
    )
    jobs = [
        AnswerJob(
            id=f"q_{request_id}" + (f"_{index}" if index else ""),
            context_id=prompt.context_id,
            also=[record.id for record in prompt.also],
            token_ids=int32_bytes(prompt.token_ids),
            sampling=Sampling(
                max_tokens=max_tokens,
                temperature=wanted.temperature,
                top_p=wanted.top_p,
                seed=None if wanted.seed is None else wanted.seed + index,
                stop=wanted.stops,
                n_top=wanted.n_top,
                logprobs=wanted.wants_logprobs,
                schema=schema,
            ),
            api=state.follower.api_id,
            sent_at=now,
        )
        for index in range(wanted.n)
    ]
    starts = (begin(state, request, prompt.card.name, job) for job in jobs)
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    begun = [each for each in outcomes if isinstance(each, Asked)]
    failure = next((each for each in outcomes if isinstance(each, BaseException)), None)
    if failure is not None:
        await asyncio.gather(*(each.close() for each in begun))
        raise failure
    return Choices(request_id, int(now), prompt.card.name, begun[0].cache, begun)


def usage_of_all(done: list[DoneEvent]) -> dict[str, Any]:
    """Usage of several choices of one prompt, as OpenAI counts it: the prompt once."""
    return usage(done[0].prompt_tokens, sum(each.completion_tokens for each in done), done[0].cached_tokens)


def schema_of(response_format: dict[str, Any] | None) -> str:
    """The JSON schema that OpenAI's `response_format` asks for; empty for text.

    Raises:
        InvalidRequest: if it cannot be understood.
    """
    kind = (response_format or {"type": "text"}).get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return json.dumps({"type": "object"})
    given = (response_format or {}).get("json_schema", response_format)
    if kind == "json_schema" and isinstance(given, dict) and isinstance(given.get("schema"), dict):
        return json.dumps(given["schema"])
    raise InvalidRequest("response_format is text, json_object, or json_schema with a schema", param="response_format")
