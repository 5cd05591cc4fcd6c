"""The errors that ckstore raises, grouped by how a handler responds, each with a stable kind and an exit code."""

from __future__ import annotations

from typing import ClassVar


class CkstoreError(Exception):
    """Base of every error that ckstore raises on purpose.

    The message is one sentence that names the remedy; `kind` is stable and meant for programs;
    `exit_code` is what the command line ends with.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return " ".join(str(part) for part in self.args)


class InputError(CkstoreError, ValueError):
    """The input is not what it claims to be: truncated, damaged, lying about its offsets, changed while read."""

    kind = "input"


class UsageError(CkstoreError, ValueError):
    """The call cannot be carried out as it was asked for."""

    kind = "usage"
    exit_code = 2


class PartialError(CkstoreError):
    """Some of several inputs were done and some were not."""

    kind = "partial"
    exit_code = 3


class IntegrityError(CkstoreError, ValueError):
    """Stored bytes are not what was written: a checksum, an id or a length does not agree."""

    kind = "integrity"
    exit_code = 4


class NoStoreError(CkstoreError, FileNotFoundError):
    """There is not a store where one was looked for."""

    kind = "no-store"
    exit_code = 10


class LockedError(CkstoreError, TimeoutError):
    """Another process held the store's catalog for longer than the timeout."""

    kind = "locked"
    exit_code = 11


class ConflictError(CkstoreError, FileExistsError):
    """Other content is already there."""

    kind = "conflict"
    exit_code = 12


class NotFoundError(CkstoreError, KeyError):
    """No version, run, tag or tensor of that name; the message names near matches."""

    kind = "not-found"
    exit_code = 13


class FormatVersionError(CkstoreError, ValueError):
    """The store was written by a later ckstore than this one."""

    kind = "format-version"
    exit_code = 14


class DiskFullError(CkstoreError):
    """The file system, or the quota, has too little room."""

    kind = "disk-full"
    exit_code = 16


class UnreachableError(CkstoreError):
    """The object store did not answer, or refused; whether it did what was asked is not known."""

    kind = "unreachable"
    exit_code = 15
