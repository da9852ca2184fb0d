"""Queue and store as two servers, and a store that is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from precis.wire import keys
from tests.stack import Stack, running_server, running_stack

TEXT = "The quick brown fox jumps over the lazy dog. " * 12
HOW = {"policy": "snapkv", "keep_ratio": 0.5}


def upload(stack: Stack, text: str, **compression: Any) -> Any:
    body = {"text": text, "compression": {**HOW, **compression}}
    return stack.http().post("/v1/contexts?wait=60", json=body)


def test_snapshots_live_on_the_store_and_all_else_on_the_queue(tiny_folder: Path) -> None:
    with running_server() as queue, running_server() as store:
        environment = {"PRECIS_STORE_URL": store.url, "PRECIS_HOT_BYTES": "0", "PRECIS_SEAL_KEY": "secret"}
        with running_stack(queue, tiny_folder, **environment) as stack:
            context = upload(stack, TEXT).json()
            assert context["status"] == "ready"
            assert [key.decode() for key in store.client().keys("*")] == [keys.snapshot(context["id"])]
            assert queue.client().keys("snapshot*") == []
            url = f"/v1/contexts/{context['id']}"
            answer = stack.http().post(f"{url}/queries", json={"question": "Who?", "max_tokens": 4})
            assert answer.headers["x-cache"] == "hit; store"
            assert stack.http().patch(url, json={"ttl_s": 1000}).status_code == 200
            assert 900_000 < store.client().pttl(keys.snapshot(context["id"])) <= 1_000_000
            assert stack.http().delete(url).json()["freed_bytes"] > context["storage"]["stored_bytes"]
            assert store.client().keys("*") == []


def test_a_store_that_is_too_small_refuses_the_upload_or_fails_the_context_clearly(tiny_folder: Path) -> None:
    small = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with running_server() as queue, running_server(*small) as store:  # noqa: SIM117 — the stack needs the store's URL
        with running_stack(queue, tiny_folder, PRECIS_STORE_URL=store.url) as stack:
            refused = upload(stack, TEXT * 20, policy="full", keep_ratio=None, codec="raw16")
            assert refused.status_code == 507
            assert refused.json()["code"] == "store_full"
            assert "give the store more memory" in refused.json()["detail"]
            assert upload(stack, TEXT).json()["status"] == "ready"
            for key in store.client().keys("*"):
                store.client().persist(key)
            store.client().config_set("maxmemory-policy", "volatile-lru")  # the estimate passes, the write does not
            store.client().config_set("maxmemory", store.client().info("memory")["used_memory"])
            failed = upload(stack, TEXT * 3, policy="full", keep_ratio=None, codec="raw16").json()
            assert failed["status"] == "failed"
            assert failed["error"]["code"] == "store_full"
            assert store.client().keys("staging*") == []
