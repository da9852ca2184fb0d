"""The worker's loop: take jobs, keep the batch moving, compress in between, and end cleanly."""

from __future__ import annotations

import time
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import msgspec
import redis
import structlog
from opentelemetry.trace import get_current_span

from precis.errors import (
    InternalError,
    JobCancelled,
    JobLost,
    PrecisError,
    ShuttingDown,
)
from precis.fingerprint import digest
from precis.wire import keys, traces
from precis.wire.codec import encode
from precis.wire.messages import (
    AnswerJob,
    CompressJob,
    FailedEvent,
    PrefetchJob,
    ScoredEvent,
    ScoreJob,
    Timings,
)
from precis.wire.records import Problem, WorkerRecord
from workers import metrics
from workers.answer import Batch
from workers.cache import SnapshotCache
from workers.compress import Compressor
from workers.events import already_answered, emit
from workers.jobs import Entry, Heart, Queue
from workers.models import Served
from workers.records import Records
from workers.score import score
from workers.sessions import Sessions
from workers.sources import Found, Sources
from workers.stores import is_away

_IDLE_BLOCK_MS = 500
_REAP_S = 1.0
_KINDS = {CompressJob: "compress", AnswerJob: "answer", ScoreJob: "score", PrefetchJob: "prefetch"}
_SHARE_S = 1.0  # seconds that answers may take between two chunks of a compression


