"""What the API knows of models and live workers, at most a second old."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog
from redis.exceptions import RedisError

from precis.errors import ModelNotFound, NoWorker, PrecisError
from precis.text import Prompter
from precis.wire import keys
from precis.wire.codec import decode
from precis.wire.messages import Message, ModelCard
from precis.wire.records import WorkerRecord

_FRESH_S, _PREPARE_S = 0.5, 2.0


class Fleet:
    """Models announced by workers, and the workers that live."""

    def __init__(self, client: Any, grace_s: float) -> None:
        self._redis, self._grace_s = client, grace_s
        self._cards: dict[str, tuple[bytes, ModelCard]] = {}
        self._prompters: dict[str, Prompter] = {}
        self._workers: list[WorkerRecord] = []
        self._looked_at = float("-inf")

    async def workers(self, model: str | None = None) -> list[WorkerRecord]:
        """Live workers, of one model or of all."""
        if time.monotonic() - self._looked_at > _FRESH_S:
            ids = [raw.decode() for raw in await self._redis.hkeys(keys.WORKERS)]
            found = await self._redis.mget([keys.worker(i) for i in ids]) if ids else []
            self._workers = [decode(data, WorkerRecord) for data in found if data]
            self._looked_at = time.monotonic()
        return [worker for worker in self._workers if model in (None, worker.model)]

    async def need_worker(self, model: str, *, job: str) -> list[WorkerRecord]:
        """Live workers that take this kind of job, waiting a little for a restarting one.

        Raises:
            NoWorker: if there is none within the grace time.
        """
        deadline = time.monotonic() + self._grace_s
        while True:
            able = [w for w in await self.workers(model) if w.role in ("all", job)]
            if able:
                return able
            if time.monotonic() > deadline:
                raise NoWorker(f"no worker for {model} is running: start one, or try again")
            await asyncio.sleep(0.1)

    async def models(self) -> list[str]:
        """Names of models with a live worker."""
        return sorted({worker.model for worker in await self.workers()})

    async def card(self, name: str | None) -> ModelCard:
        """A model's card; without a name, that of the only model served.

        Raises:
            ModelNotFound: if no worker ever announced it, or several are served and none was named.
        """
        if not name:
            names = await self.models() or [raw.decode() for raw in await self._redis.smembers(keys.MODELS)]
            if len(names) != 1:
                raise (
                    ModelNotFound(f"name a model: one of {', '.join(names)}")
                    if names
                    else NoWorker("no worker is up yet")
                )
            name = names[0]
        digest = await self._redis.hget(keys.model(name), "digest")
        if digest is None:
            raise ModelNotFound(f"there is no model {name!r}")
        if name not in self._cards or self._cards[name][0] != digest:
            self._cards[name] = (digest, decode(await self._redis.hget(keys.model(name), "card"), ModelCard))
        return self._cards[name][1]

    async def prompter(self, card: ModelCard) -> Prompter:
        """Tokenizer and template of a model."""
        if card.tokenizer_digest not in self._prompters:
            self._prompters[card.tokenizer_digest] = await asyncio.to_thread(_made, card)
        return self._prompters[card.tokenizer_digest]

    async def prepare(self) -> None:
        """Load what the tokenizers of all served models need, so that no first request waits for it."""
        for name in await self.models():
            await self.prompter(await self.card(name))

    async def prepare_forever(self) -> None:
        """Look for new models every other second."""
        while True:
            try:
                await self.prepare()
            except (RedisError, PrecisError) as error:
                structlog.get_logger("fleet").warning("prepare_failed", error=type(error).__name__)
            await asyncio.sleep(_PREPARE_S)


def _made(card: ModelCard) -> Prompter:
    prompter = Prompter(card)
    _use(prompter)
    return prompter


def _use(prompter: Prompter) -> None:
    """Templates are compiled when they are first used."""
    part = prompter.context_part([Message("user", "A document.")])
    prompter.query_part(part.roles, [Message("user", "A question?")])
