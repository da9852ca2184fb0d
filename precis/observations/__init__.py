"""Observations: what is measured of a document for scorers and selectors. One observation, one file.

All hold O(T) numbers; none forms a T x T tensor.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from precis.core import Geometry, Prefill
from precis.families import Model, Rotary
from precis.full_cache import Between, Document, Watcher


@dataclass(frozen=True, slots=True)
class Reading:
    """A document that was just read, and the means to probe it."""

    model: Model
    rotary: Rotary
    document: Document
    full: Prefill
    between: Between


class Observer(Watcher, Protocol):
    """Accumulates one observation of one document."""

    def finish(self, reading: Reading) -> Tensor:
        """The observation, with L first; may run passes of its own over the document."""
        ...


class Observation(Hashable, Protocol):
    """What to observe. Equal observations are made once, however many parts ask for them."""

    def start(self, geometry: Geometry, n_tokens: int) -> Observer:
        """Begin, before the first token is read."""
        ...


class Afterwards:
    """An observer that needs the whole full cache, and nothing before."""

    def see(self, layer: int, query: Tensor, keys: Tensor, start: int) -> None:
        """Not needed."""
