"""Tables of a packed step: one copy of a snapshot, however many ask it."""

from __future__ import annotations

import numpy as np
import torch

from precis.packing import plain, tables_of
from precis.session import Feed, Session
from precis.trims.slide import Slide
from precis.views.sage import SageView
from tests.precis.build import N_CONTEXT, attached, cut, read, tokens


def test_sixteen_questions_on_one_snapshot_read_one_copy_in_one_pass() -> None:
    model = attached()
    g = model.geometry
    keep = torch.rand(g.n_layers, g.n_kv_heads, N_CONTEXT, generator=torch.Generator().manual_seed(0)) < 0.5
    snapshot = cut(read(model, tokens(N_CONTEXT)), keep)
    feeds = [Feed(Session.on(snapshot), [index]) for index in range(16)]
    for feed in feeds:
        feed.session.tail.make_room(1)
    runs, places = tables_of(feeds).runs, tables_of(feeds).places
    assert runs.shape == (g.n_layers, g.n_kv_heads * 17, 8)
    start, stop = snapshot.keys.data_ptr(), snapshot.keys.data_ptr() + snapshot.keys.nbytes
    shared = (runs[..., 0] >= start) & (runs[..., 0] < stop)
    assert int(shared.sum()) == g.n_layers * g.n_kv_heads  # one run per head for all sixteen
    assert set(runs[shared][:, 6].tolist()) == {16 * g.group_size}
    assert int(runs[shared][:, 4].sum()) == snapshot.keys.shape[0]
    assert len(np.unique(places[..., 0])) == g.n_layers * 16 * g.n_kv_heads  # and tails of their own


def test_others_on_another_snapshot_stand_apart() -> None:
    model = attached()
    g = model.geometry
    one, other = (cut(read(model, tokens(40, seed))) for seed in range(2))
    feeds = [Feed(Session.on(snapshot), [1, 2]) for snapshot in (one, one, other)]
    runs = tables_of(feeds).runs
    assert runs.shape[1] == g.n_kv_heads * (2 + 3)
    rows = sorted((int(first), int(n)) for first, n in runs[0, : 2 * g.n_kv_heads, 5:7])
    assert rows == [(0, 8), (8, 4), (12, 8), (20, 4)]


def test_what_views_and_trims_choose_is_not_in_tables() -> None:
    model = attached()
    snapshot = cut(read(model, tokens(40)))
    assert plain([Feed(Session.on(snapshot), [1])])
    assert not plain([Feed(Session.on(snapshot), [1]), Feed(Session.on(snapshot, SageView(budget=20)), [1])])
    assert not plain([Feed(Session.on(snapshot, trim=Slide(8)), [1])])
    part = Session.on(snapshot)
    part.seen[0, 0] = snapshot.entries(0, 0)
    assert not plain([Feed(part, [1])])
