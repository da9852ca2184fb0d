"""The consuming half of the queue: take, keep the lease, finish, give back, and reap what dead workers held.

Redis Streams with one consumer group. An entry is deleted when its job is finished, so that a stream's length is what
waits plus what runs. Leases are renewed by a thread with a connection of its own, since a torch step holds the loop.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import redis
import structlog

from precis.wire import keys
from precis.wire.codec import decode_job, encode
from precis.wire.messages import Job, PrefetchJob
from precis.wire.records import WorkerRecord
from workers import metrics

MAX_ATTEMPTS = 2  # a job that two workers died on is not tried again
_DEAD_LIMIT = 1000
_PREFETCH_LIMIT = 64  # jobs waiting; beyond, loading ahead would only delay them

_FINISH = """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
return redis.call('XDEL', KEYS[1], ARGV[2])
"""
_GIVE_BACK = """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)
if #pending == 0 or pending[1][2] ~= ARGV[5] then return 0 end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'job', ARGV[3], 'attempt', ARGV[4])
return 1
"""
_RENEW = """
local lost = {}
for i = 3, #ARGV do
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)
  if #pending == 1 and pending[1][2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
"""
_MOVE_ALL = """
if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local entries = redis.call('XRANGE', KEYS[1], '-', '+')
for _, entry in ipairs(entries) do
  local f = entry[2]
  redis.call('XADD', KEYS[2], '*', 'job', f[2], 'attempt', tonumber(f[4]) + 1)
end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[4], ARGV[1])
return #entries
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A job in hand.

    Attributes:
        stream, entry_id: where it lies until it is finished.
        attempt: how many workers had it before.
    """

    stream: str
    entry_id: str
    job: Job
    attempt: int

    @property
    def lease(self) -> tuple[str, str]:
        """What the lease is kept on."""
        return self.stream, self.entry_id


class Queue:
    """One worker's view of the job streams."""

    def __init__(self, client: redis.Redis, worker_id: str, model: str, role: str, lease_s: float) -> None:
        self._redis = client
        self._log = structlog.get_logger("queue")
        self.worker_id = worker_id
        self._model = model
        self._lease_ms = int(lease_s * 1000)
        self._own = keys.worker_jobs(worker_id)
        self.answers = [self._own, keys.answer_jobs(model)] if role != "compress" else []
        self.compressions = [keys.compress_jobs(model)] if role != "answer" else []
        self._cursors = dict.fromkeys([*self.answers[1:], *self.compressions], "0-0")
        self._finish, self._give_back = client.register_script(_FINISH), client.register_script(_GIVE_BACK)
        self._move_all = client.register_script(_MOVE_ALL)
        self.create_groups()

    def create_groups(self) -> None:
        """Make sure that every stream has its group, also after the server lost them."""
        for stream in [*self.answers, *self.compressions]:
            try:
                self._redis.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def take(self, streams: Sequence[str], count: int, block_ms: int | None) -> list[Entry]:
        """Up to `count` entries of each stream, waiting up to `block_ms` for the first; None does not wait."""
        if not streams or count < 1:
            return []
        wanted: dict[Any, Any] = dict.fromkeys(streams, ">")
        try:
            found: Any = self._redis.xreadgroup(keys.GROUP, self.worker_id, wanted, count=count, block=block_ms)
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._log.warning("group_recreated")
            self.create_groups()
            return []
        return [
            entry
            for stream, entries in found or []
            for entry_id, fields in entries
            if (entry := self._entry(stream.decode(), entry_id.decode(), fields)) is not None
        ]

    def _entry(self, stream: str, entry_id: str, fields: dict[bytes, bytes]) -> Entry | None:
        try:
            return Entry(stream, entry_id, decode_job(fields[b"job"]), int(fields[b"attempt"]))
        except (msgspec.DecodeError, KeyError, ValueError, TypeError) as error:
            self._log.error("bad_entry", stream=stream, entry_id=entry_id, error=str(error))
            self.bury(stream, entry_id, fields or {})
            return None

    def prefetch(self, context_id: str) -> None:
        """Ask a worker that answers to load a snapshot; never beyond what waits anyway."""
        job = PrefetchJob(f"prefetch_{uuid.uuid4().hex[:12]}", context_id)
        stream = keys.answer_jobs(self._model)
        if self._redis.xlen(stream) < _PREFETCH_LIMIT:
            self._redis.xadd(stream, {"job": encode(job), "attempt": 0})

    def finish(self, entry: Entry) -> None:
        """The job is done, failed or cancelled: only now is it gone."""
        self._finish(keys=[entry.stream], args=[keys.GROUP, entry.entry_id])

    def give_back(self, entry: Entry, *, died: bool) -> None:
        """Put a job back for others; `died` counts an attempt."""
        shared = keys.compress_jobs(self._model) if entry.stream in self.compressions else keys.answer_jobs(self._model)
        attempt = entry.attempt + (1 if died else 0)
        args: list[Any] = [keys.GROUP, entry.entry_id, encode(entry.job), attempt, self.worker_id]
        self._give_back(keys=[entry.stream, shared], args=args)

    def bury(self, stream: str, entry_id: str, fields: dict[bytes, bytes]) -> None:
        """Move an entry to the dead letters."""
        kept: dict[Any, Any] = {**fields, b"stream": stream}
        self._redis.xadd(keys.DEAD, kept, maxlen=_DEAD_LIMIT, approximate=True)
        self._finish(keys=[stream], args=[keys.GROUP, entry_id])

    def reap(self) -> list[Entry]:
        """Take over what dead workers held. Entries past the last attempt are buried and returned, to be failed."""
        lost: list[Entry] = []
        for stream, cursor in self._cursors.items():
            try:
                found: Any = self._redis.xautoclaim(
                    stream, keys.GROUP, self.worker_id, self._lease_ms, start_id=cursor, count=16
                )
            except redis.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                self.create_groups()
                continue
            self._cursors[stream] = found[0].decode()
            for entry_id, fields in found[1]:
                entry = self._entry(stream, entry_id.decode(), fields)
                if entry is None:
                    continue
                self._log.warning("job_reclaimed", job=entry.job.id, attempt=entry.attempt + 1)
                if entry.attempt + 1 >= MAX_ATTEMPTS:
                    self.bury(stream, entry.entry_id, fields)
                    lost.append(entry)
                else:
                    self.give_back(entry, died=True)
        self._bury_dead_workers()
        return lost

    def _bury_dead_workers(self) -> None:
        """Hand on the streams of workers whose beat stopped, and forget their empty consumers."""
        registered: Any = self._redis.hgetall(keys.WORKERS)
        for raw_id, model in registered.items():
            worker_id = raw_id.decode()
            if worker_id == self.worker_id or self._redis.exists(keys.worker(worker_id)):
                continue
            source, target = keys.worker_jobs(worker_id), keys.answer_jobs(model.decode())
            self._move_all(keys=[source, target, keys.worker(worker_id), keys.WORKERS], args=[worker_id])
        for stream in self._cursors:
            try:
                consumers: Any = self._redis.xinfo_consumers(stream, keys.GROUP)
            except redis.ResponseError:  # the server has just lost the group
                self.create_groups()
                continue
            for consumer in consumers:
                name = consumer["name"].decode()
                if consumer["pending"] == 0 and name != self.worker_id and raw_missing(registered, name):
                    self._redis.xgroup_delconsumer(stream, keys.GROUP, name)


