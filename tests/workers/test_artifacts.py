"""Tables of a model: measured by one command, found by every worker, never taken for another model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from precis.artifacts import Artifact, read
from precis.errors import ArtifactUnusable, InvalidRequest
from precis.wire import keys
from precis.wire.presets import HEADS, TRANSFORM
from tests.precis.build import attached
from tests.stack import Server, Stack, running_stack
from workers import artifacts, models
from workers.calibrate import main, with_importance
from workers.corpus import samples_of

G = attached().geometry


def made(seed: int = 0, weights: str = "w") -> Artifact:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"retrieval": (4, 4), "importance": (4, 2), "layer_errors": (4,)}
    return Artifact(HEADS, (weights,), {n: torch.rand(s, generator=generator) for n, s in shapes.items()}, {})


def test_the_operators_file_wins_and_is_shared(client: Any, tmp_path: Path) -> None:
    assert artifacts.find(client, tmp_path, "w", G) is None
    client.set(keys.artifact("w", HEADS), made(1).to_bytes())
    shared = artifacts.find(client, tmp_path, "w", G)
    assert shared is not None
    assert shared.fingerprint == made(1).fingerprint
    artifacts.write(artifacts.file_of(tmp_path, "w"), made(2))
    own = artifacts.find(client, tmp_path, "w", G)
    assert own is not None
    assert own.fingerprint == made(2).fingerprint
    assert read(client.get(keys.artifact("w", HEADS))).fingerprint == made(2).fingerprint


def test_damaged_or_foreign_tables_are_not_used(client: Any, tmp_path: Path) -> None:
    path = artifacts.file_of(tmp_path, "w")
    artifacts.write(path, made(2, weights="other"))
    client.set(keys.artifact("w", HEADS), made(1).to_bytes()[:-3])
    assert artifacts.find(client, tmp_path, "w", G) is None
    artifacts.write(path, made(2))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    client.set(keys.artifact("w", HEADS), made(1).to_bytes())
    found = artifacts.find(client, tmp_path, "w", G)
    assert found is not None
    assert found.fingerprint == made(1).fingerprint


def test_kinds_are_kept_apart_and_a_transform_must_fit_the_model(client: Any, tmp_path: Path) -> None:
    heads = (4, 2, 2, 12)
    shapes = {"mean": heads, "root": (*heads, 12), "leading": (2, 96, 20), "axes": (2, 96, 30), "scales": (2, 50)}
    tables = {name: torch.ones(shape) for name, shape in shapes.items()}
    good = Artifact(TRANSFORM, ("w",), tables, {})
    path = artifacts.file_of(tmp_path, "w", TRANSFORM)
    artifacts.write(path, good)
    found = artifacts.find(client, tmp_path, "w", G, TRANSFORM)
    assert found is not None
    assert found.fingerprint == good.fingerprint
    assert artifacts.find(client, tmp_path, "w", G) is None
    artifacts.write(artifacts.file_of(tmp_path, "w"), good)
    assert artifacts.own(tmp_path, "w", G) is None  # not of this kind
    for name, shape in (("axes", (3, 96, 30)), ("leading", (2, 90, 20)), ("axes", (2, 96)), ("scales", (2, 49))):
        wrong = Artifact(TRANSFORM, ("w",), {**tables, name: torch.ones(shape)}, {})
        with pytest.raises(ArtifactUnusable, match="another model"):
            wrong.check("w", G)
    for missing in tables:
        with pytest.raises(ArtifactUnusable, match="another model"):
            Artifact(TRANSFORM, ("w",), {n: t for n, t in tables.items() if n != missing}, {}).check("w", G)


def test_a_trained_table_replaces_the_measured_one(tmp_path: Path) -> None:
    file = tmp_path / "gates.tsv"
    file.write_text("".join(f"{i / 10}\t{1 - i / 10}\n" for i in range(4)))
    found = with_importance(made(), file, attached())
    assert found.tables["importance"][3].tolist() == pytest.approx([0.3, 0.7])
    assert found.fingerprint != made().fingerprint
    for text in ("1 2\n3 4\n", "1\tx\n", "nan nan\n" * 4):
        file.write_text(text)
        with pytest.raises(InvalidRequest, match=r"gates\.tsv"):
            with_importance(made(), file, attached())


def restart(stack: Stack) -> None:
    stack.kill("worker")
    stack.start_worker()


def test_calibrating_a_model_lets_its_workers_serve_the_policies_that_need_it(
    tiny_folder: Path,
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("PRECIS_TEST_SERVER", raising=False)  # of the tests, not a setting
    monkeypatch.setenv("PRECIS_MODEL", str(tiny_folder))
    monkeypatch.setenv("PRECIS_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PRECIS_DTYPE", "float32")  # as the stack has it
    wanted = {
        "text": "All that is gold does not glitter. " * 8,
        "compression": {"policy": "compresskv", "keep_ratio": 0.5},
    }
    with running_stack(server, tiny_folder, PRECIS_DATA_DIR=str(tmp_path)) as stack, stack.http() as http:
        refused = http.post("/v1/contexts?wait=30", json=wanted)
        assert refused.status_code == 422
        assert refused.json()["code"] == "artifact_missing"
        assert "precis calibrate" in refused.json()["detail"]
        assert main(["--samples", "2", "--length", "200"]) == 0
        path = Path(capsys.readouterr().out.splitlines()[0])
        assert path.parent == tmp_path / "artifacts"
        restart(stack)
        coded = {"codec": {"name": "tc", "ratio": 2}}
        whole = http.post("/v1/contexts?wait=30", json={**wanted, "compression": coded}).json()
        assert whole["status"] == "ready", whole
        assert 1.9 < whole["storage"]["ratio"] < 2.3
        assert (whole["policy"]["policy"], whole["policy"]["keep_ratio"]) == ("full", 1.0)
        heads = http.get(f"/v1/contexts/{whole['id']}/heads").json()["layers"]
        assert sum(head["bytes"] for layer in heads for head in layer["heads"]) < whole["storage"]["stored_bytes"]
        smaller = http.post("/v1/contexts", json={**wanted, "compression": {"codec": {"name": "int4", "ratio": 2}}})
        assert smaller.status_code == 422
        assert "one rate" in smaller.json()["detail"]
        for policy in ("compresskv", "duo"):
            body = {**wanted, "compression": {"policy": policy, "keep_ratio": 0.5}}
            ready = http.post("/v1/contexts?wait=30", json=body).json()
            assert ready["status"] == "ready", ready
            answer = http.post(f"/v1/contexts/{ready['id']}/queries", json={"question": "What?", "max_tokens": 4})
            assert answer.status_code == 200
        found = read(path.read_bytes())
        artifacts.write(path, replace(found, tables={name: table + 1 for name, table in found.tables.items()}))
        restart(stack)
        asked = http.post(f"/v1/contexts/{ready['id']}/queries", json={"question": "What?", "max_tokens": 4})
        assert asked.headers["x-cache"] == "hit; store"  # the snapshot is as good as it was
        server.client().delete(keys.snapshot(ready["id"]))
        restart(stack)
        stale = http.post(f"/v1/contexts/{ready['id']}/queries", json={"question": "What?", "max_tokens": 4})
        assert stale.status_code == 409  # it cannot be made again as it was
        assert "another calibration" in stale.json()["detail"]
        kept = http.post(f"/v1/contexts/{whole['id']}/queries", json={"question": "What?", "max_tokens": 4})
        assert kept.headers["x-cache"] == "hit; store"  # by the transform, which is as it was
        of_heads, of_transform = path, path.with_name(path.name.replace(HEADS, TRANSFORM))
        assert of_heads.exists()
        again = read(of_transform.read_bytes())
        artifacts.write(of_transform, replace(again, tables={**again.tables, "mean": again.tables["mean"] + 1}))
        restart(stack)
        other = http.post(f"/v1/contexts/{whole['id']}/queries", json={"question": "What?", "max_tokens": 4})
        assert other.status_code == 409
        assert "another calibration" in other.json()["detail"]


def test_facts_lie_where_samples_say(tiny_folder: Path) -> None:
    served = models.serve("tiny", str(tiny_folder), torch.device("cpu"), torch.float32)
    samples = samples_of(served.prompter, "One thing is here. Another thing is there. And a third one, too.", 4, 300)
    assert len(samples) == 4
    depths = [sample.fact[0] / len(sample.token_ids) for sample in samples]
    assert depths == sorted(depths)
    for sample in samples:
        start, stop = sample.fact
        fact = "".join(served.prompter.piece(token) for token in sample.token_ids[start:stop])
        answer = "".join(served.prompter.piece(token) for token in sample.answer)
        assert "secret number" in fact
        assert answer.strip() in fact
        assert 300 <= len(sample.token_ids) < 450
    assert samples == samples_of(
        served.prompter, "One thing is here. Another thing is there. And a third one, too.", 4, 300
    )
