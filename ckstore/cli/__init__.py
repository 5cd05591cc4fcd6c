"""The command line: one module a verb, thin over the Python API."""

from __future__ import annotations

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

    raise SystemExit(run(arguments))