@dataclass(slots=True)
class Worker:
    """One process' loop. Everything it needs is handed in."""

    served: Served
    client: redis.Redis
    queue: Queue
    heart: Heart
    records: Records
    cache: SnapshotCache
    compressor: Compressor
    sessions: Sessions
    described: WorkerRecord
    stopping: bool = False
    batch: Batch = field(init=False)
    sources: Sources = field(init=False)
    _waiting: deque[Entry] = field(default_factory=deque)
    _reaped_at: float = 0.0

    def __post_init__(self) -> None:
        self.sources = Sources(self.records, self.cache, self.compressor)
        self.batch = Batch(self.served, self.client, self.sessions, self.described.slots, self._done)

    def run(self) -> None:
        """Work until `stopping` is set; then finish the answers in flight and give the rest back."""
        log = structlog.get_logger("worker")
        broken = announced = False
        while not self.stopping:
            try:
                if not announced:
                    self.announce()
                    announced = True
                if broken:  # events may be missing from the streams: an answer with a gap is no answer
                    self.batch.fail_all(JobLost("the connection to the store broke while answering: ask again"))
                    broken = False
                self.turn()
            except redis.RedisError as error:  # also e.g. a server that lost its data between two commands
                broken = (away := is_away(error)) or broken
                log.warning("store_unreachable" if away else "store_refused", error=str(error))
                with suppress(redis.RedisError):
                    self.queue.create_groups()
                time.sleep(0.5)
        log.info("draining", answers=len(self.batch))
        deadline = time.monotonic() + 30
        while len(self.batch) and time.monotonic() < deadline:
            self.batch.step(self.heart.lost)
        self.batch.fail_all(ShuttingDown("the worker is shutting down: ask again"))
        for entry in self._waiting:
            self.queue.give_back(entry, died=False)

    def announce(self) -> None:
        """Tell the API of the model and of this worker."""
        card = self.served.card
        encoded = encode(card)
        self.client.hset(keys.model(card.name), mapping={"digest": digest(card=encoded), "card": encoded})
        self.client.sadd(keys.MODELS, card.name)
        self._tell_heart()
        self.heart.beat()

    def turn(self) -> None:
        """One round: answers first, then one step of the batch, then a compression if there is one."""
        self._reap()
        self._tell_heart()
        idle = not len(self.batch) and not self._waiting
        self._admit(block_ms=_IDLE_BLOCK_MS if idle else None)
        self.batch.step(self.heart.lost)
        while self._waiting and not self.sources.busy:
            self._handle(self._waiting.popleft())

    def _admit(self, block_ms: int | None) -> None:
        """Take what there is room for. While a compression runs, no other is taken."""
        if (free := self.batch.free) < 1:
            return
        compressions = [] if self.sources.busy or self._waiting else self.queue.compressions
        if block_ms is not None:  # whichever comes first; one of each stream at most
            entries = self.queue.take([*self.queue.answers, *compressions], 1, block_ms)
        else:
            entries = self.queue.take(self.queue.answers, free, None) + self.queue.take(compressions, 1, None)
        for entry in entries:
            self.heart.hold(entry)
        for entry in sorted(entries, key=lambda each: isinstance(each.job, CompressJob)):
            if isinstance(entry.job, CompressJob):
                self._waiting.append(entry)
            else:
                self._handle(entry)

    def _handle(self, entry: Entry) -> None:
        """Do one job; whatever goes wrong ends in exactly one place. An answer's span is its own: it ends later."""
        kind, is_answer = _KINDS[type(entry.job)], isinstance(entry.job, AnswerJob)
        span = nullcontext() if is_answer else traces.span(kind, entry.job.trace, **{"precis.job": entry.job.id})
        try:
            with span:
                self._do(entry)
        except redis.RedisError:
            self.heart.release(entry)  # its lease runs out, and whoever reaps it begins anew
            raise

    def _do(self, entry: Entry) -> None:
        try:
            match entry.job:
                case CompressJob():
                    self._compress(entry)
                case AnswerJob():
                    self._answer(entry, entry.job)
                case ScoreJob():
                    self._score(entry, entry.job)
                case PrefetchJob():
                    metrics.JOBS.labels("prefetch", self.cache.load_ahead(entry.job.context_id)).inc()
                    self._done(entry)
        except PrecisError as error:
            self._failed(entry, error)
        except Exception as error:  # the one catch-all: a bug must not take the other answers down
            if is_away(error):
                raise
            structlog.get_logger("worker").exception("job_failed", job=entry.job.id)
            self._failed(entry, InternalError(f"the worker failed: {type(error).__name__}"))

    def _compress(self, entry: Entry) -> None:
        if (record := self.records.get(entry.job.id)) is None or record.status == "ready":
            self._done(entry)
            return
        self.sources.busy = True
        try:
            snapshot = self.compressor.run(record, lambda *_: self._between(entry), lambda: not self.heart.lost(entry))
        except ShuttingDown:
            self.records.mark(record, status="queued")
            self.queue.give_back(entry, died=False)
            self.heart.release(entry)
            return
        finally:
            self.sources.busy = False
        if self.described.role == "compress":
            self.queue.prefetch(record.id)
        else:
            self.cache.keep(record.id, snapshot)
        metrics.JOBS.labels("compress", "done").inc()
        self._done(entry)

    def _between(self, entry: Entry) -> None:
        """Between two chunks of a compression: may it go on? Then let answers move for a while."""
        if self.heart.lost(entry):
            raise JobLost("another worker took the job over")
        if self.client.exists(keys.cancelled(entry.job.id)):
            raise JobCancelled("the work was cancelled")
        if self.stopping:
            raise ShuttingDown("the worker is shutting down")
        until = time.monotonic() + _SHARE_S
        while True:
            self._tell_heart()
            self._admit(block_ms=None)
            if not len(self.batch) or time.monotonic() > until:
                return
            self.batch.step(self.heart.lost)

    def _answer(self, entry: Entry, job: AnswerJob) -> None:
        if self._stale(entry, job):
            return
        began = time.monotonic()
        if (found := self._found(entry, job)) is not None:
            self.batch.admit(entry, job, found, load_ms=(time.monotonic() - began) * 1000)

    def _score(self, entry: Entry, job: ScoreJob) -> None:
        if self._stale(entry, job):
            return
        began = time.monotonic()
        if (found := self._found(entry, job)) is None:
            return
        loaded = time.monotonic()
        items = score(self.served, found.snapshot, job, lambda: self._check_wanted(job))
        timings = Timings(
            queue_ms=max(0.0, (time.time() - job.sent_at - (time.monotonic() - began)) * 1000),
            load_ms=(loaded - began) * 1000,
            prefill_ms=(time.monotonic() - loaded) * 1000,
            cache_n=0 if found.cache.startswith("recomputed") else found.snapshot.header.n_tokens,
        )
        emit(self.client, job.id, ScoredEvent(items, found.cache, timings))
        metrics.JOBS.labels("score", "done").inc()
        self._done(entry)

    def _check_wanted(self, job: ScoreJob) -> None:
        if self._unwanted(job):
            raise JobCancelled("the scoring was cancelled")
        self.batch.step(self.heart.lost)

    def _unwanted(self, job: AnswerJob | ScoreJob) -> bool:
        return bool(self.client.exists(keys.cancelled(job.id))) or not self.client.exists(keys.api(job.api))

    def _stale(self, entry: Entry, job: AnswerJob | ScoreJob) -> bool:
        """Whether nobody waits for this job, or an earlier worker had begun to answer it; then it is over."""
        if entry.attempt and already_answered(self.client, job):
            raise JobLost("the worker died while answering: ask again")
        if self._unwanted(job):
            self._done(entry)
            metrics.JOBS.labels("answer", "cancelled").inc()
            return True
        return False

    def _found(self, entry: Entry, job: AnswerJob | ScoreJob) -> Found | None:
        """What a job stands on; None if it was put off until that can be made again."""
        found = self.sources.of(job, lambda *_: self._between(entry))
        if found is None:
            self._waiting.append(entry)
        return found

    def _failed(self, entry: Entry, error: PrecisError) -> None:
        """The one place where an exception becomes an event and, for a context, a failed record."""
        metrics.ERRORS.labels(error.code).inc()
        if isinstance(entry.job, AnswerJob):
            traces.past("answer", entry.job.trace, {}, error.code, **{"precis.job": entry.job.id})
        else:
            traces.fail(get_current_span(), error.code)
        metrics.JOBS.labels(_KINDS[type(entry.job)], error.code).inc()
        request = getattr(entry.job, "request", "")
        told = {"job": entry.job.id, "code": error.code, "why": error.detail, "request": request}
        structlog.get_logger("worker").warning("job_ended", **told)
        if self.heart.lost(entry):
            self.heart.release(entry)
        elif isinstance(error, ShuttingDown):
            self.queue.give_back(entry, died=False)
            self.heart.release(entry)
        else:
            self._tell_failure(entry, error)
            self._done(entry)

    def _tell_failure(self, entry: Entry, error: PrecisError) -> None:
        if isinstance(entry.job, CompressJob) and (record := self.records.get(entry.job.id)) is not None:
            self.records.mark(record, status="failed", error=Problem(error.code, error.detail))
        if not isinstance(entry.job, PrefetchJob):  # nobody waits for it
            emit(self.client, entry.job.id, FailedEvent(error.code, error.detail))

    def _done(self, entry: Entry) -> None:
        self.heart.release(entry)
        self.queue.finish(entry)

    def _reap(self) -> None:
        """Once a second: take over what dead workers held; fail what nobody may try again."""
        if time.monotonic() - self._reaped_at < _REAP_S:
            return
        self._reaped_at = time.monotonic()
        if not self.client.exists(keys.model(self.served.card.name)):  # the server lost its data
            self.announce()
        for entry in self.queue.reap():
            metrics.RECLAIMED.inc()
            self._tell_failure(entry, JobLost("workers died on this job: it is not tried again"))

    def _tell_heart(self) -> None:
        self.heart.announce(msgspec.structs.replace(self.described, load=len(self.batch), hot=self.cache.hot_ids))
