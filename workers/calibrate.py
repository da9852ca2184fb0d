"""`python -m workers.calibrate`: measure the tables of a model, once, with a progress bar."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from precis.artifacts import Artifact
from precis.calibration import Sample, calibrate
from precis.errors import InvalidRequest, PrecisError
from precis.families import Model
from precis.text import Prompter
from workers import artifacts, models
from workers.settings import Settings, load

_TEXT = Path(__file__).parent / "data" / "calibration.txt"
_PLACES = ("harbour", "mill", "library", "quarry", "orchard", "lighthouse", "market", "bakery", "station", "garden")


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model of the settings, measure, and write its artifact."""
    parser = argparse.ArgumentParser(prog="precis calibrate", description=__doc__)
    parser.add_argument("--samples", type=int, default=6, help="texts to measure on")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--text", type=Path, default=_TEXT, help="plain text to hide facts in")
    parser.add_argument("--importance", type=Path, help="a table of kv heads from elsewhere, one line per layer")
    options = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        path = measure(load(), options)
    except PrecisError as error:
        sys.stderr.write(f"{error.detail}\n")
        return 2
    sys.stdout.write(f"{path}\nWorkers use it from their next start on.\n")
    return 0


def measure(settings: Settings, options: argparse.Namespace) -> Path:
    """The artifact's file."""
    data_dir = settings.data_dir.expanduser()
    device = models.pick_device(settings.device)
    location = models.locate(settings.model, data_dir)
    served = models.serve(settings.model, location, device, models.pick_dtype(settings.dtype, device))
    samples = samples_of(served.prompter, options.text.read_text(), options.samples, options.length)
    if not samples:
        raise InvalidRequest(f"{options.text} is empty: give a text of a few hundred words")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"measuring {served.card.name}", total=len(samples))
        artifact = calibrate(
            served.model,
            served.rotary,
            samples,
            [served.weights],
            lambda _stage, done, total: progress.update(task, completed=done, total=total),
        )
    if options.importance is not None:
        artifact = with_importance(artifact, options.importance, served.model)
    path = artifacts.file_of(data_dir, served.weights)
    artifacts.write(path, artifact)
    return path


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


def samples_of(prompter: Prompter, text: str, n_samples: int, length: int) -> list[Sample]:
    """Texts of about `length` tokens with a number hidden at depths from front to back, the same ones every time."""
    draws, found = random.Random(1), []
    sentences = [part.strip() + "." for part in text.replace("\n", " ").split(".") if part.strip()]
    for index in range(n_samples if sentences else 0):
        place = _PLACES[index % len(_PLACES)]
        number = str(draws.randrange(1000, 10000))
        fact = f" The secret number of the {place} is {number}."
        filler: list[str] = []
        n_tokens = 0
        while n_tokens < length:
            filler.append(sentences[(index * 7 + len(filler)) % len(sentences)])
            n_tokens += len(prompter.raw(" " + filler[-1], begins=False))
        at = round(len(filler) * (index + 0.5) / n_samples)
        before, after = " ".join(filler[:at]), " ".join(filler[at:])
        span = (len(prompter.raw(before, begins=True)), len(prompter.raw(before + fact, begins=True)))
        tokens = prompter.raw(f"{before}{fact} {after}", begins=True)
        question = prompter.raw(f"\n\nQuestion: What is the secret number of the {place}?\nAnswer: It is", begins=False)
        answer = prompter.raw(f" {number}", begins=False)
        found.append(Sample(tuple(tokens), span, tuple(question), tuple(answer)))
    return found


if __name__ == "__main__":
    sys.exit(main())
