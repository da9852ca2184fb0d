"""`precis calibrate`: measure the tables that some policies read of a model, in a process of its own with torch."""

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
    samples: Annotated[int, typer.Option(min=1, help="texts to measure on")] = 6,
    length: Annotated[int, typer.Option(min=128, help="tokens of each")] = 512,
    text: Annotated[Path | None, typer.Option(help="plain text to hide facts in")] = None,
    importance: Annotated[Path | None, typer.Option(help="a trained table of kv heads, one line per layer")] = None,
) -> None:
    """Measure once which heads of a model retrieve, for the policies compresskv and duo."""
    folder = str(data_dir.expanduser().resolve())
    environment = {**os.environ, "PRECIS_MODEL": model, "PRECIS_DATA_DIR": folder}
    if model == DEFAULT_MODEL:
        subprocess.run([sys.executable, "-m", "workers.unpack", folder], env=environment, check=True)
    command = [sys.executable, "-m", "workers.calibrate", "--samples", str(samples), "--length", str(length)]
    command += ["--text", str(text)] if text is not None else []
    command += ["--importance", str(importance)] if importance is not None else []
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
