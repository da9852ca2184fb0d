"""Thousands of requests made of the API's own description: each is answered as described, and none breaks anything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Stack, running_server, running_stack

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
CHECKS = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("unsupported_method", "allow_header_conformance"),
]
EXACT = {"policy": "full", "codec": "raw16"}


@pytest.fixture(scope="module")
def own(tiny_folder: Path) -> Iterator[Stack]:
    environment = {"PRECIS_WORKER_GRACE_S": "2", "PRECIS_ANSWER_TIMEOUT_S": "30"}
    with running_server() as server, running_stack(server, tiny_folder, **environment) as stack:
        yield stack


def upload(own: Stack) -> dict[str, Any]:
    body = {"text": DOCUMENT, "compression": EXACT, "pinned": True}
    found: dict[str, Any] = own.http().post("/v1/contexts?wait=60", json=body).json()
    return found


def attack(own: Stack, folder: Path, *chosen: str) -> None:
    """Send what schemathesis makes of the description; every response is as described."""
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(folder / "schemathesis.toml")),
        *("run", f"{own.base_url}/openapi.json", "--phases", "coverage,fuzzing", "--max-examples", "10"),
        *("--checks", ",".join(CHECKS), *chosen),
        *("--exclude-path", "/v1/contexts/import", "--exclude-path", "/v1/contexts/{context_id}/events"),
        *("--request-timeout", "30", "--workers", "1", "--seed", "7", "--no-color"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-12000:]


@pytest.mark.timeout(600)
def test_no_request_that_can_be_made_breaks_anything(own: Stack, tmp_path: Path) -> None:
    http = own.http()
    context = upload(own)
    session = http.post(f"/v1/contexts/{context['id']}/sessions").json()["id"]
    response = http.post("/v1/responses", json={"input": "Who?", "max_output_tokens": 4}).json()["id"]
    before = own.worker_pids()
    known = {"context_id": context["id"], "session_id": session, "response_id": response, "model": context["model"]}
    lines = ["[parameters]", *(f'"path.{name}" = "{value}"' for name, value in known.items())]
    lines += ["[[operations]]", 'include-path = "/v1beta/models/{model}"', 'include-method = "POST"']
    lines += [f"""parameters = {{ "path.model" = "{context["model"]}:generateContent" }}"""]
    (tmp_path / "schemathesis.toml").write_text("\n".join(lines) + "\n")
    attack(own, tmp_path, "--exclude-method", "DELETE", "--exclude-method", "PATCH")
    assert http.get(f"/v1/contexts/{context['id']}").status_code == 200  # nothing of it met an unknown context only
    attack(own, tmp_path, "--include-method", "PATCH")  # by itself: it may say that the context expires
    assert own.worker_pids() == before
    log = own.log("api")
    assert "Traceback" not in log + own.log("worker"), log[-3000:]
    answer = http.post(f"/v1/contexts/{upload(own)['id']}/queries", json={"question": "Who?", "max_tokens": 4})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 5e-324},
        {"temperature": 2.0, "top_p": 5e-324},
        {"temperature": 1e-30, "top_p": 1e-30, "seed": (1 << 63) - 1},
        {"stop": ["\u0000"], "temperature": 1.0},
        {"question": "\U0010ffff" * 500},
    ],
    ids=["temperature", "top_p", "both", "stop", "question"],
)
def test_extreme_wishes_are_answered_and_hurt_nobody(own: Stack, fields: dict[str, Any]) -> None:
    context, before = upload(own), own.worker_pids()
    body = {"question": "Who?", "max_tokens": 8, **fields}
    found = own.http().post(f"/v1/contexts/{context['id']}/queries", json=body)
    assert found.status_code == 200, found.text
    assert own.worker_pids() == before
