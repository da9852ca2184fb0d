"""CateKV: heads that look at the same tokens whatever is asked are pruned, heads that change keep everything.

Jiang et al. 2025, "CateKV: On Sequential Consistency for Long-Context LLM Inference Acceleration", ICML 2025,
arXiv:2608.30295.
Differs from the paper, whose thresholds were not available: heads are ranked by the coefficient of variation over the
observed rows of the attention mass on their critical tokens; the budget decides how many keep everything, at most
`adaptive_share` of them, and the rest of it is shared equally among the consistent heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.window import WindowQueries, window_attention
from precis.ranking import shared_out
from precis.scorers import Comparable, Needs

_TINY = 1e-20


@dataclass(frozen=True, slots=True)
class Consistency:
    """Everything for heads whose attention varies, equal budgets for the others.

    Attributes:
        n_window: observed rows.
        adaptive_share: share of heads that may keep everything, in [0, 1].
        critical_share: share of tokens that count as critical.
    """

    n_window: int = 64
    adaptive_share: float = 0.4
    critical_share: float = 0.05
    needs_comparable: Comparable = "head"
    nested: Comparable | None = None

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(self.n_window)})

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Give varying heads everything as far as half of the free budget goes, and share the rest.

        Args:
            prefill: queries [L, H, W, D] of the last W tokens.
            scores: [L, K, T]; only its shape is read.
            protected: [T] bool.
            per_head: mean entries per head.

        Returns:
            [L, K] int64.
        """
        n_layers, n_kv_heads, n_tokens = scores.shape
        n_heads, n_protected = n_layers * n_kv_heads, int(protected.sum())
        room, total = n_tokens - n_protected, (per_head - n_protected) * n_heads
        n_adaptive = min(int(self.adaptive_share * n_heads), total // 2 // max(1, room))
        order = torch.sort(self.variation(prefill).flatten(), descending=True, stable=True).indices
        rest = total - n_adaptive * room
        n_others = n_heads - n_adaptive
        wanted = torch.full((n_others,), rest / max(1, n_others), dtype=torch.float64)
        budgets = torch.full((n_heads,), room, dtype=torch.int64, device=scores.device)
        budgets[order[n_adaptive:]] = shared_out(wanted, rest).to(scores.device)
        return budgets.reshape(n_layers, n_kv_heads) + n_protected

    def variation(self, prefill: Prefill) -> Tensor:
        """[L, K] deviation over mean of the mass on each head's critical tokens, over the observed rows."""
        g = prefill.geometry
        found = torch.zeros(g.n_layers, g.n_kv_heads, device=prefill.keys.device)
        for layer, weights in window_attention(prefill, self.n_window):
            rows = weights.mean(1)  # [K, W, n]
            n_critical = max(1, int(self.critical_share * rows.shape[-1]))
            critical = rows.mean(1).topk(n_critical, -1).indices
            mass = rows.gather(2, critical[:, None].expand(-1, rows.shape[1], -1)).sum(-1)
            found[layer] = mass.std(-1) / mass.mean(-1).clamp_min(_TINY)
        return found
