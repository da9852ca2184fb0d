"""The rules of CONTRIBUTING.md that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = sorted(path for package in ("precis", "service", "workers") for path in (ROOT / package).rglob("*.py"))
METHODS = sorted(
    path
    for folder in ("scorers", "budgets", "selectors", "codecs", "views")
    for path in (ROOT / "precis" / folder).glob("*.py")
    if path.name != "__init__.py"
)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", PRODUCT, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are_for(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300
    assert ast.get_docstring(parse(path))


@pytest.mark.parametrize("path", METHODS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_method_is_one_short_file_with_one_frozen_dataclass_and_its_paper(path: Path) -> None:
    tree = parse(path)
    assert len(path.read_text().splitlines()) <= 150
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert not found.bases
    assert any("frozen=True" in ast.unparse(decorator) for decorator in found.decorator_list)
    text = ast.get_docstring(tree) or ""
    assert "arXiv" in text or "No paper" in text
    assert "As in the paper" in text or "As in the papers" in text or "Differs from" in text or "No paper" in text


@pytest.mark.parametrize("path", [p for p in PRODUCT if p.is_relative_to(ROOT / "precis")], ids=lambda p: p.stem)
def test_everything_public_in_the_library_has_a_docstring(path: Path) -> None:
    classes = [node for node in parse(path).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for node in classes:
        assert ast.get_docstring(node) or path.name == "errors.py", node.name
    for body in (parse(path).body, *(found.body for found in classes)):
        for item in body:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                is_protocol_field = any("property" in ast.unparse(d) for d in item.decorator_list)
                assert ast.get_docstring(item) or is_protocol_field, item.name


@pytest.mark.parametrize("path", PRODUCT, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_vague_names_no_unpickling_no_environment_in_the_library(path: Path) -> None:
    assert path.stem not in ("utils", "common", "helpers", "base", "manager")
    imported = {
        name.split(".")[0]
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert not imported & {"pickle", "marshal", "shelve", "dill"}
    if path.is_relative_to(ROOT / "precis"):
        assert "os.environ" not in path.read_text()
        assert "open(" not in path.read_text().replace("mmap", "")


@pytest.mark.parametrize("path", PRODUCT, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_evaluated_or_imported_by_name(path: Path) -> None:
    called = {ast.unparse(node.func) for node in ast.walk(parse(path)) if isinstance(node, ast.Call)}
    bad = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "importlib.import_module",
        "import_module",
        "torch.load",
        "os.system",
    }
    assert not called & bad
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
            assert all(word.arg != "shell" for word in node.keywords)


def test_the_api_has_no_code_that_could_fetch_a_url() -> None:
    clients = {"client.py", "calls.py", "replies.py", "up.py", "bench.py"}  # the command line's side
    for path in (ROOT / "service").glob("*.py"):
        imported = {
            alias.name for node in ast.walk(parse(path)) if isinstance(node, ast.Import) for alias in node.names
        }
        imported |= {node.module or "" for node in ast.walk(parse(path)) if isinstance(node, ast.ImportFrom)}
        reaches = {
            name for name in imported if name.split(".")[0] in ("httpx", "urllib", "requests", "aiohttp", "http")
        }
        assert not reaches or path.name in clients, (path.name, reaches)
    program = "import sys, service.app; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", PRODUCT, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_wait_that_can_swallow_a_cancellation(path: Path) -> None:
    """`asyncio.wait_for` of Python 3.11 does, when its result and the cancellation come together."""
    assert "asyncio.wait_for(" not in path.read_text()


@pytest.mark.parametrize("package", ["precis", "service"])
def test_package_roots_import_nothing(package: str) -> None:
    tree = parse(ROOT / package / "__init__.py")
    assert not [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]


@pytest.mark.parametrize(
    "module", ["service.app", "service.cli", "precis.text", "precis.wire.codec", "precis.protection"]
)
def test_the_service_never_loads_torch(module: str) -> None:
    program = (
        f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'numpy', 'safetensors'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_import_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
