"""`precis batch FILE`: a file in the shape of OpenAI's batches becomes a file of answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from service.client import Client
from service.replies import ApiError
from service.terminal import URL, Url, err, told

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a file."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(text: str) -> list[Line]:
    """The requests of a file.

    Raises:
        ApiError: naming the line that is none.
    """
    found: list[Line] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            asked = json.loads(line)
            made = Line(str(asked["custom_id"]), asked["url"], dict(asked["body"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(f'line {number} is not {{"custom_id", "method", "url", "body"}}') from error
        if made.url not in _ROUTES or made.body.get("stream"):
            raise ApiError(f"line {number}: the url is one of {', '.join(_ROUTES)}, without stream")
        found.append(made)
    if not found:
        raise ApiError("the file has no requests")
    return found


def answered(client: Client, lines: list[Line], at_once: int) -> Iterator[dict[str, Any]]:
    """Answers in the order of the requests, in OpenAI's shape."""

    def answer(line: Line) -> dict[str, Any]:
        made = {"id": f"batch_req_{uuid.uuid4().hex[:20]}", "custom_id": line.custom_id}
        try:
            status, body = client.patient("POST", line.url, json=line.body)
        except ApiError as error:
            return {**made, "response": None, "error": {"code": "unreachable", "message": str(error)}}
        return {**made, "response": {"status_code": status, "request_id": made["id"], "body": body}, "error": None}

    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(answer, lines)


@told
def batch(
    file: Annotated[Path, typer.Argument(help="lines of {custom_id, method, url, body}")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where answers go, instead of the terminal")
    ] = None,
    at_once: Annotated[int, typer.Option(help="requests at the same time", min=1, max=64)] = 8,
    url: Url = URL,
) -> None:
    """Run a file of requests in the shape of OpenAI's batches."""
    try:
        lines = read_lines(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ApiError(f"{file} cannot be read: {error}") from error
    n_failed = 0
    sink = output.open("w", encoding="utf-8") if output else None
    try:
        for answer in answered(Client(url), lines, at_once):
            n_failed += answer["response"] is None or answer["response"]["status_code"] >= 400
            typer.echo(json.dumps(answer), file=sink)
    finally:
        if sink is not None:
            sink.close()
    err.print(f"{len(lines)} requests, {n_failed} failed", style="dim")
    if n_failed:
        raise typer.Exit(1)
