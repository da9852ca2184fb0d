"""What a snapshot answers, against what the full cache answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.quality.corpus import Question
from precis.core import Snapshot
from precis.engine import step
from precis.families import Model
from precis.session import Feed, Session
from precis.text import Prompter
from service.evaluate import f1, words

N_REFERENCE = 12
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as tokens.

    Attributes:
        prompt: that follows the context.
        gold: tokens of the first answer.
        reference: tokens the full cache answers with, greedily; empty until known.
        expected: float32 log-probabilities [len(reference), vocabulary] of the full cache, or None.
    """

    question: Question
    prompt: list[int]
    gold: list[int]
    reference: tuple[int, ...] = ()
    expected: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """What was measured on one question.

    Attributes:
        kl: mean KL(full || compressed) per token over the full cache's answer, nats.
        agreement: share of those tokens on whose best guess both agree.
        nll: mean negative log-likelihood of the gold answer's tokens, nats.
        exact: 1 if the greedy answer contains the gold answer (all of them where all are wanted), else 0.
        f1: of the words of the greedy answer's first line, against the best gold answer.
    """

    name: str
    kind: str
    kl: float
    agreement: float
    nll: float
    exact: float
    f1: float
    text: str


def as_asked(prompter: Prompter, question: Question, *, with_prefix: bool) -> Asked:
    """Tokenize."""
    prompt = prompter.raw(question.prompt(with_prefix=with_prefix), begins=False)
    return Asked(question, prompt, prompter.raw(" " + question.answers[0], begins=False))


def with_references(model: Model, full: Snapshot, asked: Sequence[Asked], ends: set[int]) -> list[Asked]:
    """Let the full cache answer, and remember its distributions."""
    found = []
    for start in range(0, len(asked), _BATCH):
        part = asked[start : start + _BATCH]
        sessions, first = _read(model, full, part)
        answers, logs = _decode(model, sessions, first, ends)
        found += [
            replace(one, reference=tuple(answer), expected=torch.stack(log))
            for one, answer, log in zip(part, answers, logs, strict=True)
        ]
    return found


def measure(
    model: Model, snapshot: Snapshot, asked: Sequence[Asked], prompter: Prompter, ends: set[int], *, decode: bool = True
) -> list[Answered]:
    """Ask every question of a snapshot.

    Args:
        model: that made it.
        snapshot: compressed.
        asked: with references.
        prompter: of the model.
        ends: tokens that end an answer.
        decode: whether to answer freely, too; otherwise `exact` tells whether the gold answer would be decoded.
    """
    found = []
    for start in range(0, len(asked), _BATCH):
        part = asked[start : start + _BATCH]
        sessions, first = _read(model, snapshot, part)
        of_reference = _forced(model, sessions, first, [one.reference for one in part])
        of_gold = _forced(model, sessions, first, [one.gold for one in part])
        texts: list[str | None] = [None] * len(part)
        if decode:
            answers, _ = _decode(model, sessions, first, ends)
            texts = [prompter.decode(answer) for answer in answers]
        for one, reference, gold, text in zip(part, of_reference, of_gold, texts, strict=True):
            found.append(compare(one, reference, gold, text))
    return found


def continuation(model: Model, snapshot: Snapshot, tokens: list[int]) -> Tensor:
    """Log-probabilities of text that follows the document, teacher-forced."""
    logits = step(model, [Feed(Session.on(snapshot), tokens, all_logits=True)])[0]
    return logits[:-1].log_softmax(-1)


def _read(model: Model, snapshot: Snapshot, asked: Sequence[Asked]) -> tuple[list[Session], list[Tensor]]:
    sessions = [Session.on(snapshot) for _ in asked]
    logits = step(model, [Feed(session, one.prompt) for session, one in zip(sessions, asked, strict=True)])
    return sessions, [row[-1].log_softmax(-1) for row in logits]


def _copies(sessions: Sequence[Session]) -> list[Session]:
    return [replace(session, tail=session.tail.copy()) for session in sessions]


def _forced(
    model: Model, sessions: Sequence[Session], first: Sequence[Tensor], tokens: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Per session, log-probabilities [n, vocabulary] at each of its tokens."""
    longer = [i for i, own in enumerate(tokens) if len(own) > 1]
    found = [row[None] for row in first]
    if longer:
        copies = _copies([sessions[i] for i in longer])
        feeds = [Feed(copy, tokens[i][:-1], all_logits=True) for copy, i in zip(copies, longer, strict=True)]
        for i, logits in zip(longer, step(model, feeds), strict=True):
            found[i] = torch.cat([found[i], logits.log_softmax(-1)])
    return found


def _decode(
    model: Model, sessions: Sequence[Session], first: Sequence[Tensor], ends: set[int]
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Greedy answers of N_REFERENCE tokens at most, and the log-probabilities they were chosen from."""
    copies = _copies(sessions)
    logs = [[row] for row in first]
    answers = [[int(row.argmax())] for row in first]
    for _ in range(N_REFERENCE - 1):
        going = [i for i, answer in enumerate(answers) if answer[-1] not in ends]
        if not going:
            break
        for i, logits in zip(going, step(model, [Feed(copies[i], [answers[i][-1]]) for i in going]), strict=True):
            logs[i].append(logits[-1].log_softmax(-1))
            answers[i].append(int(logits[-1].argmax()))
    return answers, logs


def compare(one: Asked, reference: Tensor, gold: Tensor, text: str | None) -> Answered:
    """Hold what a compressed cache said against what the full one said.

    Args:
        one: with its reference.
        reference: log-probabilities [n, vocabulary] at the full cache's answer.
        gold: log-probabilities at the gold answer.
        text: the free answer, or None.
    """
    if one.expected is None:
        raise ValueError("the question has no reference yet")
    kl = (one.expected.exp() * (one.expected - reference)).sum(-1).mean()
    agreement = (one.expected.argmax(-1) == reference.argmax(-1)).float().mean()
    wanted = torch.tensor(one.gold, device=gold.device)
    nll = -gold.gather(1, wanted[:, None]).mean()
    question = one.question
    if text is None:
        exact, score = float(bool((gold.argmax(-1) == wanted).all())), 0.0
    else:
        line = text.strip().split("\n")[0]
        hits = [f" {words(answer)} " in f" {words(line)} " for answer in question.answers]
        exact = float(all(hits) if question.every else any(hits))
        score = max(f1(line, answer) for answer in question.answers)
    return Answered(
        question.name, question.kind, max(0.0, float(kl)), float(agreement), float(nll), exact, score, text or ""
    )
