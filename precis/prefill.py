"""Run a document through the model once, in chunks, and observe what the policy's parts asked for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from precis.core import Prefill
from precis.families import Model, Rotary
from precis.full_cache import Between, DenseCache, Document, forward_tokens, silent
from precis.observations import Observation, Reading

CHUNK = 512


@torch.inference_mode(False)  # some observations differentiate, whatever the caller has switched off
@torch.no_grad()
def prefill(
    model: Model,
    rotary: Rotary,
    document: Document,
    needs: Iterable[Observation] = (),
    between: Between = silent,
    chunk: int = CHUNK,
) -> Prefill:
    """Run the document through the model.

    Args:
        model: from `attention.plug.attach`.
        rotary: of the model.
        document: T tokens, at least one.
        needs: observations wanted.
        between: called between chunks with ("prefill" | "score", done, total) in tokens.
        chunk: tokens per forward; bounds memory, changes nothing else.

    Returns:
        The full cache and the observations.
    """
    n_tokens = document.n_tokens
    observers = {need: need.start(model.geometry, n_tokens) for need in needs}
    cache = DenseCache.empty(model, n_tokens, tuple(observers.values()))
    read_on(model, document.token_ids, cache, between, chunk)
    full = Prefill(model.geometry, cache.keys, cache.values)
    reading = Reading(model, rotary, document, full, between)
    observed: dict[Hashable, Tensor] = {need: made.finish(reading) for need, made in observers.items()}
    return Prefill(model.geometry, cache.keys, cache.values, observed, model.tables)


@torch.inference_mode(False)
@torch.no_grad()
def read_on(model: Model, token_ids: Tensor, cache: DenseCache, between: Between, chunk: int = CHUNK) -> None:
    """Read a document from where its cache ends.

    Args:
        model: from `attention.plug.attach`.
        token_ids: [T], all of the document.
        cache: with room for all of it.
        between: called between chunks with ("prefill", done, total).
        chunk: tokens per forward.
    """
    n_tokens = token_ids.shape[0]
    for start in range(cache.length, n_tokens, chunk):
        between("prefill", start, n_tokens)
        stop = min(n_tokens, start + chunk)
        forward_tokens(model, token_ids[start:stop], start, cache)
        cache.length = stop
    between("prefill", n_tokens, n_tokens)
