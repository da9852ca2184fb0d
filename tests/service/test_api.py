"""The HTTP API over real processes, with a tiny model."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from precis.wire.presets import TRIM_NAMES, VIEW_NAMES
from tests.stack import Stack, wait_for

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EASY = {"policy": "snapkv", "keep_ratio": 0.5}


def upload(stack: Stack, text: str | None = DOCUMENT, wait: int = 60, **fields: Any) -> dict[str, Any]:
    body = {"text": text, "compression": EASY, **fields}
    response = stack.http().post(f"/v1/contexts?wait={wait}", json=body)
    assert response.status_code in (200, 202), response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.fixture(scope="module")
def context(stack: Stack) -> dict[str, Any]:
    return upload(stack, DOCUMENT + "shared")


def ask(stack: Stack, context: dict[str, Any], **body: Any) -> httpx.Response:
    url = f"/v1/contexts/{context['id']}/queries"
    return stack.http().post(url, json={"question": "Who?", "max_tokens": 8, "ignore_eos": True, **body})


def frames(response: httpx.Response) -> list[tuple[str, Any]]:
    found, name = [], "message"
    for line in response.text.splitlines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            found.append((name, line[6:] if line == "data: [DONE]" else json.loads(line[6:])))
            name = "message"
    return found


def test_upload_is_accepted_with_a_location_and_becomes_ready(stack: Stack) -> None:
    response = stack.http().post("/v1/contexts", json={"text": DOCUMENT + "accepted", "compression": EASY})
    assert response.status_code == 202
    made = response.json()
    assert response.headers["location"] == f"/v1/contexts/{made['id']}"
    assert made["status"] in ("queued", "prefilling")
    ready = upload(stack, DOCUMENT + "accepted")
    assert ready["id"] == made["id"]
    assert ready["status"] == "ready"
    storage = ready["storage"]
    assert storage["ratio"] == pytest.approx(storage["raw_bytes"] / storage["stored_bytes"], abs=0.01)
    assert storage["raw_bytes"] == ready["usage"]["total_tokens"] * 4 * 2 * 12 * 4
    assert ready["policy"] == {"policy": "snapkv", "keep_ratio": 0.5, "codec": "int4-hadamard"}
    assert ready["fidelity"]["n_tokens"] > 0
    assert set(ready["timings"]) == {"queue_ms", "prefill_ms", "compress_ms", "store_ms"}


def test_stored_bytes_are_what_the_store_holds(stack: Stack, context: dict[str, Any]) -> None:
    fields = stack.server.client().hgetall(f"snapshot:{{{context['id']}}}")
    assert sum(len(v) for k, v in fields.items() if k != b"parts") == context["storage"]["stored_bytes"]


def test_the_same_upload_is_the_same_context_and_another_policy_another(stack: Stack, context: dict[str, Any]) -> None:
    again = stack.http().post("/v1/contexts", json={"text": DOCUMENT + "shared", "compression": EASY})
    assert again.status_code == 200
    assert again.json()["id"] == context["id"]
    other = upload(stack, DOCUMENT + "shared", compression={"policy": "streaming", "keep_ratio": 0.5})
    assert other["id"] != context["id"]


def test_identical_uploads_at_the_same_time_are_one_context(stack: Stack) -> None:
    with ThreadPoolExecutor(12) as pool:
        made = list(pool.map(lambda _: upload(stack, DOCUMENT + "together"), range(12)))
    assert len({found["id"] for found in made}) == 1
    assert all(found["status"] == "ready" for found in made)


def test_a_file_can_be_uploaded_with_options(stack: Stack) -> None:
    files = {"file": ("notes.txt", (DOCUMENT + "file").encode(), "text/plain")}
    options = json.dumps({"metadata": {"a": "b"}, "compression": EASY})
    response = stack.http().post("/v1/contexts?wait=60", files=files, data={"options": options})
    assert response.status_code == 200, response.text
    assert response.json()["name"] == "notes.txt"
    assert response.json()["metadata"] == {"a": "b"}


def test_messages_and_instructions_make_contexts(stack: Stack) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": DOCUMENT + "messages"}]
    made = upload(stack, compression=EASY, text=None, messages=messages)
    assert made["status"] == "ready"
    other = upload(stack, DOCUMENT + "messages", instructions="Be brief.")
    assert other["id"] == made["id"]  # the same tokens


def test_streamed_and_unstreamed_answers_agree(stack: Stack, context: dict[str, Any]) -> None:
    whole = ask(stack, context).json()
    streamed = frames(ask(stack, context, stream=True))
    assert "".join(data["text"] for name, data in streamed if name == "token") == whole["text"]
    name, end = streamed[-1]
    assert name == "done"
    assert end["usage"] == whole["usage"]
    assert end["finish_reason"] == whole["finish_reason"]


def test_answers_say_what_was_cached_and_how_long_it_took(stack: Stack, context: dict[str, Any]) -> None:
    response = ask(stack, context)
    body = response.json()
    assert response.headers["x-cache"].startswith("hit; ")
    n_tokens = context["usage"]["total_tokens"]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": n_tokens}
    assert body["usage"]["prompt_tokens"] > n_tokens
    assert body["usage"]["completion_tokens"] == 8
    assert body["timings"]["cache_n"] == n_tokens
    assert body["timings"]["decode_ms"] > 0


def test_twenty_questions_get_the_answers_of_a_fresh_load(stack: Stack, context: dict[str, Any]) -> None:
    questions = [f"What is {i}?" for i in range(20)]
    first = [ask(stack, context, question=q).json()["text"] for q in questions]
    again = [ask(stack, context, question=q).json()["text"] for q in reversed(questions)]
    assert first == again[::-1]
    assert len(set(first)) > 1


def test_concurrent_questions_get_the_answers_of_serial_ones(stack: Stack) -> None:
    contexts = [upload(stack, f"{DOCUMENT} nonce {i}") for i in range(4)]
    jobs = [(contexts[i % 4], f"Question {i}?") for i in range(24)]
    serial = [ask(stack, c, question=q, max_tokens=12).json()["text"] for c, q in jobs]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda job: ask(stack, job[0], question=job[1], max_tokens=12).json()["text"], jobs))
    assert together == serial


def test_sampling_follows_its_seed(stack: Stack, context: dict[str, Any]) -> None:
    def draw(seed: int) -> str:
        text: str = ask(stack, context, temperature=1.5, seed=seed, max_tokens=16).json()["text"]
        return text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(5)}) > 1


def test_a_stop_string_ends_the_answer_before_it(stack: Stack, context: dict[str, Any]) -> None:
    text = ask(stack, context, max_tokens=30).json()["text"]
    stop = next(text[i : i + 2] for i in range(2, len(text) - 2) if "\ufffd" not in text[i : i + 2])
    body = ask(stack, context, max_tokens=30, stop=stop).json()
    assert body["text"] == text[: text.index(stop)]
    assert body["finish_reason"] == "stop"


def test_logprobs_name_each_token_and_its_alternatives(stack: Stack, context: dict[str, Any]) -> None:
    body = ask(stack, context, logprobs=True, top_logprobs=3).json()
    assert len(body["logprobs"]) == 8
    for found in body["logprobs"]:
        assert found["logprob"] <= 0
        assert len(found["top_logprobs"]) == 3
        assert found["top_logprobs"][0]["logprob"] == pytest.approx(found["logprob"])  # greedy


def test_a_view_answers_and_leaves_the_snapshot_for_others(stack: Stack, context: dict[str, Any]) -> None:
    before = ask(stack, context, max_tokens=16).json()["text"]
    small = ask(stack, context, max_tokens=16, view={"kind": "sage", "budget": 16})
    assert small.status_code == 200
    for kind in VIEW_NAMES:
        assert ask(stack, context, max_tokens=16, view=kind).json()["text"]
        assert ask(stack, context, max_tokens=16, view={"kind": kind, "budget": 10_000}).json()["text"] == before
    assert ask(stack, context, max_tokens=16).json()["text"] == before


def test_a_trim_bounds_a_long_answer_and_leaves_others_alone(stack: Stack, context: dict[str, Any]) -> None:
    before = ask(stack, context, max_tokens=60, ignore_eos=True).json()["text"]
    for kind in TRIM_NAMES:
        wide = ask(stack, context, max_tokens=60, ignore_eos=True, trim=kind)
        assert wide.json()["text"] == before
        small = ask(stack, context, max_tokens=60, ignore_eos=True, trim={"kind": kind, "budget": 16})
        assert small.json()["usage"]["completion_tokens"] == 60
    sliding = ask(stack, context, max_tokens=60, ignore_eos=True, view={"kind": "sage", "budget": 40, "slide": True})
    assert sliding.json()["usage"]["completion_tokens"] == 60
    assert ask(stack, context, max_tokens=60, ignore_eos=True).json()["text"] == before


def test_scores_agree_with_answers(stack: Stack) -> None:
    made = upload(stack, DOCUMENT + "raw", template="raw")
    answer = ask(stack, made, question=None, prompt="abc", logprobs=True, top_logprobs=20, max_tokens=1).json()
    best = answer["logprobs"][0]["top_logprobs"]
    plain = [found for found in best if found["token"] and found["token"].isascii() and found["token"].isprintable()]
    items = [{"prompt": "abc", "continuation": found["token"]} for found in plain]
    scored = stack.http().post(f"/v1/contexts/{made['id']}/score", json={"items": items})
    assert scored.status_code == 200, scored.text
    assert scored.headers["x-cache"].startswith("hit")
    for found, score in zip(plain, scored.json()["items"], strict=True):
        assert score["tokens"] == [found["token"]]
        assert score["logprobs"] == pytest.approx([found["logprob"]], abs=1e-4)
        assert score["greedy"] == [found == best[0]]


def test_heads_add_up(stack: Stack, context: dict[str, Any]) -> None:
    body = stack.http().get(f"/v1/contexts/{context['id']}/heads").json()
    assert [len(layer["heads"]) for layer in body["layers"]] == [2] * 4
    kept = sum(head["n_kept"] for layer in body["layers"] for head in layer["heads"])
    assert kept == 8 * round(0.5 * context["usage"]["total_tokens"])
    stored = sum(layer["stored_bytes"] for layer in body["layers"])
    levels = kept  # one byte per entry, for tightening
    assert stored + levels < context["storage"]["stored_bytes"] < stored + levels + 2000


def test_events_tell_the_work_and_can_be_resumed(stack: Stack) -> None:
    made = stack.http().post("/v1/contexts", json={"text": DOCUMENT + "events", "compression": EASY}).json()
    response = stack.http().get(f"/v1/contexts/{made['id']}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [name for name, _ in frames(response)]
    assert names[0] == "queued"
    assert names[-2:] == ["stored", "ready"]
    assert "prefill" in names
    assert "scored" in names
    last = [line[4:] for line in response.text.splitlines() if line.startswith("id: ")][-2]
    rest = stack.http().get(f"/v1/contexts/{made['id']}/events", headers={"Last-Event-ID": last})
    assert [name for name, _ in frames(rest)] == ["stored", "ready"]


def test_lists_page_and_filter(stack: Stack) -> None:
    made = [upload(stack, f"{DOCUMENT} page {i}") for i in range(3)]
    first = stack.http().get("/v1/contexts?limit=2").json()
    assert [c["id"] for c in first["data"]] == [made[2]["id"], made[1]["id"]]
    assert first["has_more"]
    second = stack.http().get("/v1/contexts", params={"limit": 2, "after": first["data"][-1]["id"]}).json()
    assert second["data"][0]["id"] == made[0]["id"]
    assert stack.http().get("/v1/contexts?status=failed").json()["data"] == []
    assert stack.http().get("/v1/contexts?model=none").json()["data"] == []


def test_patch_changes_name_metadata_pin_and_expiry(stack: Stack) -> None:
    made = upload(stack, DOCUMENT + "patch", ttl_s=100)
    url = f"/v1/contexts/{made['id']}"
    pinned = stack.http().patch(url, json={"pinned": True, "name": "n", "metadata": {"k": "v"}}).json()
    assert (pinned["pinned"], pinned["expire_time"], pinned["name"], pinned["metadata"]) == (
        True,
        None,
        "n",
        {"k": "v"},
    )
    assert stack.server.client().pttl(f"snapshot:{{{made['id']}}}") == -1
    again = stack.http().patch(url, json={"ttl_s": 50}).json()
    assert again["pinned"] is False
    assert 40_000 < stack.server.client().pttl(f"snapshot:{{{made['id']}}}") <= 50_000


def test_delete_frees_everything(stack: Stack) -> None:
    made = upload(stack, DOCUMENT + "delete")
    response = stack.http().delete(f"/v1/contexts/{made['id']}")
    assert response.json()["freed_bytes"] > made["storage"]["stored_bytes"]
    assert stack.http().get(f"/v1/contexts/{made['id']}").status_code == 404
    left = [key for key in stack.server.client().keys("*") if made["id"].encode() in key]
    assert left == []
    assert upload(stack, DOCUMENT + "delete")["id"] != made["id"]


def test_an_expired_context_says_so_and_can_be_uploaded_again(stack: Stack) -> None:
    made = upload(stack, DOCUMENT + "expire", ttl_s=1)
    time.sleep(1.2)
    assert ask(stack, made).status_code == 410
    assert stack.http().get(f"/v1/contexts/{made['id']}").json()["status"] == "expired"
    again = upload(stack, DOCUMENT + "expire")
    assert again["id"] != made["id"]
    assert ask(stack, again).status_code == 200


def test_totals_follow_contexts(stack: Stack) -> None:
    def totals() -> tuple[float, ...]:
        lines = dict(line.rsplit(" ", 1) for line in stack.http().get("/metrics").text.splitlines() if line[0] != "#")
        return tuple(float(lines[f'precis_context_bytes{{kind="{kind}"}}']) for kind in ("raw", "stored"))

    def sums() -> tuple[float, ...]:
        found = stack.http().get("/v1/contexts?limit=200").json()
        assert not found["has_more"]
        storage = [context["storage"] for context in found["data"] if context["status"] == "ready"]
        return tuple(float(sum(each[f"{kind}_bytes"] for each in storage)) for kind in ("raw", "stored"))

    made = upload(stack, DOCUMENT + "totals")
    wait_for(lambda: totals() == sums())  # contexts of other tests may be expiring meanwhile
    assert min(totals()) >= made["storage"]["stored_bytes"] > 0
    stack.http().delete(f"/v1/contexts/{made['id']}")
    wait_for(lambda: totals() == sums())


def test_a_context_is_tightened_without_reading_it_again(stack: Stack) -> None:
    made = upload(stack, DOCUMENT + "tighten")
    url = f"/v1/contexts/{made['id']}"
    patched = stack.http().patch(url, json={"compression": {"keep_ratio": 0.3}, "name": "small"})
    assert patched.status_code == 200
    assert patched.json()["status"] in ("queued", "compressing")
    wait_for(lambda: stack.http().get(url).json()["status"] == "ready")
    small = stack.http().get(url).json()
    assert small["name"] == "small"
    assert small["policy"]["keep_ratio"] == 0.3
    assert small["storage"]["kept_ratio"] == pytest.approx(0.3, abs=0.002)
    assert small["storage"]["stored_bytes"] < made["storage"]["stored_bytes"] * 0.7
    assert small["fidelity"] is None
    assert small["timings"]["prefill_ms"] == 0
    told = [name for name, _ in frames(stack.http().get(f"{url}/events"))]
    assert told == ["queued", "tighten", "storing", "stored", "ready"]
    found = ask(stack, small)
    assert found.status_code == 200
    assert found.headers["x-cache"].startswith("hit")
    again = upload(stack, DOCUMENT + "tighten", compression={**EASY, "keep_ratio": 0.3})
    assert again["id"] == made["id"]
    loose = upload(stack, DOCUMENT + "tighten")
    assert loose["id"] != made["id"]
    taken = stack.http().patch(f"/v1/contexts/{loose['id']}", json={"compression": {"keep_ratio": 0.3}})
    assert (taken.status_code, taken.json()["code"]) == (422, "invalid_request")
    assert made["id"] in taken.json()["detail"]


@pytest.mark.parametrize(
    ("policy", "ratio", "keep_ratio", "words"),
    [
        ("snapkv", 0.5, 0.5, "already"),
        ("snapkv", 0.5, 0.9, "already"),
        ("snapkv", 0.5, 0.05, "always kept"),
        ("critical-adakv", 0.5, 0.3, "cannot be tightened"),
        ("kvzip-fisher", 0.3, 0.15, "fewer of the last tokens"),
        ("snapkv", 0.5, 1.5, "less than 1"),
    ],
)
def test_what_cannot_be_tightened_is_said(
    stack: Stack, policy: str, ratio: float, keep_ratio: float, words: str
) -> None:
    made = upload(stack, DOCUMENT[:450] + "untightened", compression={"policy": policy, "keep_ratio": ratio})
    refused = stack.http().patch(f"/v1/contexts/{made['id']}", json={"compression": {"keep_ratio": keep_ratio}})
    assert refused.status_code == 422
    assert words in refused.text
    assert stack.http().get(f"/v1/contexts/{made['id']}").json()["status"] == "ready"


def test_bounds_and_probes_over_the_api(stack: Stack) -> None:
    small = upload(stack, DOCUMENT + "bounds", compression={"policy": "kvzip", "max_bytes": 60_000})
    assert small["status"] == "ready"
    assert small["storage"]["stored_bytes"] <= 60_000
    assert small["policy"]["max_bytes"] == 60_000
    close = upload(stack, DOCUMENT + "bounds", compression={"policy": "kvzip", "codec": "raw16", "max_kl": 0.05})
    assert close["fidelity"]["kl"] <= 0.05
    assert 0 < close["storage"]["kept_ratio"] <= 1
    failed = upload(stack, DOCUMENT + "bounds", compression={"policy": "kvzip", "max_kl": 1e-9})
    assert failed["error"]["code"] == "bound_not_reached"
    probed = upload(stack, DOCUMENT + "bounds", compression={"policy": "kvzip-probes", "probes": ["Who jumps?"]})
    assert probed["policy"]["probes"] == ["Who jumps?"]
    assert probed["status"] == "ready"
    assert ask(stack, probed).status_code == 200


def test_models_and_workers_are_listed(stack: Stack) -> None:
    models = stack.http().get("/v1/models").json()["data"]
    assert [model["object"] for model in models] == ["model"]
    (worker,) = stack.http().get("/v1/workers").json()["data"]
    assert worker["pid"] == stack.processes["worker"].pid
    assert {"id", "pid", "host", "role", "model", "load"} <= set(worker)
    assert worker["model"] == models[0]["id"]


def test_the_openai_sdk_works_streaming_too(stack: Stack, context: dict[str, Any]) -> None:
    sdk = openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0)
    assert [model.id for model in sdk.models.list()] == [context["model"]]
    asked: dict[str, Any] = {
        "model": context["model"],
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"context": context["id"]},
    }
    whole = sdk.chat.completions.create(**asked)
    assert whole.choices[0].message.content == ask(stack, context, ignore_eos=False).json()["text"]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == context["usage"]["total_tokens"]
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]
    in_parts = sdk.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": parts}]})
    assert in_parts.choices[0].message.content == whole.choices[0].message.content
    chunks = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    with pytest.raises(openai.NotFoundError, match="no context"):
        sdk.chat.completions.create(**{**asked, "extra_body": {"context": "ctx_none"}})


def test_the_schema_names_every_route(stack: Stack) -> None:
    paths = stack.http().get("/openapi.json").json()["paths"]
    assert {
        "/v1/contexts",
        "/v1/contexts/{context_id}",
        "/v1/contexts/{context_id}/events",
        "/v1/contexts/{context_id}/heads",
        "/v1/contexts/{context_id}/queries",
        "/v1/contexts/{context_id}/score",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/workers",
        "/healthz",
        "/readyz",
        "/metrics",
    } <= set(paths)
