"""`precis eval`: a document and questions with known answers, asked of the full cache and of compressed ones."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from service.client import Client
from service.replies import ApiError

_TTL_S = 3600
_MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and answers of which any is right."""

    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way of compressing kept.

    Attributes:
        right: share of answers that contain a known one.
        f1: mean word overlap with the best known answer.
        same: share of answers that are the full cache's, word for word.
    """

    name: str
    context: dict[str, Any]
    right: float
    f1: float
    same: float


def read_questions(text: str) -> list[Question]:
    """Lines of JSON: `{"question": "...", "answers": ["...", ...]}`.

    Raises:
        ApiError: naming the line that is wrong.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            answers = tuple(map(str, row["answers"]))
            found.append(Question(str(row["question"]), answers))
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(f'line {number} is not {{"question": "...", "answers": ["..."]}}') from error
        if not answers or not all(words(answer) for answer in answers):
            raise ApiError(f"line {number} has no answer")
    if not found:
        raise ApiError("there are no questions")
    return found


def evaluate(
    client: Client, text: str, questions: Sequence[Question], ways: Sequence[dict[str, Any]]
) -> Iterator[Outcome]:
    """Upload the document once per way, ask every question of each, and take away what was uploaded for this.

    Args:
        client: of a running server.
        text: of the document.
        questions: at least one.
        ways: values of `compression`; the full cache is asked first, whatever they are.

    Raises:
        ApiError: if an upload or an answer fails.
    """
    expected: list[str] | None = None
    for how in [{"policy": "full", "codec": "raw16"}, *ways]:
        mark = {"precis-eval": uuid.uuid4().hex}
        body = {"text": text, "compression": how, "ttl_s": _TTL_S, "metadata": mark, "name": "precis eval"}
        context = client.call("POST", "/v1/contexts", params={"wait": _TTL_S}, json=body)
        if context["status"] != "ready":
            raise ApiError((context["error"] or {}).get("detail", f"the context is {context['status']}"))
        try:
            answers = [_ask(client, context["id"], question.text) for question in questions]
        finally:
            if context["metadata"] == mark:  # an upload that was there before stays
                client.call("DELETE", f"/v1/contexts/{context['id']}")
        expected = answers if expected is None else expected
        pairs = list(zip(answers, questions, strict=True))
        yield Outcome(
            name=" ".join(_words(value) for value in how.values() if not isinstance(value, list)),
            context=context,
            right=_mean([float(is_right(answer, question)) for answer, question in pairs]),
            f1=_mean([max(f1(answer, known) for known in question.answers) for answer, question in pairs]),
            same=_mean([float(one == other) for one, other in zip(answers, expected, strict=True)]),
        )


def _words(value: Any) -> str:
    """A setting for people: that of a codec with its name."""
    return " ".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def _ask(client: Client, context_id: str, question: str) -> str:
    body = {"question": question, "max_tokens": _MAX_TOKENS}
    return str(client.call("POST", f"/v1/contexts/{context_id}/queries", json=body)["text"])


def is_right(answer: str, question: Question) -> bool:
    """Whether the answer contains a known one, word by word."""
    return any(f" {words(known)} " in f" {words(answer)} " for known in question.answers)


def f1(answer: str, known: str) -> float:
    """Word overlap as SQuAD measures it: articles and punctuation do not count."""
    one, other = ([w for w in words(text).split() if w not in ("a", "an", "the")] for text in (answer, known))
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other)) if common else 0.0


def words(text: str) -> str:
    """Lower-case words without punctuation, one blank between."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
