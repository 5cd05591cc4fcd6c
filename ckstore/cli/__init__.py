"""The command line: one module a verb, thin over the Python API."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from gc import freeze, set_threshold  # `gc` is a verb here: its module takes that name.
from typing import NoReturn

#: The exit code of a program that was interrupted, as shells have it.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code; see `ckstore.cli.program`.

    Parameters
    ----------
    arguments
        What follows the program's name; by default those of the process.
    """
    try:
        _run(arguments)
    except KeyboardInterrupt:
        # Before a verb began, or after it ended: not where the program itself looks for it.
        sys.stderr.write("ckstore: interrupted; the store is consistent.\n")
        raise SystemExit(_INTERRUPTED) from None


def _run(arguments: Sequence[str] | None) -> NoReturn:
    from ckstore.cli.program import run
    from ckstore.runtime.collector import SELDOM
    from ckstore.runtime.numba_hooks import without_linear_algebra

    if arguments is not None:
        raise SystemExit(run(arguments))
    # The process is ours alone. Python looks for garbage among what is imported, and once more among all there is when
    # it ends: a third of a second.
    without_linear_algebra()
    set_threshold(SELDOM)
    try:
        raise SystemExit(run())
    finally:
        freeze()
