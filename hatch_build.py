"""The hook of the build: wheels carry the library of the kernels, and serve every Python."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface):  # type: ignore[misc]
    """Compiles the kernels with the compiler of the build."""

    def dependencies(self) -> list[str]:
        """Ask for a compiler where there is none."""
        return [] if self._tool().compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library to the sources; an editable installation finds it there."""
        settings = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        command = [sys.executable, "-m", "tools.compile_kernels"]
        if subprocess.run(command, cwd=self.root, env=settings).returncode:
            raise SystemExit("The kernels were not compiled.")
        build_data.update(pure_python=False, tag=f"py3-none-{self._tool().wheel_platform()}")

    def _tool(self) -> Any:
        sys.path.insert(0, self.root)
        try:
            from tools import compile_kernels
        finally:
            sys.path.remove(self.root)
        return compile_kernels
