"""What the command line needs of the API, over HTTP."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event with JSON data."""

    name: str
    data: dict[str, Any]


class ApiError(Exception):
    """The server refused, or cannot be reached; the message is for people."""


class Client:
    """A thin client of one server."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`api_key` is by default what the environment has as PRECIS_API_KEY, or else as PRECIS_ADMIN_KEY."""
        self._base_url = base_url
        key = api_key or os.environ.get("PRECIS_API_KEY") or os.environ.get("PRECIS_ADMIN_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=httpx.Timeout(30, read=700))

    def call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """One request.

        Raises:
            ApiError: with the server's own words.
        """
        response = self._sent(method, path, **options)
        self._check(response)
        body: dict[str, Any] = response.json()
        return body

    def patient(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """One request's status and body, whatever they are; a server that is full is asked again when it says so.

        Raises:
            ApiError: if the server cannot be reached.
        """
        while True:
            response = self._sent(method, path, **options)
            wait = response.headers.get("retry-after", "")
            if response.status_code not in (429, 503) or not wait.isdigit():
                body: dict[str, Any] = response.json()
                return response.status_code, body
            time.sleep(int(wait))

    def download(self, path: str) -> Iterator[bytes]:
        """The bytes of one response, as they come.

        Raises:
            ApiError: with the server's own words, or if they end early.
        """
        try:
            with self._http.stream("GET", path) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                yield from response.iter_bytes()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def stream(self, method: str, path: str, **options: Any) -> Iterator[ServerEvent]:
        """Server-sent events of one request, until the server ends them.

        Raises:
            ApiError: with the server's own words.
        """
        try:
            with self._http.stream(method, path, **options) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                yield from _events(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _sent(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> ApiError:
        return ApiError(
            f"no answer from {self._base_url} ({error}): is `precis up` running? --url names another server"
        )

    @staticmethod
    def _check(response: httpx.Response) -> None:
        if response.is_error:
            try:
                detail = response.json()["detail"]
            except (ValueError, KeyError):
                detail = response.text or response.reason_phrase
            raise ApiError(f"{detail} (HTTP {response.status_code})")


def _events(lines: Iterator[str]) -> Iterator[ServerEvent]:
    name, data = "message", []
    for line in lines:
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield ServerEvent(name, json.loads("\n".join(data)))
            name, data = "message", []
