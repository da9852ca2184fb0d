"""A context goes from one cluster to another as a file, and is there what it was here; nothing that was touched is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from precis.errors import InvalidRequest
from precis.wire import keys
from precis.wire.exchange import Reader, Writer
from service.cli import app
from tests.stack import Stack, running_server, running_stack
from tests.tiny import save_tiny

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
WAYS = [
    {"policy": "snapkv", "keep_ratio": 0.5},
    {"policy": "kvzip", "keep_ratio": 0.4, "codec": "int4"},
]


@pytest.fixture(scope="module")
def here(tiny_folder: Path) -> Iterator[Stack]:
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_CHUNK_BYTES="4096") as stack:
        yield stack


@pytest.fixture(scope="module")
def there(tiny_folder: Path) -> Iterator[Stack]:
    secret = {"PRECIS_ENCRYPTION_KEYS": "a secret that is long enough for a test"}
    with running_server() as server, running_stack(server, tiny_folder, **secret) as stack:
        yield stack


def upload(stack: Stack, text: str = DOCUMENT, **how: Any) -> dict[str, Any]:
    body = {"text": text, "compression": how or WAYS[0], "name": "fox", "metadata": {"a": "b"}}
    found: dict[str, Any] = stack.http().post("/v1/contexts?wait=60", json=body).json()
    assert found["status"] == "ready", found
    return found


def export(stack: Stack, context: dict[str, Any]) -> bytes:
    found = stack.http().get(f"/v1/contexts/{context['id']}/snapshot")
    assert found.status_code == 200, found.text
    assert found.headers["content-type"] == "application/vnd.precis.context"
    return found.content


def take(stack: Stack, data: bytes) -> httpx.Response:
    return stack.http().post("/v1/contexts/import?wait=60", content=data)


def answer(stack: Stack, context: dict[str, Any]) -> dict[str, Any]:
    body = {"question": "Who jumps over whom?", "max_tokens": 16}
    found: dict[str, Any] = stack.http().post(f"/v1/contexts/{context['id']}/queries", json=body).json()
    return found


def frames(data: bytes) -> dict[str, bytes]:
    reader = Reader()
    found = dict(reader.feed(data))
    reader.finish()
    return found


def file_of(found: dict[str, bytes]) -> bytes:
    writer = Writer()
    return writer.begin() + b"".join(writer.frame(name, data) for name, data in found.items()) + writer.end()


@pytest.mark.parametrize("how", WAYS, ids=lambda how: how["policy"])
def test_an_imported_context_is_what_it_was_and_nothing_is_computed(
    here: Stack, there: Stack, how: dict[str, Any]
) -> None:
    context = upload(here, **how)
    answered = take(there, export(here, context))
    taken = answered.json()
    assert (answered.status_code, answered.headers["x-import"], taken["status"]) == (200, "snapshot", "ready"), taken
    assert taken["timings"]["prefill_ms"] == 0
    assert taken["id"] != context["id"]
    for name in ("fingerprint", "policy", "name", "metadata", "fidelity", "storage", "usage", "template", "model"):
        assert taken[name] == context[name], name
    for what in ("heads", "retention"):
        one, other = (
            s.http().get(f"/v1/contexts/{c['id']}/{what}").json() for s, c in ((here, context), (there, taken))
        )
        assert {**one, "id": ""} == {**other, "id": ""}
    assert answer(there, taken)["text"] == answer(here, context)["text"]
    one, other = frames(export(here, context)), frames(export(there, taken))
    assert [other[name] for name in ("tokens", "retention", "0/m")] == [one[n] for n in ("tokens", "retention", "0/m")]
    again = take(there, export(here, context))  # the same once more is the same context
    assert again.json()["id"] == taken["id"]
    assert there.http().delete(f"/v1/contexts/{taken['id']}").status_code == 200
    assert there.server.client().keys("*snapshot*") == []
    assert there.server.client().keys("*staging*") == []


def test_a_changed_snapshot_is_not_taken_over_but_made_again(here: Stack, there: Stack) -> None:
    context = upload(here, DOCUMENT + "Changed.")
    found = frames(export(here, context))
    name = next(name for name in found if name.endswith(".0"))
    changed = bytearray(found[name])
    changed[len(changed) // 2] ^= 1
    answered = take(there, file_of({**found, name: bytes(changed)}))
    assert answered.json()["status"] == "ready"
    assert answered.json()["timings"]["prefill_ms"] > 0
    assert "not_reused" in there.log("worker")
    assert answer(there, answered.json())["text"] == answer(here, context)["text"]


def test_without_its_snapshot_a_context_is_made_from_its_tokens(here: Stack, there: Stack) -> None:
    context = upload(here, DOCUMENT + "Bare.")
    bare = {name: data for name, data in frames(export(here, context)).items() if name in ("head", "tokens")}
    taken = take(there, file_of(bare)).json()
    assert taken["timings"]["prefill_ms"] > 0
    assert answer(there, taken)["text"] == answer(here, context)["text"]


def test_other_weights_compress_it_again_and_another_tokenizer_refuses(here: Stack, tmp_path: Path) -> None:
    data = export(here, upload(here))
    save_tiny(tmp_path, seed=5)
    with running_server() as server, running_stack(server, tmp_path, PRECIS_MODEL_NAME=model_of(here)) as other:
        answered = take(other, data)
        assert answered.headers["x-import"].startswith("source; made with other weights")
        assert answered.json()["status"] == "ready"
        assert answered.json()["timings"]["prefill_ms"] > 0
        found = frames(data)
        head = {**json.loads(found["head"]), "tokenizer_digest": "another"}
        refused = take(other, file_of({**found, "head": json.dumps(head).encode()}))
        assert (refused.status_code, refused.json()["code"]) == (409, "snapshot_stale")


def model_of(stack: Stack) -> str:
    found: str = stack.http().get("/v1/models").json()["data"][0]["id"]
    return found


LIES: dict[str, dict[str, Any]] = {
    "more tokens than there are": {"n_tokens": 3},
    "a body out of bounds": {"body": [0, 10**9]},
    "a role that is none": {"roles": ["root"]},
    "a template that does not fit": {"template": "raw"},
    "a long name": {"name": "x" * 1000},
    "a policy that is none": {"compression": {"policy": "nonsense"}},
    "a compression that contradicts itself": {"compression": {"policy": "full", "keep_ratio": 0.5}},
    "a field of a wrong type": {"body": "everything"},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_head_that_lies_is_refused_and_nothing_is_kept(here: Stack, there: Stack, lie: dict[str, Any]) -> None:
    found = frames(export(here, upload(here)))
    before = set(there.server.client().keys("*"))
    refused = take(there, file_of({**found, "head": json.dumps({**json.loads(found["head"]), **lie}).encode()}))
    assert refused.status_code == 422, refused.text
    assert {key for key in there.server.client().keys("*") if b"ctx" in key} <= before


def test_tokens_that_the_model_does_not_have_are_refused(here: Stack, there: Stack) -> None:
    found = frames(export(here, upload(here)))
    for token in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x7f"):
        refused = take(there, file_of({**found, "tokens": token + found["tokens"][4:]}))
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")


def test_a_cut_or_damaged_file_is_refused(here: Stack, there: Stack) -> None:
    data = export(here, upload(here))
    damaged = bytearray(data)
    damaged[-40] ^= 1
    for bad in (b"", b"PK\x03\x04", data[:100], data[:-1], data + b"x", bytes(damaged)):
        refused = take(there, bad)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request"), refused.text
    assert there.server.client().keys("*staging*") == []


def test_a_snapshot_that_is_gone_is_not_exported(here: Stack) -> None:
    context = upload(here, DOCUMENT + "Gone.")
    here.server.client().unlink(keys.snapshot(context["id"]))
    found = here.http().get(f"/v1/contexts/{context['id']}/snapshot")
    assert (found.status_code, found.json()["code"]) == (410, "snapshot_missing")


def test_imports_have_a_limit_of_their_own(tiny_folder: Path) -> None:
    with running_server() as server:
        stack = Stack(server, tiny_folder, {"PRECIS_MAX_BODY_BYTES": "2000", "PRECIS_MAX_IMPORT_BYTES": "5000"})
        try:
            stack.start_api()
            for path, size, status in (("/v1/contexts", 3000, 413), ("/v1/contexts/import", 3000, 422)):
                assert stack.http().post(path, content=b"x" * size).status_code == status
            assert stack.http().post("/v1/contexts/import", content=b"x" * 6000).status_code == 413
            unsaid = stack.http().post("/v1/contexts/import", content=iter([b"PRECIS\x00\x01", b"\0" * 6000]))
            assert unsaid.status_code in (413, 422)
        finally:
            stack.close()


def test_the_command_line_exports_and_imports(here: Stack, there: Stack, tmp_path: Path) -> None:
    context, target = upload(here, DOCUMENT + "By hand."), tmp_path / "fox.precis"
    runner = CliRunner()
    done = runner.invoke(app, ["export", context["id"], "-o", str(target), "--url", here.base_url])
    assert done.exit_code == 0, done.output
    assert target.read_bytes()[:8] == b"PRECIS\x00\x01"
    taken = runner.invoke(app, ["import", str(target), "-q", "--name", "other", "--url", there.base_url])
    assert taken.exit_code == 0, taken.output
    found = there.http().get(f"/v1/contexts/{taken.output.strip().splitlines()[-1]}").json()
    assert (found["name"], found["fingerprint"]) == ("other", context["fingerprint"])
    missing = runner.invoke(app, ["export", "ctx_none", "--url", here.base_url])
    assert missing.exit_code == 1
    assert not Path("ctx_none.precis").exists()


NAMES = st.from_regex(r"[a-z0-9./]{1,20}", fullmatch=True)


@given(st.dictionaries(NAMES, st.binary(max_size=300), max_size=6), st.data())
def test_frames_come_back_however_they_are_cut(found: dict[str, bytes], draw: st.DataObject) -> None:
    data = file_of(found)
    reader, read, at = Reader(), list[tuple[str, bytes]](), 0
    while at < len(data):
        n = draw.draw(st.integers(1, 200))
        read += reader.feed(data[at : at + n])
        at += n
    reader.finish()
    assert read == list(found.items())


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_break_the_reader_and_no_changed_byte_goes_unseen(noise: bytes, at: int, value: int) -> None:
    data = bytearray(file_of({"head": b"{}", "tokens": noise, "0/m": b"manifest"}))
    if at < len(data) and data[at] != value:
        data[at] = value
        with pytest.raises(InvalidRequest):
            frames(bytes(data))
    for start in (b"", b"PRECIS\x00\x01"):
        try:
            Reader().feed(start + noise)
        except InvalidRequest:
            continue
