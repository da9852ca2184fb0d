"""The model that benchmarks measure."""

from __future__ import annotations

from pathlib import Path

from workers import unpack
from workers.models import folder_of_default


def located(folder: str) -> str:
    """A model's folder; for an empty string the default model's, unpacked if it was not yet."""
    if folder:
        return folder
    data_dir = Path("~/.local/share/precis").expanduser()
    unpack.main(data_dir)
    return str(folder_of_default(data_dir))
