"""Every error of the design, by enumeration: its status, its code, its shape, and what it tells people to do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from precis import errors
from service import problems
from tests.stack import Stack

EASY = {"policy": "snapkv", "keep_ratio": 0.5}
LONG_TEXT = "word " * 60


@pytest.fixture(scope="module")
def app() -> TestClient:
    """An app that raises what the path names."""
    made = FastAPI()
    problems.install(made)
    by_code = {found.__name__: found for found in errors.all_errors()}

    async def fail(name: str) -> None:
        raise by_code[name]("what to do")

    made.get("/v1/contexts/{name}")(fail)
    made.get("/v1/chat/{name}")(fail)
    return TestClient(made, raise_server_exceptions=False)


def test_every_error_has_a_status() -> None:
    assert set(problems.STATUS) == set(errors.all_errors())


@pytest.mark.parametrize("kind", errors.all_errors(), ids=lambda kind: kind.__name__)
def test_an_error_is_a_problem_on_our_routes_and_an_openai_error_on_openai_routes(
    app: TestClient, kind: type[errors.PrecisError]
) -> None:
    ours = app.get(f"/v1/contexts/{kind.__name__}")
    assert ours.status_code == problems.STATUS[kind]
    assert ours.headers["content-type"] == "application/problem+json"
    body = ours.json()
    assert (body["code"], body["status"], body["detail"]) == (kind.code, ours.status_code, "what to do")
    theirs = app.get(f"/v1/chat/{kind.__name__}")
    assert theirs.status_code == ours.status_code
    assert theirs.json()["error"]["code"] == kind.code
    assert set(theirs.json()["error"]) == {"message", "type", "param", "code"}


def test_capacity_errors_say_when_to_come_again(app: TestClient) -> None:
    assert app.get("/v1/contexts/NoWorker").headers["retry-after"] == "5"


Call = tuple[str, str, dict[str, Any], int, str]
_MANY = {"text": "word " * 14000, "compression": EASY}
CALLS: list[Call] = [
    ("POST", "/v1/contexts", {"json": {"text": " \n "}}, 422, "empty_document"),
    ("POST", "/v1/contexts", {"json": {"messages": [{"role": "system", "content": "x"}]}}, 422, "empty_document"),
    ("POST", "/v1/contexts", {"json": {"text": "tiny"}}, 422, "budget_too_small"),
    ("POST", "/v1/contexts", {"json": {}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "messages": []}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "colour": "red"}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "ttl_s": 0}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "ttl_s": 9, "pinned": True}}, 422, "invalid_request"),
    (
        "POST",
        "/v1/contexts",
        {"json": {"text": LONG_TEXT, "expire_time": "2001-01-01T00:00:00Z"}},
        422,
        "invalid_request",
    ),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "compression": {"policy": "magic"}}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "compression": {"codec": "zip"}}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "compression": {"keep_ratio": 0}}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "compression": {"keep_ratio": "a"}}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": {"text": LONG_TEXT, "model": "none"}}, 404, "model_not_found"),
    (
        "POST",
        "/v1/contexts",
        {"content": b"{", "headers": {"content-type": "application/json"}},
        422,
        "invalid_request",
    ),
    ("POST", "/v1/contexts", {"files": {"other": b"x"}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"files": {"file": b"caf\xe9"}}, 422, "unreadable_file"),
    ("POST", "/v1/contexts", {"files": {"file": b"\x00\x01\x02"}}, 415, "unsupported_file"),
    ("POST", "/v1/contexts", {"files": {"file": b"x"}, "data": {"options": "[1]"}}, 422, "invalid_request"),
    ("POST", "/v1/contexts", {"json": _MANY}, 413, "context_too_long"),
    ("POST", "/v1/contexts", {"content": b" " * (21 << 20)}, 413, "body_too_large"),
    ("GET", "/v1/contexts/ctx_none", {}, 404, "context_not_found"),
    ("PATCH", "/v1/contexts/ctx_none", {"json": {"name": "x"}}, 404, "context_not_found"),
    ("DELETE", "/v1/contexts/ctx_none", {}, 404, "context_not_found"),
    ("GET", "/v1/contexts/ctx_none/heads", {}, 404, "context_not_found"),
    ("GET", "/v1/contexts/ctx_none/events", {}, 404, "context_not_found"),
    ("POST", "/v1/contexts/ctx_none/queries", {"json": {"question": "x"}}, 404, "context_not_found"),
    (
        "POST",
        "/v1/contexts/ctx_none/score",
        {"json": {"items": [{"prompt": "a", "continuation": "b"}]}},
        404,
        "context_not_found",
    ),
    ("GET", "/v1/contexts?limit=0", {}, 422, "invalid_request"),
    ("GET", "/v1/contexts?after=ctx_none", {}, 404, "context_not_found"),
    ("GET", "/v1/nothing", {}, 404, "not_found"),
    ("PUT", "/v1/contexts", {}, 405, "method_not_allowed"),
]


@pytest.mark.parametrize("call", CALLS, ids=[f"{c[4]}-{i}" for i, c in enumerate(CALLS)])
def test_a_bad_request_gets_its_status_and_code(stack: Stack, call: Call) -> None:
    method, path, options, status, code = call
    response = stack.http().request(method, path, **options)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["code"], body["status"]) == (code, status)
    assert len(body["detail"]) > 5


def test_a_method_that_is_not_allowed_names_those_that_are(stack: Stack) -> None:
    assert stack.http().put("/v1/contexts").headers["allow"] == "GET, POST"
    assert stack.http().post("/v1/contexts/ctx_none").headers["allow"] == "DELETE, GET, PATCH"


def test_the_description_names_the_errors_of_each_shape(stack: Stack) -> None:
    paths = stack.http().get("/openapi.json").json()["paths"]
    for path, field in (("/v1/contexts", "code"), ("/v1/chat/completions", "error"), ("/v1beta/models", "error")):
        (told,) = next(iter(paths[path].values()))["responses"]["4XX"]["content"].values()
        assert field in told["schema"]["required"]


def test_a_body_in_chunks_that_is_too_large_is_refused_as_well(stack: Stack) -> None:
    def chunks() -> Any:
        for _ in range(22):
            yield b" " * (1 << 20)

    response = stack.http().post("/v1/contexts", content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["code"] == "body_too_large"


def test_too_long_a_document_names_the_limit_and_the_count(stack: Stack) -> None:
    body = stack.http().post("/v1/contexts", json=_MANY).json()
    assert body["limit"] == 65536 - 256
    assert body["n_tokens"] > body["limit"]


@pytest.fixture(scope="module")
def ready(stack: Stack) -> dict[str, Any]:
    made: dict[str, Any] = (
        stack.http().post("/v1/contexts?wait=60", json={"text": LONG_TEXT + "e", "compression": EASY}).json()
    )
    assert made["status"] == "ready"
    return made


BAD_QUERIES: list[tuple[dict[str, Any], int, str]] = [
    ({}, 422, "invalid_request"),
    ({"question": ""}, 422, "invalid_request"),
    ({"question": "x", "prompt": "y"}, 422, "invalid_request"),
    ({"prompt": "raw text"}, 422, "invalid_request"),
    ({"question": "x", "max_tokens": 0}, 422, "invalid_request"),
    ({"question": "x", "temperature": -1}, 422, "invalid_request"),
    ({"question": "x", "top_p": 0}, 422, "invalid_request"),
    ({"question": "x", "stop": [""]}, 422, "invalid_request"),
    ({"question": "x", "view": {"kind": "magic"}}, 422, "invalid_request"),
    ({"question": "x", "view": {"budget": 2}}, 422, "invalid_request"),
    ({"question": "x", "view": {"kind": "quest", "slide": True}}, 422, "invalid_request"),
    ({"question": "x", "trim": "magic"}, 422, "invalid_request"),
    ({"question": "x", "trim": {"budget": 2}}, 422, "invalid_request"),
    ({"question": "x", "trim": "gkv", "view": {"kind": "sage", "slide": True}}, 422, "invalid_request"),
    ({"question": "x", "surprise": 1}, 422, "invalid_request"),
    ({"messages": []}, 422, "invalid_request"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 422, "invalid_request"),
    ({"question": "word " * 14000}, 413, "query_too_long"),
]


@pytest.mark.parametrize("query", BAD_QUERIES, ids=lambda q: json.dumps(q[0])[:40])
def test_a_bad_query_gets_its_status_and_code(
    stack: Stack, ready: dict[str, Any], query: tuple[dict[str, Any], int, str]
) -> None:
    body, status, code = query
    response: httpx.Response = stack.http().post(f"/v1/contexts/{ready['id']}/queries", json=body)
    assert (response.status_code, response.json()["code"]) == (status, code), response.text


def test_a_context_that_is_not_ready_is_a_conflict_that_names_its_status(stack: Stack) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 250
    compression = {"policy": "kvzip", "keep_ratio": 0.5}
    made = stack.http().post("/v1/contexts", json={"text": text, "compression": compression}).json()
    response = stack.http().post(f"/v1/contexts/{made['id']}/queries", json={"question": "x"})
    assert response.status_code == 409
    assert response.json()["code"] == "context_not_ready"
    assert response.json()["status_now"] in ("queued", "prefilling", "compressing")
    assert stack.http().delete(f"/v1/contexts/{made['id']}").status_code == 200


OPENAI_CALLS: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": [{"role": "user", "content": "x"}], "n": 99}, 422, "invalid_request"),
    ({"messages": [], "context": "ctx_none"}, 422, "invalid_request"),
    ({"messages": [{"role": "user", "content": "x"}], "context": "ctx_none"}, 404, "context_not_found"),
]


@pytest.mark.parametrize("call", OPENAI_CALLS, ids=["too-many-choices", "no-messages", "unknown-context"])
def test_openai_routes_answer_in_openai_shape(stack: Stack, call: tuple[dict[str, Any], int, str]) -> None:
    body, status, code = call
    response = stack.http().post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


def test_a_wrong_model_is_named_on_openai_routes(stack: Stack, ready: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "context": ready["id"], "model": "gpt-9"}
    response = stack.http().post("/v1/chat/completions", json=body)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "model"
