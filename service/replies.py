"""What the API answers, as both clients read it: errors, and server-sent events."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event with JSON data."""

    name: str
    data: dict[str, Any]


class ApiError(Exception):
    """The server refused, or cannot be reached; the message is for people.

    Attributes:
        status: of the answer, or 0 if there was none.
        code: stable, or empty.
    """

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Events:
    """Server-sent events out of lines."""

    def __init__(self) -> None:
        self._name, self._data = "message", list[str]()

    def line(self, line: str) -> Iterable[ServerEvent]:
        """The event that a line completes, if it does."""
        if line.startswith("event:"):
            self._name = line[6:].strip()
        elif line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        elif not line and self._data:
            yield ServerEvent(self._name, json.loads("\n".join(self._data)))
            self._name, self._data = "message", []


def headers_of(api_key: str | None) -> dict[str, str]:
    """With a key: the one given, or what the environment has."""
    key = api_key or os.environ.get("PRECIS_API_KEY") or os.environ.get("PRECIS_ADMIN_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def pieces_of(event: ServerEvent) -> Iterator[str]:
    """The text of an event.

    Raises:
        ApiError: if it says that the answer broke off.
    """
    if event.name == "token":
        yield event.data["text"]
    elif event.name == "error":
        raise ApiError(event.data["detail"], code=event.data["code"])


def unreachable(base_url: str, error: httpx.HTTPError) -> ApiError:
    """What to say of a server that does not answer."""
    return ApiError(f"no answer from {base_url} ({error}): is `precis up` running? --url names another server")


def check(response: httpx.Response) -> None:
    """Do nothing of an answer that is none of an error.

    Raises:
        ApiError: with the server\'s own words.
    """
    if not response.is_error:
        return
    try:
        body = response.json()
        detail, code = body["detail"], str(body.get("code", ""))
    except (ValueError, KeyError, TypeError):
        detail, code = response.text or response.reason_phrase, ""
    raise ApiError(f"{detail} (HTTP {response.status_code})", response.status_code, code)
