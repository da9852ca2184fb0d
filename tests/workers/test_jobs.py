"""The queue on a real server: leases, reaping, dead letters, lost groups, dead workers' streams."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from precis.errors import QueueFull
from precis.wire import keys
from precis.wire.codec import encode
from precis.wire.messages import AnswerJob, CompressJob, Sampling
from precis.wire.records import WorkerRecord
from service.jobs import Jobs
from service.store import connect
from tests.stack import Server, wait_for
from workers.jobs import MAX_ATTEMPTS, Heart, Queue

LEASE_S = 0.5


def queue(client: Any, worker_id: str, role: str = "all") -> Queue:
    return Queue(client, worker_id, "m", role, LEASE_S)


def add(client: Any, job: CompressJob | AnswerJob, stream: str | None = None) -> None:
    client.xadd(stream or keys.compress_jobs("m"), {"job": encode(job), "attempt": 0})


def answer(job_id: str = "q1", context: str = "c1") -> AnswerJob:
    return AnswerJob(job_id, context, b"\x01\x00\x00\x00", Sampling(), "api1", time.time())


def record(worker_id: str, *, load: int = 0, hot: tuple[str, ...] = ()) -> WorkerRecord:
    return WorkerRecord(worker_id, 1, "h", "all", "m", "cpu", load, 4, list(hot), 0.0)


def test_a_job_is_taken_once_and_gone_when_finished(client: Any) -> None:
    one, two = queue(client, "a"), queue(client, "b")
    add(client, CompressJob("c1"))
    (entry,) = one.take(one.compressions, 4, None)
    assert entry.job == CompressJob("c1")
    assert two.take(two.compressions, 4, None) == []
    assert client.xlen(keys.compress_jobs("m")) == 1  # waiting plus running
    one.finish(entry)
    assert client.xlen(keys.compress_jobs("m")) == 0


def test_a_dead_workers_job_goes_to_another_and_after_two_deaths_to_the_dead_letters(client: Any) -> None:
    one = queue(client, "a")
    add(client, CompressJob("c1"))
    for attempt in range(MAX_ATTEMPTS):
        (entry,) = one.take(one.compressions, 1, None)
        assert entry.attempt == attempt
        time.sleep(LEASE_S + 0.05)
        reaper = queue(client, f"reaper{attempt}")
        lost = reaper.reap()
        one = queue(client, f"next{attempt}")
        assert [e.job.id for e in lost] == ([] if attempt + 1 < MAX_ATTEMPTS else ["c1"])
    assert client.xlen(keys.compress_jobs("m")) == 0
    assert client.xlen(keys.DEAD) == 1


def test_a_kept_lease_is_not_reaped_and_does_not_count_as_an_attempt(client: Any, server: Server) -> None:
    one, two = queue(client, "a"), queue(client, "b")
    heart = Heart(server.client(), "a", LEASE_S)
    heart.announce(record("a"))
    heart.start()
    add(client, CompressJob("c1"))
    (entry,) = one.take(one.compressions, 1, None)
    heart.hold(entry)
    time.sleep(2 * LEASE_S)
    assert two.reap() == []
    pending = client.xpending_range(keys.compress_jobs("m"), keys.GROUP, "-", "+", 10)
    assert [(p["consumer"], p["times_delivered"]) for p in pending] == [(b"a", 1)]
    assert not heart.lost(entry)
    heart.stop()
    assert not client.exists(keys.worker("a"))


def test_a_worker_that_slept_too_long_learns_that_its_job_is_lost(client: Any, server: Server) -> None:
    one, two = queue(client, "a"), queue(client, "b")
    heart = Heart(server.client(), "a", LEASE_S)
    add(client, CompressJob("c1"))
    (entry,) = one.take(one.compressions, 1, None)
    heart.hold(entry)
    time.sleep(LEASE_S + 0.05)
    two.reap()
    heart.beat()
    assert heart.lost(entry)
    one.give_back(entry, died=False)  # does nothing: the job is not ours any more
    assert client.xlen(keys.compress_jobs("m")) == 1


def test_reaping_works_on_idle_queues(client: Any) -> None:
    one, two = queue(client, "a"), queue(client, "b")
    add(client, CompressJob("c1"))
    one.take(one.compressions, 1, None)
    time.sleep(LEASE_S + 0.05)
    two.reap()  # nothing new ever arrived
    (entry,) = two.take(two.compressions, 1, None)
    assert (entry.job.id, entry.attempt) == ("c1", 1)


def test_a_lost_group_is_made_again_and_no_job_is_skipped(client: Any) -> None:
    one = queue(client, "a")
    client.flushall()
    add(client, CompressJob("c1"))
    assert one.take(one.compressions, 1, None) == []
    (entry,) = one.take(one.compressions, 1, None)
    assert entry.job.id == "c1"
    one.reap()


def test_what_is_no_job_is_buried_and_the_rest_goes_on(client: Any) -> None:
    one = queue(client, "a")
    client.xadd(keys.compress_jobs("m"), {"job": b"\xff\x00", "attempt": 0})
    client.xadd(keys.compress_jobs("m"), {"nonsense": 1})
    add(client, CompressJob("c1"))
    assert [e.job.id for e in one.take(one.compressions, 9, None)] == ["c1"]
    assert client.xlen(keys.DEAD) == 2


def test_a_dead_workers_own_stream_is_handed_on(client: Any) -> None:
    dead, alive = queue(client, "dead"), queue(client, "alive")
    client.hset(keys.WORKERS, mapping={"dead": "m", "alive": "m"})
    client.set(keys.worker("alive"), encode(record("alive")))
    add(client, answer("q1"), keys.worker_jobs("dead"))
    add(client, answer("q2"), keys.worker_jobs("dead"))
    dead.take([keys.worker_jobs("dead")], 1, None)  # one in hand, one not even taken
    alive.reap()
    taken = alive.take(alive.answers, 9, None)
    assert {e.job.id for e in taken} == {"q1", "q2"}
    assert not client.exists(keys.worker_jobs("dead"))
    assert client.hkeys(keys.WORKERS) == [b"alive"]


def test_empty_consumers_of_dead_workers_do_not_pile_up(client: Any) -> None:
    add(client, CompressJob("c1"))
    for index in range(3):
        gone = queue(client, f"gone{index}")
        for entry in gone.take(gone.compressions, 1, None):
            gone.finish(entry)
    last = queue(client, "last")
    last.take(last.compressions, 1, None)
    last.reap()
    names = {c["name"] for c in client.xinfo_consumers(keys.compress_jobs("m"), keys.GROUP)}
    assert names <= {b"last"}


@pytest.mark.parametrize("role", ["all", "compress", "answer"])
def test_a_role_takes_only_its_jobs(client: Any, role: str) -> None:
    one = queue(client, "a", role)
    add(client, CompressJob("c1"))
    add(client, answer(), keys.answer_jobs("m"))
    taken = {type(e.job) for e in one.take([*one.answers, *one.compressions], 4, None)}
    expected = {"all": {CompressJob, AnswerJob}, "compress": {CompressJob}, "answer": {AnswerJob}}
    assert taken == expected[role]


def submit(server: Server, workers: list[WorkerRecord], *jobs: AnswerJob, limit: int = 2) -> None:
    async def run() -> None:
        stores = connect(server.url, "")
        made = Jobs(stores.queue, limit)
        try:
            for job in jobs:
                await made.submit(job, "m", workers)
        finally:
            await stores.close()

    asyncio.run(run())


def test_a_full_queue_says_when_to_come_again_and_takes_nothing(client: Any, server: Server) -> None:
    with pytest.raises(QueueFull) as caught:
        submit(server, [record("w")], answer("q1"), answer("q2"), answer("q3"))
    assert caught.value.extra["retry_after_s"] == 1
    assert client.xlen(keys.answer_jobs("m")) == 2


def test_a_repeated_enqueue_is_one_job(client: Any, server: Server) -> None:
    submit(server, [record("w")], answer("q1"), answer("q1"))
    assert client.xlen(keys.answer_jobs("m")) == 1


def test_answers_prefer_the_worker_that_holds_the_snapshot_and_spill_over(client: Any, server: Server) -> None:
    holder, other = record("holder", hot=("c1",)), record("other")
    client.hset(keys.WORKERS, "holder", "m")
    submit(server, [other, holder], answer("q1"))
    assert client.xlen(keys.worker_jobs("holder")) == 1
    busy = record("busy", load=4, hot=("c1",))
    submit(server, [busy], answer("q2"))
    assert client.xlen(keys.answer_jobs("m")) == 1
    submit(server, [holder], *(answer(f"r{i}") for i in range(8)))
    assert client.xlen(keys.worker_jobs("holder")) == 8  # twice its slots
    assert client.xlen(keys.answer_jobs("m")) == 2
    wait_for(lambda: client.exists(keys.queued("q1")))


def test_an_answer_for_a_worker_that_was_just_forgotten_goes_to_another(client: Any, server: Server) -> None:
    submit(server, [record("gone", hot=("c1",))], answer("q1"))  # the API's list of workers is a moment old
    assert client.exists(keys.worker_jobs("gone")) == 0
    assert client.xlen(keys.answer_jobs("m")) == 1
