"""The arena lends pieces that do not overlap, and gets them back."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.memory import Arena

SIZE = 1 << 16


@given(st.lists(st.tuples(st.integers(0, SIZE), st.booleans()), max_size=30))
@settings(max_examples=60, deadline=None)
def test_pieces_do_not_overlap_and_come_back(wishes: list[tuple[int, bool]]) -> None:
    arena = Arena(SIZE)
    held: list[Tensor] = []
    for number, (n_bytes, drops) in enumerate(wishes):
        piece = arena.take(n_bytes)
        assert piece.shape == (n_bytes,)
        held.append(piece.fill_(number))
        if drops:
            del held[len(held) // 2]
        del piece
        assert all(not part.numel() or int(part.min()) == int(part.max()) for part in held)
        assert len({int(part[0]) for part in held if part.numel()}) == sum(part.numel() > 0 for part in held)
    del held
    gc.collect()
    assert arena.free_bytes == SIZE


def test_a_view_keeps_its_piece_and_what_does_not_fit_comes_from_elsewhere() -> None:
    arena = Arena(SIZE, touched=0)
    piece = arena.take(1 << 13)
    view = piece.view(torch.bfloat16).view(2, -1)[1]
    del piece
    gc.collect()
    assert arena.free_bytes == SIZE - (1 << 13)
    assert arena.take(SIZE).shape == (SIZE,)
    assert arena.free_bytes == SIZE - (1 << 13)
    del view
    gc.collect()
    assert arena.free_bytes == SIZE
