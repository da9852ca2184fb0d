"""Processes are killed while documents come and go and questions are asked; a journal says what was promised.

`make test-chaos ARGS="--seconds 600 --seed 3"`; the seed is printed. What must hold: an acknowledged context is whole
or honestly gone; an answer is that of its own document, however often it was killed, recomputed or loaded; what was
deleted or has expired answers no more, and leaves nothing behind. As a soak, `--every 60` kills once a minute only, so
that processes live long enough for the printed slopes of their memory to mean something.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from precis.wire import keys
from tests.chaos.load import QUESTION, REFUSED, Journal, asking, deleting, uploading
from tests.chaos.slopes import Slopes
from tests.stack import Stack, running_server, running_stack, wait_for

LASTING = {  # keys without an end that may be there when no context is left
    *(keys.EXPIRY, keys.TOMBSTONES, keys.DEAD, keys.WORKERS, keys.MODELS, keys.TOTALS, keys.ARCHIVED),
    *(keys.AUDIT, keys.usage("default"), keys.contexts("default")),
}


def storming(stack: Stack, chance: random.Random, journal: Journal, until: float, every: float) -> None:
    """Kill and stop, one at a time, and start again."""
    while time.monotonic() < until:
        time.sleep(min(every * chance.uniform(0.4, 1.6), max(0.0, until - time.monotonic())))
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


@pytest.mark.chaos
@pytest.mark.timeout(0)
def test_nothing_that_was_promised_is_lost_or_wrong(tiny_folder: Path, request: pytest.FixtureRequest) -> None:
    seconds, seed, every = (float(request.config.getoption(name)) for name in ("--seconds", "--seed", "--every"))
    chance, journal, stop = random.Random(seed), Journal(), threading.Event()
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_WORKER_GRACE_S="3") as stack:
        stack.start_worker("other")
        slopes = Slopes(stack)
        slopes.start()
        with ThreadPoolExecutor() as pool:
            clients = [pool.submit(uploading, stack, journal, stop, 0), pool.submit(deleting, stack, journal, stop)]
            clients += [pool.submit(asking, stack, journal, stop, int(seed) + n) for n in range(3)]
            try:
                storming(stack, chance, journal, time.monotonic() + seconds, every)
            finally:
                stop.set()
        for client in clients:
            client.result()  # what it saw go wrong
        slopes.stop()
        for name in ("worker", "other"):
            if name not in stack.processes:
                stack.start_worker(name, wait=False)
        wait_for(lambda: stack.http().get("/readyz").status_code == 200, 60)
        outcomes = check(stack, journal)
        told = f"seed {seed:g}, {seconds:g} s: {dict(sorted(journal.seen.items()))}; {dict(outcomes)}"
        sys.stderr.write("\n".join([told, *slopes.told()]) + "\n")
        check_nothing_is_left(stack)
    assert journal.seen["upload"] > seconds / 3
    assert sum(n for what, n in journal.seen.items() if what.startswith("answer")) > seconds


def check(stack: Stack, journal: Journal) -> Counter[str]:
    """Hold what is there against what was promised."""
    outcomes: Counter[str] = Counter()
    whole: dict[str, str] = {}
    for context_id in journal.texts:
        outcomes[checked(stack, journal, context_id, whole)] += 1
    assert len(set(whole.values())) > len(whole) * 0.9  # documents are told apart by their answers
    wait_for(lambda: counted(stack) == (0, stored_bytes(stack)), 30, step=0.5)  # what expired last is still to be swept
    client = stack.server.client()
    assert all(client.ttl(key) > 0 for key in client.keys("*staging*"))
    for queue in stack.http().get("/v1/queues").json()["data"]:
        assert (queue["compressions"], queue["answers"]) == (0, 0)
    return outcomes


def counted(stack: Stack) -> tuple[int, int]:
    """Active contexts and stored bytes, as the tenant's usage has them."""
    usage = stack.http().get("/v1/admin/tenants/default").json()["usage"]
    return usage["active"], usage["stored_bytes"]


def stored_bytes(stack: Stack) -> int:
    """The same, of the contexts themselves."""
    return sum(context["storage"]["stored_bytes"] for context in listed(stack) if context["status"] == "ready")


def checked(stack: Stack, journal: Journal, context_id: str, whole: dict[str, str]) -> str:
    """What became of one context."""
    if context_id in journal.ends:
        time.sleep(max(0.0, journal.ends[context_id][1] - time.time()))
    found = settled(stack, context_id)
    if found is None:
        assert context_id in journal.deleting, context_id
        return "deleted"
    assert context_id not in journal.deleted, found
    assert (found["status"] == "expired") == (context_id in journal.ends), found
    if found["status"] == "expired":
        return "expired"
    if found["status"] == "failed":
        assert found["error"]["code"] == "job_lost", found
        return "honestly gone"
    answer = answered(stack, context_id)
    whole[context_id] = answer
    assert journal.answers.get(context_id, set()) <= {answer}, (context_id, journal.answers[context_id], answer)
    return "whole"


def settled(stack: Stack, context_id: str) -> dict[str, Any] | None:
    """A context when its work is over; None if it is no more."""

    def look() -> Any:
        found = stack.http().get(f"/v1/contexts/{context_id}")
        assert found.status_code in (200, 404), (context_id, found.text)
        over = found.status_code == 404 or found.json()["status"] in ("ready", "failed", "expired")
        return found if over else None

    try:
        found = wait_for(look, 90, step=0.2)
    except AssertionError:
        raise AssertionError(stack.http().get(f"/v1/contexts/{context_id}").text) from None
    body: dict[str, Any] | None = found.json() if found.status_code == 200 else None
    return body


def listed(stack: Stack) -> list[dict[str, Any]]:
    """Every context, also those whose upload was never acknowledged."""
    found: list[dict[str, Any]] = []
    more = True
    while more:
        after = {"after": found[-1]["id"]} if found else {}
        page = stack.http().get("/v1/contexts", params={"limit": 200, **after}).json()
        more = page["has_more"]
        found += page["data"]
    return found


def check_nothing_is_left(stack: Stack) -> None:
    """When every context has been deleted, the store holds what has no end by design, and what ends by itself."""
    for context in listed(stack):
        assert stack.http().delete(f"/v1/contexts/{context['id']}").status_code == 200
    assert counted(stack) == (0, 0)
    client = stack.server.client()
    left = [key.decode() for key in client.keys("*") if client.ttl(key) == -1]
    beside = ("{precis}:jobs:", "{precis}:model:", "{precis}:artifact:")
    assert [key for key in left if key not in LASTING and not key.startswith(beside)] == []
    assert client.zcard(keys.EXPIRY) == 0
    assert {key: client.xrange(key) for key in left if key.startswith("{precis}:jobs:") and client.xlen(key)} == {}


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
