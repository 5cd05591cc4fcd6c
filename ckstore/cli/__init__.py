"""The command line: one module a verb, thin over the Python API."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code; see `ckstore.cli.program`.

    Parameters
    ----------
    arguments
        What follows the program's name; by default those of the process.
    """
    from ckstore.cli.program import run

    if arguments is None:
        # numba asks SciPy for linear algebra that no kernel needs: a tenth of a second. The process is ours alone.
        sys.modules.setdefault("scipy.linalg.cython_blas", None)  # type: ignore[arg-type]
    raise SystemExit(run(arguments))
