"""Scoring holds O(T) numbers: no operation of any policy, at 8,192 tokens, makes anything like a T x T tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from precis.families import Rotary
from precis.policies import POLICIES
from precis.prefill import prefill
from precis.selection import choose, protected_mask, score
from tests.precis.build import attached, document, tokens

T = 8192


class Largest(TorchDispatchMode):
    """Remembers the most numbers that any operation gave out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n_numbers, self.operation = 0, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor) and made.untyped_storage().nbytes() // made.element_size() > self.n_numbers:
                self.n_numbers, self.operation = made.untyped_storage().nbytes() // made.element_size(), str(func)
        return out


def largest(work: Callable[[], Any]) -> int:
    """The most numbers that an operation of `work` gave out."""
    with Largest() as seen:
        work()
    return int(seen.n_numbers)


def test_the_watch_sees_a_square() -> None:
    rows = torch.zeros(100, 1)
    assert largest(lambda: rows @ rows.T) == 100 * 100


def test_no_policy_makes_a_square_of_the_context() -> None:
    model = attached(num_hidden_layers=2, max_position_embeddings=20_000)
    asked = replace(document(tokens(T)), probes=((21, 22, 23),))
    rotary = Rotary(model, 20_000)
    needs = frozenset[Any]().union(*(policy.needs for policy in POLICIES.values()))
    found: list[Any] = []
    assert largest(lambda: found.append(prefill(model, rotary, asked, needs))) < T * T / 8
    (full,) = found
    protected = protected_mask(T, [(0, 4), (T - 128, T)], model.device)
    for name, policy in POLICIES.items():
        n_numbers = largest(lambda: choose(full, score(full, policy), policy, protected, T // 4))  # noqa: B023
        assert n_numbers < T * T / 8, name
