"""Tools of a chat, given when it asks: told to the model in words, read back from its answer.

No template of a context has to know of them: they stand before the first message after the context, in the form that
Hermes' models were trained on, which is the most common one. `tool_choice` "required", or a name, bounds the answer to
a call token by token; with "auto" what the model writes is looked at, and what is no sound call stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from precis.errors import InvalidRequest
from precis.wire.messages import Message

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}\s*(.*?)\s*(?:{_CLOSE}|$)", re.DOTALL)
_TOLD = """You may call functions to help with the question. They are described by JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with a JSON object of its name and arguments, and nothing else:
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>
"""


class FunctionIn(BaseModel):
    """A function that may be called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolIn(BaseModel):
    """OpenAI's; other kinds than functions are refused."""

    type: Literal["function"]
    function: FunctionIn


class NamedFunction(BaseModel):
    """A name."""

    name: str


class NamedTool(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedTool


class CallFunction(BaseModel):
    """A function as it was called; the arguments are JSON."""

    name: str
    arguments: str = "{}"


class CallIn(BaseModel):
    """A call that the assistant made earlier."""

    id: str = ""
    function: CallFunction

    def text(self) -> str:
        """As the model wrote it."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except json.JSONDecodeError:
            arguments = self.function.arguments
        return f"{_OPEN}\n{json.dumps({'name': self.function.name, 'arguments': arguments})}\n{_CLOSE}"


def none_here(tools: list[Any]) -> list[Any]:
    """For routes that take no tools yet: better refused than never called.

    Raises:
        ValueError: if there are any.
    """
    if tools:
        raise ValueError("tools are taken by /v1/chat/completions only")
    return tools


class Tools:
    """The tools that one answer may call."""

    def __init__(self, tools: Sequence[ToolIn], choice: Choice | None) -> None:
        """Without a choice it is "auto" where there are tools.

        Raises:
            InvalidRequest: if a tool has to be called that is not there.
        """
        self._functions = [tool.function for tool in tools] if choice != "none" else []
        self.must_call = choice == "required" or isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool):
            self._functions = [each for each in self._functions if each.name == choice.function.name]
        if self.must_call and not self._functions:
            raise InvalidRequest("tool_choice asks for a tool that is not among tools", param="tool_choice")

    def __bool__(self) -> bool:
        return bool(self._functions)

    def told(self, messages: Sequence[Message]) -> list[Message]:
        """The messages after a context, the first of the user's with the tools before it."""
        found = list(messages)
        if not self._functions:
            return found
        lines = [json.dumps({"type": "function", "function": each.model_dump()}) for each in self._functions]
        text = _TOLD.format(tools="\n".join(lines))
        first = next((index for index, message in enumerate(found) if message.role == "user"), None)
        if first is None:
            return [Message("user", text), *found]
        found[first] = Message("user", f"{text}\n{found[first].content}")
        return found

    def schema(self) -> str:
        """The JSON schema of an answer that has to be a call; empty where it has not."""
        if not self.must_call:
            return ""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": each.name}, "arguments": each.parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for each in self._functions
        ]
        return json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})

    def read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """An answer's text without its calls, and the calls as OpenAI has them."""
        if self.must_call:
            call = self._call(text)
            return ("", [call]) if call else (text, [])
        calls = [self._call(match[1]) for match in _CALL.finditer(text)] if self._functions else []
        sound = [call for call in calls if call]
        if not sound or len(sound) < len(calls):  # a call that cannot be read is shown as it was written
            return text, []
        return _CALL.sub("", text).strip(), sound

    def _call(self, text: str) -> dict[str, Any] | None:
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            return None
        known = {each.name for each in self._functions}
        if not isinstance(found, dict) or found.get("name") not in known:
            return None
        if not isinstance(found.get("arguments", {}), dict):
            return None
        function = {"name": found["name"], "arguments": json.dumps(found.get("arguments", {}))}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class Held:
    """Text of a stream, held back from where a call may begin."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._text, self._n_shown = tools, "", 0

    def push(self, text: str) -> str:
        """What can be shown now."""
        self._text += text
        if self._tools.must_call:
            return ""
        at = self._text.find(_OPEN)
        if at < 0:
            at = next(
                (len(self._text) - n for n in range(len(_OPEN) - 1, 0, -1) if self._text.endswith(_OPEN[:n])),
                len(self._text),
            )
        shown, self._n_shown = self._text[self._n_shown : at], max(self._n_shown, at)
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What was held back after all, and the calls."""
        _, calls = self._tools.read(self._text)
        return ("" if calls else self._text[self._n_shown :]), calls
