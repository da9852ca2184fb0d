"""The quality bench measures what its names say: a full cache is right and close, a cut one is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import measure as asking
from benchmarks.quality.corpus import Question, from_folder
from benchmarks.quality.report import grouped, interval, table
from benchmarks.quality.ruler import Length, documents
from tests.precis.build import attached, cut, read, tokens

FILLER = "\n\n".join(f"The harbour lay quiet on day {i}, and nothing was written down." for i in range(60))
WORDS = Length(600, lambda text: len(text.split()))


def test_generated_documents_hold_every_answer_and_have_the_wanted_length() -> None:
    made = documents(FILLER, WORDS, seed=1)
    assert [text.name.removeprefix("ruler-") for text in made] == [
        "niah_single",
        "niah_multikey",
        "niah_multivalue",
        "vartrack",
        "common",
        "lookup",
    ]
    for text in made:
        assert 0.8 * WORDS.n_tokens <= WORDS.count(text.text) <= 1.2 * WORDS.n_tokens
        for question in text.questions:
            assert all(answer in text.text for answer in question.answers)
            assert not any(answer in question.prompt(with_prefix=True) for answer in question.answers)
    assert documents(FILLER, WORDS, seed=1) == made
    assert documents(FILLER, WORDS, seed=2) != made


def test_chains_assign_a_variable_after_its_source() -> None:
    text = next(text for text in documents(FILLER, WORDS) if text.name == "ruler-vartrack")
    for name, source in re.findall(r"VAR (\w+) = VAR (\w+)", text.text):
        assert text.text.index(f"VAR {source} =") < text.text.index(f"VAR {name} =")


def test_common_words_are_the_most_common() -> None:
    text = next(text for text in documents(FILLER, WORDS) if text.name == "ruler-common")
    counts = {word: text.text.split().count(word) for word in set(text.text.split())}
    best = sorted(counts, key=lambda word: -counts[word])[:3]
    assert set(best) == set(text.questions[0].answers)


def test_folders_are_read_without_questions_marked_hard(tmp_path: Path) -> None:
    row = {
        "document": "a.txt",
        "kind": "niah",
        "question": "Which?",
        "prefix": "It is",
        "answers": ["7"],
        "hard": False,
    }
    rows = [{**row, "id": "1"}, {**row, "id": "2", "hard": True}, {**row, "id": "3"}]
    (tmp_path / "documents.jsonl").write_text(json.dumps({"document": "a.txt", "continuation": "on"}))
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.txt").write_text("text")
    (found,) = from_folder(tmp_path, [], 12)
    assert [question.name for question in found.questions] == ["1", "3"]
    assert found.questions[0].prompt(with_prefix=True) == "\n\nQuestion: Which?\nAnswer: It is"
    assert found.questions[0].prompt(with_prefix=False) == "\n\nQuestion: Which?\nAnswer:"
    assert from_folder(tmp_path, ["b"], 12) == []


def asked(prompt: int, *gold: int) -> asking.Asked:
    question = Question("q", "niah", "?", "", ("x",))
    return asking.Asked(question, tokens(9, seed=prompt).tolist(), list(gold))


def test_the_full_cache_agrees_with_itself_and_a_cut_one_does_not() -> None:
    model = attached()
    full = read(model, tokens(120))
    whole = cut(full)
    plain = asking.with_references(model, whole, [asked(3, 5, 6, 7), asked(4, 8)], ends={2})
    logits = model.hf(
        input_ids=torch.cat([tokens(120), torch.tensor(plain[0].prompt)])[None], use_cache=False, kv_store=_Plain()
    ).logits[0, -1]
    assert plain[0].reference[0] == int(logits.argmax())
    assert plain[0].expected is not None
    torch.testing.assert_close(plain[0].expected[0], logits.log_softmax(-1), atol=2e-5, rtol=0)
    keep = torch.zeros(4, 2, 120, dtype=torch.bool)
    keep[..., :30] = True

    class Plain:
        @staticmethod
        def decode(token_ids: list[int]) -> str:
            return " ".join(map(str, token_ids))

    same = asking.measure(model, whole, plain, Plain(), {2})  # type: ignore[arg-type]
    other = asking.measure(model, cut(full, keep), plain, Plain(), {2})  # type: ignore[arg-type]
    assert all(answer.kl < 1e-6 and answer.agreement == 1.0 for answer in same)
    assert same[0].text == Plain.decode(list(plain[0].reference))
    assert all(answer.kl > 1e-4 for answer in other)


class _Plain:
    """Causal attention over the new tokens alone."""

    def attend(self, layer: int, query: Any, key: Any, value: Any, sinks: Any) -> Any:
        later = torch.arange(key.shape[1]) > torch.arange(key.shape[1])[:, None]
        logits = query @ key.repeat_interleave(2, 0).transpose(1, 2) / 12**0.5
        return logits.masked_fill(later, float("-inf")).softmax(-1) @ value.repeat_interleave(2, 0)


def row(document: str, policy: str, kls: list[float], exact: list[float]) -> dict[str, Any]:
    answers = [
        {"name": str(i), "kind": "k", "kl": kl, "agreement": 1.0, "nll": kl, "exact": right, "f1": right, "text": ""}
        for i, (kl, right) in enumerate(zip(kls, exact, strict=True))
    ]
    return {
        "document": document,
        "format": "plain",
        "policy": policy,
        "codec": "none",
        "keep_ratio": 1.0 if policy == "full" else 0.25,
        "bytes_per_token": 100.0,
        "continuation_kl": None,
        "cost": {"prefill_s": 2.0, "observe_s": 1.0, "score_s": 0.0},
        "answers": answers,
    }


def test_tables_report_means_worst_and_what_the_full_cache_had_right() -> None:
    rows = [
        row("a", "full", [0.0, 0.0], [1.0, 0.0]),
        row("a", "p", [9.0, 9.0], [1.0, 1.0]),
        row("a", "p", [0.1, 0.3], [0.0, 1.0]),  # measured again
    ]
    lines = table(grouped(rows)).splitlines()
    (line,) = [line for line in lines if line.startswith("| p ")]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[1] == "100"
    assert cells[2].startswith("0.500")
    assert cells[3].startswith("0.000")  # of the one question that the full cache had right
    assert cells[4].startswith("0.200")
    assert cells[5] == "0.30"
    assert cells[10] == "0.50x"
    assert interval(rows[:1], lambda row: []) == "-"
