"""What a client can ask of the API, written once for clients that block and clients that do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_WORKS_S = 3600  # that an upload may be waited for


@dataclass(frozen=True, slots=True)
class Context:
    """A stored document.

    Attributes:
        status: "ready" once it can be asked.
        ratio: of the full cache's bytes to the stored ones, or None.
        kl: measured divergence from the full cache, nats per token, or None.
        error: why it failed, or empty.
        raw: everything that the server said.
    """

    id: str
    status: str
    name: str
    n_tokens: int
    raw_bytes: int
    stored_bytes: int
    ratio: float | None
    kl: float | None
    error: str
    raw: dict[str, Any] = field(repr=False, compare=False)

    @staticmethod
    def of(body: dict[str, Any]) -> Context:
        """As the server shows it."""
        storage = body["storage"]
        return Context(
            body["id"],
            body["status"],
            body["name"],
            body["usage"]["total_tokens"],
            storage["raw_bytes"],
            storage["stored_bytes"],
            storage["ratio"],
            (body["fidelity"] or {}).get("kl"),
            (body["error"] or {}).get("detail", ""),
            body,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer.

    Attributes:
        finish_reason: "stop" or "length".
        cached_tokens: of the prompt, that were not computed again.
        timings: in milliseconds.
        raw: everything that the server said.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: dict[str, float]
    raw: dict[str, Any] = field(repr=False, compare=False)

    @staticmethod
    def of(body: dict[str, Any]) -> Answer:
        """As the server shows it."""
        usage = body["usage"]
        return Answer(
            body["text"],
            body["finish_reason"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            body["timings"],
            body,
        )


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and what its answer is read as.

    Attributes:
        options: of httpx' `request`.
    """

    method: str
    path: str
    read: Callable[[dict[str, Any]], T]
    options: dict[str, Any] = field(default_factory=dict)


def upload(document: str | bytes, *, name: str = "", wait_s: float = _WORKS_S, **fields: Any) -> Call[Context]:
    """A text, or the bytes of a file (PDF, DOCX, HTML, Markdown, text)."""
    params = {"wait": wait_s}
    if isinstance(document, str):
        body = {"text": document, "name": name, **fields}
        return Call("POST", "/v1/contexts", Context.of, {"params": params, "json": body})
    form = {"options": json.dumps({"name": name, **fields})}
    files = {"file": (name or "document", document)}
    return Call("POST", "/v1/contexts", Context.of, {"params": params, "data": form, "files": files})


def context(context_id: str) -> Call[Context]:
    """One context."""
    return Call("GET", f"/v1/contexts/{context_id}", Context.of)


def contexts(limit: int = 50, after: str | None = None) -> Call[list[Context]]:
    """The newest."""
    params = {"limit": limit, **({"after": after} if after else {})}
    return Call("GET", "/v1/contexts", lambda body: [Context.of(each) for each in body["data"]], {"params": params})


def append(context_id: str, text: str, wait_s: float = _WORKS_S) -> Call[Context]:
    """More of a document."""
    options = {"params": {"wait": wait_s}, "json": {"text": text}}
    return Call("POST", f"/v1/contexts/{context_id}/append", Context.of, options)


def delete(context_id: str) -> Call[int]:
    """Take a context away; bytes that were freed."""
    return Call("DELETE", f"/v1/contexts/{context_id}", lambda body: int(body["freed_bytes"]))


def ask(context_id: str, question: str | None, **fields: Any) -> Call[Answer]:
    """A question about a context; further fields as the route has them, `prompt` instead of the question too."""
    body = {**({} if question is None else {"question": question}), **fields}
    return Call("POST", f"/v1/contexts/{context_id}/queries", Answer.of, {"json": body})


def ask_all(context_id: str, questions: Sequence[str], **fields: Any) -> Call[list[Answer | None]]:
    """Many questions at once; None where one failed."""
    body = {"questions": list(questions), **fields}
    return Call("POST", f"/v1/contexts/{context_id}/batch", _answers, {"json": body})


def session(context_id: str) -> Call[str]:
    """A conversation; its id goes with the questions as `session`."""
    return Call("POST", f"/v1/contexts/{context_id}/sessions", lambda body: str(body["id"]))


def _answers(body: dict[str, Any]) -> list[Answer | None]:
    return [None if "error" in each else Answer.of(each) for each in body["data"]]
