"""`precis calibrate`: measure what policies and the codec tc read of a model, in a process of its own with torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.up import DEFAULT_MODEL


def calibrate(
    model: Annotated[str, typer.Option(envvar="PRECIS_MODEL", help="a folder or a Hugging Face id")] = DEFAULT_MODEL,
    data_dir: Annotated[Path, typer.Option(envvar="PRECIS_DATA_DIR", help="where everything is kept")] = Path(
        "~/.local/share/precis"
    ),
    documents: Annotated[Path | None, typer.Option(help="a folder of texts of the kind that will be uploaded")] = None,
    n_documents: Annotated[int, typer.Option(min=1, help="texts to read, evenly from all files")] = 48,
    length: Annotated[int, typer.Option(min=128, help="tokens of each")] = 1024,
    block_layers: Annotated[int, typer.Option(min=0, help="layers coded together; 0: as fits the model")] = 0,
    importance: Annotated[Path | None, typer.Option(help="a trained table of kv heads, one line per layer")] = None,
) -> None:
    """Measure a model once: the transform of the codec tc, and the heads for the policies compresskv and duo."""
    folder = str(data_dir.expanduser().resolve())
    environment = {**os.environ, "PRECIS_MODEL": model, "PRECIS_DATA_DIR": folder}
    if model == DEFAULT_MODEL:
        subprocess.run([sys.executable, "-m", "workers.unpack", folder], env=environment, check=True)
    numbers = {"--n-documents": n_documents, "--length": length, "--block-layers": block_layers}
    command = [sys.executable, "-m", "workers.calibrate", *(str(part) for pair in numbers.items() for part in pair)]
    command += ["--documents", str(documents)] if documents is not None else []
    command += ["--importance", str(importance)] if importance is not None else []
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
