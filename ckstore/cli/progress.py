"""A progress bar on stderr, where that is a terminal, and nothing anywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from ckstore.cli.output import printable


@contextmanager
def progress_bar(label: str, length: int, *, shown: bool = True) -> Iterator[Callable[[int], None] | None]:
    """A function that is called with numbers of bytes which add up to about `length`, or None where nobody looks.

    Parameters
    ----------
    label
        The text before the bar.
    length
        Bytes that make the bar full.
    shown
        False where it was asked not to be shown.
    """
    if not shown or length <= 0 or not sys.stderr.isatty():
        yield None
        return
    color = False if "NO_COLOR" in os.environ else None
    with click.progressbar(length=length, label=printable(label), file=sys.stderr, color=color, show_pos=False) as bar:
        yield bar.update
        bar.update(length - bar.pos)
