"""Shorthand for tests of the library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from precis.attention.plug import attach
from precis.core import Prefill, Selection, Snapshot, SnapshotHeader
from precis.families import Model, Rotary
from precis.full_cache import Document
from precis.observations import Observation
from precis.prefill import prefill
from precis.selection import gather
from precis.transform import Transform
from precis.wire.presets import HEADS, TRANSFORM, Compression, with_artifacts
from tests.tiny import VOCABULARY, tiny

N_CONTEXT = 150


def tokens(n: int, seed: int = 1) -> Tensor:
    """Random token ids."""
    return torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def attached(family: str = "llama", **changes: Any) -> Model:
    """A tiny model with the precis attention, and tables and a transform by chance."""
    return with_tables(attach(tiny(family, **changes)))


def with_tables(model: Model) -> Model:
    """The same model with tables and a transform by chance."""
    g, generator = model.geometry, torch.Generator().manual_seed(5)
    tables = {
        "retrieval": torch.rand(g.n_layers, g.n_heads, generator=generator),
        "importance": torch.rand(g.n_layers, g.n_kv_heads, generator=generator),
        "layer_errors": torch.rand(g.n_layers, generator=generator),
    }
    size = 2 * g.n_kv_heads * g.head_dim
    axes = torch.linalg.qr(torch.randn(g.n_layers, size, size, generator=generator))[0]
    heads = torch.eye(g.head_dim).expand(g.n_layers, 2, g.n_kv_heads, -1, -1)
    scales = torch.zeros(g.n_layers, size, dtype=torch.int8)
    given = {
        "mean": torch.zeros(heads.shape[:-1]),
        "root": heads,
        "leading": axes,
        "axes": axes[:, :, :0],
        "scales": scales,
    }
    chance = Transform.of(given, model.device, "c0de")
    return replace(model, tables=tables, transform=chance, artifacts={HEADS: "by chance", TRANSFORM: "c0de"})


def asked(model: Model, policy: str, keep_ratio: float, codec: str) -> Compression:
    """A compression with the fingerprints of the model's tables; `tc` at a rate that tiny documents have room for."""
    return with_artifacts(Compression(policy, keep_ratio, codec, ratio={"tc": 4.0}.get(codec)), model.artifacts)


def document(token_ids: Tensor) -> Document:
    """All body, with a request to repeat it."""
    return Document(token_ids, (0, len(token_ids)), (), (11, 12, 13), ((14, 15), (16,)))


def read(model: Model, token_ids: Tensor, *needs: Observation, chunk: int = 64) -> Prefill:
    """The full cache of these tokens."""
    return prefill(model, Rotary(model, 1024), document(token_ids), needs, chunk=chunk)


def cut(full: Prefill, keep: Tensor | None = None) -> Snapshot:
    """A snapshot of what `keep` [L, K, T] marks, by default of all that is visible."""
    g, n = full.geometry, full.n_tokens
    if keep is None:
        keep = torch.ones(g.n_layers, g.n_kv_heads, n, dtype=torch.bool)
    for layer in range(g.n_layers):
        keep[layer, :, : g.first_visible(layer, n)] = False
    return gather(full, Selection.from_mask(keep), SnapshotHeader("f", n, n, 4, {}))