def raw_missing(registered: dict[bytes, bytes], name: str) -> bool:
    """Whether a consumer belongs to no registered worker."""
    return name.encode() not in registered


class Heart(threading.Thread):
    """Renews leases and announces the worker, from a thread with its own connection."""

    def __init__(self, client: redis.Redis, worker_id: str, lease_s: float) -> None:
        super().__init__(name="heart", daemon=True)
        self._redis, self._worker_id, self._lease_s = client, worker_id, lease_s
        self._renew = client.register_script(_RENEW)
        self._lock = threading.Lock()
        self._held: set[tuple[str, str]] = set()
        self._lost: set[tuple[str, str]] = set()
        self._stopped = threading.Event()
        self._record: WorkerRecord | None = None
        self.last_beat = time.monotonic()

    def hold(self, entry: Entry) -> None:
        """Keep this entry's lease from now on."""
        with self._lock:
            self._held.add(entry.lease)

    def release(self, entry: Entry) -> None:
        """Stop keeping it."""
        with self._lock:
            self._held.discard(entry.lease)
            self._lost.discard(entry.lease)

    def lost(self, entry: Entry) -> bool:
        """Whether another worker has the job now: its result must not be used."""
        with self._lock:
            return entry.lease in self._lost

    def announce(self, record: WorkerRecord) -> None:
        """What to tell of the worker at the next beats."""
        with self._lock:
            self._record = record

    def stop(self) -> None:
        """End the thread, and the worker's registration with it."""
        self._stopped.set()
        self.join(timeout=5)
        with suppress(redis.RedisError):  # it ends by itself
            self._redis.delete(keys.worker(self._worker_id))

    def run(self) -> None:
        """Beat three times a lease until stopped."""
        log = structlog.get_logger("heart")
        while not self._stopped.is_set():
            try:
                self.beat()
            except redis.RedisError as error:
                log.warning("beat_failed", error=type(error).__name__)
            self._stopped.wait(self._lease_s / 3)

    def beat(self) -> None:
        """One beat."""
        with self._lock:
            held, record = set(self._held), self._record
        if record is not None:
            self._redis.set(keys.worker(self._worker_id), encode(record), px=int(self._lease_s * 1000))
            self._redis.hset(keys.WORKERS, self._worker_id, record.model)
        for stream in {stream for stream, _ in held}:
            ids = [entry_id for where, entry_id in held if where == stream]
            gone: Any = self._renew(keys=[stream], args=[keys.GROUP, self._worker_id, *ids])
            with self._lock:
                self._lost |= {(stream, entry_id.decode()) for entry_id in gone} & self._held
        self.last_beat = time.monotonic()
        metrics.BEAT.set_to_current_time()
