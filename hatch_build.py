"""The hook of the build: wheels carry machine code of all kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MachineCode(BuildHookInterface):  # type: ignore[misc]
    """Compiles the kernels with the numba of the build, for the Python of the build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add machine code to the sources; an editable installation finds it there."""
        settings = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        if subprocess.run([sys.executable, "-m", "tools.machine_code"], cwd=self.root, env=settings).returncode:
            self.app.display_warning("The kernels were not compiled: ckstore compiles them at first use.")
        build_data.update(pure_python=False, infer_tag=True)
