"""The step of the transform codec that makes a snapshot as large as it may be, and the classes of its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from precis.blob import Block
from precis.codecs.tc import TransformCodec
from precis.coefficients import encode, estimated_bytes
from precis.container import Packed, blocks_of, layouts_of, packed
from precis.core import Prefill, Snapshot
from precis.errors import BudgetTooSmall
from precis.families import Rotary
from precis.observations.fisher import RepeatGradients
from precis.observations.repeat import RepeatAttention
from precis.rows import MAX_CLASS, Rows
from precis.transform import Transform

EXPONENT = 0.8  # of a token's importance in its precision; 1 would be right if errors stayed where they are
_ROWS = 128  # per block that sizes are estimated from
_ROUNDS = 9  # of halving 24 octaves
_TRIES = 8
_FLATTEST = 0.25  # octaves that bytes fall at least when the step grows by one
_SLACK = 0.01  # share of the limit that may stay unused
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Coding:
    """A snapshot whose coefficients are known, to be coded in any step.

    Attributes:
        snapshot: before any codec.
        codec: with the transform of the model and the classes of the tokens.
        blocks: of the snapshot, as the codec takes them.
        rows: their coefficients.
        octaves: binary logarithms of the finest step that can be counted with, and of one that makes everything 0.
        key: seals the manifest, if not empty.
    """

    snapshot: Snapshot
    codec: TransformCodec
    blocks: list[Block]
    rows: list[Rows]
    octaves: tuple[float, float]
    key: bytes

    @staticmethod
    def of(snapshot: Snapshot, transform: Transform, classes: Tensor, rotary: Rotary, key: bytes = b"") -> Coding:
        """Take a snapshot's coefficients.

        Args:
            snapshot: before any codec.
            transform: of the model.
            classes: [B, T], from `classes_of`.
            rotary: of the model.
            key: seals the manifest, if not empty.
        """
        codec = TransformCodec(transform, 1.0, classes.to(torch.int64))
        blocks = blocks_of(snapshot, codec, rotary)
        told = zip(blocks, layouts_of(snapshot, blocks), strict=True)
        rows = [codec.rows(block.keys, block.values, layout) for block, layout in told]
        sizes = [float(part.coefficients.abs().max()) for part in rows if part.coefficients.numel()]
        largest = math.log2(max([*sizes, _TINY])) + MAX_CLASS / 2
        return Coding(snapshot, codec, blocks, rows, (largest - 23, largest + 1), key)

    def at(self, step: float) -> Packed:
        """The snapshot in this step.

        Raises:
            ValueError: if a coefficient is not finite, or beyond 2^24 steps.
        """
        codec = replace(self.codec, step=step, coded=encode(self.rows, step))
        return packed(self.snapshot, self.blocks, codec, self.key)

    def within(self, limit: int, floor: int = 0) -> Packed:
        """The snapshot in the finest step whose bytes stay within a limit.

        Args:
            limit: bytes of the whole: blobs, positions, manifest and levels.
            floor: bytes that coefficients may take in any case, beside what no step changes.

        Raises:
            BudgetTooSmall: if no step is coarse enough.
        """
        finest, coarsest = self.octaves
        fixed = self.at(2.0**coarsest).n_bytes  # positions, sinks, tables and manifest
        limit = max(limit, fixed + floor) if floor else limit
        room = max(1, limit - fixed)
        octave, slope = self._guess(room)
        best: Packed | None = None
        for _ in range(_TRIES if limit >= fixed else 0):
            found = self.at(2.0**octave)
            if found.n_bytes <= limit:
                best = found
                if found.n_bytes - fixed >= (1 - _SLACK) * room:
                    break
            octave += math.log2((1 - _SLACK / 2) * room / max(1, found.n_bytes - fixed)) / slope
            octave = min(max(octave, finest), coarsest)
        if best is None:
            raise BudgetTooSmall(
                f"{limit} bytes are too few: positions, sinks and tables alone take {fixed}: allow more",
                n_bytes=fixed,
            )
        return best

    def step_near(self, n_bytes: int) -> float:
        """The step that gives about so many bytes of coefficients."""
        return float(2.0 ** self._guess(n_bytes)[0])

    def _guess(self, n_bytes: int) -> tuple[float, float]:
        """From evenly spaced rows: binary logarithm of the step that gives `n_bytes`, and how they fall with it."""
        apart = max(1, max(len(part.classes) for part in self.rows) // _ROWS)
        few = [part.every(apart) for part in self.rows]
        share = sum(len(part.classes) for part in self.rows) / max(1, sum(len(part.classes) for part in few))

        def estimated(octave: float) -> float:
            return estimated_bytes(few, 2.0**octave) * share

        low, high = self.octaves
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if estimated(middle) > n_bytes else (low, middle)
        near, far = estimated(high), estimated(high + 1)
        slope = math.log2(max(far, _TINY) / near) if near > 0 else -1.0
        return high, min(slope, -_FLATTEST)


def classes_of(full: Prefill, block_layers: int) -> Tensor:
    """How much more precision than others each token deserves: [B, T] int64, -16 to 16, in half octaves.

    By the squared attention that a repetition paid to it, over a block's layers and heads, and, where gradients were
    seen, their mean square: their geometric mean. Classes are relative to the mean of the document.

    Raises:
        ValueError: if the document was not repeated.
    """
    importance = _importance(full)
    n_layers, n_kv_heads, n_tokens = importance.shape
    together = importance.reshape(n_layers // block_layers, block_layers * n_kv_heads, n_tokens).mean(1)
    octaves = EXPONENT / 2 * torch.log2(together.clamp_min(_TINY))
    seen = together > _TINY  # protected tokens outside of the document are not repeated: they are as the best tenth
    floor = torch.where(seen, octaves, torch.full_like(octaves, math.nan))
    middle = floor.nanmean(1, keepdim=True).nan_to_num(0.0)
    top = floor.nan_to_num(-math.inf).topk(max(1, n_tokens // 10), 1).values[:, -1:]
    octaves = torch.where(seen, octaves, torch.where(top.isfinite(), top, middle))
    return (2 * (octaves - middle)).round().clamp(-MAX_CLASS, MAX_CLASS).to(torch.int64).cpu()


def _importance(full: Prefill) -> Tensor:
    """[L, K, T] float32."""
    g = full.geometry
    if RepeatGradients() in full.observed:
        found = full.seen(RepeatGradients())
        information, squares = found[:, g.n_heads : g.n_heads + g.n_kv_heads], found[:, g.n_heads + g.n_kv_heads :]
        return (information * squares).sqrt()
    return full.seen(RepeatAttention())[:, g.n_heads :]
