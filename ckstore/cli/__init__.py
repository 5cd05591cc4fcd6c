"""The command line: one module a verb, thin over the Python API."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from gc import freeze, set_threshold  # `gc` is a verb here: its module takes that name.
from typing import NoReturn

#: The exit code after an interrupt, as in shells.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, by default with the arguments of the process; exit with its code."""
    try:
        _run(arguments)
    except KeyboardInterrupt:
        # An interrupt before or after a verb, where the program itself does not catch it.
        sys.stderr.write("ckstore: interrupted; the store is consistent.\n")
        raise SystemExit(_INTERRUPTED) from None


def _run(arguments: Sequence[str] | None) -> NoReturn:
    from ckstore.cli.program import run
    from ckstore.runtime.collector import SELDOM

    if arguments is not None:
        raise SystemExit(run(arguments))
    # This process runs nothing else. Python would walk over all imported objects for garbage, again at exit, which
    # takes a third of a second.
    set_threshold(SELDOM)
    try:
        raise SystemExit(run())
    finally:
        freeze()
