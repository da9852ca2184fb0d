"""The README says what is true: the walk, settings, routes, policies, codecs and error codes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from precis.errors import all_errors
from precis.wire.presets import CODEC_NAMES, PRESETS
from precis.wire.settings import SERVICE_NAMES, WORKER_NAMES, unknown_names
from service.app import create_app
from service.settings import Settings as ServiceSettings
from workers.settings import Settings as WorkerSettings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
STEPS = re.findall(r"`((?:precis|service|workers)/[\w/]+\.py):(\w+)`", README)


def test_the_walk_has_its_length() -> None:
    assert len(STEPS) >= 25


@pytest.mark.parametrize(("path", "function"), STEPS, ids=[f"{p}:{f}" for p, f in STEPS])
def test_each_step_of_the_walk_exists(path: str, function: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    names = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert function in names


def test_settings_are_the_known_names_and_in_the_readme() -> None:
    assert set(ServiceSettings.model_fields) == SERVICE_NAMES
    assert set(WorkerSettings.model_fields) == WORKER_NAMES
    for name in SERVICE_NAMES | WORKER_NAMES:
        assert f"PRECIS_{name.upper()}" in README, name
    for written in set(re.findall(r"PRECIS_[A-Z_]+", README)):
        assert unknown_names([written]) == [], written


def test_every_route_is_in_the_readme() -> None:
    for path, operations in create_app(ServiceSettings()).openapi()["paths"].items():
        shown = path.replace("{context_id}", "{id}")
        for method in operations:
            assert path == "/" or f"`{method.upper()} {shown}`" in README or f"`{shown}`" in README, (method, path)


def test_every_policy_codec_and_error_code_is_in_the_readme() -> None:
    methods = (ROOT / "docs" / "methods.md").read_text().split("\n## ")[1]
    assert methods.startswith("Policies")
    for name in PRESETS:
        assert methods.count(f"\n| `{name}`") == 1, name
    assert f"All {len(PRESETS)}, with papers" in README
    for name in CODEC_NAMES:
        assert f"`{name}`" in README
    for error in all_errors():
        assert error.__subclasses__() or f"`{error.code}`" in README, error.code


def test_commands_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)`?", README)):
        assert f"\n{target}:" in makefile, target
