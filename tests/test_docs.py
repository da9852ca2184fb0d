"""The README says what is true: the walk, settings, routes, policies, codecs and error codes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from precis.wire.presets import CODEC_NAMES, PRESETS
from precis.wire.settings import SERVICE_NAMES, WORKER_NAMES, unknown_names
from service.reference import reference
from service.settings import Settings as ServiceSettings
from workers.settings import Settings as WorkerSettings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
README = (ROOT / "README.md").read_text()
STEPS = re.findall(r"`((?:precis|service|workers)/[\w/]+\.py):(\w+)`", README)


def test_the_walk_has_its_length() -> None:
    assert len(STEPS) >= 25


@pytest.mark.parametrize(("path", "function"), STEPS, ids=[f"{p}:{f}" for p, f in STEPS])
def test_each_step_of_the_walk_exists(path: str, function: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    names = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert function in names


def test_settings_are_the_known_names_and_in_the_operations_guide() -> None:
    text = (DOCS / "operations.md").read_text()
    assert set(ServiceSettings.model_fields) == SERVICE_NAMES
    assert set(WorkerSettings.model_fields) == WORKER_NAMES
    for name in SERVICE_NAMES | WORKER_NAMES:
        assert f"`PRECIS_{name.upper()}`" in text, name
    for file in PAGES:
        for written in set(re.findall(r"PRECIS_[A-Z_]*[A-Z]", file.read_text())):
            assert unknown_names([written]) == [], (file.name, written)


def test_the_api_reference_is_what_the_routes_say() -> None:
    assert (DOCS / "api.md").read_text() == reference(), "run: python -m service.reference > docs/api.md"


def test_every_policy_and_codec_is_described() -> None:
    methods = (DOCS / "methods.md").read_text().split("\n## ")[1]
    assert methods.startswith("Policies")
    for name in PRESETS:
        assert methods.count(f"\n| `{name}`") == 1, name
    guide, codecs = (DOCS / "guide.md").read_text(), (DOCS / "codecs.md").read_text()
    assert f"All {len(PRESETS)}, with papers" in guide
    for name in CODEC_NAMES:
        assert f"`{name}`" in guide
        assert f"`{name}`" in codecs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_metrics_that_are_named_exist() -> None:
    sources = "".join((ROOT / name / "metrics.py").read_text() for name in ("service", "workers"))
    for page in PAGES:
        for name in set(re.findall(r"`(precis_[a-z_]+)", page.read_text())):
            assert f'"{name}"' in sources, (page.name, name)


def test_commands_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)`?", README)):
        assert f"\n{target}:" in makefile, target
