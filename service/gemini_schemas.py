"""What requests in Gemini's shapes say; both spellings of every field, and unknown fields are ignored."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from precis.wire.messages import Message
from service.openai_schemas import ChatIn
from service.schemas import validated
from service.tools import none_here

Duration = Annotated[str, StringConstraints(pattern=r"^\d{1,9}(\.\d{1,9})?s$")]


class Camel(BaseModel):
    """Gemini's clients write camelCase, people snake_case."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class Part(Camel):
    """A piece of a content; other kinds than text are refused."""

    text: str


class ContentIn(Camel):
    """A message."""

    role: Literal["user", "model", "system", "function", ""] = "user"
    parts: list[Part] = Field(min_length=1)

    def plain(self, role: str | None = None) -> Message:
        """For the library."""
        ours = {"model": "assistant", "system": "system"}.get(role or self.role, "user")
        return Message(ours, "".join(part.text for part in self.parts))


class CachedContentIn(Camel):
    """A context to be made."""

    model: str
    contents: list[ContentIn] = Field(min_length=1)
    system_instruction: ContentIn | str | None = None
    display_name: str = Field("", max_length=128)
    ttl: Duration | None = None
    expire_time: datetime | None = None


class CachedContentPatch(Camel):
    """Only the expiry can change."""

    ttl: Duration | None = None
    expire_time: datetime | None = None


class GenerationConfig(Camel):
    """How answers are chosen."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 20)
    stop_sequences: list[str] = Field(default_factory=list)
    seed: int | None = Field(None, ge=0)
    candidate_count: int = Field(1, ge=1, le=16)
    response_mime_type: str = "text/plain"
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None

    def schema_text(self) -> str:
        """The JSON schema that the answer must fit, as JSON; empty: none."""
        if self.response_json_schema is not None:
            return json.dumps(self.response_json_schema)
        if self.response_schema is not None:
            return json.dumps(plain_schema(self.response_schema))
        return json.dumps({"type": "object"}) if self.response_mime_type == "application/json" else ""


class GenerateIn(Camel):
    """A question, on a context if one is named."""

    contents: list[ContentIn] = Field(min_length=1)
    cached_content: str | None = None
    system_instruction: ContentIn | str | None = None
    tools: Annotated[list[dict[str, Any]], AfterValidator(none_here)] = Field(default_factory=list)
    generation_config: GenerationConfig = Field(default_factory=GenerationConfig)

    def sampling(self) -> ChatIn:
        """The same wishes as OpenAI's clients have them."""
        how = self.generation_config
        return validated(
            ChatIn,
            {
                "messages": [{"role": "user", "content": ""}],
                "temperature": how.temperature,
                "top_p": how.top_p,
                "max_tokens": how.max_output_tokens,
                "stop": how.stop_sequences,
                "seed": how.seed,
                "n": how.candidate_count,
            },
        )


def messages_of(contents: list[ContentIn], instruction: ContentIn | str | None) -> list[Message]:
    """Contents after the instruction, for the library."""
    system = [] if instruction is None else [instruction]
    told = [Message("system", each) if isinstance(each, str) else each.plain("system") for each in system]
    return [*told, *(content.plain() for content in contents)]


def plain_schema(schema: Any) -> Any:
    """Gemini's subset of OpenAPI, whose types are in capitals, as JSON schema."""
    if isinstance(schema, list):
        return [plain_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: value for name, value in schema.items() if name not in ("nullable", "propertyOrdering")}
    for name, value in found.items():
        if name == "type" and isinstance(value, str):
            found[name] = value.lower()
        elif name == "properties" and isinstance(value, dict):
            found[name] = {key: plain_schema(each) for key, each in value.items()}
        elif name in ("items", "anyOf"):
            found[name] = plain_schema(value)
        elif name in ("minItems", "maxItems", "minLength", "maxLength") and isinstance(value, str):
            found[name] = int(value)
    if "properties" in found:
        found.setdefault("additionalProperties", False)  # Gemini answers with what is listed, and nothing else
    if schema.get("nullable"):
        return {"anyOf": [found, {"type": "null"}]}
    return found
