"""What is known of each policy without torch: its name, what it always keeps, and whether it evicts at all.

`precis.policies` builds the same names from real parts; a test compares both.
"""

from __future__ import annotations

import msgspec

from precis.errors import InvalidRequest

CODEC_BITS = {"raw16": 16.0, "int8": 8.6, "int4": 4.6}  # stored bits per number, positions included, about
CODEC_NAMES = tuple(CODEC_BITS)
DEFAULT_POLICY, DEFAULT_KEEP_RATIO, DEFAULT_CODEC = "kvzip", 0.25, "int4"


class Preset(msgspec.Struct, frozen=True):
    """A policy's protection.

    Attributes:
        n_sink: first tokens that every head keeps.
        n_window: last tokens that every head keeps.
        window_share: share of the budget that goes to the last tokens instead, counting sinks (SAGE-KV).
        evicts: False for `full`.
        summary: one line for people.
    """

    summary: str
    n_sink: int = 4
    n_window: int = 0
    window_share: float = 0.0
    evicts: bool = True


PRESETS: dict[str, Preset] = {
    "full": Preset("keeps every entry", evicts=False),
    "streaming": Preset("keeps the first and the last tokens (StreamingLLM)"),
    "snapkv": Preset("keeps what the document's end looks at (SnapKV)", n_window=64),
    "criticalkv": Preset("SnapKV scores, then output perturbation (CriticalKV)", n_window=64),
    "critical-adakv": Preset("CriticalKV with budgets that follow the heads (AdaKV)", n_window=64),
    "sage": Preset("one top-k from the last token's query (SAGE-KV)", window_share=0.5),
    "kvzip": Preset("keeps what the model reads when it repeats the document (KVzip)"),
}


class Compression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a context is compressed, fully resolved: the `policy` part of a fingerprint."""

    policy: str = DEFAULT_POLICY
    keep_ratio: float = DEFAULT_KEEP_RATIO
    codec: str = DEFAULT_CODEC

    def estimated_bytes(self, raw_bytes: int) -> int:
        """About what a cache of `raw_bytes` in 16 bits will take in the store."""
        return int(raw_bytes * self.keep_ratio * CODEC_BITS[self.codec] / 16)

    def parameters(self) -> dict[str, str | int | float]:
        """As stored in the snapshot's header and hashed into the fingerprint."""
        return {"policy": self.policy, "keep_ratio": self.keep_ratio, "codec": self.codec}


def resolve(policy: str | None, keep_ratio: float | None, codec: str | None) -> Compression:
    """Fill in defaults and check.

    Raises:
        InvalidRequest: naming what is allowed.
    """
    policy = policy or DEFAULT_POLICY
    if policy not in PRESETS:
        raise InvalidRequest(f"there is no policy {policy!r}; choose one of {', '.join(PRESETS)}")
    codec = codec or DEFAULT_CODEC
    if codec not in CODEC_NAMES:
        raise InvalidRequest(f"there is no codec {codec!r}; choose one of {', '.join(CODEC_NAMES)}")
    if not PRESETS[policy].evicts:
        if keep_ratio not in (None, 1.0):
            raise InvalidRequest(
                f"the policy {policy} keeps everything: leave keep_ratio out, or choose another policy"
            )
        keep_ratio = 1.0
    keep_ratio = DEFAULT_KEEP_RATIO if keep_ratio is None else keep_ratio
    if not 0 < keep_ratio <= 1:
        raise InvalidRequest(f"keep_ratio is the share of entries kept, above 0 and at most 1, not {keep_ratio}")
    return Compression(policy, float(keep_ratio), codec)
