"""Where artifacts are kept: a folder beside the model, Redis for other workers, the package for the default model."""

from __future__ import annotations

import os
from pathlib import Path

import redis
import structlog

from precis import artifacts
from precis.artifacts import Artifact
from precis.core import Geometry
from precis.errors import ArtifactUnusable
from precis.wire import keys
from precis.wire.presets import HEADS

_PACKAGED = Path(__file__).parent / "data"


def file_of(data_dir: Path, weights: str, kind: str = HEADS) -> Path:
    """Where `precis calibrate` puts what it measured of a model."""
    return data_dir / "artifacts" / f"{weights[:32]}-{kind}.safetensors"


def write(path: Path, artifact: Artifact) -> None:
    """Write a file that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}.part")
    made.write_bytes(artifact.to_bytes())
    made.replace(path)


def find(client: redis.Redis, data_dir: Path, weights: str, geometry: Geometry, kind: str = HEADS) -> Artifact | None:
    """What was measured of a model: the operator's own file, else what other workers have, else the package's.

    What is found is published, so that all workers of a model use the same. What cannot be used is said and skipped.
    """
    key = keys.artifact(weights, kind)
    shared: bytes | None = client.get(key)  # type: ignore[assignment]
    found = own(data_dir, weights, geometry, kind)
    if found is None and shared is not None:
        found = _usable("redis", shared, weights, geometry, kind)
    found = found or packaged(weights, geometry, kind)
    if found is not None and (data := found.to_bytes()) != shared:
        client.set(key, data)
    return found


def own(data_dir: Path, weights: str, geometry: Geometry, kind: str = HEADS) -> Artifact | None:
    """What `precis calibrate` measured on this machine."""
    path = file_of(data_dir, weights, kind)
    return _usable(str(path), path.read_bytes(), weights, geometry, kind) if path.exists() else None


def packaged(weights: str, geometry: Geometry, kind: str = HEADS) -> Artifact | None:
    """What comes with the package, for the default model."""
    for path in sorted(_PACKAGED.glob(f"*-{kind}.safetensors")):
        artifact = artifacts.read(path.read_bytes())
        if weights in artifact.weights:
            artifact.check(weights, geometry)
            return artifact
    return None


def _usable(where: str, data: bytes, weights: str, geometry: Geometry, kind: str) -> Artifact | None:
    try:
        artifact = artifacts.read(data)
        if artifact.kind != kind:
            raise ArtifactUnusable(f"this is an artifact of the kind {artifact.kind}, not {kind}")  # noqa: TRY301
        artifact.check(weights, geometry)
    except ArtifactUnusable as error:
        structlog.get_logger("worker").warning("artifact_unusable", where=where, why=error.detail)
        return None
    return artifact
