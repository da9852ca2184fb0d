"""Answers in flight: one running batch, one packed forward per turn, tokens out as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import redis
import structlog
import torch

from precis.detokenize import Detokenizer, StopText
from precis.engine import step
from precis.errors import InternalError, JobCancelled, JobLost, OutOfMemory, PrecisError
from precis.sampling import Sampled, Sampler
from precis.session import Feed, Session
from precis.wire import keys, traces
from precis.wire.messages import (
    AnswerJob,
    CacheEvent,
    DoneEvent,
    FailedEvent,
    Timings,
    TokenEvent,
    TokenLogprob,
)
from workers import metrics
from workers.events import emit
from workers.jobs import Entry
from workers.models import Served
from workers.sessions import Sessions, Turn
from workers.sources import Found, choices_of

QUERY_CHUNK = 256  # query tokens prefilled per step, so that running answers do not wait long


@dataclass(slots=True)
class Answer:
    """One query being answered."""

    entry: Entry
    job: AnswerJob
    session: Session
    sampler: Sampler
    detokenizer: Detokenizer
    stop_text: StopText
    query: list[int]
    cache: str
    admitted_at: float
    queue_ms: float
    load_ms: float
    n_again: int = 0
    n_fed: int = 0
    n_tokens: int = 0
    next_token: int = -1
    first_at: float = 0.0
    last_at: float = 0.0
    turn: Turn | None = None
    given: list[int] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)
    held_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def prefilled(self) -> bool:
        """Whether the whole query is in the tail."""
        return self.n_fed == len(self.query)

    def feed(self) -> Feed:
        """What this answer brings to the next step."""
        if self.prefilled:
            return Feed(self.session, [self.next_token])
        chunk = self.query[self.n_fed : self.n_fed + QUERY_CHUNK]
        return Feed(self.session, chunk, last=self.n_fed + len(chunk) == len(self.query))

    def timings(self) -> Timings:
        """As reported at the end."""
        now = time.monotonic()
        first = self.first_at or now
        return Timings(
            queue_ms=round(self.queue_ms, 3),
            load_ms=round(self.load_ms, 3),
            prefill_ms=round((first - self.admitted_at) * 1000, 3),
            decode_ms=round((now - first) * 1000, 3),
            cache_n=self.cached_tokens,
        )

    @property
    def cached_tokens(self) -> int:
        """Context tokens that were not computed for this answer."""
        n_context = 0 if self.cache.startswith("recomputed") else self.session.snapshot.header.n_tokens
        return n_context - min(n_context, self.n_again) + self.n_resumed

    @property
    def n_resumed(self) -> int:
        """Tokens of earlier turns whose entries were loaded."""
        return self.turn.n_resumed if self.turn else 0


class Batch:
    """The answers in flight of one worker."""

    def __init__(
        self, served: Served, client: redis.Redis, sessions: Sessions, slots: int, done: Callable[[Entry], None]
    ) -> None:
        self._served, self._redis, self._sessions, self._slots, self._done = served, client, sessions, slots, done
        self._answers: list[Answer] = []
        self._log = structlog.get_logger("batch")

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def free(self) -> int:
        """Answers that can still join."""
        return self._slots - len(self._answers)

    def admit(self, entry: Entry, job: AnswerJob, found: Found, load_ms: float) -> None:
        """Let a query join the batch at the next step."""
        sampling = job.sampling
        view, trim = choices_of(job)
        session = Session.on(found.snapshot, view, trim)
        turn = self._sessions.resume(job, session) if job.session else None
        constraint = self._served.grammars.of_schema(sampling.schema) if sampling.schema else None
        answer = Answer(
            entry=entry,
            job=job,
            session=session,
            sampler=Sampler(sampling.temperature, sampling.top_p, sampling.seed, sampling.n_top, constraint),
            detokenizer=self._served.prompter.detokenizer(),
            stop_text=StopText(sampling.stop),
            query=[*(turn.before if turn else []), *np.frombuffer(job.token_ids, "<i4").tolist()],
            turn=turn,
            cache=found.cache,
            n_again=found.n_again,
            admitted_at=time.monotonic(),
            queue_ms=max(0.0, (time.time() - job.sent_at) * 1000 - load_ms),
            load_ms=load_ms,
        )
        emit(self._redis, job.id, CacheEvent(found.cache, answer.cached_tokens))
        self._answers.append(answer)
        self._answers.sort(key=lambda each: id(each.session.snapshot))  # neighbours share one read of their snapshot
        metrics.TOKENS.labels("cached").inc(answer.cached_tokens)
        metrics.RUNNING.set(len(self._answers))

    def step(self, lost: Callable[[Entry], bool]) -> None:
        """One packed forward: a token for every running answer, a chunk of one query; then send what came."""
        prefilling = next((a for a in self._answers if not a.prefilled), None)
        moving = [a for a in self._answers if a.prefilled or a is prefilling]
        if not moving:
            return
        began = time.monotonic()
        feeds = [answer.feed() for answer in moving]
        try:
            logits = step(self._served.model, feeds)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:  # must not take the worker down with it
            self._log.exception("step_failed")
            full = isinstance(error, (torch.OutOfMemoryError, MemoryError))
            kind = OutOfMemory if full else InternalError
            self._fail(moving, kind(f"the worker failed while answering: {type(error).__name__}"))
            return
        metrics.STEP_SECONDS.observe(time.monotonic() - began)
        metrics.STEP_TOKENS.observe(sum(len(feed.token_ids) for feed in feeds))
        pipe = self._redis.pipeline(transaction=False)
        for answer, fed, rows in zip(moving, feeds, logits, strict=True):
            if not answer.prefilled:
                answer.n_fed += len(fed.token_ids)
                metrics.TOKENS.labels("prefilled").inc(len(fed.token_ids))
            if answer.prefilled:
                try:
                    self._advance(pipe, answer, rows[-1])
                except Exception as error:  # nor one answer the others
                    self._log.exception("answer_failed", answer=answer.job.id)
                    if answer in self._answers:
                        self._end(pipe, answer, FailedEvent(InternalError.code, f"the worker failed: {error}"))
        self._watch(pipe, lost)

    def _advance(self, pipe: redis.client.Pipeline, answer: Answer, logits: torch.Tensor) -> None:
        """Sample the next token, send what text it completes, and end the answer if it is at its end."""
        sampled = answer.sampler.sample(logits)
        now = time.monotonic()
        if not answer.first_at:
            answer.first_at = now
            metrics.FIRST_TOKEN_SECONDS.labels(str(answer.cached_tokens > 0).lower()).observe(
                time.time() - answer.job.sent_at
            )
        sampling = answer.job.sampling
        if sampled.token_id in self._served.card.eos_ids and not sampling.ignore_eos:
            self._finish(pipe, answer, "stop")
            return
        if answer.n_tokens:
            metrics.BETWEEN_TOKENS_SECONDS.observe(now - answer.last_at)
        answer.last_at = now
        complete = answer.sampler.constraint is not None and answer.sampler.constraint.take(sampled.token_id)
        answer.n_tokens += 1
        answer.next_token = sampled.token_id
        metrics.TOKENS.labels("decoded").inc()
        shown, stopped = answer.stop_text.push(answer.detokenizer.push(sampled.token_id))
        answer.held_ids.append(sampled.token_id)
        answer.given.append(sampled.token_id)
        if sampling.logprobs:
            answer.held_logprobs.append(self._logprob(sampled))
        if shown or sampling.logprobs:
            self._send(pipe, answer, shown)
        if stopped:
            self._finish(pipe, answer, "stop", held="")
        elif complete:
            self._finish(pipe, answer, "stop")
        elif answer.n_tokens >= sampling.max_tokens or answer.session.position >= self._served.card.max_length:
            self._finish(pipe, answer, "length")

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        prompter = self._served.prompter
        top = [(prompter.piece(token), token, logprob) for token, logprob in sampled.top]
        return TokenLogprob(prompter.piece(sampled.token_id), sampled.token_id, sampled.logprob, top)

    def _send(self, pipe: redis.client.Pipeline, answer: Answer, text: str) -> None:
        emit(pipe, answer.job.id, TokenEvent(text, answer.held_ids, answer.held_logprobs))
        answer.held_ids, answer.held_logprobs = [], []

    def _finish(self, pipe: redis.client.Pipeline, answer: Answer, reason: str, held: str | None = None) -> None:
        """End an answer well; `held` is text still to be shown, by default all that was held back."""
        if answer.turn is not None:
            try:
                self._keep_turn(answer.turn, answer)
            except (PrecisError, ValueError) as error:
                failure = error if isinstance(error, PrecisError) else InternalError(str(error))
                self._end(pipe, answer, FailedEvent(failure.code, failure.detail))
                return
        if held is None:
            shown, stopped = answer.stop_text.push(answer.detokenizer.finish())
            held = shown if stopped else shown + answer.stop_text.finish()
        if held or answer.held_ids:
            self._send(pipe, answer, held)
        prompt_tokens = answer.session.snapshot.header.n_tokens + answer.n_resumed + len(answer.query)
        told = (prompt_tokens, answer.cached_tokens, answer.n_tokens, answer.timings())
        metrics.count_answer(reason, *told, whole_s=time.time() - answer.job.sent_at)
        event = DoneEvent(
            finish_reason="stop" if reason == "stop" else "length",
            prompt_tokens=prompt_tokens,
            completion_tokens=answer.n_tokens,
            cached_tokens=answer.cached_tokens,
            cache=answer.cache,
            timings=answer.timings(),
        )
        self._end(pipe, answer, event)

    def _keep_turn(self, turn: Turn, answer: Answer) -> None:
        """Store the conversation, before anybody hears that the turn is over."""
        fed = [*answer.query, *answer.given]
        n_fed = answer.session.tail.n_tokens - turn.n_resumed
        self._sessions.keep(answer.job, turn, answer.session, fed[:n_fed], fed[-1] if n_fed < len(fed) else -1)

    def _end(self, pipe: redis.client.Pipeline, answer: Answer, event: DoneEvent | FailedEvent) -> None:
        emit(pipe, answer.job.id, event)
        self._remove(answer, "done" if isinstance(event, DoneEvent) else event.code)

    def _remove(self, answer: Answer, outcome: str) -> None:
        self._answers.remove(answer)
        self._done(answer.entry)
        spent = msgspec.structs.asdict(answer.timings())
        about: dict[str, str | int] = {"precis.job": answer.job.id, "precis.cache": answer.cache}
        about |= {"precis.tokens": answer.n_tokens, "precis.cached_tokens": spent.pop("cache_n")}
        traces.past("answer", answer.job.trace, spent, "" if outcome == "done" else outcome, **about)
        metrics.JOBS.labels("answer", outcome).inc()
        metrics.RUNNING.set(len(self._answers))

    def _watch(self, pipe: redis.client.Pipeline, lost: Callable[[Entry], bool]) -> None:
        """Send everything, and drop answers that nobody waits for or that another worker has now."""
        running = list(self._answers)
        n_sent = len(pipe)
        for answer in running:
            pipe.exists(keys.cancelled(answer.job.id))
            pipe.exists(keys.api(answer.job.api))
        flags = pipe.execute()[n_sent:]
        for answer, cancelled, api_lives in zip(running, flags[0::2], flags[1::2], strict=True):
            if cancelled or not api_lives:
                emit(self._redis, answer.job.id, FailedEvent(JobCancelled.code, "the answer was cancelled"))
                self._remove(answer, "cancelled")
            elif lost(answer.entry):
                self._remove(answer, JobLost.code)

    def _fail(self, answers: list[Answer], error: PrecisError) -> None:
        for answer in answers:
            emit(self._redis, answer.job.id, FailedEvent(error.code, error.detail))
            metrics.ERRORS.labels(error.code).inc()
            self._remove(answer, error.code)

    def fail_all(self, error: PrecisError) -> None:
        """End every answer with an error."""
        self._fail(list(self._answers), error)
