"""Compiles the C++ kernels when the package is installed; without a compiler, torch computes the same."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface[Any]):
    """Called by hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and mark the wheel as one for this kind of machine."""
        script = Path(self.root) / "precis" / "native" / "build.py"
        try:
            made = runpy.run_path(str(script))["build"](script.parent, os.environ.get("CXX"))
        except RuntimeError as error:
            self.app.display_warning(f"the kernels could not be compiled, torch will compute instead:\n{error}")
            return
        if made:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"] += [str(path.relative_to(self.root)) for path in made]
