"""Deployment files, rendered and checked without a cluster or an engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from precis.wire.settings import unknown_names

ROOT = Path(__file__).parents[1]
OVERLAYS = ("cpu", "gpu", "keda")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def rendered(overlay: str) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", f"deploy/kubernetes/overlays/{overlay}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def pods(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["spec"]["template"] for each in found if each["kind"] in ("Deployment", "StatefulSet")]


@pytest.mark.parametrize("overlay", OVERLAYS, ids="on-{}".format)
def test_every_object_is_one_that_a_cluster_takes(overlay: str) -> None:
    found = rendered(overlay)
    assert len(found) >= 12
    for each in found:
        if each["kind"] != "ScaledObject":
            kubernetes_validate.validate(each, "1.37", strict=True)
    broken = next(each for each in found if each["kind"] == "Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS, ids="on-{}".format)
def test_pods_are_locked_down_probed_and_bounded(overlay: str) -> None:
    found = rendered(overlay)
    assert len(pods(found)) == 4
    for pod in pods(found):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            secured = container["securityContext"]
            assert secured["readOnlyRootFilesystem"] is True
            assert secured["allowPrivilegeEscalation"] is False
            assert secured["capabilities"] == {"drop": ["ALL"]}
            assert "livenessProbe" in container
            assert container["resources"]["limits"]["memory"]
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            claims = {"data"} if spec.get("volumes") is None else {volume["name"] for volume in spec["volumes"]}
            assert mounts <= claims | {"data"}
    labels = [pod["metadata"]["labels"] for pod in pods(found)]
    for each in found:
        if each["kind"] in ("PodDisruptionBudget", "NetworkPolicy", "Service"):
            spec = each["spec"]
            wanted = spec.get("selector", spec.get("podSelector", {}))
            wanted = wanted.get("matchLabels", wanted if each["kind"] == "Service" else {})
            assert any(wanted.items() <= label.items() for label in labels), each["metadata"]["name"]


@pytest.mark.parametrize("overlay", OVERLAYS, ids="on-{}".format)
def test_settings_are_those_that_exist_and_reach_the_pods(overlay: str) -> None:
    found = rendered(overlay)
    (settings,) = [each for each in found if each["kind"] == "ConfigMap"]
    assert unknown_names(settings["data"]) == []
    assert {"PRECIS_QUEUE_URL", "PRECIS_STORE_URL", "PRECIS_MODEL", "PRECIS_DEVICE"} <= set(settings["data"])
    sources = [
        source["configMapRef"]["name"]
        for pod in pods(found)
        for container in pod["spec"]["containers"]
        for source in container.get("envFrom", [])
        if "configMapRef" in source
    ]
    assert sources == [settings["metadata"]["name"]] * 2


def test_the_gpu_overlay_asks_for_one_and_keda_scales_the_worker() -> None:
    found = rendered("keda")
    (worker,) = [each for each in found if each["kind"] == "Deployment" and each["metadata"]["name"] == "worker"]
    limits = worker["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    (scaled,) = [each for each in found if each["kind"] == "ScaledObject"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == "worker"
    assert scaled["spec"]["minReplicaCount"] >= 1
    sources = (ROOT / "service/metrics.py").read_text()
    for trigger in scaled["spec"]["triggers"]:
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        for name in re.findall(r"precis_[a-z_]+", trigger["metadata"]["query"]):
            assert f'"{name}"' in sources
    grace = worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 30  # seconds that a stopping worker gives its answers


def test_the_composition_is_locked_down_and_its_settings_exist() -> None:
    services = COMPOSE["services"]
    assert {"queue", "store", "service", "worker-cpu", "worker-gpu", "prometheus", "grafana"} == set(services)
    for name, each in services.items():
        assert unknown_names(each.get("environment", {})) == [], name
        assert each["cap_drop"] == ["ALL"], name
        assert each["security_opt"] == ["no-new-privileges:true"], name
        assert each["restart"] == "unless-stopped", name
        assert name == "grafana" or each["read_only"] is True, name  # Grafana writes where it likes
        assert all(port.startswith("127.0.0.1:") for port in each.get("ports", [])), name
    assert services["queue"]["command"][-1] == "noeviction"
    assert "volatile-lru" in services["store"]["command"]
    for volume in services["prometheus"]["volumes"] + services["grafana"]["volumes"]:
        source = volume.split(":")[0]
        assert not source.startswith("./") or (ROOT / source).exists(), volume
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    names = {name for job in scraped for source in job["dns_sd_configs"] for name in source["names"]}
    assert names <= set(services)
