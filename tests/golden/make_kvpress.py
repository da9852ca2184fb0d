"""Make kvpress.npz: what kvpress 0.5.5 keeps and scores on a tiny model. Not run by tests.

kvpress pins transformers < 5.3, so this runs in an environment of its own, from the repository's root:

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install torch==2.13.0 kvpress==0.5.5 transformers==5.2.0 msgspec
    PYTHONPATH=. /tmp/kvpress/bin/python tests/golden/make_kvpress.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import numpy as np
import torch
from kvpress.presses import leverage_press
from transformers import DynamicCache

from tests.golden.constants import (
    CHUNK,
    KERNEL,
    LAG,
    LOCAL_CHUNK,
    N_TOKENS,
    N_WINDOW,
    RATIO,
    REPEAT_FIRST,
    REPEAT_NEXT,
    SEED,
    SKETCH,
    SUFFIX,
)
from tests.tiny import tiny


class Words:
    """Stands for a tokenizer: one fixed token sequence per instruction."""

    def encode(self, text: str, **_: Any) -> torch.Tensor:
        """Token ids [1, n]."""
        return torch.tensor([REPEAT_NEXT if "starting with" in text else REPEAT_FIRST])


Grabbed = dict[int, tuple[Any, ...]]


def grabbed(model: Any, ids: torch.Tensor) -> Grabbed:
    """Per layer, what a press is called with after a real prefill: module, hidden states, keys, values, kwargs."""
    states: Grabbed = {}

    def grab(module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        module.rotary_emb, module.masked_key_indices = model.model.rotary_emb, None
        states[module.layer_idx] = (module, kwargs["hidden_states"], layer.keys.clone(), layer.values.clone(), kwargs)

    hooks = [layer.self_attn.register_forward_hook(grab, with_kwargs=True) for layer in model.model.layers]
    model(input_ids=ids, past_key_values=DynamicCache())
    for hook in hooks:
        hook.remove()
    return states


def scores_of(press: Any, states: Grabbed, attentions: Any = None) -> np.ndarray:
    """[L, K, T] float32."""
    found = []
    for index in sorted(states):
        attention, hidden, keys, values, kwargs = states[index]
        weights = None if attentions is None else attentions[index]
        found.append(press.score(attention, hidden, keys, values, weights, kwargs)[0].float().numpy())
    return np.stack(found)


def kept_by(press: Any, states: Grabbed) -> np.ndarray:
    """[L, K, T] bool, what a press leaves."""
    masks = []
    for index in sorted(states):
        attention, hidden, keys, values, kwargs = states[index]
        if isinstance(press, kvpress.CriticalAdaKVPress | kvpress.AdaKVPress):
            press.compress(attention, hidden, keys, values, None, kwargs)
            keep = torch.ones(keys.shape[1], N_TOKENS, dtype=torch.bool)
            _, heads, positions = attention.masked_key_indices
            keep[heads, positions] = False
        else:
            scores = press.score(attention, hidden, keys, values, None, kwargs)[0]
            n_kept = N_TOKENS - int(N_TOKENS * RATIO)
            keep = torch.zeros(scores.shape, dtype=torch.bool)
            keep.scatter_(-1, scores.topk(n_kept, dim=-1).indices, True)
        masks.append(keep.numpy())
    return np.stack(masks)


def kvzip_scores(model: Any, ids: torch.Tensor, *, plus: bool) -> np.ndarray:
    """[L, K, T] float32 of KVzipPress' own scoring passes."""
    press = kvpress.KVzipPress(compression_ratio=RATIO, chunk_size=CHUNK, kvzip_plus_normalization=plus)
    cache = DynamicCache()
    model(input_ids=ids, past_key_values=cache)
    press.prefix_length, press.context_length = 0, N_TOKENS
    press._suffix_ids, press._context_ids, press._cache = torch.tensor([SUFFIX]), ids, cache
    pairs = press.prepare(model, Words())
    hooks = [
        layer.self_attn.register_forward_hook(press.forward_hook, with_kwargs=True) for layer in model.model.layers
    ]
    press.start_idx = 0
    for part, repeated in pairs:
        press.end_idx = press.start_idx + part.shape[1]
        positions = torch.arange(N_TOKENS, N_TOKENS + repeated.shape[1])[None]
        model.model(input_ids=repeated, past_key_values=cache, position_ids=positions)
        press.start_idx = press.end_idx
    for hook in hooks:
        hook.remove()
    scores: np.ndarray = press.score_val[:, 0].float().numpy()
    return scores


