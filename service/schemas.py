"""What requests say, as pydantic models. Never leaves service/."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from precis.wire.messages import Message

_M = TypeVar("_M", bound=BaseModel)
Metadata = dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]]
Ttl = Annotated[int, Field(gt=0, le=10 * 365 * 86400, description="seconds to live from now")]


ViewKind = Literal["sage", "quest", "cluster"]
TrimKind = Literal["gkv", "corm", "slide"]


class Strict(BaseModel):
    """Requests: an unknown field is an error, not a silence."""

    model_config = ConfigDict(extra="forbid")


def validated(kind: type[_M], data: Any) -> _M:
    """Data that did not come as the body of a route, as one of these.

    Raises:
        RequestValidationError: as if it had.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        located = [{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_input=False)]
        raise RequestValidationError(located) from error


class TextPart(BaseModel):
    """A piece of a message's content, as OpenAI has it; other kinds than text are refused."""

    type: Literal["text"]
    text: str


class MessageIn(BaseModel):
    """One chat message; further fields of other clients are ignored."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> Message:
        """For the library."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text)


class CodecIn(Strict):
    """A codec with its setting."""

    name: str
    ratio: float | None = Field(None, description="of tc: how many times smaller than the cache in 16 bits")


class CompressionIn(Strict):
    """How to compress; what is left out takes the server's default."""

    policy: str | None = Field(None, description="docs/methods.md has all")
    keep_ratio: float | None = Field(None, description="share of entries kept, above 0 and at most 1")
    codec: str | CodecIn | None = Field(None, description="docs/codecs.md has all")
    max_bytes: int | None = Field(None, description="keep as much as fits into so many stored bytes")
    max_kl: float | None = Field(None, description="keep as little as this divergence allows, nats per token")
    probes: list[str] = Field(default_factory=list, description="representative questions, for policies that ask them")


class ContextIn(Strict):
    """A document, given as text or as messages."""

    text: str | None = Field(None, description="the document")
    messages: list[MessageIn] | None = Field(None, description="or a whole beginning of a chat")
    template: Literal["chat", "raw"] = Field("chat", description="raw: the text as it is, without the chat template")
    instructions: str | None = Field(None, description="system message before the text")
    model: str | None = Field(None, description="where several are served")
    name: str = Field("", max_length=128, description="to remember it by")
    metadata: Metadata = Field(default_factory=dict, max_length=16, description="up to 16 strings")
    ttl_s: Ttl | None = None
    expire_time: datetime | None = Field(None, description="or the time it ends, with its time zone")
    pinned: bool = Field(False, description="or never")
    overflow: Literal["refuse", "split"] = Field("refuse", description="what to do with a text that is too long")
    compression: CompressionIn = Field(default_factory=CompressionIn)

    @model_validator(mode="after")
    def _one_source(self) -> ContextIn:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        if self.messages is not None and self.instructions is not None:
            raise ValueError("instructions go with text; put a system message among the messages")
        if self.overflow == "split" and self.text is None:
            raise ValueError("only text can be split")
        if self.template == "raw" and (self.text is None or self.instructions is not None):
            raise ValueError("the raw template takes text alone")
        _one_expiry(self.ttl_s, self.expire_time, self.pinned)
        return self


class TighterIn(Strict):
    """A smaller budget for a context that is there already."""

    keep_ratio: float = Field(gt=0, lt=1)


class AppendIn(Strict):
    """More of a document."""

    text: str


class ContextPatch(Strict):
    """What may change later."""

    ttl_s: Ttl | None = None
    expire_time: datetime | None = None
    pinned: bool | None = None
    name: str | None = Field(None, max_length=128)
    metadata: Metadata | None = Field(None, max_length=16)
    compression: TighterIn | None = None

    @model_validator(mode="after")
    def _one_expiry(self) -> ContextPatch:
        _one_expiry(self.ttl_s, self.expire_time, bool(self.pinned))
        return self


