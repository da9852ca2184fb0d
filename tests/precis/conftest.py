"""One tiny model for the tests of a module; tiny tensors are faster on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from precis.families import Model, Rotary
from tests.precis.build import attached


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """For the tests of the library."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Model:
    """A tiny model with the precis attention, and tables and a transform by chance."""
    return attached()


@pytest.fixture(scope="module")
def rotary(model: Model) -> Rotary:
    """Of this model."""
    return Rotary(model, 512)
