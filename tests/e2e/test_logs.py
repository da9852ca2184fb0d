"""Logs in JSON, with a request's id on both sides, and never a word of anybody's text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precis.wire import keys
from tests.stack import Stack, running_server, running_stack

SECRET = "xylophone"
DOCUMENT = f"The {SECRET} stands in the cellar. " * 20
EXACT = {"policy": "full", "codec": "raw16"}


@pytest.fixture(scope="module")
def own(tiny_folder: Path) -> Iterator[Stack]:
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_LOG_FORMAT="json") as stack:
        yield stack


def lines(own: Stack, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in own.log(name).splitlines() if line.startswith("{")]


def test_every_line_is_json_and_a_request_is_found_on_both_sides(own: Stack) -> None:
    context = own.http().post("/v1/contexts?wait=60", json={"text": DOCUMENT, "compression": EXACT}).json()
    url = f"/v1/contexts/{context['id']}/queries"
    body = {"question": f"Where is the {SECRET}?", "max_tokens": 8}
    first = own.http().post(url, json=body)
    assert len(first.headers["x-request-id"]) == 16
    client = own.server.client()
    client.delete(keys.snapshot(context["id"]), keys.tokens(context["id"]))
    own.kill("worker")
    own.start_worker()
    failed = own.http().post(url, json=body, headers={"x-request-id": "mine-1"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (410, "mine-1")
    (told,) = [line for line in lines(own, "api") if line.get("request") == "mine-1"]
    assert (told["event"], told["status"], told["path"]) == ("request", 410, url)
    (ended,) = [line for line in lines(own, "worker") if line.get("request") == "mine-1"]
    assert (ended["event"], ended["code"], ended["level"]) == ("job_ended", "snapshot_missing", "warning")
    for bad in ("a b", "x" * 65, "é"):
        found = own.http().get("/v1/contexts", headers=[(b"x-request-id", bad.encode())])
        assert found.headers["x-request-id"] != bad


def test_no_text_of_anybody_is_in_a_log(own: Stack) -> None:
    http = own.http()
    context = http.post("/v1/contexts?wait=60", json={"text": DOCUMENT, "compression": EXACT, "name": "n"}).json()
    http.post(f"/v1/contexts/{context['id']}/queries", json={"question": SECRET, "max_tokens": 4, "stream": True})
    http.post(f"/v1/contexts/{context['id']}/append?wait=60", json={"text": SECRET * 9})
    http.post("/v1/contexts", json={"text": DOCUMENT, "compression": {"policy": SECRET}})
    http.post("/v1/contexts", json={"wrong": DOCUMENT})
    http.post("/v1/contexts", files={"file": ("a.pdf", b"%PDF-1.4 " + DOCUMENT.encode())})
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": DOCUMENT}], "max_tokens": 4})
    http.post("/v1/responses", json={"input": SECRET, "max_output_tokens": 4})
    for name in ("api", "worker"):
        assert SECRET not in own.log(name)
        assert lines(own, name)