def _one_expiry(ttl_s: int | None, expire_time: datetime | None, pinned: bool) -> None:
    if (ttl_s is not None) + (expire_time is not None) + pinned > 1:
        raise ValueError("give one of ttl_s, expire_time and pinned")
    if expire_time is not None and (expire_time.tzinfo is None or expire_time <= datetime.now(UTC)):
        raise ValueError("expire_time must be in the future and name its time zone")


class ViewIn(Strict):
    """A query-time view: which entries of the snapshot this query reads while decoding."""

    kind: ViewKind = "sage"
    budget: int = Field(512, ge=16, le=1 << 20, description="entries per kv head")
    slide: bool = Field(False, description="sage only: each token of the answer replaces the oldest recent entry")

    @model_validator(mode="after")
    def _only_sage_slides(self) -> ViewIn:
        if self.slide and self.kind != "sage":
            raise ValueError("slide is for the view sage")
        return self


class TrimIn(Strict):
    """What an answer forgets of itself while it grows; the question and the snapshot stay."""

    kind: TrimKind = "gkv"
    budget: int = Field(1024, ge=16, le=1 << 20, description="entries of the answer per kv head, about")


class SamplingIn(BaseModel):
    """What answers have in common on all routes."""

    max_tokens: int | None = Field(None, ge=1, le=1 << 20, description="default: 256; on OpenAI routes 1024")
    temperature: float = Field(0.0, ge=0, le=2, description="0: always the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: str | list[str] = Field(default_factory=list, description="texts before which an answer ends")
    stream: bool = Field(False, description="server-sent events")
    top_logprobs: int = Field(0, ge=0, le=20, description="alternatives per token")

    @model_validator(mode="after")
    def _few_stops(self) -> SamplingIn:
        if len(self.stops) > 16 or any(not 0 < len(stop) <= 256 for stop in self.stops):
            raise ValueError("stop takes up to 16 strings of 1 to 256 characters")
        return self

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class QueryIn(SamplingIn, Strict):
    """A question about a context."""

    model_config = ConfigDict(extra="forbid")
    question: str | None = Field(None, description="one message of the user's")
    messages: list[MessageIn] | None = Field(None, min_length=1, description="or several messages")
    prompt: str | None = Field(None, description="raw text after the seam, for contexts with the raw template")
    logprobs: bool = Field(False, description="of each token of the answer")
    ignore_eos: bool = Field(False, description="go on to max_tokens, for measurements")
    view: ViewIn | ViewKind | None = Field(None, description="which entries are read while decoding")
    trim: TrimIn | TrimKind | None = Field(None, description="what a long answer forgets of itself")
    session: str | None = Field(None, description="id of a session, of which this is the next turn")
    also: list[str] = Field(
        default_factory=list, max_length=15, description="ids of further contexts, read behind this"
    )

    @property
    def wanted_view(self) -> ViewIn | None:
        """With the defaults of its kind."""
        return ViewIn(kind=self.view) if isinstance(self.view, str) else self.view

    @property
    def wanted_trim(self) -> TrimIn | None:
        """With the defaults of its kind."""
        return TrimIn(kind=self.trim) if isinstance(self.trim, str) else self.trim

    @model_validator(mode="after")
    def _one_trim(self) -> QueryIn:
        view = self.wanted_view
        if view is not None and view.slide and self.trim is not None:
            raise ValueError("a view that slides trims the answer itself: leave trim out")
        if self.session is not None and (self.trim is not None or (view is not None and view.slide)):
            raise ValueError("a session remembers all that was said: leave trim and slide out")
        if self.session is not None and self.also:
            raise ValueError("a session is on one context: leave also out")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> QueryIn:
        if sum(x is not None for x in (self.question, self.messages, self.prompt)) != 1:
            raise ValueError("give one of question, messages and prompt")
        return self


class ScoreItemIn(Strict):
    """`prompt` is raw text after the seam and is not scored; at least one token each."""

    prompt: str = Field(min_length=1)
    continuation: str = Field(min_length=1)


class ScoreIn(Strict):
    """Continuations to score."""

    items: list[ScoreItemIn] = Field(min_length=1, max_length=256)
