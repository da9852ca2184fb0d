"""Slow, independent references: plain transformers with eviction as a mask, and softmax attention spelled out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface


@dataclass
class Mask:
    """Which of the first `n_context` tokens later rows may see, per layer and kv head."""

    keep: Tensor | None = None
    n_context: int = 0


@dataclass
class MaskedModel:
    """A model whose attention is spelled out, with an eviction mask on rows that come after the context."""

    hf: Any
    mask: Mask = field(default_factory=Mask)

    def logits(self, token_ids: Tensor, keep: Tensor | None = None, n_context: int = 0) -> Tensor:
        """[T, vocabulary] of one dense forward."""
        self.mask.keep, self.mask.n_context = keep, n_context
        before = self.hf.config._attn_implementation
        self.hf.set_attn_implementation("masked_reference")
        try:
            with torch.inference_mode():
                out: Tensor = self.hf(input_ids=token_ids[None], use_cache=False, mask=self.mask).logits[0]
                return out
        finally:
            self.hf.set_attn_implementation(before)


def masked_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Dense attention with an explicit mask; nothing shared with the product's code."""
    _, n_heads, n, _ = query.shape
    group = n_heads // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ keys.transpose(-1, -2) * kwargs["scaling"]
    if kwargs.get("softcap"):
        logits = kwargs["softcap"] * torch.tanh(logits / kwargs["softcap"])
    rows, columns = torch.arange(n)[:, None], torch.arange(n)[None]
    visible = columns <= rows
    if kwargs.get("sliding_window"):
        visible = visible & (columns > rows - kwargs["sliding_window"])
    seen = visible[None].repeat(n_heads, 1, 1)
    mask: Mask = kwargs["mask"]
    if mask.keep is not None:
        kept = torch.ones(n_heads, n, dtype=torch.bool)
        kept[:, : mask.n_context] = mask.keep[module.layer_idx].repeat_interleave(group, 0)
        seen[:, mask.n_context :] &= kept[:, None]
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ values).transpose(1, 2), None


AttentionInterface.register("masked_reference", masked_attention)
