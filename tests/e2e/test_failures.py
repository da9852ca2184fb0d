"""What breaks in the field, on real processes: nothing acknowledged is lost, and no answer is silently wrong."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from precis.wire import keys
from tests.stack import Server, Stack, running_server, running_stack, wait_for
from tests.tiny import save_tiny

LONG = "The quick brown fox jumps over the lazy dog. " * 200  # 9,000 tokens: seconds of work
SHORT = "The quick brown fox jumps over the lazy dog. " * 12
N_SLOW = 3000  # tokens of an answer that lasts long enough to be seen


@pytest.fixture
def own_server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def own_stack(own_server: Server, tiny_folder: Path) -> Iterator[Stack]:
    with running_stack(own_server, tiny_folder) as stack:
        yield stack


def upload(stack: Stack, text: str, wait: float = 60, policy: str = "snapkv", **fields: Any) -> dict[str, Any]:
    body = {"text": text, "compression": {"policy": policy, "keep_ratio": 0.5}, **fields}
    response = stack.http().post(f"/v1/contexts?wait={wait}", json=body)
    assert response.status_code in (200, 202), response.text
    found: dict[str, Any] = response.json()
    return found


def status(stack: Stack, context: dict[str, Any]) -> str:
    found: str = stack.http().get(f"/v1/contexts/{context['id']}").json()["status"]
    return found


def ask(stack: Stack, context: dict[str, Any], **body: Any) -> httpx.Response:
    url = f"/v1/contexts/{context['id']}/queries"
    return stack.http().post(url, json={"question": "Who?", "max_tokens": 12, "ignore_eos": True, **body})


def owner(stack: Stack, stream: str) -> str:
    """Which process holds the one pending job of a stream."""
    (pending,) = wait_for(lambda: stack.server.client().xpending_range(stream, keys.GROUP, "-", "+", 9))
    worker = pending["consumer"].decode()
    by_pid = {process.pid: name for name, process in stack.processes.items()}
    workers = stack.http().get("/v1/workers").json()["data"]
    return next(by_pid[w["pid"]] for w in workers if w["id"] == worker)


def model_name(stack: Stack) -> str:
    name: str = stack.http().get("/v1/models").json()["data"][0]["id"]
    return name


def test_a_worker_killed_mid_compress_is_replaced_and_one_snapshot_is_published(own_stack: Stack) -> None:
    own_stack.start_worker("worker1")
    model = model_name(own_stack)
    context = upload(own_stack, LONG, wait=0, policy="kvzip")
    wait_for(lambda: status(own_stack, context) in ("prefilling", "compressing"))
    own_stack.kill(owner(own_stack, keys.compress_jobs(model)))
    wait_for(lambda: status(own_stack, context) == "ready", 90)
    client = own_stack.server.client()
    assert [key.decode() for key in client.keys("snapshot*")] == [keys.snapshot(context["id"])]
    wait_for(lambda: client.xlen(keys.compress_jobs(model)) == 0)
    assert client.keys("staging*") == []
    assert ask(own_stack, context).status_code == 200


def test_a_worker_that_wakes_up_late_does_not_undo_what_another_has_ended(own_stack: Stack) -> None:
    own_stack.start_worker("other")
    context = upload(own_stack, LONG + "late", wait=0)
    wait_for(lambda: status(own_stack, context) == "prefilling")
    sleeper = own_stack.processes[owner(own_stack, keys.compress_jobs(model_name(own_stack)))]
    sleeper.send_signal(signal.SIGSTOP)
    wait_for(lambda: status(own_stack, context) == "ready", 60)
    sleeper.send_signal(signal.SIGCONT)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert status(own_stack, context) == "ready"
    assert ask(own_stack, context).status_code == 200


def test_a_worker_killed_mid_answer_ends_it_with_an_error_and_no_replay(own_stack: Stack) -> None:
    context = upload(own_stack, SHORT)
    url = f"/v1/contexts/{context['id']}/queries"
    body = {"question": "Who?", "max_tokens": 20000, "stream": True, "ignore_eos": True}
    seen: list[str] = []
    with own_stack.http().stream("POST", url, json=body) as response:
        lines = response.iter_lines()
        while len(seen) < 20:
            seen.append(next(lines))
        own_stack.kill("worker")
        own_stack.start_worker("worker1")
        rest = list(lines)
    events = [line[7:] for line in [*seen, *rest] if line.startswith("event: ")]
    assert events[-1] == "error"
    assert "done" not in events
    error = json.loads([line for line in rest if line.startswith("data: ")][-1][6:])
    assert error["code"] == "job_lost"
    assert ask(own_stack, context).status_code == 200


def test_contexts_survive_a_restart_of_the_store_and_service_goes_on(own_stack: Stack) -> None:
    context = upload(own_stack, SHORT)
    before = ask(own_stack, context).json()["text"]
    own_stack.server.stop(signal.SIGKILL)
    assert own_stack.http().get("/readyz").status_code == 503
    failed = ask(own_stack, context)
    assert failed.status_code == 503
    assert failed.json()["code"] == "over_capacity"
    own_stack.server.start()
    wait_for(lambda: own_stack.http().get("/readyz").status_code == 200, 30)
    assert ask(own_stack, context).json()["text"] == before
    assert upload(own_stack, SHORT + "again")["status"] == "ready"


def test_a_worker_that_is_started_before_its_store_waits_for_it(own_server: Server, tiny_folder: Path) -> None:
    stack = Stack(own_server, tiny_folder, {})
    try:
        stack.start_api()
        own_server.stop(signal.SIGKILL)
        stack.start_worker(wait=False)
        wait_for(lambda: "store_unreachable" in stack.log("worker"), 60)
        own_server.start()
        wait_for(lambda: stack.http().get("/readyz").status_code == 200, 30)
        assert upload(stack, SHORT)["status"] == "ready"
    finally:
        stack.close()


def test_a_store_that_lost_everything_is_used_again(own_stack: Stack) -> None:
    context = upload(own_stack, SHORT)
    own_stack.server.client().flushall()
    wait_for(lambda: own_stack.http().get("/readyz").status_code == 200, 30)
    assert ask(own_stack, context).status_code == 404
    wait_for(lambda: own_stack.http().get("/v1/models").json()["data"], 30)
    assert upload(own_stack, SHORT)["status"] == "ready"


def test_the_slot_of_a_client_that_has_gone_is_free_within_a_few_steps(own_stack: Stack) -> None:
    context = upload(own_stack, SHORT)
    url = f"/v1/contexts/{context['id']}/queries"
    for stream in (True, False):
        body = {"question": "Who?", "max_tokens": 30000, "stream": stream, "ignore_eos": True}
        if stream:
            with own_stack.http().stream("POST", url, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                own_stack.http().post(url, json=body, timeout=1.0)
        stream_key = keys.answer_jobs(model_name(own_stack))
        wait_for(lambda key=stream_key: own_stack.server.client().xlen(key) == 0, 5)
        wait_for(lambda: own_stack.http().get("/v1/workers").json()["data"][0]["load"] == 0, 5)


def test_a_full_queue_answers_429_and_loses_nothing(own_server: Server, tiny_folder: Path) -> None:
    with running_stack(own_server, tiny_folder, PRECIS_COMPRESS_QUEUE_LIMIT="2", PRECIS_LEASE_S="30") as stack:
        stack.processes["worker"].send_signal(signal.SIGSTOP)
        accepted = [upload(stack, f"{SHORT} {i}", wait=0) for i in range(2)]
        refused = stack.http().post("/v1/contexts", json={"text": SHORT + " third"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["code"] == "queue_full"
        again = stack.http().post("/v1/contexts", json={"text": f"{SHORT} 0", "compression": accepted[0]["policy"]})
        assert again.json()["id"] == accepted[0]["id"]  # already accepted: no new place is needed
        stack.processes["worker"].send_signal(signal.SIGCONT)
        for context in accepted:
            wait_for(lambda c=context: status(stack, c) == "ready", 60)


def test_a_deleted_context_is_not_compressed_to_its_end(own_stack: Stack) -> None:
    context = upload(own_stack, LONG, wait=0, policy="kvzip")
    wait_for(lambda: status(own_stack, context) == "prefilling")
    assert own_stack.http().delete(f"/v1/contexts/{context['id']}").status_code == 200
    client = own_stack.server.client()
    wait_for(lambda: client.xlen(keys.compress_jobs(model_name(own_stack))) == 0, 20)
    assert [
        key
        for key in client.keys("*")
        if context["id"].encode() in key and b"cancelled" not in key and b"events" not in key
    ] == []


def test_answers_move_while_a_long_document_is_compressed(own_stack: Stack) -> None:
    context = upload(own_stack, SHORT)
    long = upload(own_stack, LONG, wait=0, policy="kvzip")
    wait_for(lambda: status(own_stack, long) in ("prefilling", "compressing"))
    assert ask(own_stack, context).status_code == 200
    assert status(own_stack, long) != "ready"
    wait_for(lambda: status(own_stack, long) == "ready", 90)


def test_a_stopping_worker_finishes_its_answers_and_gives_its_compression_back(own_stack: Stack) -> None:
    context = upload(own_stack, SHORT)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, own_stack, context, max_tokens=N_SLOW)
        wait_for(lambda: own_stack.http().get("/v1/workers").json()["data"][0]["load"] == 1)
        own_stack.kill("worker", signal.SIGTERM)
        assert answer.result().json()["usage"]["completion_tokens"] == N_SLOW
    own_stack.start_worker("worker1")
    long = upload(own_stack, LONG, wait=0, policy="kvzip")
    wait_for(lambda: status(own_stack, long) in ("prefilling", "compressing"))
    own_stack.kill("worker1", signal.SIGTERM)
    assert status(own_stack, long) == "queued"
    own_stack.start_worker("worker2")
    wait_for(lambda: status(own_stack, long) == "ready", 90)


def test_a_stopping_api_ends_its_streams_with_an_error(own_stack: Stack) -> None:
    context = upload(own_stack, SHORT)
    body = {"question": "Who?", "max_tokens": 30000, "stream": True, "ignore_eos": True}
    with own_stack.http().stream("POST", f"/v1/contexts/{context['id']}/queries", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        own_stack.processes["api"].send_signal(signal.SIGTERM)
        rest = list(lines)
    assert "event: error" in rest
    assert '"shutting_down"' in rest[rest.index("event: error") + 1]
    own_stack.processes.pop("api").wait(20)


@pytest.fixture(scope="module")
def forgetful(tiny_folder: Path) -> Iterator[Stack]:
    """A stack whose worker holds no snapshot, so that every answer loads from the store."""
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_HOT_BYTES="0") as stack:
        yield stack


def flip_a_byte(client: Any, key: str) -> None:
    piece = bytearray(client.hget(key, "2.0"))
    piece[len(piece) // 2] ^= 1
    client.hset(key, "2.0", bytes(piece))


def truncate(client: Any, key: str) -> None:
    client.hset(key, "3.0", client.hget(key, "3.0")[:-7])


def lose_a_chunk(client: Any, key: str) -> None:
    client.hdel(key, "1.0")


def break_the_manifest(client: Any, key: str) -> None:
    client.hset(key, "m", client.hget(key, "m").replace(b'"next_position":', b'"next_position":1'))


def lose_the_manifest(client: Any, key: str) -> None:
    client.hdel(key, "m")


def evict(client: Any, key: str) -> None:
    client.delete(key)


DAMAGES = [
    (flip_a_byte, "corrupt"),
    (truncate, "corrupt"),
    (lose_a_chunk, "corrupt"),
    (break_the_manifest, "corrupt"),
    (lose_the_manifest, "missing"),
    (evict, "missing"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[d.__name__ for d, _ in DAMAGES])
def test_a_damaged_snapshot_is_recomputed_and_counted_and_the_answer_is_the_same(
    forgetful: Stack, damage: Any, reason: str
) -> None:
    context = upload(forgetful, f"{SHORT} {damage.__name__}")
    before = ask(forgetful, context)
    assert before.headers["x-cache"] == "hit; store"
    client = forgetful.server.client()
    damage(client, keys.snapshot(context["id"]))
    found = ask(forgetful, context)
    assert found.headers["x-cache"] == f"recomputed; {reason}"
    assert found.json()["text"] == before.json()["text"]
    assert found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    after = ask(forgetful, context)
    assert after.headers["x-cache"] == "hit; store"
    assert after.json()["text"] == before.json()["text"]
    (port,) = re.findall(r"metrics=(\d+)", forgetful.log("worker"))
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert f'precis_recomputed_total{{reason="{reason}"}}' in metrics


def test_a_snapshot_of_another_context_is_refused(forgetful: Stack) -> None:
    one, other = upload(forgetful, SHORT + " one"), upload(forgetful, SHORT + " other")
    right = ask(forgetful, one).json()["text"]
    client = forgetful.server.client()
    client.copy(keys.snapshot(other["id"]), keys.snapshot(one["id"]), replace=True)
    found = ask(forgetful, one)
    assert found.headers["x-cache"] == "recomputed; stale"
    assert found.json()["text"] == right


def test_without_snapshot_and_source_tokens_there_is_a_clear_error(forgetful: Stack) -> None:
    context = upload(forgetful, SHORT + " gone")
    client = forgetful.server.client()
    client.delete(keys.snapshot(context["id"]), keys.tokens(context["id"]))
    found = ask(forgetful, context)
    assert found.status_code == 410
    assert found.json()["code"] == "snapshot_missing"
    assert "upload it again" in found.json()["detail"]


def test_a_snapshot_that_expires_while_being_read_is_never_half_used(forgetful: Stack) -> None:
    context = upload(forgetful, SHORT + " expiring")
    right = ask(forgetful, context).json()["text"]
    client = forgetful.server.client()
    for delay_ms in range(1, 12):
        client.pexpire(keys.snapshot(context["id"]), delay_ms)
        found = ask(forgetful, context)
        assert found.status_code == 200
        assert found.json()["text"] == right


def test_changed_weights_under_the_same_name_never_use_old_snapshots(
    own_server: Server, tiny_folder: Path, tmp_path: Path
) -> None:
    with running_stack(own_server, tiny_folder, PRECIS_MODEL_NAME="same") as stack:
        context = upload(stack, SHORT)
        old = ask(stack, context, max_tokens=30).json()["text"]
        stack.kill("worker", signal.SIGTERM)
        save_tiny(tmp_path, seed=1)
        stack.model = tmp_path
        stack.start_worker("worker1")
        found = ask(stack, context, max_tokens=30)
        assert found.headers["x-cache"] == "recomputed; stale"
        assert found.json()["text"] != old
        fresh = upload(stack, SHORT)
        assert fresh["id"] != context["id"]  # another fingerprint
        assert ask(stack, fresh, max_tokens=30).json()["text"] == found.json()["text"]


def test_a_changed_tokenizer_is_refused_with_what_to_do(own_server: Server, tiny_folder: Path, tmp_path: Path) -> None:
    with running_stack(own_server, tiny_folder, PRECIS_MODEL_NAME="same") as stack:
        context = upload(stack, SHORT)
        stack.kill("worker", signal.SIGTERM)
        save_tiny(tmp_path)
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        template = tmp_path / "chat_template.jinja"
        if template.exists():
            template.write_text(template.read_text() + " ")
        else:
            settings["chat_template"] += " "
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        stack.model = tmp_path
        stack.start_worker("worker1")
        wait_for(lambda: ask(stack, context).status_code == 409, 10)
        assert "upload the context again" in ask(stack, context).json()["detail"]


def test_no_worker_is_said_after_a_grace_time(own_server: Server, tiny_folder: Path) -> None:
    with running_stack(own_server, tiny_folder, PRECIS_WORKER_GRACE_S="0.5") as stack:
        context = upload(stack, SHORT)
        stack.kill("worker")
        time.sleep(2.5)
        found = ask(stack, context)
        assert found.status_code == 503
        assert found.json()["code"] == "no_worker"
        assert "retry-after" in found.headers


def holders(stack: Stack) -> list[str]:
    """Roles of workers that hold a snapshot."""
    return [worker["role"] for worker in stack.http().get("/v1/workers").json()["data"] if worker["hot"]]


def test_workers_of_one_role_work_together_and_the_answering_one_loads_ahead(
    own_server: Server, tiny_folder: Path
) -> None:
    with running_stack(own_server, tiny_folder, PRECIS_ROLE="compress") as stack:
        stack.start_worker("answering", PRECIS_ROLE="answer")
        context = upload(stack, SHORT)
        wait_for(lambda: holders(stack) == ["answer"])
        assert ask(stack, context).headers["x-cache"] == "hit; memory"
        stack.kill("answering", signal.SIGTERM)
        stack.start_worker("later", PRECIS_ROLE="answer")
        url = f"/v1/contexts/{context['id']}/prefetch"
        asked = stack.http().post(url)
        assert (asked.status_code, asked.json()["status"]) == (202, "queued")
        wait_for(lambda: holders(stack) == ["answer"])
        assert stack.http().post(url).json()["status"] == "held"
        assert ask(stack, context).headers["x-cache"] == "hit; memory"
        assert stack.http().post("/v1/contexts/ctx_none/prefetch").status_code == 404
