"""All fixtures. None is ever imported by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where kernels are defined, so before they are imported

from tests.stack import Server, Stack, running_server, running_stack
from tests.tiny import save_tiny

EVALSET = Path(__file__).parents[2] / "shared" / "evalset" / "dev"


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long a storm lasts, and which."""
    parser.addoption("--seconds", default="60", help="of the chaos suite's storm")
    parser.addoption("--every", default="1.25", help="so many seconds something is killed")
    parser.addoption("--seed", default="1", help="of what is killed when")


def pytest_configure() -> None:
    """Two threads at most, so that tests on a shared machine do not fight."""
    torch.set_num_threads(2)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="transformers")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow, GPU and chaos tests run only when asked for."""
    asked = config.getoption("-m")
    for item in items:
        for marker in ("slow", "gpu", "chaos"):
            if item.get_closest_marker(marker) and marker not in str(asked):
                item.add_marker(pytest.mark.skip(reason=f"run with -m {marker}"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder of a tiny Llama with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def session_server() -> Iterator[Server]:
    """One server for tests that do not hurt it."""
    with running_server() as server:
        yield server


@pytest.fixture
def server(session_server: Server) -> Server:
    """The same, emptied."""
    session_server.client().flushall()
    return session_server


@pytest.fixture
def client(server: Server) -> Any:
    """A client of the emptied server."""
    return server.client()


@pytest.fixture(scope="session")
def stack(tiny_folder: Path) -> Iterator[Stack]:
    """API and one worker with the tiny model, for tests that do not hurt them."""
    with running_server() as server, running_stack(server, tiny_folder) as stack:
        yield stack


@pytest.fixture
def evalset() -> Path:
    """Real documents, where they lie beside the checkout."""
    if not EVALSET.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{EVALSET} is missing")
        pytest.skip("the evaluation set is not beside this checkout")
    return EVALSET
