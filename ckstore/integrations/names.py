"""Names of versions in place of other libraries' paths, and the store that they refer to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ckstore.errors import UsageError
from ckstore.store import Store, open
from ckstore.version import Version

#: Prefix that distinguishes the name of a version from a path.
PREFIX = "ckstore:"


def version_name(name: object) -> str | None:
    """Return the part after `ckstore:`; None if the name has another form, such as a path.

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
    """Return the run and step in the name of a version to be saved.

    Raises
    ------
    UsageError
        The part after the last @ is not a step.

    Examples
    --------
    >>> run_and_step("gpt@100"), run_and_step("gpt")
    (('gpt', 100), ('gpt', None))
    """
    run, at, step = name.rpartition("@")
    if not at:
        return name, None
    if not (step.isascii() and step.isdigit()):
        raise UsageError(f"{PREFIX}{name} has no valid step; write {PREFIX}RUN@STEP with a number, or {PREFIX}RUN.")
    return run, int(step)


def found(store: Store, name: str) -> Version | None:
    """Return the version of a name; None for `RUN@latest` of a run without versions."""
    run, _, step = name.rpartition("@")
    return None if step == "latest" and store._catalog.latest(run) is None else store[name]


@contextmanager
def opened(store: Store | str | os.PathLike[str] | None) -> Iterator[Store]:
    """Yield a store: an open one as it is, a path opened as by `ckstore.open` and closed at the end."""
    with nullcontext(store) if isinstance(store, Store) else open(store) as usable:
        yield usable
