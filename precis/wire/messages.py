"""What crosses a process: cards, jobs and events, as msgspec structs. A wrong type fails at decode, with its path."""

from __future__ import annotations

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True):
    """One chat message."""

    role: str
    content: str


class ModelCard(msgspec.Struct, frozen=True):
    """What a worker tells of its model, so that the API can tokenize without a model file.

    Attributes:
        name: as clients say it.
        digest: hash over weights, config and dtype.
        tokenizer_json: of the `tokenizers` library.
        tokenizer_digest: hash over tokenizer and template; token ids are only valid together with it.
        eos_ids: tokens that end an answer.
        max_length: tokens of context and answer together.
        min_room: tokens that a context must leave free for a query.
        raw_bytes_per_token: of the full cache in 16 bits.
        artifacts: per kind, the fingerprint of what was measured of the model once.
    """

    name: str
    digest: str
    tokenizer_json: str
    tokenizer_digest: str
    chat_template: str
    bos_token: str
    eos_token: str
    eos_ids: list[int]
    max_length: int
    min_room: int
    n_layers: int
    n_kv_heads: int
    dtype: str
    raw_bytes_per_token: int
    artifacts: dict[str, str] = {}

    @property
    def max_context(self) -> int:
        """Tokens that a context may have."""
        return self.max_length - self.min_room


class Sampling(msgspec.Struct, frozen=True):
    """How an answer's tokens are chosen; temperature 0 is greedy.

    Attributes:
        schema: JSON schema that the answer must fit, as JSON; empty: none.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    n_top: int = 0
    logprobs: bool = False
    ignore_eos: bool = False
    schema: str = ""


class CompressJob(msgspec.Struct, frozen=True, tag="compress"):
    """Make the snapshot of a context; everything else is in its record.

    Attributes:
        trace: of the request that asked for it, as `traceparent`.
    """

    id: str
    trace: str = ""


class AnswerJob(msgspec.Struct, frozen=True, tag="answer"):
    """Answer one query.

    Attributes:
        id: of the query; its events go to its own stream.
        context_id: empty for a prompt that stands alone.
        also: ids of further contexts, read behind the first.
        token_ids: the query part, little-endian int32.
        view_budget: entries per kv head that the view leaves visible; 0 = no view.
        view: its kind.
        view_slides: whether the view's recent entries make room for the answer's.
        trim_budget: entries per kv head that the trim leaves of the answer, about; 0 = no trim.
        trim: its kind.
        session: id of the conversation that this is a turn of; empty: none.
        turn: how many turns it had before.
        session_roles: of its messages once this turn is answered.
        request: id of the HTTP request, for logs.
        trace: of that request, as `traceparent`.
        api: id of the API process that reads the answer; when it dies, the answer is dropped.
        sent_at: Unix time, seconds.
    """

    id: str
    context_id: str
    token_ids: bytes
    sampling: Sampling
    api: str
    sent_at: float
    also: list[str] = []
    view_budget: int = 0
    view: Literal["sage", "quest", "cluster"] = "sage"
    view_slides: bool = False
    trim_budget: int = 0
    trim: Literal["gkv", "corm", "slide"] = "gkv"
    session: str = ""
    turn: int = 0
    session_roles: list[str] = []
    request: str = ""
    trace: str = ""


class ScoreItem(msgspec.Struct, frozen=True):
    """Raw text after the seam, not scored, and the continuation to score. Tokens as little-endian int32."""

    prompt: bytes
    continuation: bytes


class ScoreJob(msgspec.Struct, frozen=True, tag="score"):
    """Measure log-probabilities on the compressed cache."""

    id: str
    context_id: str
    items: list[ScoreItem]
    api: str
    sent_at: float
    request: str = ""
    trace: str = ""


class PrefetchJob(msgspec.Struct, frozen=True, tag="prefetch"):
    """Load a context's snapshot, so that its first question finds it in memory. Nobody waits for it.

    Attributes:
        id: of the job.
        trace: of the request that asked for it, as `traceparent`.
    """

    id: str
    context_id: str
    trace: str = ""


Job = CompressJob | AnswerJob | ScoreJob | PrefetchJob


class TokenEvent(msgspec.Struct, frozen=True, tag="token"):
    """Text that one or more tokens completed."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token's log-probability, in nats, and its best alternatives."""

    token: str
    token_id: int
    logprob: float
    top: list[tuple[str, int, float]] = []


class Timings(msgspec.Struct, frozen=True):
    """Of one answer, in milliseconds; cache_n is the number of context tokens that were not computed again."""

    queue_ms: float = 0.0
    load_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    cache_n: int = 0


class DoneEvent(msgspec.Struct, frozen=True, tag="done"):
    """The answer is complete.

    Attributes:
        cache: "hit" from the worker's memory or the store, or "recomputed; reason" from the source tokens.
    """

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: str
    timings: Timings


class CacheEvent(msgspec.Struct, frozen=True, tag="cache"):
    """Sent first: where the snapshot came from."""

    cache: str
    cached_tokens: int


class ItemScore(msgspec.Struct, frozen=True):
    """Per continuation token: its text, its log-probability, and whether it was the argmax."""

    tokens: list[str]
    logprobs: list[float]
    greedy: list[bool]


class ScoredEvent(msgspec.Struct, frozen=True, tag="scored"):
    """All items of a ScoreJob."""

    items: list[ItemScore]
    cache: str
    timings: Timings


class FailedEvent(msgspec.Struct, frozen=True, tag="failed"):
    """The work ended with an error."""

    code: str
    detail: str


class ProgressEvent(msgspec.Struct, frozen=True, tag="progress"):
    """A context's work goes on."""

    status: str
    stage: str
    processed: int
    total: int


class ReadyEvent(msgspec.Struct, frozen=True, tag="ready"):
    """A context is ready."""


Event = TokenEvent | CacheEvent | DoneEvent | ScoredEvent | FailedEvent | ProgressEvent | ReadyEvent
TERMINAL_EVENTS = (DoneEvent, ScoredEvent, FailedEvent, ReadyEvent)
