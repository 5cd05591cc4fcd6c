"""A progress bar on stderr, if that is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from ckstore.cli.output import printable


@contextmanager
def progress_bar(label: str, length: int, *, shown: bool = True) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that takes numbers of bytes, up to `length` in total; None without a terminal."""
    if not shown or length <= 0 or not sys.stderr.isatty():
        yield None
        return
    color = False if "NO_COLOR" in os.environ else None
    with click.progressbar(length=length, label=printable(label), file=sys.stderr, color=color, show_pos=False) as bar:
        yield bar.update
        bar.update(length - bar.pos)
