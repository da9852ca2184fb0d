"""Policies: named compositions of parts. A literal dict of real objects; a method is a row here, not a code path."""

from __future__ import annotations

from dataclasses import dataclass

from precis.budgets import Allocator
from precis.budgets.adaptive import Adaptive
from precis.budgets.consistency import Consistency
from precis.budgets.convex import Convex
from precis.budgets.global_ import Global
from precis.budgets.heads import TwoLevel
from precis.budgets.layer_errors import LayerErrors
from precis.budgets.mass import Mass
from precis.budgets.pyramid import Pyramid
from precis.budgets.threshold import Threshold
from precis.budgets.uniform import Uniform
from precis.mergers import Merger
from precis.mergers.folding import Folding
from precis.mergers.kvmerger import KVMerger
from precis.scorers import Comparable, Needs, Scorer
from precis.scorers.blend import Blend
from precis.scorers.compactor import Compactor
from precis.scorers.compresskv import CompressKV
from precis.scorers.corm import Corm
from precis.scorers.defensive import Defensive as DefensiveScorer
from precis.scorers.expected import Expected
from precis.scorers.finch import Finch
from precis.scorers.fisher import Fisher
from precis.scorers.h2o import H2O
from precis.scorers.keydiff import KeyDiff
from precis.scorers.knorm import Knorm
from precis.scorers.kvzip import KVzip
from precis.scorers.lagkv import LagKV
from precis.scorers.probing import Probing
from precis.scorers.random_ import Random
from precis.scorers.sage import Sage
from precis.scorers.snapkv import SnapKV
from precis.scorers.streaming import Streaming
from precis.scorers.tova import Tova
from precis.selectors import Selector
from precis.selectors.cascade import Cascade
from precis.selectors.defensive import Defensive
from precis.selectors.topk import TopK
from precis.selectors.two_stage import TwoStage
from precis.trims.corm import Corm as CormTrim
from precis.trims.gkv import GKV
from precis.trims.slide import Slide
from precis.views.cluster import ClusterView
from precis.views.quest import QuestView
from precis.views.sage import SageView

VIEWS: dict[str, type[SageView | QuestView | ClusterView]] = {
    "sage": SageView,
    "quest": QuestView,
    "cluster": ClusterView,
}
TRIMS: dict[str, type[GKV | CormTrim | Slide]] = {"gkv": GKV, "corm": CormTrim, "slide": Slide}
_WIDTH = {"head": 0, "layer": 1, "global": 2}


@dataclass(frozen=True, slots=True)
class Policy:
    """A scorer, an allocator, a selector, and for some a merger, that fit together; else ValueError."""

    scorer: Scorer
    allocator: Allocator
    selector: Selector
    merger: Merger | None = None

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
    def nested(self) -> Comparable | None:
        """Across what a smaller budget keeps a subset, or None: then a snapshot cannot be tightened."""
        return self.allocator.nested if self.selector.nested and self.merger is None else None

    @property
    def needs(self) -> Needs:
        """Observations that the parts read."""
        return self.scorer.needs | self.allocator.needs | self.selector.needs


_SNAPKV, _KVZIP, _KVMERGER = SnapKV(), KVzip(), KVMerger()
_PLAIN_EXPECTED = Expected(value_norm=False)

POLICIES: dict[str, Policy] = {
    "full": Policy(Streaming(), Uniform(), TopK()),
    "streaming": Policy(Streaming(), Uniform(), TopK()),
    "random": Policy(Random(), Uniform(), TopK()),
    "snapkv": Policy(_SNAPKV, Uniform(), TopK()),
    "criticalkv": Policy(_SNAPKV, Uniform(), TwoStage()),
    "critical-adakv": Policy(_SNAPKV, Adaptive(), TwoStage()),
    "adakv": Policy(SnapKV(32, 7, "maximum"), Convex(), TopK()),
    "pyramidkv": Policy(_SNAPKV, Pyramid(), TopK()),
    "sage": Policy(Sage(), Uniform(), TopK()),
    "tova": Policy(Tova(), Uniform(), TopK()),
    "finch": Policy(Finch(), Uniform(), TopK()),
    "h2o": Policy(H2O(), Uniform(), TopK()),
    "minikv": Policy(H2O(), Pyramid(7.0), TopK()),
    "corm": Policy(Corm(), Threshold(), TopK()),
    "dbudgetkv": Policy(Streaming(), Mass(), TopK()),
    "cascadingkv": Policy(H2O(), Uniform(), Cascade()),
    "catekv": Policy(_SNAPKV, Consistency(), TopK()),
    "kvmerger": Policy(H2O(), Uniform(), _KVMERGER, _KVMERGER),
    "compresskv": Policy(CompressKV(), LayerErrors(), TopK()),
    "duo": Policy(Streaming(), TwoLevel(by_table=True), TopK()),
    "expected": Policy(Expected(), Uniform(), TopK()),
    "expected-adakv": Policy(Expected(epsilon=1e-2), Adaptive(), TopK()),
    "critical-expected": Policy(_PLAIN_EXPECTED, Uniform(), TwoStage(order=2)),
    "keydiff": Policy(KeyDiff(), Uniform(), TopK()),
    "knorm": Policy(Knorm(), Uniform(), TopK()),
    "lagkv": Policy(LagKV(), Uniform(), TopK()),
    "compactor": Policy(Compactor(), Uniform(), TopK()),
    "defensivekv": Policy(DefensiveScorer(), Adaptive(safeguard=0.0), Defensive()),
    "layer-defensivekv": Policy(DefensiveScorer(), Global(), Defensive()),
    "kvzip": Policy(_KVZIP, Global(), TopK()),
    "kvzip-uniform": Policy(_KVZIP, Uniform(), TopK()),
    "kvzip-layer": Policy(_KVZIP, Adaptive(safeguard=0.0), TopK()),
    "kvzip-head": Policy(_KVZIP, TwoLevel(), TopK()),
    "kvzip-plus": Policy(KVzip(plus=True), Global(), TopK()),
    "kvzip-critical": Policy(_KVZIP, Global(), TwoStage(order=2)),
    "kvzip-folding": Policy(_KVZIP, Global(), TopK(), Folding()),
    "fisher": Policy(Fisher(), Global(), TopK()),
    "kvzip-fisher": Policy(Fisher(attention=True), Global(), TopK()),
    "probes": Policy(Probing(), Global(), TopK()),
    "kvzip-probes": Policy(Blend((_KVZIP, Probing()), (1.0, 1.0)), Global(), TopK()),
}
