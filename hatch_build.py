"""The hook of the build: wheels carry the library of the kernels, and machine code of those that numba compiles."""

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
        if self._run("tools.compile_kernels"):
            raise SystemExit("The kernels were not compiled.")
        if self._run("tools.machine_code"):
            self.app.display_warning("Some kernels were not compiled: ckstore compiles them at first use.")
        build_data.update(pure_python=False, infer_tag=True)

    def _tool(self) -> Any:
        sys.path.insert(0, self.root)
        try:
            from tools import compile_kernels
        finally:
            sys.path.remove(self.root)
        return compile_kernels

    def _run(self, module: str) -> int:
        settings = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        return subprocess.run([sys.executable, "-m", module], cwd=self.root, env=settings).returncode
