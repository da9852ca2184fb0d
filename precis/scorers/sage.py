"""SAGE-KV: one top-k per head from the last token's query.

Wang et al. 2025, "LLMs Know What to Drop: Self-Attention Guided KV Cache Eviction for Efficient Long-Context
Inference", arXiv:2503.08879.
Differs from the paper: at upload no question is known, so the last token is the document's; the paper's own setting is
the query-time view in `precis.views`. The paper does not say how the group is reduced: logits are summed over it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.window import WindowQueries
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class Sage:
    """Score a token by the last query's logit for it, summed over the query group."""

    comparable: Comparable = "head"
    kind: Kind = "other"

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(1)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: the last token's queries [L, H, 1, D].

        Returns:
            [L, K, T] float32.

        Raises:
            ValueError: if no query was observed.
        """
        g = prefill.geometry
        scaling = torch.tensor(g.scaling, device=prefill.keys.device)
        last = prefill.seen(WindowQueries(1))[:, :, -1].reshape(g.n_layers, g.n_kv_heads, g.group_size, g.head_dim)
        logits = last.float() @ prefill.keys.float().transpose(-1, -2)
        return logits.sum(2) * scaling[:, None, None]
