"""The producing half of the queue: bounded, deduplicated enqueue in one script, and cancel by flag."""

from __future__ import annotations

import uuid
from math import ceil
from typing import Any

import msgspec
import structlog

from precis.errors import QueueFull
from precis.wire import keys, traces
from precis.wire.codec import encode
from precis.wire.messages import AnswerJob, PrefetchJob, ScoreJob
from precis.wire.records import WorkerRecord
from service import metrics

_FLAG_S = 600
_ENQUEUE = """
if ARGV[4] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[4]) == 0 then return 'full' end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'duplicate' end
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 'full' end
redis.call('SET', KEYS[2], 1, 'EX', ARGV[3])
redis.call('XADD', KEYS[1], '*', 'job', ARGV[2], 'attempt', 0)
return 'queued'
"""


class Jobs:
    """Hands jobs to workers."""

    def __init__(self, client: Any, answer_limit: int) -> None:
        self._redis = client
        self._limit = answer_limit
        self._enqueue = client.register_script(_ENQUEUE)

    async def submit(self, job: AnswerJob | ScoreJob, model: str, workers: list[WorkerRecord]) -> None:
        """Queue an answer: with the worker that holds the snapshot if it has room, else with whoever comes first.

        Raises:
            QueueFull: if too many wait; says when to come again.
        """
        request = structlog.contextvars.get_contextvars().get("request", "")
        job = msgspec.structs.replace(job, request=request, trace=traces.carrier())
        holders = [w for w in workers if job.context_id in w.hot and w.load < w.slots and w.role != "compress"]
        if holders:
            best = min(holders, key=lambda worker: worker.load)
            if await self._add(keys.worker_jobs(best.id), 2 * best.slots, job, best.id):
                metrics.AFFINITY.labels("holder").inc()
                return
        if not await self._add(keys.answer_jobs(model), self._limit, job):
            waiting = await self._redis.xlen(keys.answer_jobs(model))
            raise QueueFull(
                f"{waiting} answers are waiting or running, which is the limit: try again",
                retry_after_s=retry_after_s(waiting, sum(w.slots for w in workers)),
            )
        held = any(job.context_id in worker.hot for worker in workers)
        metrics.AFFINITY.labels("spill" if held else "any").inc()

    async def prefetch(self, context_id: str, model: str, workers: list[WorkerRecord]) -> bool:
        """Let a worker load a snapshot ahead of its first question; False if one holds it already.

        Raises:
            QueueFull: if too many wait; says when to come again.
        """
        if any(context_id in worker.hot for worker in workers if worker.role != "compress"):
            return False
        job = PrefetchJob(f"prefetch_{uuid.uuid4().hex[:12]}", context_id, traces.carrier())
        if not await self._add(keys.answer_jobs(model), self._limit, job):
            raise QueueFull("too many answers are waiting or running: try again", retry_after_s=1)
        return True

    async def _add(self, stream: str, limit: int, job: AnswerJob | ScoreJob | PrefetchJob, worker: str = "") -> bool:
        """Whether there was room. A worker's own stream takes nothing once the worker is forgotten: nobody reads it."""
        where = [stream, keys.queued(job.id), keys.WORKERS]
        outcome = await self._enqueue(keys=where, args=[limit, encode(job), _FLAG_S, worker])
        return bool(outcome != b"full")

    async def cancel(self, job_id: str) -> None:
        """Ask the worker to stop; it looks after every step."""
        await self._redis.set(keys.cancelled(job_id), 1, ex=_FLAG_S)


def retry_after_s(waiting: int, slots: int) -> int:
    """Seconds after which a full queue has probably moved: about two per round of all slots, 1 to 60."""
    return max(1, min(60, ceil(2 * waiting / max(1, slots))))
