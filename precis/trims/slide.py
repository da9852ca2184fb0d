"""Sliding: an answer remembers its last tokens only.

How StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) and SAGE-KV (Wang et al. 2025, arXiv:2503.08879) keep a cache at a
constant size while decoding. Differs from both: the question is never dropped, and positions stay as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slide:
    """Keep the last entries.

    Attributes:
        budget: entries of the answer per kv head.
    """

    budget: int = 512
    every: int = 1
    n_window: int = 0

    def keep(self, weights: Tensor, rows: Tensor, keys: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See `Trim`; nothing but the order is read."""
        kept = torch.zeros(memory.shape, dtype=torch.bool, device=memory.device)
        kept[-self.budget :] = True
        return kept, memory
