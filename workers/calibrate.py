"""`python -m workers.calibrate`: measure a model once: its heads, and the transform of its cache."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from precis import axes
from precis.artifacts import Artifact
from precis.calibration import calibrate
from precis.core import Geometry
from precis.errors import InvalidRequest, PrecisError
from precis.families import Model
from precis.full_cache import Between, Document
from precis.wire.presets import TRANSFORM
from workers import artifacts, models
from workers.corpus import documents_of, samples_of, standard_texts, texts_in
from workers.settings import Settings, load

_TEXT, _SAMPLE_LENGTH = Path(__file__).parent / "data" / "calibration.txt", 512
_DIFFERENTIATED = 12  # documents with a backward pass
_NUMBERS, _RANK = 2048, 8 / 15  # numbers of a token in a block, and the share of them that is kept
_TOKENS_PER_NUMBER = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model of the settings, measure, and write its artifacts."""
    parser = argparse.ArgumentParser(prog="precis calibrate", description=__doc__)
    parser.add_argument("--documents", type=Path, help="a folder of texts of the kind that will be uploaded")
    parser.add_argument("--n-documents", type=int, default=48, help="texts to read, evenly from all files")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each")
    parser.add_argument(
        "--block-layers", type=int, default=0, help="layers that are coded together; 0: as fits the model"
    )
    parser.add_argument("--samples", type=int, default=6, help="texts with a hidden fact")
    parser.add_argument("--importance", type=Path, help="a table of kv heads from elsewhere, one line per layer")
    options = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        for path in measure(load(), options):
            sys.stdout.write(f"{path}\n")
    except PrecisError as error:
        sys.stderr.write(f"{error.detail}\n")
        return 2
    sys.stdout.write("Workers use them from their next start on.\n")
    return 0


def measure(settings: Settings, options: argparse.Namespace) -> list[Path]:
    """The artifacts' files."""
    data_dir = settings.data_dir.expanduser()
    device = models.pick_device(settings.device)
    location = models.locate(settings.model, data_dir)
    served = models.serve(settings.model, location, device, models.pick_dtype(settings.dtype, device))
    texts = texts_in(options.documents) if options.documents else standard_texts()
    length = min(options.length, served.model.geometry.max_length // 2)  # the other half is for reading it again
    documents = documents_of(served.prompter, texts, options.n_documents, length)
    samples = samples_of(served.prompter, _TEXT.read_text(), options.samples, _SAMPLE_LENGTH)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def follow(what: str) -> Between:
            task = progress.add_task(f"{served.card.name}: {what}", total=None)

            def told(stage: str, done: int, total: int) -> None:
                if stage == "calibrate":
                    progress.update(task, completed=done, total=total)

            return told

        heads = calibrate(served.model, served.rotary, samples, [served.weights], follow("heads"))
        transform = transform_of(served, documents, options.block_layers, follow("transform"))
    if options.importance is not None:
        heads = with_importance(heads, options.importance, served.model)
    paths = [artifacts.file_of(data_dir, served.weights, artifact.kind) for artifact in (heads, transform)]
    for path, artifact in zip(paths, (heads, transform), strict=True):
        artifacts.write(path, artifact)
    return paths


def transform_of(served: models.Served, documents: Sequence[Document], block_layers: int, between: Between) -> Artifact:
    """The transform of a model, fitted to documents.

    Args:
        served: the model.
        documents: whatever they are about.
        block_layers: g, or 0 for as many as the model's size suggests.
        between: told of the progress.

    Raises:
        InvalidRequest: if the layers cannot be divided like that, or the documents have too few tokens.
    """
    geometry = served.model.geometry
    g = block_layers or fitting_block(geometry)
    if g < 1 or geometry.n_layers % g:
        raise InvalidRequest(f"{geometry.n_layers} layers cannot be divided into blocks of {g}")
    size = g * 2 * geometry.n_kv_heads * geometry.head_dim
    n_tokens = sum(document.n_tokens for document in documents)
    if n_tokens < _TOKENS_PER_NUMBER * size:
        raise InvalidRequest(
            f"{n_tokens} tokens of text are too few to know {size} numbers by: give {_TOKENS_PER_NUMBER * size} or more"
        )
    rank = math.ceil(size * _RANK)
    found = axes.measure(served.model, served.rotary, documents, g, rank, _DIFFERENTIATED, between)
    made = {"documents": str(len(documents)), "tokens": str(n_tokens), "block_layers": str(g), "rank": str(rank)}
    return Artifact(TRANSFORM, (served.weights,), found.tables(), made)


def fitting_block(geometry: Geometry) -> int:
    """Layers to be coded together: as many as divide the model's and have at most 2,048 numbers per token."""
    per_layer = 2 * geometry.n_kv_heads * geometry.head_dim
    fitting = [g for g in range(1, geometry.n_layers + 1) if geometry.n_layers % g == 0 and g * per_layer <= _NUMBERS]
    return max(fitting, default=1)


def with_importance(artifact: Artifact, path: Path, model: Model) -> Artifact:
    """The same tables with an importance of kv heads that was trained elsewhere (DuoAttention, PruLong).

    Raises:
        InvalidRequest: if the file is no table of this model's kv heads.
    """
    wanted = (model.geometry.n_layers, model.geometry.n_kv_heads)
    try:
        table = np.loadtxt(path, dtype=np.float32, ndmin=2)
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"{path} cannot be read as a table of numbers: {error}") from error
    if table.shape != wanted or not np.isfinite(table).all():
        raise InvalidRequest(f"{path} has {table.shape} numbers, the model {wanted} layers and kv heads")
    tables = {**artifact.tables, "importance": torch.from_numpy(table)}
    return replace(artifact, tables=tables, made={**artifact.made, "importance": path.name})


if __name__ == "__main__":
    sys.exit(main())
