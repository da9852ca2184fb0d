"""Where artifacts are kept: a folder beside the model, Redis for other workers, the package for the default model."""

from __future__ import annotations

import os
from pathlib import Path

import redis
import structlog

from precis import artifacts
from precis.artifacts import HEADS, Artifact
from precis.core import Geometry
from precis.errors import ArtifactUnusable
from precis.wire import keys

_PACKAGED = Path(__file__).parent / "data"


def file_of(data_dir: Path, weights: str) -> Path:
    """Where `precis calibrate` puts a model's tables."""
    return data_dir / "artifacts" / f"{weights[:32]}-{HEADS}.safetensors"


def write(path: Path, artifact: Artifact) -> None:
    """Write a file that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}.part")
    made.write_bytes(artifact.to_bytes())
    made.replace(path)


def find(client: redis.Redis, data_dir: Path, weights: str, geometry: Geometry) -> Artifact | None:
    """A model's tables: the operator's own file, else what other workers have, else the package's.

    What is found is published, so that all workers of a model use the same. What cannot be used is said and skipped.
    """
    own, key = file_of(data_dir, weights), keys.artifact(weights, HEADS)
    shared: bytes | None = client.get(key)  # type: ignore[assignment]
    packaged = [path.read_bytes() for path in sorted(_PACKAGED.glob("*.safetensors"))]
    sources: list[tuple[str, list[bytes]]] = [
        (str(own), [own.read_bytes()] if own.exists() else []),
        ("redis", [] if shared is None else [shared]),
        ("package", packaged),
    ]
    for where, found in sources:
        for data in found:
            try:
                artifact = artifacts.read(data)
                artifact.check(weights, geometry)
            except ArtifactUnusable as error:
                if where != "package":  # the package's are for other models than this one, as a rule
                    structlog.get_logger("worker").warning("artifact_unusable", where=where, why=error.detail)
                continue
            if where != "redis":
                client.set(key, data)
            return artifact
    return None
