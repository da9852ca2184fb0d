"""transformers as it comes: the whole prompt again for every question, and its own cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Plain:
    """A model with SDPA attention."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        self._hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def ask(self, prompt: Sequence[int], n_tokens: int) -> tuple[float, float, int]:
        """Of `generate`: times of the first token and of the end, on the clock, and tokens."""
        clock = _Clock()
        ids = torch.tensor([list(prompt)])
        self._hf.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=n_tokens, max_new_tokens=n_tokens, do_sample=False,
            logits_processor=[clock], pad_token_id=0,
        )  # fmt: skip
        return clock.first, time.perf_counter(), n_tokens


class _Clock:
    """Notes when logits came for the first time."""

    def __init__(self) -> None:
        self.first = 0.0

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        return scores
