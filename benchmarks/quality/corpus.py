"""Documents with questions, as read from a folder or made by `ruler`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOTS = (
    "\n\nQuestion: What is the capital of France?\nAnswer: Paris"
    "\n\nQuestion: Who wrote the play Hamlet?\nAnswer: William Shakespeare"
    "\n\nQuestion: How many legs does a spider have?\nAnswer: eight"
)
"""Put between document and question where natural questions are asked of a small model."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        prefix: start of the answer that repeats the document's sentence, or empty.
        answers: each of them is right; all of them are wanted where `every`.
    """

    name: str
    kind: str
    text: str
    prefix: str
    answers: tuple[str, ...]
    every: bool = False

    def prompt(self, *, with_prefix: bool) -> str:
        """Plain text that follows the document."""
        prefix = self.prefix if with_prefix else ""
        if self.kind == "quote":
            return "\n\n... " + self.prefix
        if self.kind == "kv" and not self.text:
            return "\n" + self.prefix
        shots = SHOTS if self.kind == "squad" else ""
        return f"{shots}\n\nQuestion: {self.text}\nAnswer:" + (f" {prefix}" if prefix else "")


@dataclass(frozen=True, slots=True)
class Text:
    """A document, text that would follow it, and questions."""

    name: str
    text: str
    continuation: str
    questions: tuple[Question, ...]


def from_folder(folder: Path, names: list[str], n_questions: int) -> list[Text]:
    """Read documents.jsonl, questions.jsonl and the texts.

    Args:
        folder: with those files.
        names: of documents, without .txt; all if empty.
        n_questions: at most so many of each document.
    """
    questions = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    found = []
    for line in (folder / "documents.jsonl").read_text().splitlines():
        document = json.loads(line)
        name = document["document"].removesuffix(".txt")
        if names and name not in names:
            continue
        own = [_question(q) for q in questions if q["document"] == document["document"] and not q["hard"]]
        text = (folder / document["document"]).read_text()
        found.append(Text(name, text, document["continuation"], tuple(own[:n_questions])))
    return found


def _question(row: dict[str, Any]) -> Question:
    kind = row["kind"]
    text = "" if kind == "kv" else row["question"]
    return Question(row["id"], kind, text, row["prefix"], tuple(row["answers"]))
