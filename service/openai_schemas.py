"""What requests in OpenAI's shapes say, as pydantic models; unknown fields are ignored, as their clients expect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from precis.wire.messages import Message
from service.schemas import MessageIn, SamplingIn, TextPart
from service.tools import CallIn, Choice, ToolIn, none_here


class StreamOptions(BaseModel):
    """OpenAI's."""

    include_usage: bool = False


class OpenAiIn(SamplingIn):
    """What OpenAI's completions share; unknown fields are ignored, as their clients expect."""

    model: str = ""
    context: str | list[str] | None = Field(None, description="id of a context that the prompt follows, or several")
    cache: Literal["auto", "off"] | None = Field(None, description="store a long beginning that came before")
    temperature: float = Field(1.0, ge=0, le=2)
    n: int = Field(1, ge=1, le=16)
    stop: str | list[str] | None = None  # type: ignore[assignment]
    stream: bool | None = False  # type: ignore[assignment]
    stream_options: StreamOptions | None = None

    @property
    def contexts(self) -> list[str] | None:
        """Ids of the contexts that are named, or None."""
        return [self.context] if isinstance(self.context, str) else self.context or None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        """Of the answer."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens come with their log-probabilities."""
        return False

    @property
    def n_top(self) -> int:
        """Alternatives per token."""
        return 0


class ChatMessageIn(MessageIn):
    """A message of a chat in which tools are called."""

    role: Literal["system", "developer", "user", "assistant", "tool"]  # type: ignore[assignment]
    content: str | list[TextPart] | None = None  # type: ignore[assignment]
    tool_calls: list[CallIn] | None = None

    def plain(self) -> Message:
        """For the library: calls and their results in words."""
        text = "" if self.content is None else super().plain().content
        if self.role == "tool":
            return Message("user", f"<tool_response>\n{text}\n</tool_response>")
        calls = [call.text() for call in self.tool_calls or []]
        role = "system" if self.role == "developer" else self.role
        return Message(role, "\n".join([*([text] if text or not calls else []), *calls]))


class ChatIn(OpenAiIn):
    """OpenAI's chat completion request, plus `context`."""

    messages: list[ChatMessageIn] = Field(min_length=1)
    tools: list[ToolIn] | None = Field(None, max_length=128)
    tool_choice: Choice | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 20)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(0, ge=0, le=20)  # type: ignore[assignment]
    response_format: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Of the answer, by either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens come with their log-probabilities."""
        return bool(self.logprobs)

    @property
    def n_top(self) -> int:
        """Alternatives per token."""
        return (self.top_logprobs or 0) if self.logprobs else 0


class CompletionIn(OpenAiIn):
    """OpenAI's text completion request, plus `context`."""

    prompt: str
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens come with their log-probabilities."""
        return self.logprobs is not None

    @property
    def n_top(self) -> int:
        """Alternatives per token."""
        return self.logprobs or 0


class InputPart(BaseModel):
    """A piece of an input item's content; other kinds than text are refused."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(MessageIn):
    """A message in OpenAI's responses."""

    type: Literal["message"] = "message"
    content: str | list[InputPart]  # type: ignore[assignment]


class TextConfig(BaseModel):
    """How an answer is to look."""

    format: dict[str, Any] | None = None


class ResponseIn(OpenAiIn):
    """OpenAI's response request, plus `context`."""

    input: str | list[InputItem] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 20)
    metadata: dict[str, str] | None = None
    store: bool = True
    text: TextConfig | None = None
    tools: Annotated[list[dict[str, Any]], AfterValidator(none_here)] = Field(default_factory=list)
    n: int = Field(1, ge=1, le=1)

    @property
    def most_tokens(self) -> int | None:
        """Of the answer."""
        return self.max_output_tokens

    @property
    def turns(self) -> list[Message]:
        """The new messages."""
        if isinstance(self.input, str):
            return [Message("user", self.input)]
        return [item.plain() for item in self.input]

    @property
    def format(self) -> dict[str, Any] | None:
        """How the answer is to look, as `response_format` has it."""
        return None if self.text is None else self.text.format
