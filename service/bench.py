"""`precis bench FILE`: what a document and its questions cost on a running server, with the snapshot and without."""

from __future__ import annotations

import statistics
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from service.client import Client
from service.replies import ApiError
from service.terminal import URL, AsJson, Url, err, out, told

_QUESTION = "What is this document about? Answer in detail."
_TTL_S = 900


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer, as a client sees it: seconds to the first token, tokens per second after it."""

    first_s: float
    per_s: float
    n_tokens: int


@told
def bench(
    file: Annotated[Path, typer.Argument(help="PDF, DOCX, HTML, Markdown or text")],
    rounds: Annotated[int, typer.Option(min=1, help="questions of each kind")] = 5,
    at_once: Annotated[int, typer.Option(min=1, max=256, help="questions at the same time, for throughput")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="tokens of each answer")] = 64,
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """Upload a document, ask it, and ask the same with the document in the prompt; then delete it."""
    client = Client(url)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ApiError(f"{file} cannot be read: {error.strerror}") from error
    with err.status("uploading"):
        began, mark = time.monotonic(), {"precis-bench": uuid.uuid4().hex}
        context = client.upload(data, name=file.name, ttl_s=_TTL_S, metadata=mark)
        upload_s = time.monotonic() - began
    try:
        with err.status("asking"):
            found = _measured(client, context.id, rounds, at_once, max_tokens)
            plain = _without(client, context.id, rounds, max_tokens)
    finally:
        if context.raw["metadata"] == mark:  # an upload that was there before stays
            client.delete(context.id)
    row: dict[str, Any] = {
        "document_tokens": context.n_tokens,
        "raw_bytes": context.raw_bytes,
        "stored_bytes": context.stored_bytes,
        "upload_s": round(upload_s, 3) if context.raw["metadata"] == mark else None,
        **found,
        **plain,
    }
    if as_json:
        out.print_json(data=row)
        return
    table = Table("", "", show_header=False)
    for name, value in row.items():
        unknown = "it was there already" if name == "upload_s" else "the prompt is too long"
        table.add_row(name.replace("_", " "), f"{value:,}" if value is not None else unknown)
    out.print(table)


def _measured(client: Client, context_id: str, rounds: int, at_once: int, max_tokens: int) -> dict[str, Any]:
    one = [_asked(client, context_id, max_tokens) for _ in range(rounds)]
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        many = list(pool.map(lambda _: _asked(client, context_id, max_tokens), range(at_once)))
    seconds = time.monotonic() - began
    return {
        "first_token_s": round(statistics.median(each.first_s for each in one), 4),
        "tokens_per_s": round(statistics.median(each.per_s for each in one), 1),
        f"tokens_per_s_of_{at_once}_at_once": round(sum(each.n_tokens for each in many) / seconds, 1),
    }


def _asked(client: Client, context_id: str, max_tokens: int) -> Timed:
    body = {"question": _QUESTION, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    began, first, n_tokens = time.monotonic(), 0.0, 0
    for event in client.stream("POST", f"/v1/contexts/{context_id}/queries", json=body):
        if event.name == "token" and not first:
            first = time.monotonic()
        elif event.name == "done":
            n_tokens = event.data["usage"]["completion_tokens"]
        elif event.name == "error":
            raise ApiError(event.data["detail"])
    if not first:
        raise ApiError("an answer was empty")
    return Timed(first - began, (n_tokens - 1) / max(1e-9, time.monotonic() - first), n_tokens)


def _without(client: Client, context_id: str, rounds: int, max_tokens: int) -> dict[str, Any]:
    """The first token of a prompt that has the document in it, so that the server reads it again each time."""
    shown = client.call("GET", f"/v1/contexts/{context_id}/retention")["tokens"]
    text, model = "".join(piece for piece, _ in shown), client.context(context_id).raw["model"]
    times = []
    for number in range(rounds):
        content = f"{number}. {text}\n\n{_QUESTION}"  # begins like nothing that is stored
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True, "cache": "off"}
        began = time.monotonic()
        try:
            times.append(_first_delta(client, body) - began)
        except ApiError as error:
            if error.status == 413:
                return {"first_token_s_reading_again": None}
            raise
    return {"first_token_s_reading_again": round(statistics.median(times), 4)}


def _first_delta(client: Client, body: dict[str, Any]) -> float:
    """When the first text came; the rest is not waited for."""
    for event in client.stream("POST", "/v1/chat/completions", json=body):
        if "error" in event.data:
            raise ApiError(event.data["error"]["message"])
        if any(choice["delta"].get("content") for choice in event.data["choices"]):
            return time.monotonic()
    raise ApiError("an answer was empty")
