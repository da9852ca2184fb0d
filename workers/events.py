"""The emitting half of the event streams: one capped stream per query or context."""

from __future__ import annotations

import redis

from precis.wire import keys
from precis.wire.codec import encode
from precis.wire.messages import TERMINAL_EVENTS, AnswerJob, Event, ScoreJob

_CAP = 4096
_KEEP_S = 600  # after any event; a reader who comes back within it misses nothing
_KEEP_AFTER_END_S = 120


def emit(pipe: redis.client.Pipeline | redis.Redis, job_id: str, event: Event) -> None:
    """Append an event to a job's stream; after a terminal one the stream is about to go."""
    stream = keys.events(job_id)
    pipe.xadd(stream, {"event": encode(event)}, maxlen=_CAP, approximate=True)
    pipe.expire(stream, _KEEP_AFTER_END_S if isinstance(event, TERMINAL_EVENTS) else _KEEP_S)


def already_answered(client: redis.Redis, job: AnswerJob | ScoreJob) -> bool:
    """Whether an earlier worker had begun to send: such an answer is never replayed."""
    return bool(client.xlen(keys.events(job.id)))
