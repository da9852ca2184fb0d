"""The nouns, all frozen. Shapes are written in these letters, here and everywhere:

L layers   H query heads   K kv heads   G = H / K query heads per kv head (group size)
T context tokens   W observed window tokens   N kept entries, summed over layers and kv heads   D head dim
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Entries = tuple[Tensor, Tensor, Tensor, Tensor | None]  # of one kv head: keys, values [n, D], positions, bias [n]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model's KV cache.

    Attributes:
        windows: per layer, how many tokens a query sees counting itself, or None for full attention.
        max_length: tokens that the model was made for, context and answer together.
        scaling: factor on q·k, per layer.
        softcap: logit soft-capping, per layer, or None.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_length: int
    windows: tuple[int | None, ...]
    scaling: tuple[float, ...]
    softcap: tuple[float | None, ...]

    @property
    def group_size(self) -> int:
        """G."""
        return self.n_heads // self.n_kv_heads

    def grouped(self, per_query_head: Tensor) -> Tensor:
        """[L, H, ...] -> [L, K, G, ...]."""
        return per_query_head.reshape(
            per_query_head.shape[0], self.n_kv_heads, self.group_size, *per_query_head.shape[2:]
        )

    def first_visible(self, layer: int, n_tokens: int) -> int:
        """The first position that a query at position `n_tokens` can still see in this layer."""
        window = self.windows[layer]
        return 0 if window is None else max(0, n_tokens - window + 1)

    def evicts(self, layer: int, n_tokens: int) -> bool:
        """Whether this layer is compressed. A layer whose window is already full bounds its cache by itself."""
        return self.first_visible(layer, n_tokens) == 0

    def evicting_layers(self, n_tokens: int) -> list[int]:
        """Layers that are compressed; the others keep their full sliding window."""
        return [layer for layer in range(self.n_layers) if self.evicts(layer, n_tokens)]

    def n_entries(self, n_tokens: int) -> int:
        """Entries of the full cache: what a query at position `n_tokens` can see, over all layers and kv heads."""
        return self.n_kv_heads * sum(n_tokens - self.first_visible(layer, n_tokens) for layer in range(self.n_layers))

    def raw_bytes(self, n_tokens: int) -> int:
        """Bytes of the full cache in a 16-bit dtype, keys and values."""
        return self.n_entries(n_tokens) * self.head_dim * 4


@dataclass(frozen=True, slots=True)
class Prefill:
    """The full cache of one context, and what was observed of it.

    Attributes:
        keys: [L, K, T, D] after RoPE, in the model's dtype.
        values: [L, K, T, D].
        observed: per observation (`precis.observations`), a tensor with L first.
        tables: of the model, from its artifact, with L first.
    """

    geometry: Geometry
    keys: Tensor
    values: Tensor
    observed: Mapping[Hashable, Tensor] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = self.geometry
        want = (g.n_layers, g.n_kv_heads, self.keys.shape[2], g.head_dim)
        if tuple(self.keys.shape) != want or tuple(self.values.shape) != want:
            raise ValueError(f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} must be {want}")

    @property
    def n_tokens(self) -> int:
        """T."""
        return int(self.keys.shape[2])

    def seen(self, observation: Hashable) -> Tensor:
        """An observation.

        Raises:
            ValueError: if it was not made.
        """
        if observation not in self.observed:
            raise ValueError(f"{observation} was not observed during prefill")
        return self.observed[observation]

    def table(self, name: str) -> Tensor:
        """A table of the model.

        Raises:
            ValueError: if it was never measured.
        """
        if name not in self.tables:
            raise ValueError(f"the model has no table {name}: run precis calibrate")
        return self.tables[name]

    def of_layers(self, layers: list[int]) -> Prefill:
        """The same context, as if the model had only these layers."""
        if len(layers) == self.geometry.n_layers:
            return self
        g = self.geometry
        geometry = replace(
            g,
            n_layers=len(layers),
            windows=tuple(g.windows[layer] for layer in layers),
            scaling=tuple(g.scaling[layer] for layer in layers),
            softcap=tuple(g.softcap[layer] for layer in layers),
        )
        observed = {name: seen[layers] for name, seen in self.observed.items()}
        tables = {name: table[layers] for name, table in self.tables.items()}
        return Prefill(geometry, self.keys[layers], self.values[layers], observed, tables)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which entries each kv head keeps.

    Attributes:
        positions: [N] int32, ascending inside a head; heads in order layer, kv head.
        offsets: [L*K+1] int64; entries of layer l, kv head k are offsets[l*K+k] : offsets[l*K+k+1].
    """

    positions: Tensor
    offsets: Tensor

    @staticmethod
    def from_mask(keep: Tensor) -> Selection:
        """From a bool mask [L, K, T], True = keep."""
        n_layers, n_kv_heads, _ = keep.shape
        counts = keep.sum(-1).reshape(n_layers * n_kv_heads)
        offsets = torch.zeros(n_layers * n_kv_heads + 1, dtype=torch.int64, device=keep.device)
        torch.cumsum(counts, 0, out=offsets[1:])
        return Selection(keep.nonzero()[:, 2].to(torch.int32), offsets)

    def flat_index(self, n_tokens: int) -> Tensor:
        """[N] int64: where the entries lie in a tensor [L, K, T] that is seen as one row."""
        counts = self.offsets[1:] - self.offsets[:-1]
        heads = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
        return heads * n_tokens + self.positions.long()


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What a snapshot is of, and what a query on it must know.

    Attributes:
        fingerprint: hash of weights, tokens and policy (`precis.fingerprint`); compared at every load.
        n_tokens: T.
        next_position: position of the first query token: T, however few entries are kept.
        n_sink: first tokens, which low-bit codecs keep at 8 bits.
        policy: the policy with every resolved parameter.
    """

    fingerprint: str
    n_tokens: int
    next_position: int
    n_sink: int
    policy: dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How long each kept entry would be kept if the budget shrank, for methods whose selections are nested.

    Attributes:
        levels: [N] uint8; 255 = always kept, below that the higher the longer.
        across: "head", "layer" or "global": the entries among which levels compare.
    """

    levels: Tensor
    across: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The kept entries of a context. Read-only and shared by every query on it.

    Attributes:
        keys: [N, D] after RoPE at their original positions.
        values: [N, D].
        positions: [N] int32, ascending inside a head.
        offsets: [L*K+1] int64 on the CPU.
        ranks: for tightening, or None; stored, but not loaded for answers.
        bias: [N] float32 added to the entries' logits, for entries that stand for several tokens, or None.
        indexes: what views derived from the keys, by view, layer and kv head; made when first asked for.
    """

    geometry: Geometry
    header: SnapshotHeader
    keys: Tensor
    values: Tensor
    positions: Tensor
    offsets: Tensor
    ranks: Ranks | None = None
    bias: Tensor | None = None
    indexes: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = int(self.offsets[-1])
        g = self.geometry
        if self.offsets.shape != (g.n_layers * g.n_kv_heads + 1,) or self.positions.shape != (n,):
            raise ValueError("offsets must be [L*K+1] and positions [N]")
        if self.keys.shape != (n, g.head_dim) or self.values.shape != (n, g.head_dim):
            raise ValueError(f"keys {tuple(self.keys.shape)} and values must be [{n}, {g.head_dim}]")
        if self.bias is not None and self.bias.shape != (n,):
            raise ValueError(f"bias {tuple(self.bias.shape)} must be [{n}]")

    def to(self, device: torch.device) -> Snapshot:
        """The same entries on another device; on the CPU, where a GPU fetches them fast."""
        parts = [part.to(device) for part in (self.keys, self.values, self.positions)]
        bias = None if self.bias is None else self.bias.to(device)
        if device.type == "cpu" and self.keys.is_cuda:
            parts, bias = [part.pin_memory() for part in parts], None if bias is None else bias.pin_memory()
        return replace(self, keys=parts[0], values=parts[1], positions=parts[2], bias=bias)

    def bounds(self, layer: int, kv_head: int) -> tuple[int, int]:
        """Start and stop of one head's entries in keys, values and positions."""
        head = layer * self.geometry.n_kv_heads + kv_head
        return int(self.offsets[head]), int(self.offsets[head + 1])

    def entries(self, layer: int, kv_head: int) -> Entries:
        """What one head kept."""
        a, b = self.bounds(layer, kv_head)
        bias = None if self.bias is None else self.bias[a:b]
        return self.keys[a:b], self.values[a:b], self.positions[a:b], bias

    @property
    def n_bytes(self) -> int:
        """Bytes that the snapshot holds in memory."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.keys.nbytes + self.values.nbytes + self.positions.nbytes + self.offsets.nbytes + bias
