"""Sentences for denied access: the owner of the path, and the remedy."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckstore.errors import AccessError

#: Numbers of the errors by which a system denies access.
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def denied(path: str | os.PathLike[str], error: OSError | None = None, *, writing: bool = False) -> AccessError:
    """Return the error for a path that may not be read or, with `writing`, not be written."""
    place = Path(os.path.abspath(path))
    if (error is not None and error.errno == errno.EROFS) or (writing and is_read_only(place)):
        return AccessError(
            f"{place} is on a file system that is mounted read-only; mount it for writing, or write elsewhere."
        )
    closed = next((one for one in reversed(place.parents) if not os.access(one, os.X_OK)), None)
    verb = "reached" if closed is not None else "written" if writing else "read"
    cannot = f"{place} cannot be {verb} by {_name(_user())}"
    if closed is None:
        closed = _unwritable(place) if writing else place
        if os.access(closed, os.W_OK if writing else os.R_OK):
            why = "" if error is None else f" ({error.strerror})"
            return AccessError(f"{cannot}{why}, though its mode allows it; look for access control lists, or a flag.")
    try:
        status = os.stat(closed)
    except OSError:
        return AccessError(f"{cannot}; check the permissions of the directories above it.")
    it = "it" if closed == place else str(closed)
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid == _user():
        return AccessError(f"{cannot}: {it} has mode {mode}; allow it with `chmod`.")
    owner = _name(status.st_uid)
    return AccessError(
        f"{cannot}: {it} belongs to {owner}, with mode {mode}; work as {owner}, or let {owner} allow it with `chmod`."
    )


class Explained:
    """A block whose errors become others: `explain(error, ...)` returns the one to raise, or None to keep it.

    Entering and leaving it takes three calls of Python, a generator seven.
    """

    __slots__ = ("_explain", "_more")

    def __init__(self, explain: Callable[..., BaseException | None], *more: Any) -> None:
        self._explain, self._more = explain, more

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and (other := self._explain(error, *self._more)) is not None:
            raise other from error


def access_explained(path: str | os.PathLike[str], *, writing: bool = False) -> Explained:
    """Turn the system's refusal to read or write a path into `AccessError`, in a block."""
    return Explained(denial, path, writing)


def denial(error: BaseException, path: str | os.PathLike[str], writing: bool) -> AccessError | None:
    """Return the error for the system's refusal to read or write a path; None for any other error."""
    if not isinstance(error, OSError) or isinstance(error, AccessError) or error.errno not in DENIED:
        return None
    return denied(path, error, writing=writing)


def unusable(path: Path) -> AccessError | None:
    """Return the error for a file that may not be read, or not be written with a file next to it; else None."""
    if not os.access(path, os.R_OK):
        return denied(path)
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        return denied(path, writing=True)
    return None


def is_read_only(path: Path) -> bool:
    """Return whether a path, or where it would be created, is on a file system that is mounted read-only."""
    for place in (path, *path.parents):
        try:
            return bool(os.statvfs(place).f_flag & os.ST_RDONLY)
        except FileNotFoundError:
            continue
        except (OSError, AttributeError):  # Windows has neither.
            return False
    return False


def _unwritable(path: Path) -> Path:
    """Return the obstacle to writing a path: itself, or the directory in which it would be made."""
    if os.path.exists(path) and not os.access(path, os.W_OK):
        return path
    return next((place for place in path.parents if os.path.exists(place)), path)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _name(user: int) -> str:
    """Return the name of a user."""
    try:
        import pwd

        return pwd.getpwuid(user).pw_name
    except (ImportError, KeyError):
        return f"user {user}"
