"""`python -m workers.unpack DATA_DIR`: make the default model's transformers folder, once, with a progress bar."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from workers.gguf import convert
from workers.models import DEFAULT_MODEL, folder_of_default, gguf_of_default


def main(data_dir: Path) -> None:
    """Unpack unless it was done before."""
    target = folder_of_default(data_dir)
    if target.exists():
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"unpacking {DEFAULT_MODEL} (first start only)", total=None)
        convert(gguf_of_default(), target, lambda done, total: progress.update(task, completed=done, total=total))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
