"""What is known of each policy without torch: its name, what it always keeps, and whether it evicts at all.

`precis.policies` builds the same names from real parts; a test compares both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from precis.errors import ArtifactMissing, InvalidRequest

# stored bits per number, positions included, about
CODEC_BITS = {
    "raw16": 16.0,
    "think": 13.2,
    "int8": 8.6,
    "int4": 4.6,
    "int4-hadamard": 4.6,
    "int3": 3.6,
    "int2": 3.1,
    "minikv": 4.2,
}  # stored per number
HEADS, TRANSFORM = "heads", "transform"  # kinds of artifacts: some policies read the first, `tc` the second
CODEC_NAMES = (*CODEC_BITS, "tc")
VIEW_NAMES = ("sage", "quest", "cluster")
TRIM_NAMES = ("gkv", "corm", "slide")
MAX_PROBES, MAX_PROBE_LENGTH = 32, 2000
DEFAULT_POLICY, DEFAULT_KEEP_RATIO, DEFAULT_CODEC = (
    "kvzip-fisher",
    0.25,
    "int4-hadamard",
)  # of models without a transform
DEFAULT_RATIO, MAX_RATIO = 16.0, 1000.0  # of `tc`
AUTO = "auto"  # everything kept through `tc` where the model has a transform, else the default policy


class Preset(msgspec.Struct, frozen=True):
    """A policy's protection.

    Attributes:
        n_sink: first tokens that every head keeps.
        n_window: last tokens that every head keeps.
        window_cap: share of the budget that the last tokens take at most.
        window_share: share of the budget that goes to the last tokens instead, counting sinks (SAGE-KV).
        evicts: False for `full`.
        nested: whether its snapshots can be tightened later without reading the document again.
        probes: whether it asks representative questions, which then have to be given.
        finds_budget: the kept share is the method's own, and `keep_ratio` only its ceiling, 1 by default.
        artifact: kind of artifact that the model must have, or empty.
        summary: one line for people.
    """

    summary: str
    n_sink: int = 4
    n_window: int = 0
    window_cap: float = 1.0
    window_share: float = 0.0
    evicts: bool = True
    finds_budget: bool = False
    probes: bool = False
    nested: bool = False
    artifact: str = ""


PRESETS: dict[str, Preset] = {
    "full": Preset("keeps every entry", evicts=False),
    "streaming": Preset("keeps the first and the last tokens (StreamingLLM)", nested=True),
    "random": Preset("keeps tokens by chance, the baseline to beat", n_window=64, nested=True),
    "snapkv": Preset("keeps what the document's end looks at (SnapKV)", n_window=64, nested=True),
    "criticalkv": Preset("SnapKV scores, then output perturbation (CriticalKV)", n_window=64),
    "critical-adakv": Preset("CriticalKV with budgets that follow the heads (AdaKV)", n_window=64),
    "adakv": Preset("SnapKV scores, budgets that follow the heads (AdaKV)", n_window=32),
    "pyramidkv": Preset("SnapKV scores, larger budgets for lower layers (PyramidKV)", n_window=64),
    "sage": Preset("one top-k from the last token's query (SAGE-KV)", window_share=0.5),
    "tova": Preset("keeps what the last token looks at, the same for all heads (TOVA)", n_window=1, nested=True),
    "finch": Preset("keeps what the document's end looks at, row by row normalised (FINCH)", n_window=64, nested=True),
    "h2o": Preset("keeps what the whole document looks at most (H2O)", window_share=0.5),
    "minikv": Preset(
        "keeps what the whole document looks at most, more in lower layers (MiniKV; its codec has the same name)",
        window_share=0.5,
    ),
    "corm": Preset("keeps what any late token looks at more than evenly (CORM)", n_window=64, finds_budget=True),
    "dbudgetkv": Preset("evicts old tokens until attention would suffer (DBudgetKV)", finds_budget=True),
    "cascadingkv": Preset("ever sparser windows over the past (CascadingKV)"),
    "catekv": Preset("prunes heads that look at the same tokens all the time (CateKV)", n_window=64),
    "kvmerger": Preset("merges runs of neighbours with similar keys (KVMerger)", window_share=1 / 3),
    "compresskv": Preset(
        "keeps what known retrieval heads look at, more where a layer suffers (CompressKV)",
        n_window=8,
        artifact=HEADS,
    ),
    "duo": Preset(
        "keeps everything in known retrieval heads, the ends elsewhere (DuoAttention, PruLong)",
        n_sink=16,
        n_window=256,
        window_cap=0.5,
        artifact=HEADS,
    ),
    "expected": Preset("keeps what future queries are expected to look at (ExpectedAttention)", nested=True),
    "expected-adakv": Preset("ExpectedAttention with budgets that follow the heads (AdaKV)"),
    "critical-expected": Preset("ExpectedAttention, then output perturbation (CriticalKV)"),
    "keydiff": Preset("keeps the keys least like the average (KeyDiff)", nested=True),
    "knorm": Preset("keeps the shortest keys (Knorm)", nested=True),
    "lagkv": Preset("keeps what stands out against the following block (LagKV)", n_window=128, nested=True),
    "compactor": Preset("leverage of keys and local attention (Compactor)", n_sink=8, n_window=4, nested=True),
    "defensivekv": Preset("worst case over the document's end (DefensiveKV)", n_window=32),
    "layer-defensivekv": Preset("DefensiveKV with one budget for all layers (LayerDefensiveKV)", n_window=32),
    "kvzip": Preset("keeps what the model reads when it repeats the document (KVzip)", nested=True),
    "kvzip-uniform": Preset("KVzip with the same budget for every head", nested=True),
    "kvzip-layer": Preset("KVzip with the same budget for every layer", nested=True),
    "kvzip-head": Preset("KVzip's scores decide which heads keep everything", n_window=64),
    "kvzip-plus": Preset("KVzip weighted with output norms (KVzip+)", nested=True),
    "kvzip-critical": Preset("KVzip scores, then output perturbation (CriticalKV)"),
    "kvzip-folding": Preset("KVzip, evicted values folded into the kept ones most like them"),
    "fisher": Preset(
        "keeps what the repetition's predictions depend on",
        n_window=32,
        window_cap=0.25,
        nested=True,
    ),
    "kvzip-fisher": Preset(
        "KVzip's attention and Fisher information together", n_window=32, window_cap=0.25, nested=True
    ),
    "probes": Preset("keeps what given questions, and answers to them, look at", probes=True, nested=True),
    "kvzip-probes": Preset("KVzip, and what given questions look at", probes=True, nested=True),
}


class Compression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a context is compressed, fully resolved: the `policy` part of a fingerprint.

    Attributes:
        keep_ratio: share of entries kept; the ceiling where another bound decides.
        max_bytes: keep as much as fits into so many stored bytes, or None.
        max_kl: keep as little as measured fidelity allows, in nats per token, or None.
        probes: representative questions.
        artifact: fingerprint of the model's tables, for policies that read them.
        ratio: of the cache's bytes in 16 bits to the stored ones, for `tc`; there, `max_bytes` and `max_kl` are other
            ways to say it, and the kept share is not searched for.
        transform: fingerprint of the model's transform, for `tc`.
    """

    policy: str = DEFAULT_POLICY
    keep_ratio: float = DEFAULT_KEEP_RATIO
    codec: str = DEFAULT_CODEC
    max_bytes: int | None = None
    max_kl: float | None = None
    probes: tuple[str, ...] = ()
    artifact: str = ""
    ratio: float | None = None
    transform: str = ""

    @property
    def searches(self) -> bool:
        """Whether the kept share is searched for."""
        return self.codec != "tc" and (self.max_bytes is not None or self.max_kl is not None)

    def estimated_bytes(self, raw_bytes: int) -> int:
        """About what a cache of `raw_bytes` in 16 bits will take in the store."""
        if self.codec == "tc":
            share = 1 / (self.ratio or DEFAULT_RATIO)
        else:
            kept = DEFAULT_KEEP_RATIO if self.max_kl is not None else self.keep_ratio
            share = kept * CODEC_BITS[self.codec] / 16
        estimate = int(raw_bytes * share)
        return estimate if self.max_bytes is None else min(estimate, self.max_bytes)

    def parameters(self) -> dict[str, str | int | float]:
        """As stored in the snapshot's header and hashed into the fingerprint."""
        found: dict[str, str | int | float] = {
            "policy": self.policy,
            "keep_ratio": self.keep_ratio,
            "codec": self.codec,
        }
        for name in ("max_bytes", "max_kl", "ratio"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.probes:
            found["probes"] = hashlib.sha256(msgspec.json.encode(self.probes)).hexdigest()
        for name in ("artifact", "transform"):
            if value := getattr(self, name):
                found[name] = value
        return found


def with_artifacts(how: Compression, artifacts: Mapping[str, str]) -> Compression:
    """The same compression with the fingerprints of the artifacts that its policy and its codec read.

    Raises:
        ArtifactMissing: if the model has not all of them.
    """
    for_policy, for_codec = PRESETS[how.policy].artifact, TRANSFORM if how.codec == "tc" else ""
    for user, kind in ((f"policy {how.policy}", for_policy), (f"codec {how.codec}", for_codec)):
        if kind and kind not in artifacts:
            raise ArtifactMissing(
                f"the {user} needs what was not measured of this model yet: run `precis calibrate` beside its worker "
                f"and start it again, or choose another {user.split()[0]}"
            )
    return msgspec.structs.replace(how, artifact=artifacts.get(for_policy, ""), transform=artifacts.get(for_codec, ""))


def resolve(  # noqa: PLR0913 — what a client may say
    policy: str | None = None,
    keep_ratio: float | None = None,
    codec: str | None = None,
    *,
    ratio: float | None = None,
    max_bytes: int | None = None,
    max_kl: float | None = None,
    probes: Sequence[str] = (),
    transforms: bool = False,
) -> Compression:
    """Fill in defaults and check.

    Args:
        policy: of `PRESETS`, or `auto`, the default.
        keep_ratio: share of entries kept.
        codec: of `CODEC_NAMES`.
        ratio: for `tc`.
        max_bytes: of the snapshot.
        max_kl: nats per token.
        probes: representative questions.
        transforms: whether the model has a transform, so that `tc` can be the default.

    Raises:
        InvalidRequest: naming what is allowed.
    """
    policy = None if policy == AUTO else policy
    if codec is None:
        codec = "tc" if ratio is not None or (transforms and policy is None and keep_ratio is None) else DEFAULT_CODEC
    if policy is None:
        policy = "full" if codec == "tc" and keep_ratio in (None, 1.0) else DEFAULT_POLICY
    if policy not in PRESETS:
        raise InvalidRequest(f"there is no policy {policy!r}; choose one of {AUTO}, {', '.join(PRESETS)}")
    if codec not in CODEC_NAMES:
        raise InvalidRequest(f"there is no codec {codec!r}; choose one of {', '.join(CODEC_NAMES)}")
    _check_bounds(ratio, max_bytes, max_kl)
    _check_probes(policy, probes)
    preset, sizes = PRESETS[policy], {"max_bytes": max_bytes, "max_kl": max_kl}
    if codec == "tc":
        _at_most_one({"ratio": ratio, **sizes})
        ratio = DEFAULT_RATIO if max_bytes is None and max_kl is None and ratio is None else ratio
        sizes = {}
    elif ratio is not None:
        raise InvalidRequest(f"the codec {codec} has one rate: leave ratio out, or choose the codec tc")
    bounds = {"keep_ratio": keep_ratio, **sizes}
    given = [name for name, value in bounds.items() if value is not None]
    if not preset.evicts and given and bounds != {**dict.fromkeys(bounds), "keep_ratio": 1.0}:
        raise InvalidRequest(f"the policy {policy} keeps everything: leave {given[0]} out, or choose another policy")
    _at_most_one(bounds)
    if keep_ratio is None:
        keep_ratio = DEFAULT_KEEP_RATIO if preset.evicts and not preset.finds_budget and not given else 1.0
    if not 0 < keep_ratio <= 1:
        raise InvalidRequest(f"keep_ratio is the share of entries kept, above 0 and at most 1, not {keep_ratio}")
    ratio = None if ratio is None else float(ratio)
    return Compression(policy, float(keep_ratio), codec, max_bytes, max_kl, tuple(probes), ratio=ratio)


def checked(how: Compression) -> Compression:
    """A compression that was resolved elsewhere, without artifacts.

    Raises:
        InvalidRequest: if this program would not have resolved it so.
    """
    keep_ratio = None if how.searches else how.keep_ratio
    bounds = {"ratio": how.ratio, "max_bytes": how.max_bytes, "max_kl": how.max_kl}
    ours = resolve(how.policy, keep_ratio, how.codec, **bounds, probes=how.probes)  # type: ignore[arg-type]
    if ours != msgspec.structs.replace(how, artifact="", transform=""):
        raise InvalidRequest("the compression contradicts itself")
    return ours


def _at_most_one(bounds: Mapping[str, float | None]) -> None:
    given = [name for name, value in bounds.items() if value is not None]
    if len(given) > 1:
        *others, last = bounds
        raise InvalidRequest(f"give one of {', '.join(others)} and {last}, not {' and '.join(given)}")


def _check_bounds(ratio: float | None, max_bytes: int | None, max_kl: float | None) -> None:
    if ratio is not None and not 1 < ratio <= MAX_RATIO:
        raise InvalidRequest(f"ratio is how much smaller a snapshot is, above 1 and up to {MAX_RATIO:g}, not {ratio}")
    if max_bytes is not None and max_bytes <= 0:
        raise InvalidRequest(f"max_bytes is the size of the stored snapshot, above 0, not {max_bytes}")
    if max_kl is not None and not 0 < max_kl < float("inf"):
        raise InvalidRequest(f"max_kl is a divergence in nats per token, above 0, not {max_kl}")


def _check_probes(policy: str, probes: Sequence[str]) -> None:
    if PRESETS[policy].probes and not probes:
        raise InvalidRequest(f"the policy {policy} needs probes: representative questions about the document")
    if probes and not PRESETS[policy].probes:
        users = [name for name, preset in PRESETS.items() if preset.probes]
        raise InvalidRequest(f"the policy {policy} asks no probes; {' and '.join(users)} do")
    if len(probes) > MAX_PROBES or any(not 0 < len(probe.strip()) <= MAX_PROBE_LENGTH for probe in probes):
        raise InvalidRequest(f"probes are up to {MAX_PROBES} questions of 1 to {MAX_PROBE_LENGTH} characters")
