"""The errors that ckstore raises, grouped by how a handler responds, each with a stable kind and an exit code."""

from __future__ import annotations

from typing import ClassVar


class CkstoreError(Exception):
    """Base of all errors of ckstore.

    The message is one sentence that names the remedy; `kind` is stable and meant for programs;
    `exit_code` is that of the command line.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return " ".join(str(part) for part in self.args)


class InputError(CkstoreError, ValueError):
    """The input is truncated, damaged or inconsistent, or it changed while it was read."""

    kind = "input"


class UsageError(CkstoreError, ValueError):
    """The arguments of a call are invalid."""

    kind = "usage"
    exit_code = 2


class ReadOnlyError(UsageError):
    """The store is open for reading only."""

    kind = "read-only"


class ClosedError(UsageError):
    """The store is closed."""

    kind = "closed"


class AccessError(CkstoreError, PermissionError):
    """The system denies access: permissions, or a file system that is mounted read-only. Nothing is damaged."""

    kind = "access"


class PartialError(CkstoreError):
    """Some of several inputs failed; the others are stored."""

    kind = "partial"
    exit_code = 3


class IntegrityError(CkstoreError, ValueError):
    """Stored bytes are damaged: a checksum, an id or a length does not match."""

    kind = "integrity"
    exit_code = 4


class NoStoreError(CkstoreError, FileNotFoundError):
    """No store was found."""

    kind = "no-store"
    exit_code = 10


class LockedError(CkstoreError, TimeoutError):
    """Another process held the lock of the store for longer than the timeout."""

    kind = "locked"
    exit_code = 11


class ConflictError(CkstoreError, FileExistsError):
    """Different content exists."""

    kind = "conflict"
    exit_code = 12


class NotFoundError(CkstoreError, KeyError):
    """A version, run, tag or tensor was not found; the message lists near matches."""

    kind = "not-found"
    exit_code = 13


class FormatVersionError(CkstoreError, ValueError):
    """A later version of ckstore wrote the store."""

    kind = "format-version"
    exit_code = 14


class DiskFullError(CkstoreError):
    """The disk or the quota is full."""

    kind = "disk-full"
    exit_code = 16


class UnreachableError(CkstoreError):
    """The object store did not answer or refused; the outcome of a write is unknown."""

    kind = "unreachable"
    exit_code = 15
