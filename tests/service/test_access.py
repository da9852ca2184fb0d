"""Keys, tenants, quotas and rates, over real processes: nobody sees what is not theirs, and bounds are hard."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from precis.wire import keys
from service.app import create_app
from service.settings import Settings, check_exposure
from tests.stack import ADMIN_KEY, Stack, wait_for

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EASY = {"policy": "snapkv", "keep_ratio": 0.5}
OPEN = {"/v1", "/healthz", "/readyz", "/metrics"}


def key(stack: Stack, **wanted: Any) -> httpx.Client:
    """A client with a new key."""
    made = stack.http().post("/v1/admin/keys", json=wanted)
    assert made.status_code == 201, made.text
    return stack.http(headers={"authorization": f"Bearer {made.json()['key']}"})


def upload(client: httpx.Client, text: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/contexts?wait=60", json={"text": text, "compression": EASY, **fields})


def routes() -> list[tuple[str, str]]:
    """Every route of the API, by method."""
    paths = create_app(Settings()).openapi()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert len(found) > 20
    return sorted(found)


def test_every_route_needs_a_key_but_those_that_say_nothing_of_anybody(guarded: Stack) -> None:
    for method, path in routes():
        url = guarded.base_url + path.replace("{", "").replace("}", "")
        for headers in ({}, {"authorization": "Bearer pk_wrong"}, {"authorization": "Basic abc"}, {"x-api-key": "no"}):
            found = httpx.request(method, url, headers=headers, json={})
            if path in OPEN:
                assert found.status_code in (200, 503), (method, path)
            else:
                assert found.status_code == 401, (method, path)
                assert found.headers["www-authenticate"] == "Bearer"
    assert httpx.get(guarded.base_url + "/openapi.json").status_code == 200  # the shape of the API is no secret


def test_a_key_opens_the_api_in_every_header_that_clients_use(guarded: Stack) -> None:
    secret = key(guarded).headers["authorization"].removeprefix("Bearer ")
    for headers in ({"authorization": f"bearer {secret}"}, {"x-api-key": secret}, {"x-goog-api-key": secret}):
        assert httpx.get(guarded.base_url + "/v1/contexts", headers=headers).status_code == 200
    sdk = openai.OpenAI(base_url=guarded.base_url + "/v1", api_key=secret)
    assert len(sdk.models.list().data) == 1
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=guarded.base_url + "/v1", api_key="pk_other").models.list()


def test_a_key_is_stored_as_its_hash_only_and_is_worthless_once_revoked_or_expired(guarded: Stack) -> None:
    made = guarded.http().post("/v1/admin/keys", json={"name": "one", "tenant": "acme"}).json()
    client = guarded.http(headers={"authorization": f"Bearer {made['key']}"})
    assert client.get("/v1/contexts").status_code == 200
    everything = b"".join(b"".join(pair) for pair in guarded.server.client().hgetall(keys.API_KEYS).items())
    assert made["key"].encode() not in everything
    listed = [each for each in guarded.http().get("/v1/admin/keys").json()["data"] if each["id"] == made["id"]]
    assert listed == [{name: value for name, value in made.items() if name != "key"}]
    assert guarded.http().delete(f"/v1/admin/keys/{made['id']}").json()["deleted"] is True
    assert client.get("/v1/contexts").status_code == 401
    assert guarded.http().delete(f"/v1/admin/keys/{made['id']}").status_code == 422
    short = key(guarded, ttl_s=1)
    assert short.get("/v1/contexts").status_code == 200
    wait_for(lambda: short.get("/v1/contexts").status_code == 401, 5)


def test_scopes_bound_what_a_key_may_do(guarded: Stack) -> None:
    asks, writes = key(guarded, scopes=["ask"]), key(guarded, scopes=["ask", "write"])
    context = upload(writes, DOCUMENT + "scopes").json()
    url = f"/v1/contexts/{context['id']}"
    assert upload(asks, DOCUMENT).status_code == 403
    assert asks.patch(url, json={"name": "x"}).status_code == 403
    assert asks.delete(url).status_code == 403
    assert asks.get(url).status_code == 200
    answer = asks.post(f"{url}/queries", json={"question": "Who?", "max_tokens": 4})
    assert answer.status_code == 200
    for client in (asks, writes):
        found = client.get("/v1/admin/keys")
        assert found.status_code == 403
        assert found.json()["code"] == "forbidden"
    assert writes.delete(url).status_code == 200


def test_a_foreign_context_looks_exactly_like_one_that_never_was(guarded: Stack) -> None:
    mine, other = key(guarded, tenant="mine"), key(guarded, tenant="other")
    context = upload(mine, DOCUMENT + "isolation").json()
    unknown = "ctx_" + "0" * 20
    bodies: dict[str, Any] = {
        "/queries": {"question": "Who?"},
        "/batch": {"questions": ["Who?"]},
        "/append": {"text": "More."},
        "/score": {"items": [{"prompt": "a", "continuation": "b"}]},
    }
    n_seen = 0
    for method, path in routes():
        if "{context_id}" not in path:
            continue
        body: Any = next(
            (found for end, found in bodies.items() if path.endswith(end)), {} if method == "PATCH" else None
        )
        seen = []
        for context_id in (context["id"], unknown):
            found = other.request(method, path.replace("{context_id}", context_id), json=body)
            seen.append((found.status_code, found.text.replace(context_id, "ID")))
        assert seen[0] == seen[1], (method, path)
        assert seen[0][0] == 404, (method, path, seen)
        n_seen += 1
    assert n_seen >= 11
    chat = {"messages": [{"role": "user", "content": "Who?"}], "context": context["id"]}
    assert other.post("/v1/chat/completions", json=chat).status_code == 404
    assert other.get("/v1/contexts").json()["data"] == []
    own = upload(other, DOCUMENT + "own").json()
    url = f"/v1/contexts/{own['id']}/queries"
    for also in (context["id"], unknown):
        found = other.post(url, json={"question": "Who?", "also": [also]})
        assert (found.status_code, found.json()["detail"]) == (404, f"there is no context {also}")
    gemini = {"contents": [{"parts": [{"text": "Who?"}]}], "cachedContent": f"cachedContents/{context['id']}"}
    assert other.post(f"/v1beta/models/{own['model']}:generateContent", json=gemini).status_code == 404
    assert other.get("/v1/contexts", params={"after": context["id"]}).status_code == 404
    assert mine.get(f"/v1/contexts/{context['id']}").status_code == 200


def test_the_same_document_of_two_tenants_is_two_contexts(guarded: Stack) -> None:
    one, two = key(guarded, tenant="one"), key(guarded, tenant="two")
    first, second = (upload(client, DOCUMENT + "same").json() for client in (one, two))
    assert first["id"] != second["id"]
    assert upload(one, DOCUMENT + "same").json()["id"] == first["id"]
    assert one.delete(f"/v1/contexts/{first['id']}").status_code == 200
    assert (
        two.post(f"/v1/contexts/{second['id']}/queries", json={"question": "Who?", "max_tokens": 2}).status_code == 200
    )


def test_quotas_are_hard_also_when_uploads_come_at_once(guarded: Stack) -> None:
    client = key(guarded, tenant="bounded")
    assert guarded.http().put("/v1/admin/tenants/bounded/quota", json={"max_contexts": 3}).status_code == 200
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: upload(client, f"{DOCUMENT} number {i}"), range(8)))
    assert sorted(each.status_code for each in found) == [200] * 3 + [429] * 5
    refused = next(each for each in found if each.status_code == 429).json()
    assert (refused["code"], refused["quota"]) == ("quota_exceeded", "contexts")
    told = guarded.http().get("/v1/admin/tenants/bounded").json()
    assert told["usage"]["contexts"] == 3
    made = client.get("/v1/contexts").json()["data"]
    assert told["usage"]["bytes"] == told["usage"]["stored_bytes"] == sum(c["storage"]["stored_bytes"] for c in made)
    client.delete(f"/v1/contexts/{made[0]['id']}")
    assert upload(client, DOCUMENT + " after").status_code == 200
    room = {"max_bytes": guarded.http().get("/v1/admin/tenants/bounded").json()["usage"]["bytes"] + 10}
    guarded.http().put("/v1/admin/tenants/bounded/quota", json=room)
    assert upload(client, DOCUMENT + " too much").json()["quota"] == "bytes"
    for each in client.get("/v1/contexts").json()["data"]:
        client.delete(f"/v1/contexts/{each['id']}")
    usage = guarded.http().get("/v1/admin/tenants/bounded").json()["usage"]
    assert usage == dict.fromkeys(usage, 0)


def test_usage_returns_to_nothing_whatever_becomes_of_a_context(guarded: Stack) -> None:
    client = key(guarded, tenant="passing")

    def usage() -> dict[str, int]:
        found: dict[str, int] = guarded.http().get("/v1/admin/tenants/passing").json()["usage"]
        return found

    deleted = client.post("/v1/contexts", json={"text": DOCUMENT * 40, "compression": EASY}).json()
    assert usage()["active"] == 1
    assert usage()["bytes"] > 0
    client.delete(f"/v1/contexts/{deleted['id']}")
    expiring = upload(client, DOCUMENT + "expiring", ttl_s=2).json()
    tightened = upload(client, DOCUMENT + "tightened").json()
    client.patch(f"/v1/contexts/{tightened['id']}", json={"compression": {"keep_ratio": 0.3}})
    wait_for(lambda: client.get(f"/v1/contexts/{tightened['id']}").json()["status"] == "ready")
    smaller = client.get(f"/v1/contexts/{tightened['id']}").json()["storage"]["stored_bytes"]
    assert smaller < tightened["storage"]["stored_bytes"]
    wait_for(lambda: client.get(f"/v1/contexts/{expiring['id']}").json()["status"] == "expired")
    wait_for(lambda: usage()["contexts"] == 1)
    assert usage()["bytes"] == usage()["stored_bytes"] == smaller
    client.delete(f"/v1/contexts/{expiring['id']}")
    client.delete(f"/v1/contexts/{tightened['id']}")
    wait_for(lambda: not any(usage().values()))


def test_too_many_requests_are_told_when_to_come_again(guarded: Stack) -> None:
    client = key(guarded, tenant="hasty")
    guarded.http().put("/v1/admin/tenants/hasty/quota", json={"requests_per_minute": 20})
    found = [client.get("/v1/contexts").status_code for _ in range(24)]
    assert found[:20] == [200] * 20
    assert 429 in found[20:]
    refused = client.get("/v1/contexts")
    assert refused.json()["code"] == "rate_limited"
    time.sleep(int(refused.headers["retry-after"]))
    assert client.get("/v1/contexts").status_code == 200
    chat = [client.post("/v1/chat/completions", json={"messages": [], "context": "x"}) for _ in range(3)][-1]
    assert chat.json()["error"]["type"] == "rate_limit_error"


def test_changes_are_noted_with_who_made_them(guarded: Stack) -> None:
    client = key(guarded, tenant="noted", name="audited")
    context = upload(client, DOCUMENT + "noted").json()
    client.post(f"/v1/contexts/{context['id']}/queries", json={"question": "Who?", "max_tokens": 2})
    client.delete(f"/v1/contexts/{context['id']}")
    noted = [each for each in guarded.http().get("/v1/admin/audit").json()["data"] if each["tenant"] == "noted"]
    assert [(each["method"], each["status"]) for each in noted] == [("DELETE", "200"), ("POST", "200")]
    assert noted[1]["target"] == context["id"]
    assert noted[0]["key"].startswith("key_")
    assert "Who?" not in json.dumps(noted)
    assert "fox" not in json.dumps(noted)


@pytest.mark.parametrize(
    ("host", "admin_key", "open_to_all", "starts"),
    [
        ("127.0.0.1", "", False, True),
        ("localhost", "", False, True),
        ("::1", "", False, True),
        ("0.0.0.0", "", False, False),
        ("192.168.1.4", "", False, False),
        ("example.org", "", False, False),
        ("0.0.0.0", "", True, True),
        ("0.0.0.0", "short", False, False),
        ("0.0.0.0", ADMIN_KEY, False, True),
    ],
)
def test_without_keys_a_server_listens_on_loopback_only(
    host: str, admin_key: str, open_to_all: bool, starts: bool
) -> None:
    if starts:
        check_exposure(host, admin_key, open_to_all=open_to_all)
    else:
        with pytest.raises(SystemExit, match="PRECIS_ADMIN_KEY"):
            check_exposure(host, admin_key, open_to_all=open_to_all)


def test_without_keys_there_is_one_caller_with_every_scope(stack: Stack) -> None:
    assert stack.http().get("/v1/admin/keys").status_code == 200
    context = upload(stack.http(), DOCUMENT + "open").json()
    assert context["status"] == "ready"
    assert stack.http().get("/v1/admin/tenants/default").json()["usage"]["contexts"] >= 1
