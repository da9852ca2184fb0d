"""What was kept of each token equals a count by hand."""

from __future__ import annotations

import torch

from precis.retention import kept_shares, precisions
from tests.precis.build import N_CONTEXT, attached, cut, read, tokens


def test_shares_are_counted_over_heads_of_layers_that_choose() -> None:
    for family in ("llama", "gemma3"):
        model = attached(family)
        g = model.geometry
        keep = torch.rand(g.n_layers, g.n_kv_heads, N_CONTEXT, generator=torch.Generator().manual_seed(1)) < 0.5
        keep[:, :, 3] = True
        keep[:, :, 4] = False
        layers = g.evicting_layers(N_CONTEXT)
        assert len(layers) == (4 if family == "llama" else 1)
        expected = (keep[layers].double().mean((0, 1)) * 255).round()
        found = torch.tensor(list(kept_shares(cut(read(model, tokens(N_CONTEXT)), keep.clone()))))
        assert torch.equal(found.double(), expected)
        assert (int(found[3]), int(found[4])) == (255, 0)


def test_precisions_go_from_the_coarsest_to_the_finest_token() -> None:
    classes = torch.tensor([[0, 4, -2, 8], [0, 0, -2, 8]])
    assert list(precisions(classes)) == [51, 102, 0, 255]
    assert list(precisions(torch.zeros(3, 5, dtype=torch.int64))) == [0] * 5
