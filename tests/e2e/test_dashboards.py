"""A real Prometheus scrapes a live service under load: every expression of every dashboard and alert has an answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.test_metrics import ask, happened, port_of
from tests.stack import ADMIN_KEY, Stack, running_server, running_stack, wait_for

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
NEEDS_GPU = {"gpu"}
COMPARED = re.compile(r"^(.*) (?:<|>) [\d.]+$", re.DOTALL)


def board(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def tools() -> None:
    for tool in ("prometheus", "promtool"):
        if shutil.which(tool) is None:
            if os.environ.get("CI"):
                pytest.fail(f"{tool} is missing")
            pytest.skip(f"{tool} is not installed (Debian: prometheus)")


@pytest.fixture(scope="module")
def prometheus(tools: None, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that has scraped a service to which everything happened."""
    folder = tmp_path_factory.mktemp("prometheus")
    environment = {"PRECIS_ADMIN_KEY": ADMIN_KEY, "PRECIS_VLLM_METRICS": "true", "PRECIS_AUTO_CACHE": "true"}
    with running_server("--maxmemory", "200mb") as server, running_stack(server, tiny_folder, **environment) as stack:
        targets = folder / "targets.json"

        def tell() -> None:
            api = stack.base_url.removeprefix("http://")
            groups = [("precis-api", api), ("precis-worker", f"127.0.0.1:{port_of(stack)}")]
            told = json.dumps([{"targets": [target], "labels": {"job": job}} for job, target in groups])
            targets.with_suffix(".new").write_text(told)
            targets.with_suffix(".new").rename(targets)

        tell()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "deploy/prometheus/alerts.yml")],
            "scrape_configs": [
                {"job_name": "live", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
            try:
                wait_for(lambda: httpx.get(f"http://{address}/-/ready").status_code == 200, 30)
                under_load(stack, tell)
                yield f"http://{address}"
            finally:
                process.terminate()
                process.wait(20)


def under_load(stack: Stack, tell: Any) -> None:
    """Everything happens, twice, so that counters grow between scrapes, and goes on while targets are found anew."""
    stopping = threading.Event()

    def keep_telling() -> None:
        while not stopping.wait(0.2):
            tell()

    teller = threading.Thread(target=keep_telling)
    teller.start()
    try:
        for _ in range(2):
            _, context = happened(stack)
        for _ in range(4):  # between scrapes, on the worker that lives
            ask(stack, context)
            stack.http().post(f"/v1/contexts/{context['id']}/append?wait=60", json={"text": "More."})
            time.sleep(1.2)
    finally:
        stopping.set()
        teller.join()
    tell()


def answered(prometheus: str, expression: str) -> list[Any]:
    text = expression.replace("$__rate_interval", "90s").replace("[10m]", "[90s]").replace("[15m]", "[90s]")
    found = httpx.get(f"{prometheus}/api/v1/query", params={"query": text.replace("[1h]", "[90s]")}).json()
    assert found["status"] == "success", (expression, found)
    series: list[Any] = found["data"]["result"]
    return series


def test_every_expression_of_every_dashboard_has_an_answer(prometheus: str) -> None:
    n_asked, empty = 0, []
    for path in BOARDS:
        for panel in board(path)["panels"]:
            for target in panel["targets"]:
                if not answered(prometheus, target["expr"]) and path.stem not in NEEDS_GPU:
                    empty.append((path.stem, panel["title"], target["expr"]))
                n_asked += 1
    assert empty == []
    assert n_asked > 60


def test_every_alert_is_about_something_that_is_there(prometheus: str) -> None:
    for rule in RULES:
        expression = rule["expr"].strip()
        assert answered(prometheus, rule["expr"]) is not None
        compared = COMPARED.match(expression)
        assert compared, rule["alert"]
        if rule["alert"] in ("PrecisNotScraped", "PrecisJobsLost"):  # nothing is absent, no worker died on a job
            continue
        assert answered(prometheus, compared[1]), rule["alert"]
    firing = httpx.get(f"{prometheus}/api/v1/alerts").json()["data"]["alerts"]
    assert {alert["labels"]["alertname"] for alert in firing} <= {rule["alert"] for rule in RULES}


def test_metrics_are_sound(tools: None, prometheus: str) -> None:
    targets = httpx.get(f"{prometheus}/api/v1/targets").json()["data"]["activeTargets"]
    assert {target["labels"]["job"] for target in targets} == {"precis-api", "precis-worker"}
    for target in targets:
        text = httpx.get(target["scrapeUrl"]).text
        ours = "".join(line for line in text.splitlines(keepends=True) if "precis_" in line)
        done = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, text=True, check=False)
        known = {"precis_iteration_tokens_total"}  # vLLM's name of a histogram
        told = [line for line in (done.stdout + done.stderr).splitlines() if line.split(" ")[0] not in known]
        assert told == [], told


def test_rules_are_checked_and_each_alert_is_tested_and_has_a_runbook(tools: None) -> None:
    for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run(
            ["promtool", *command], cwd=ROOT / "deploy/prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (ROOT / "deploy/prometheus/alerts_test.yml").read_text()
    runbooks = (ROOT / "docs/runbooks.md").read_text()
    for rule in RULES:
        name = rule["alert"]
        assert f"alertname: {name}\n" in tested, name
        assert f"\n## {name}\n" in runbooks
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"


def test_dashboards_are_those_that_are_made_and_well_formed() -> None:
    before = {path: path.read_text() for path in BOARDS}
    subprocess.run([sys.executable, str(ROOT / "deploy/grafana/make.py")], check=True)
    assert {path: path.read_text() for path in BOARDS} == before, "run: python deploy/grafana/make.py"
    uids = [board(path)["uid"] for path in BOARDS]
    assert len(set(uids)) == len(uids) >= 7
    for path in BOARDS:
        panels, taken = board(path)["panels"], set[tuple[int, int]]()
        assert len({panel["id"] for panel in panels}) == len(panels)
        for panel in panels:
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
            where = panel["gridPos"]
            cells = {(where["x"] + x, where["y"] + y) for x in range(where["w"]) for y in range(where["h"])}
            assert not cells & taken
            assert where["x"] + where["w"] <= 24
            taken |= cells
    folders = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/default.yml").read_text())
    assert folders["providers"][0]["type"] == "file"
