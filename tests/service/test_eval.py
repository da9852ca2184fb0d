"""`precis eval` against real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli import app
from service.evaluate import Question, f1, is_right, read_questions
from service.replies import ApiError
from tests.stack import Stack

TEXT = "The quick brown fox jumps over the lazy dog. " * 12


def test_your_own_questions_are_asked_of_the_full_cache_and_of_compressed_ones(stack: Stack, tmp_path: Path) -> None:
    document, questions = tmp_path / "a.txt", tmp_path / "q.jsonl"
    document.write_text(TEXT + "eval")
    rows = [{"question": "Who jumps?", "answers": ["fox"]}, {"question": "Over whom?", "answers": ["dog", "the dog"]}]
    questions.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    before = stack.http().get("/v1/contexts?limit=200").json()["data"]
    url = ["--url", stack.base_url]
    ran = CliRunner().invoke(
        app, ["eval", str(document), str(questions), "--policies", "snapkv,kvzip", "--keep-ratios", "0.5,1", *url]
    )
    assert ran.exit_code == 0, ran.output
    lines = [line for line in ran.output.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].split()[0] for line in lines] == ["full", "snapkv", "snapkv", "kvzip", "kvzip"]
    full = [cell.strip() for cell in lines[0].split("│")[1:-1]]
    assert (full[2], full[5]) == ("1.000", "1.00")
    assert float(full[6]) <= 0.002  # bfloat16 adds up differently over a snapshot than over a dense cache
    half = [cell.strip() for cell in lines[1].split("│")[1:-1]]
    assert 0.45 < float(half[2]) < 0.55
    assert float(half[1]) < float(full[1]) / 2
    assert stack.http().get("/v1/contexts?limit=200").json()["data"] == before
    told = CliRunner().invoke(app, ["eval", str(document), str(questions), "--keep-ratios", "", "--json", *url])
    row = json.loads(told.stdout.splitlines()[-1])
    assert (row["way"], row["as_full"], row["storage"]["kept_ratio"]) == ("full raw16", 1.0, 1.0)
    coded = CliRunner().invoke(app, ["eval", str(document), str(questions), "--keep-ratios", "", "--ratios", "8", *url])
    assert coded.exit_code == 1
    assert "precis calibrate" in " ".join(
        coded.output.split()
    )  # the codec tc is asked for, and this model has no transform


def test_bad_questions_are_refused_with_their_line() -> None:
    with pytest.raises(ApiError, match="line 2 is not"):
        read_questions('{"question": "a", "answers": ["b"]}\n{"question": "a"}')
    with pytest.raises(ApiError, match="line 1 has no answer"):
        read_questions('{"question": "a", "answers": ["!"]}')
    with pytest.raises(ApiError, match="no questions"):
        read_questions("\n")


def test_answers_are_compared_word_by_word() -> None:
    question = Question("How many?", ("12", "a dozen"))
    assert is_right("There are 12.", question)
    assert is_right("It is A dozen!", question)
    assert not is_right("There are 121.", question)
    assert f1("The red fox.", "a red fox") == 1.0
    assert f1("red", "red fox") == pytest.approx(2 / 3)
    assert f1("blue", "red fox") == 0.0


def test_the_command_line_tightens_and_says_what_was_kept(stack: Stack, tmp_path: Path) -> None:
    document = tmp_path / "a.txt"
    document.write_text(TEXT + "tighten by hand")
    url = ["--url", stack.base_url]
    put = CliRunner().invoke(app, ["put", str(document), "--policy", "kvzip", "--keep-ratio", "0.5", "--quiet", *url])
    assert put.exit_code == 0, put.output
    context = put.output.split()[-1]
    ran = CliRunner().invoke(app, ["tighten", context, "0.3", *url])
    assert ran.exit_code == 0, ran.output
    assert "30.1%" in ran.output  # 169 of 562
    assert "not measured" in ran.output
    refused = CliRunner().invoke(app, ["tighten", context, "0.4", *url])
    assert refused.exit_code == 1
    assert "already" in refused.output
