"""The following half of the event streams: one multiplexed XREAD for all requests of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import structlog
from redis.exceptions import RedisError

from precis.errors import JobLost, ShuttingDown
from precis.wire import keys
from precis.wire.codec import decode_event
from precis.wire.messages import TERMINAL_EVENTS, Event, FailedEvent
from service import metrics

_API_S = 10
_BLOCK_MS = 5000


@dataclass(slots=True)
class Subscription:
    """One followed stream: events with their ids, in order."""

    job_id: str
    last_id: str
    queue: asyncio.Queue[tuple[str, Event]] = field(default_factory=asyncio.Queue)


class Follower:
    """Reads every followed stream in one blocking call, woken by a stream of its own when one is added."""

    def __init__(self, client: Any, api_id: str) -> None:
        self._redis, self.api_id = client, api_id
        self._followed: dict[str, list[Subscription]] = {}
        self._task: asyncio.Task[None] | None = None
        self._beat_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to read and to beat."""
        await self._redis.set(keys.api(self.api_id), 1, ex=_API_S)
        self._task = asyncio.create_task(self._read())
        self._beat_task = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        """End; workers drop this process' answers."""
        for task in (self._task, self._beat_task):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in (self._task, self._beat_task) if t is not None), return_exceptions=True)
        await self._redis.delete(keys.api(self.api_id), keys.wake(self.api_id))

    async def follow(self, job_id: str, after: str = "0-0") -> Subscription:
        """Begin to receive a job's events; to be ended with `unfollow`."""
        subscription = Subscription(job_id, after)
        self._followed.setdefault(job_id, []).append(subscription)
        metrics.STREAMS.inc()
        await self._wake()
        return subscription

    def unfollow(self, subscription: Subscription) -> None:
        """Stop receiving."""
        others = self._followed.get(subscription.job_id, [])
        if subscription in others:
            others.remove(subscription)
            metrics.STREAMS.dec()
        if not others:
            self._followed.pop(subscription.job_id, None)

    def end_all(self, detail: str) -> None:
        """Tell every reader that this process stops."""
        for subscription in [s for subs in self._followed.values() for s in subs]:
            subscription.queue.put_nowait((subscription.last_id, FailedEvent(ShuttingDown.code, detail)))

    async def _wake(self) -> None:
        wake = keys.wake(self.api_id)
        await self._redis.xadd(wake, {"w": 1}, maxlen=1)
        await self._redis.expire(wake, _API_S)

    async def _beat(self) -> None:
        while True:
            try:
                await self._redis.set(keys.api(self.api_id), 1, ex=_API_S)
            except RedisError:
                structlog.get_logger("events").warning("beat_failed")
            await asyncio.sleep(_API_S / 4)

    async def _read(self) -> None:
        wake, woken = keys.wake(self.api_id).encode(), "0-0"
        while True:
            cursors = {
                keys.events(job): min((s.last_id for s in subs), key=_order)
                for job, subs in self._followed.items()
                if subs
            }
            try:
                streams: dict[Any, Any] = {wake: woken, **cursors}
                found = await self._redis.xread(streams, block=_BLOCK_MS, count=256)
            except RedisError as error:
                structlog.get_logger("events").warning("read_failed", error=type(error).__name__)
                await asyncio.sleep(0.2)
                continue
            for stream, entries in found or []:
                if stream == wake:
                    woken = entries[-1][0]
                else:
                    self._deliver(stream.decode(), entries)

    def _deliver(self, stream: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        job_id = stream.rsplit(":", 1)[1]
        for subscription in self._followed.get(job_id, []):
            for raw_id, fields in entries:
                entry_id = raw_id.decode()
                if _order(entry_id) > _order(subscription.last_id):
                    subscription.last_id = entry_id
                    subscription.queue.put_nowait((entry_id, decode_event(fields[b"event"])))


async def events_of(subscription: Subscription, timeout_s: float) -> AsyncIterator[tuple[str, Event]]:
    """Events until a terminal one.

    Raises:
        JobLost: if none comes for `timeout_s` seconds.
    """
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                entry_id, event = await subscription.queue.get()
        except TimeoutError:
            raise JobLost(f"no worker sent anything for {timeout_s:g} seconds: ask again") from None
        yield entry_id, event
        if isinstance(event, TERMINAL_EVENTS):
            return
        await asyncio.sleep(0)  # a full queue never waits, and would starve whoever watches for a client that goes


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
