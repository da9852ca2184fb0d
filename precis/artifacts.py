"""Artifacts: what was measured of a model once, for all of its documents. Named tensors that know whose they are.

As bytes an artifact is a safetensors file whose metadata holds the other fields and a digest over everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from precis.core import Geometry
from precis.errors import ArtifactUnusable
from precis.fingerprint import digest
from precis.wire.presets import HEADS

VERSION = 1
_FIELD = "precis"


class _About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    version: int
    weights: list[str]
    made: dict[str, str]
    fingerprint: str


@dataclass(frozen=True)
class Artifact:
    """Tables of one model.

    Attributes:
        kind: what the tables are for: HEADS or TRANSFORM (`precis.wire.presets`).
        weights: digests of the weights that they fit: one model in several dtypes.
        tables: of heads, all float32: retrieval [L, H], how much of its attention a head pays to what is being
            retrieved; importance [L, K], what is lost where a kv head sees the ends of the document only; layer_errors
            [L], what a layer's output loses under compression. Of a transform: `Transform.tables`.
        made: how they were measured, for people.
    """

    kind: str
    weights: tuple[str, ...]
    tables: Mapping[str, Tensor]
    made: Mapping[str, str]

    @cached_property
    def fingerprint(self) -> str:
        """Part of the fingerprint of every snapshot that was made with it: over the tables, wherever they came from."""
        named = {name: safetensors.torch.save({name: table}) for name, table in self.tables.items()}
        return digest(kind=self.kind, version=VERSION, **{f"table_{name}": data for name, data in named.items()})

    def to_bytes(self) -> bytes:
        """For a file or a store."""
        about = _About(self.kind, VERSION, list(self.weights), dict(self.made), self.fingerprint)
        tables = {name: table.contiguous() for name, table in self.tables.items()}
        return bytes(safetensors.torch.save(tables, {_FIELD: msgspec.json.encode(about).decode()}))

    def check(self, weights: str, geometry: Geometry) -> None:
        """Check that it is this model's.

        Raises:
            ArtifactUnusable: if it is of other weights, or a table has another shape.
        """
        shapes = {name: tuple(table.shape) for name, table in self.tables.items()}
        wanted = (
            _of_heads(geometry)
            if self.kind == HEADS
            else _of_transform(geometry, shapes.get("leading", ()), shapes.get("axes", ()))
        )
        if weights not in self.weights or shapes != wanted:
            raise ArtifactUnusable("the artifact was measured on another model: run precis calibrate")


Shapes = dict[str, tuple[int, ...]]


def _of_heads(g: Geometry) -> Shapes:
    return {
        "retrieval": (g.n_layers, g.n_heads),
        "importance": (g.n_layers, g.n_kv_heads),
        "layer_errors": (g.n_layers,),
    }


def _of_transform(g: Geometry, leading: tuple[int, ...], axes: tuple[int, ...]) -> Shapes:
    """The shapes that go with those of the axes; none where these cannot be the model's."""
    n_blocks, size, n_leading = leading if len(leading) == 3 else (0, 0, 0)
    rank = n_leading + (axes[2] if len(axes) == 3 else 0)
    per_layer = 2 * g.n_kv_heads * g.head_dim
    if n_blocks < 1 or g.n_layers % n_blocks or size != g.n_layers // n_blocks * per_layer or not 0 < rank <= size:
        return {}
    heads = (g.n_layers, 2, g.n_kv_heads, g.head_dim)
    given = {"leading": (n_blocks, size, n_leading), "axes": (n_blocks, size, rank - n_leading)}
    return {"mean": heads, "root": (*heads, g.head_dim), **given, "scales": (n_blocks, rank)}


def read(data: bytes) -> Artifact:
    """An artifact from its bytes.

    Raises:
        ArtifactUnusable: if a byte is wrong, or it has another version.
    """
    try:
        tables = safetensors.torch.load(data)
        about = msgspec.json.decode(_metadata(data), type=_About)
    except (SafetensorError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise ArtifactUnusable(f"the artifact cannot be read: {error}") from error
    found = Artifact(about.kind, tuple(about.weights), tables, about.made)
    if about.version != VERSION or found.fingerprint != about.fingerprint:
        raise ArtifactUnusable("the artifact is damaged, or of another version: run precis calibrate")
    return found


def _metadata(data: bytes) -> str:
    length = int.from_bytes(data[:8], "little")
    header: dict[str, dict[str, str]] = msgspec.json.decode(data[8 : 8 + length])
    return header["__metadata__"][_FIELD]
