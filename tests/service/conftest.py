"""Fixtures of the API's tests. None is ever imported by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.stack import ADMIN_KEY, Stack, running_server, running_stack


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path) -> Iterator[Stack]:
    """A stack that asks for keys."""
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_ADMIN_KEY=ADMIN_KEY) as stack:
        yield stack


@pytest.fixture(scope="module")
def sdk(stack: Stack) -> openai.OpenAI:
    """OpenAI's client, which is told of every refusal at once."""
    return openai.OpenAI(base_url=stack.base_url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def model(sdk: openai.OpenAI) -> str:
    """The name of the model that is served."""
    return sdk.models.list().data[0].id
