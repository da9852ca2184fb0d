"""Clients of a soak: they upload, ask, delete and let expire, and write down what they were promised."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.stack import Stack

EXACT = {"policy": "full", "codec": "raw16"}
REFUSED = {409, 429, 500, 503, 507}  # honest ends of a request, while a storm is on
QUESTION = {"prompt": " and", "max_tokens": 12}
N_KEPT = 40  # contexts that a soak holds at a time, so that what grows beside them is a leak
_TTL_S = 12


@dataclass
class Journal:
    """What was promised, written by the clients' side only.

    Attributes:
        texts: id -> text of every acknowledged upload.
        answers: id -> every answer that was given.
        ends: id -> Unix times between which a context expires.
        deleting: ids whose deletion was asked for.
        deleted: ids whose deletion was acknowledged.
        seen: how often what was seen.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    texts: dict[str, str] = field(default_factory=dict)
    answers: dict[str, set[str]] = field(default_factory=dict)
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    deleting: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def uploaded(self, context_id: str, text: str, ends: tuple[float, float] | None) -> None:
        with self.lock:
            self.texts[context_id] = text
            if ends is not None:
                self.ends[context_id] = ends

    def answered(self, context_id: str, text: str) -> None:
        with self.lock:
            self.answers.setdefault(context_id, set()).add(text)

    def count(self, what: str) -> None:
        with self.lock:
            self.seen[what] += 1

    def is_gone(self, context_id: str, at: float) -> bool:
        """Whether nobody may get an answer of it any more."""
        return context_id in self.deleted or at > self.ends.get(context_id, (0, float("inf")))[1]

    def may_be_gone(self, context_id: str, at: float) -> bool:
        """Whether its end was asked for, or is due."""
        return context_id in self.deleting or at >= self.ends.get(context_id, (float("inf"), 0))[0]

    def standing(self) -> list[str]:
        """Ids of contexts that live until they are deleted, oldest first."""
        with self.lock:
            return [each for each in self.texts if each not in self.deleting and each not in self.ends]

    def some(self, chance: random.Random) -> str | None:
        """An id: mostly one of the latest, which may have come to its end."""
        with self.lock:
            latest = list(self.texts)[-2 * N_KEPT :]
        return chance.choice(latest) if latest else None


def document(number: int) -> str:
    """Its own text."""
    words = random.Random(number)
    return f"Document {number}. " + " ".join(words.choice(["fox", "hen", "bee", "dog", "cat"]) for _ in range(60))


def uploading(stack: Stack, journal: Journal, stop: threading.Event, first: int) -> None:
    """One document after another; every fourth is gone soon."""
    number = first
    while not stop.is_set():
        number += 1
        text = document(number)
        body: dict[str, Any] = {"text": text, "template": "raw", "compression": EXACT}
        if number % 4 == 0:
            body["ttl_s"] = _TTL_S
        sent = time.time()
        try:
            found = stack.http(timeout=20).post("/v1/contexts", json=body)
        except httpx.HTTPError:
            journal.count("upload unanswered")
            continue
        if found.status_code in (200, 202):
            ends = (sent + _TTL_S, time.time() + _TTL_S + 0.1) if "ttl_s" in body else None
            journal.uploaded(found.json()["id"], text, ends)  # only now is it promised
            journal.count("upload")
        else:
            assert found.status_code in REFUSED, found.text
            journal.count(f"upload {found.status_code}")
        stop.wait(0.3)


def deleting(stack: Stack, journal: Journal, stop: threading.Event) -> None:
    """The oldest of more than so many, and now and then the newest, whose work is still going on."""
    chance = random.Random(0)
    while not stop.wait(0.1):
        standing = journal.standing()
        if len(standing) <= N_KEPT:
            continue
        context_id = standing[-1] if chance.random() < 0.1 else standing[0]
        journal.deleting.add(context_id)
        try:
            found = stack.http(timeout=20).delete(f"/v1/contexts/{context_id}")
        except httpx.HTTPError:
            journal.count("delete unanswered")
            continue
        if found.status_code == 200:
            journal.deleted.add(context_id)
        else:
            assert found.status_code in REFUSED, found.text
        journal.count(f"delete {found.status_code}")


def asking(stack: Stack, journal: Journal, stop: threading.Event, seed: int) -> None:
    """One question after another."""
    chance = random.Random(seed)
    while not stop.is_set():
        context_id = journal.some(chance)
        if context_id is None:
            stop.wait(0.1)
            continue
        was_gone = journal.is_gone(context_id, time.time())
        try:
            found = stack.http(timeout=20).post(f"/v1/contexts/{context_id}/queries", json=QUESTION)
        except httpx.HTTPError:
            journal.count("ask unanswered")
            continue
        if found.status_code == 200:
            assert not was_gone, (context_id, found.text)
            journal.answered(context_id, found.json()["text"])
            journal.count("answer " + found.headers["x-cache"].split(";")[0])
        elif found.status_code in (404, 410):
            assert journal.may_be_gone(context_id, time.time()), (context_id, found.text)
            journal.count("ask gone")
        else:
            assert found.status_code in REFUSED, found.text
            journal.count(f"ask {found.status_code}")
