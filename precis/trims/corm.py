"""CORM: an entry that none of the last queries found more than evenly interesting will not be asked for again.

Dai et al. 2024, "CORM: Cache Optimization with Recent Message for Large Language Model Inference", arXiv:2404.15949.
As in the paper: an entry is minor to a query at position t if it got less than 1 / (t + 1) of the attention; entries
minor to all of the last `budget` queries go, the last `budget` entries stay, and no budget bounds what is left.
Differs from the paper: it looks every 16 tokens instead of at each; one query head that finds an entry interesting
keeps it for its kv head; and the question and the document are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Corm:
    """Drop what is minor to all recent queries.

    Attributes:
        budget: recent queries that vote, and recent entries that always stay.
        threshold: times 1 / (t + 1), the even share.
    """

    budget: int = 256
    threshold: float = 1.0
    every: int = 16

    @property
    def n_window(self) -> int:
        """Queries that vote."""
        return self.budget

    def keep(self, weights: Tensor, rows: Tensor, keys: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See `Trim`."""
        even = self.threshold / (rows.float() + 1)
        kept = (weights >= even[:, None]).any(0).any(0)
        kept[-self.budget :] = True
        return kept, memory
