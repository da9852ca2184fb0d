"""Processes are killed and stopped while documents go in and questions are asked; a journal says what was promised.

`make test-chaos ARGS="--seconds 600 --seed 3"`; the seed is printed. What must hold: an acknowledged context is whole
or honestly gone; an answer is that of its own document, however often it was killed, recomputed or loaded; nothing is
left behind. Memory is printed.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.stack import Stack, running_server, running_stack, wait_for

EXACT = {"policy": "full", "codec": "raw16"}
GONE = {"job_lost", "context_expired"}  # honest ends of a context
REFUSED = {409, 429, 500, 503, 507}  # honest ends of a request, while a storm is on
QUESTION = {"prompt": " and", "max_tokens": 12}


@dataclass
class Journal:
    """What was promised, written by the clients' side only."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    texts: dict[str, str] = field(default_factory=dict)
    answers: dict[str, set[str]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def uploaded(self, context_id: str, text: str) -> None:
        with self.lock:
            self.texts[context_id] = text

    def answered(self, context_id: str, text: str) -> None:
        with self.lock:
            self.answers.setdefault(context_id, set()).add(text)

    def some(self, chance: random.Random) -> str | None:
        with self.lock:
            return chance.choice(list(self.texts)) if self.texts else None

    def count(self, what: str) -> None:
        with self.lock:
            self.seen[what] += 1


def document(number: int) -> str:
    words = random.Random(number)
    return f"Document {number}. " + " ".join(words.choice(["fox", "hen", "bee", "dog", "cat"]) for _ in range(60))


def uploading(stack: Stack, journal: Journal, stop: threading.Event, first: int) -> None:
    number = first
    while not stop.is_set():
        number += 1
        text = document(number)
        body = {"text": text, "template": "raw", "compression": EXACT}
        try:
            found = stack.http(timeout=20).post("/v1/contexts", json=body)
        except httpx.HTTPError:
            journal.count("upload unanswered")
            continue
        if found.status_code in (200, 202):
            journal.uploaded(found.json()["id"], text)  # only now is it promised
            journal.count("upload")
        else:
            assert found.status_code in REFUSED, found.text
            journal.count(f"upload {found.status_code}")
        stop.wait(0.3)


def asking(stack: Stack, journal: Journal, stop: threading.Event, seed: int) -> None:
    chance = random.Random(seed)
    while not stop.is_set():
        context_id = journal.some(chance)
        if context_id is None:
            stop.wait(0.1)
            continue
        try:
            found = stack.http(timeout=20).post(f"/v1/contexts/{context_id}/queries", json=QUESTION)
        except httpx.HTTPError:
            journal.count("ask unanswered")
            continue
        if found.status_code == 200:
            journal.answered(context_id, found.json()["text"])
            journal.count("answer " + found.headers["x-cache"].split(";")[0])
        else:
            assert found.status_code in REFUSED, found.text
            journal.count(f"ask {found.status_code}")


def storming(stack: Stack, chance: random.Random, journal: Journal, until: float) -> None:
    """Kill and stop, one at a time, and start again."""
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.5, 2.0))
        name = chance.choice(["worker", "other", "api", "server", "stop"])
        journal.count(f"storm {name}")
        if name == "server":
            stack.server.stop(signal.SIGKILL)
            stack.server.start()
        elif name == "stop":
            victim = chance.choice([each for each in ("worker", "other", "api") if each in stack.processes])
            stack.processes[victim].send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.5, 4.0))  # longer than a lease, now and then
            stack.processes[victim].send_signal(signal.SIGCONT)
        elif name == "api":
            port = int(stack.base_url.rsplit(":", 1)[1])
            stack.kill("api")
            stack.start_api(port=port)
        else:
            stack.kill(name)
            stack.start_worker(name, wait=False)


def memory(stack: Stack) -> dict[str, float]:
    """Resident megabytes."""
    return {name: psutil.Process(process.pid).memory_info().rss / 1e6 for name, process in stack.processes.items()}


def settled(stack: Stack, context_id: str) -> dict[str, Any]:
    """A context when its work is over."""

    def look() -> Any:
        found = stack.http().get(f"/v1/contexts/{context_id}")
        assert found.status_code == 200, (context_id, found.text)
        return found.json() if found.json()["status"] in ("ready", "failed") else None

    found: dict[str, Any] = wait_for(look, 90, step=0.2)
    return found


@pytest.mark.chaos
@pytest.mark.timeout(0)
def test_nothing_that_was_promised_is_lost_or_wrong(tiny_folder: Path, request: pytest.FixtureRequest) -> None:
    seconds, seed = float(request.config.getoption("--seconds")), int(request.config.getoption("--seed"))
    chance, journal, stop = random.Random(seed), Journal(), threading.Event()
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_WORKER_GRACE_S="3") as stack:
        stack.start_worker("other")
        threads = [threading.Thread(target=uploading, args=(stack, journal, stop, 0))]
        threads += [threading.Thread(target=asking, args=(stack, journal, stop, seed + n)) for n in range(3)]
        for thread in threads:
            thread.start()
        began = memory(stack)
        try:
            storming(stack, chance, journal, time.monotonic() + seconds)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        for name in ("worker", "other"):
            if name not in stack.processes:
                stack.start_worker(name, wait=False)
        wait_for(lambda: stack.http().get("/readyz").status_code == 200, 60)
        outcomes = check(stack, journal)
        told = f"seed {seed}, {seconds:g} s: {dict(sorted(journal.seen.items()))}; {dict(outcomes)}"
        sys.stderr.write(f"{told}\nresident MB: {began} -> {memory(stack)}\n")
    assert journal.seen["upload"] > seconds / 3
    assert sum(n for what, n in journal.seen.items() if what.startswith("answer")) > seconds


def check(stack: Stack, journal: Journal) -> Counter[str]:
    """Hold what is there against what was promised."""
    outcomes: Counter[str] = Counter()
    whole: dict[str, str] = {}
    for context_id in journal.texts:
        found = settled(stack, context_id)
        if found["status"] == "failed":
            assert found["error"]["code"] in GONE, found
            outcomes["honestly gone"] += 1
            continue
        answer = answered(stack, context_id)
        whole[context_id] = answer
        outcomes["whole"] += 1
        assert journal.answers.get(context_id, set()) <= {answer}, (context_id, journal.answers[context_id], answer)
    assert len(set(whole.values())) > len(whole) * 0.9  # documents are told apart by their answers
    usage = stack.http().get("/v1/admin/tenants/default").json()["usage"]
    listed = stack.http().get("/v1/contexts?limit=200").json()["data"]
    stored = sum(context["storage"]["stored_bytes"] for context in listed)
    if len(listed) < 200:
        assert (usage["active"], usage["stored_bytes"]) == (0, stored)
    client = stack.server.client()
    assert all(client.ttl(key) > 0 for key in client.keys("*staging*"))
    for queue in stack.http().get("/v1/queues").json()["data"]:
        assert (queue["compressions"], queue["answers"]) == (0, 0)
    return outcomes


def answered(stack: Stack, context_id: str) -> str:
    """A context's answer; honest refusals are waited out for a while."""
    refusals: list[str] = []
    for _ in range(30):
        found = stack.http().post(f"/v1/contexts/{context_id}/queries", json=QUESTION)
        if found.status_code == 200:
            text: str = found.json()["text"]
            return text
        assert found.status_code in REFUSED, found.text
        refusals.append(found.text)
        time.sleep(1)
    raise AssertionError(refusals[-3:])
