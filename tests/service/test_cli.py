"""The command line against real processes: what it prints, what it says when refused, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from service.cli import app
from tests.service.test_files import pdf, word
from tests.stack import ADMIN_KEY, Stack

SENTENCE = "The quick brown fox jumps over the lazy dog. "
FAST = ["--policy", "snapkv", "--keep-ratio", "0.5"]


@pytest.fixture
def run(guarded: Stack) -> Any:
    def run(*arguments: str, given: str | None = None, key: str = ADMIN_KEY) -> Result:
        environment = {"PRECIS_URL": guarded.base_url, "PRECIS_API_KEY": key, "COLUMNS": "200"}
        return CliRunner().invoke(app, list(arguments), env=environment, input=given)

    return run


@pytest.fixture
def context(run: Any, tmp_path: Path) -> str:
    file = tmp_path / "fox.txt"
    file.write_text(SENTENCE * 12)
    found: str = run("put", str(file), *FAST, "--quiet").stdout.strip()
    assert found.startswith("ctx_")
    return found


@pytest.mark.parametrize(
    ("name", "data"),
    [("fox.pdf", pdf([SENTENCE * 3])), ("fox.docx", word()), ("fox.md", b"# Fox\n" + SENTENCE.encode())],
)
def test_put_takes_any_kind_of_file(run: Any, tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    made = run("put", str(tmp_path / name), "--policy", "full", "--codec", "int8", "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert (found["status"], found["name"]) == ("ready", name)


def test_refusals_are_one_line_and_exit_code_1(run: Any, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    for arguments, says in [
        (("put", str(tmp_path / "image.png")), "a PNG image"),
        (("put", str(tmp_path / "none.txt")), "cannot be read"),
        (("ask", "ctx_none", "Who?"), "there is no context ctx_none"),
        (("show", "ctx_none"), "there is no context ctx_none"),
        (("keys", "revoke", "key_none"), "there is no key key_none"),
    ]:
        found = run(*arguments)
        assert found.exit_code == 1, found.output
        assert says in found.stderr.replace("\n", " ")
    assert run("ls", key="pk_wrong").exit_code == 1
    assert "key is not known" in run("ls", key="pk_wrong").stderr
    assert run("put").exit_code == 2


def test_a_question_and_a_conversation(run: Any, context: str) -> None:
    asked = run("ask", context, "Who jumps?", "--max-tokens", "8", "--json")
    assert json.loads(asked.stdout)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    once = run("ask", context, "Who jumps?", "--max-tokens", "8")
    assert once.stdout.strip() == json.loads(asked.stdout)["text"].strip()
    talk = run("ask", context, "--max-tokens", "8", given="Who jumps?\nAnd then?\n\n")
    assert talk.exit_code == 0
    assert once.stdout.strip() in talk.stdout
    assert talk.stdout.count("> ") == 3


def test_listing_as_a_table_and_as_json(run: Any, context: str) -> None:
    assert context in run("ls").stdout
    assert context in [found["id"] for found in json.loads(run("ls", "--json").stdout)["data"]]
    assert json.loads(run("models", "--json").stdout)["data"][0]["max_context"] > 0
    told = run("top", "--once").stdout
    assert "contexts ready" in told
    assert "0/8" in told
    assert json.loads(run("top", "--json").stdout)["contexts"]["ready"] >= 1


def test_keys_are_made_used_and_revoked(run: Any) -> None:
    made = json.loads(run("keys", "create", "--tenant", "acme", "--scope", "ask", "--json").stdout)
    assert run("ls", key=made["key"]).exit_code == 0
    assert "needs the scope admin" in run("keys", "ls", key=made["key"]).stderr
    assert made["id"] in run("keys", "ls").stdout
    assert run("tenants", "quota", "acme", "--contexts", "3").exit_code == 0
    assert json.loads(run("tenants", "show", "acme", "--json").stdout)["quota"]["max_contexts"] == 3
    assert run("keys", "revoke", made["id"]).exit_code == 0
    assert run("ls", key=made["key"]).exit_code == 1


def test_deleting(run: Any, context: str) -> None:
    assert "MB freed" in run("rm", context).stdout
    assert run("show", context).exit_code == 1


def test_a_file_of_requests_becomes_a_file_of_answers(run: Any, context: str, tmp_path: Path) -> None:
    def line(custom_id: str, url: str, **body: Any) -> str:
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"max_tokens": 4, **body}})

    messages = [{"role": "user", "content": "Who jumps?"}]
    lines = [
        line("one", "/v1/chat/completions", messages=messages, context=context),
        line("two", "/v1/completions", prompt="The fox"),
        line("bad", "/v1/chat/completions", messages=messages, context="ctx_none"),
    ]
    asked, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(lines) + "\n\n")
    assert run("batch", str(asked), "-o", str(answers)).exit_code == 1
    found = [json.loads(each) for each in answers.read_text().splitlines()]
    assert [(each["custom_id"], each["response"]["status_code"]) for each in found] == [
        ("one", 200),
        ("two", 200),
        ("bad", 404),
    ]
    assert found[0]["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    asked.write_text(lines[0])
    assert json.loads(run("batch", str(asked)).stdout)["custom_id"] == "one"
    asked.write_text('{"custom_id": 1}')
    assert "line 1 is not" in run("batch", str(asked)).stderr
    asked.write_text(json.dumps({"custom_id": "x", "url": "/v1/contexts", "body": {}}))
    assert "line 1: the url" in run("batch", str(asked)).stderr


def test_append_and_ask_several(run: Any, tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        (tmp_path / name).write_text(SENTENCE * 4 + name)
        found.append(run("put", str(tmp_path / name), "--policy", "full", "--codec", "raw16", "-q").stdout.strip())
    grown = run("append", found[0], "-", "--json", given="And a hen.")
    assert grown.exit_code == 0, grown.output
    assert json.loads(grown.stdout)["usage"]["total_tokens"] > len(SENTENCE * 4)
    both = run("ask", found[0], "Who?", "--also", found[1], "--max-tokens", "4", "--json")
    assert both.exit_code == 0, both.output
    assert json.loads(both.stdout)["also"] == [found[1]]
    assert "empty" in run("append", found[0], "-", given=" ").output


def test_bench_measures_and_leaves_nothing(run: Any, tmp_path: Path) -> None:
    (tmp_path / "fox.txt").write_text(SENTENCE * 20 + "bench")
    before = json.loads(run("ls", "--json").stdout)["data"]
    found = run("bench", str(tmp_path / "fox.txt"), "--rounds", "2", "--at-once", "2", "--max-tokens", "4", "--json")
    assert found.exit_code == 0, found.output
    row = json.loads(found.stdout)
    assert row["document_tokens"] > len(SENTENCE * 20)
    for name in (
        "upload_s",
        "first_token_s",
        "tokens_per_s",
        "tokens_per_s_of_2_at_once",
        "first_token_s_reading_again",
    ):
        assert row[name] > 0, name
    assert json.loads(run("ls", "--json").stdout)["data"] == before
    shown = run("bench", str(tmp_path / "fox.txt"), "--rounds", "1", "--at-once", "1", "--max-tokens", "4")
    assert "first token s reading again" in shown.output