def folded_by(press: Any, states: Grabbed) -> np.ndarray:
    """[L, K, T, D] values after merging, zero where a token was evicted."""
    found = []
    for index in sorted(states):
        attention, hidden, keys, values, kwargs = states[index]
        n_kept = N_TOKENS - int(N_TOKENS * RATIO)
        kept = press.press.score(attention, hidden, keys, values, None, kwargs).topk(n_kept, dim=-1).indices
        _, merged = press.merge(keys, values, kept)
        keep = torch.zeros(keys.shape[:3]).scatter_(-1, kept, 1.0)
        found.append((merged * keep[..., None])[0].float().numpy())
    return np.stack(found)


@torch.no_grad()
def main() -> None:
    """Write the file beside this script."""
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    ids = torch.randint(3, 199, (1, N_TOKENS), generator=torch.Generator().manual_seed(1))
    snapkv = {"compression_ratio": RATIO, "window_size": N_WINDOW, "kernel_size": KERNEL}
    presses = {
        "snapkv": kvpress.SnapKVPress(**snapkv),
        "criticalkv": kvpress.CriticalKVPress(kvpress.SnapKVPress(**snapkv)),
        "critical-adakv": kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(**snapkv)),
        "adakv": kvpress.AdaKVPress(kvpress.SnapKVPress(**snapkv)),
    }
    states = grabbed(model, ids)
    found = {name: kept_by(press, states) for name, press in presses.items()}
    finch = kvpress.FinchPress(compression_ratio=RATIO)
    finch.window_size = N_WINDOW
    scorers = {
        "keydiff": kvpress.KeyDiffPress(RATIO),
        "knorm": kvpress.KnormPress(RATIO),
        "lagkv": kvpress.LagKVPress(RATIO, lag_size=LAG),
        "tova": kvpress.TOVAPress(RATIO),
        "finch": finch,
        "expected": kvpress.ExpectedAttentionPress(RATIO),
        "expected-plain": kvpress.ExpectedAttentionPress(RATIO, use_vnorm=False),
        "compactor": kvpress.CompactorPress(RATIO, chunk_size=LOCAL_CHUNK, sketch_dimension=SKETCH, blending=0.35),
    }
    found["folding"] = folded_by(kvpress.MergingPress(kvpress.KnormPress(RATIO)), states)
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randn

    def sketch(batch: int, heads: int, dim: int, size: int, **_: Any) -> torch.Tensor:
        return drawn(dim, size, generator=generator).expand(batch, heads, dim, size)

    leverage_press.torch = SimpleNamespace(**{**vars(torch), "randn": sketch})
    found.update({name: scores_of(press, states) for name, press in scorers.items()})
    model.set_attn_implementation("eager")
    attentions = model(input_ids=ids, output_attentions=True).attentions
    found["h2o"] = scores_of(kvpress.ObservedAttentionPress(RATIO), states, attentions)
    model.set_attn_implementation("sdpa")
    path = Path(__file__).with_name("kvpress.npz")
    arrays: dict[str, Any] = {**found, "token_ids": ids[0].numpy(), "kvzip": kvzip_scores(model, ids, plus=False)}
    arrays["kvzip-plus"] = kvzip_scores(model, ids, plus=True)
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main()
