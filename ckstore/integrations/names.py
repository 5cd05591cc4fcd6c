"""Names of versions where other libraries take paths, and the store that they are in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.errors import UsageError
from ckstore.store import Store, open

#: What begins a name that is a version's and no file's.
PREFIX = "ckstore:"


def version_name(name: object) -> str | None:
    """What follows `ckstore:` in a name; None where it is something else, such as a file.

    Examples
    --------
    >>> version_name("ckstore:gpt@100"), version_name("gpt.pt")
    ('gpt@100', None)
    """
    if not isinstance(name, str | os.PathLike):
        return None
    text = os.fspath(name)
    return text.removeprefix(PREFIX) if isinstance(text, str) and text.startswith(PREFIX) else None


def run_and_step(name: str) -> tuple[str, int | None]:
    """The run and the step that a version to be is named by.

    Raises
    ------
    UsageError
        What follows the last @ is no step.

    Examples
    --------
    >>> run_and_step("gpt@100"), run_and_step("gpt")
    (('gpt', 100), ('gpt', None))
    """
    run, at, step = name.rpartition("@")
    if not at:
        return name, None
    if not (step.isascii() and step.isdigit()):
        raise UsageError(
            f"{PREFIX}{name} names no step to save at; write {PREFIX}RUN@STEP with a number, or {PREFIX}RUN."
        )
    return run, int(step)


@contextmanager
def opened(store: Store | str | os.PathLike[str] | None) -> Iterator[Store]:
    """A store that is open already, or one that is opened as `ckstore.open` does and closed at the end."""
    if isinstance(store, Store):
        yield store
    else:
        with open(store) as found:
            yield found
