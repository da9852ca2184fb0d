"""CompressKV: let only heads that are known to retrieve vote, and keep what they look at for all heads of the layer.

Lin et al. 2025, "CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before Generation",
arXiv:2508.02401.
As in the paper: the four best query heads of a layer vote with the attention of the last 8 tokens, averaged over
neighbours; the table of heads is measured once per model (`precis.calibration`). Differs from the paper: the window is
the document's end, since no question is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from precis.core import Prefill
from precis.observations.window import WindowQueries, window_attention
from precis.scorers import Comparable, Kind, Needs, blank


@dataclass(frozen=True, slots=True)
class CompressKV:
    """Score a token by what the layer's retrieval heads pay to it.

    Attributes:
        n_voters: query heads per layer that vote.
        n_window: observed tokens.
        kernel: width of the pooling over positions, in tokens; odd.
    """

    n_voters: int = 4
    n_window: int = 8
    kernel: int = 5
    comparable: Comparable = "layer"
    kind: Kind = "attention"

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(self.n_window)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token, the same for all kv heads of a layer.

        Args:
            prefill: queries of the last tokens, and the table `retrieval` [L, H].

        Returns:
            [L, K, T] float32; 0 inside the window.
        """
        scores, table = blank(prefill), prefill.table("retrieval")
        for layer, weights in window_attention(prefill, self.n_window):
            voters = table[layer].sort(descending=True, stable=True).indices[: self.n_voters]
            seen = weights.flatten(0, 1)[voters].mean((0, 1))[None]
            pooled = functional.avg_pool1d(seen, self.kernel, stride=1, padding=self.kernel // 2)
            scores[layer, :, : seen.shape[-1]] = pooled
        return scores
