"""Policies: named compositions of parts. A literal dict of real objects; a method is a row here, not a code path."""

from __future__ import annotations

from dataclasses import dataclass

from precis.budgets import Allocator
from precis.budgets.adaptive import Adaptive
from precis.budgets.global_ import Global
from precis.budgets.uniform import Uniform
from precis.scorers import Needs, Scorer
from precis.scorers.kvzip import KVzip
from precis.scorers.sage import Sage
from precis.scorers.snapkv import SnapKV
from precis.scorers.streaming import Streaming
from precis.selectors import Selector
from precis.selectors.topk import TopK
from precis.selectors.two_stage import TwoStage

_WIDTH = {"head": 0, "layer": 1, "global": 2}


@dataclass(frozen=True, slots=True)
class Policy:
    """A scorer, an allocator and a selector that fit together; else ValueError."""

    scorer: Scorer
    allocator: Allocator
    selector: Selector

    def __post_init__(self) -> None:
        has, wants = self.scorer.comparable, self.allocator.needs_comparable
        if self.selector.wants_attention and self.scorer.kind != "attention":
            raise ValueError(
                f"{type(self.selector).__name__} weights attention with value norms, but the scores of "
                f"{type(self.scorer).__name__} are no plain attention (or are weighted already)"
            )
        if _WIDTH[has] < _WIDTH[wants]:
            raise ValueError(
                f"{type(self.allocator).__name__} compares scores across a {wants}, "
                f"but those of {type(self.scorer).__name__} are comparable across a {has} only"
            )

    @property
    def needs(self) -> Needs:
        """Observations that the parts read."""
        return self.scorer.needs | self.selector.needs


POLICIES: dict[str, Policy] = {
    "full": Policy(Streaming(), Uniform(), TopK()),
    "streaming": Policy(Streaming(), Uniform(), TopK()),
    "snapkv": Policy(SnapKV(), Uniform(), TopK()),
    "criticalkv": Policy(SnapKV(), Uniform(), TwoStage()),
    "critical-adakv": Policy(SnapKV(), Adaptive(), TwoStage()),
    "sage": Policy(Sage(), Uniform(), TopK()),
    "kvzip": Policy(KVzip(), Global(), TopK()),
}
