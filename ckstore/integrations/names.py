"""Names of versions in place of other libraries' paths, and the store that they refer to."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from ckstore.errors import IntegrityError, UsageError
from ckstore.steps import step_of_text
from ckstore.store import Store, open
from ckstore.version import Version

Result = TypeVar("Result")

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
    number = step_of_text(step)
    if number is None or number < 0:
        raise UsageError(f"{PREFIX}{name} has no valid step; write {PREFIX}RUN@STEP with a number, or {PREFIX}RUN.")
    return run, number


def found(store: Store, name: str) -> Version | None:
    """Return the version of a name; None for `RUN@latest` of a run, or `latest` of a store, without versions."""
    run, _, step = name.rpartition("@")
    return None if step == "latest" and store._catalog.latest(run or None) is None else store[name]


def read_sound(store: Store, name: str, read: Callable[[Version], Result]) -> tuple[Version, Result]:
    """Read the version of a name; return it, and the result.

    If it is damaged and named as the latest one, fall back to the newest sound one before it, with a warning.

    Raises
    ------
    IntegrityError
        The version is damaged, and it is named by itself, or none before it is sound.
    """
    version = store[name]
    try:
        return version, read(version)
    except IntegrityError as error:
        sound = version.fallback()
        if sound is None:
            raise
        if name not in ("latest", version.run, f"{version.run}@latest"):
            raise IntegrityError(f"{error} The newest sound version before {version.name} is {sound.name}.") from error
        warnings.warn(f"{error} The training resumes from {sound.name}, the newest sound version.", stacklevel=3)
    return sound, read(sound)


@contextmanager
def opened(store: Store | str | os.PathLike[str] | None) -> Iterator[Store]:
    """Yield a store: an open one as it is, a path opened as by `ckstore.open` and closed at the end."""
    with nullcontext(store) if isinstance(store, Store) else open(store) as usable:
        yield usable
