"""Ends or fails an operation at any of its steps: each system call that changes files, and each SQL statement.

Operations run in processes that are forked off, so that a step costs milliseconds. `POWER` ends them as a loss of power
does: bytes without an fsync are lost, and without an fsync of their directory the last names, or all, are restored: a
file system with a journal keeps the order of changes in a directory.
The catalog is left as it is at the end of a statement: that SQLite syncs it in order is its own promise. The claims,
which nothing syncs, are lost, cut, or full of noise.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckstore.errors import CkstoreError
from ckstore.storage.root import CATALOG, CLAIMS
from ckstore.storage.zip_stream import ZipStream

KILL, POWER, NO_SPACE, BROKEN = "kill", "power", "no space", "broken"
MODES = (KILL, POWER, NO_SPACE, BROKEN)

#: Exit codes of children besides 0: died where they should, gave up with an error of ours, failed otherwise.
DIED, REFUSED, FAILED = 9, 3, 1

_CALLS = ("fsync", "replace", "rename", "unlink", "link", "mkdir", "rmdir")


class Steps:
    """Counts the steps of an operation below a directory, and strikes at one of them."""

    def __init__(self, root: Path, mode: str, at: int) -> None:
        self.root = os.path.realpath(root)
        self.mode = mode
        self.at = at
        self.count = 0
        self._graveyard = Path(tempfile.mkdtemp(dir=root.parent))
        self._old = {os.lstat(path).st_ino for path in self._files()}
        self._synced: set[int] = set()
        # Undo functions of directory changes that were not synced, by directory.
        self._undo: list[tuple[str, Callable[[], None]]] = []

    def step(self, failure: Callable[[int], Exception]) -> None:
        """One step is about to be made."""
        self.count += 1
        if self.count != self.at:
            return
        if self.mode in (KILL, POWER):
            if self.mode == POWER:
                self._lose()
            os._exit(DIED)
        raise failure(errno.ENOSPC if self.mode == NO_SPACE else errno.EIO)

    def install(self) -> None:
        """Watch this process, which is never to be used for anything else."""
        for name in _CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))
        put = ZipStream._put

        def written(stream: ZipStream, view: memoryview) -> None:
            self.step(lambda code: OSError(code, os.strerror(code)))
            put(stream, view)

        ZipStream._put = written  # type: ignore[method-assign]
        connect = sqlite3.connect

        def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
            return connect(*arguments, **options, factory=watched)

        class watched(sqlite3.Connection):  # noqa: N801
            def execute(connection, statement: str, *arguments: Any) -> sqlite3.Cursor:  # noqa: N805
                if statement.split(" ", 1)[0] in ("BEGIN", "INSERT", "UPDATE", "DELETE", "COMMIT"):
                    self.step(_sql_failure)
                return super().execute(statement, *arguments)

            def executemany(connection, statement: str, *arguments: Any) -> sqlite3.Cursor:  # noqa: N805
                self.step(_sql_failure)
                return super().executemany(statement, *arguments)

        sqlite3.connect = connected  # type: ignore[assignment]

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            paths = [os.path.realpath(os.fspath(one)) for one in arguments[:2] if not isinstance(one, int)]
            if paths and not paths[-1].startswith(self.root):
                return call(*arguments, **options)
            self.step(lambda code: OSError(code, os.strerror(code)))
            if name == "fsync":
                self._note_sync(arguments[0])
                return None  # The real one takes milliseconds, and no power is lost.
            self._bury(name, paths)
            return call(*arguments, **options)

        return watched

    def _note_sync(self, descriptor: int) -> None:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        self._synced.add(os.fstat(descriptor).st_ino)
        self._undo = [(directory, undo) for directory, undo in self._undo if directory != place]

    def _bury(self, name: str, paths: list[str]) -> None:
        """Save the state that undoing a call needs."""
        if name not in ("replace", "rename", "unlink") or CATALOG in os.path.basename(paths[-1]):
            return
        target = paths[-1]
        grave = None
        if os.path.isfile(target):
            grave = self._graveyard / str(self.count)
            os.symlink(target, f"{grave}.of")
            shutil.copy2(target, grave)
            self._synced.add(os.stat(target).st_ino)

        def undo() -> None:
            if name != "unlink" and os.path.lexists(target):
                os.rename(target, paths[0])
            # A directory that was removed later keeps no file.
            if grave is not None and not os.path.exists(target) and os.path.isdir(os.path.dirname(target)):
                shutil.copy2(grave, target)
                self._old.add(os.stat(target).st_ino)

        self._undo.append((os.path.dirname(target), undo))

    def _lose(self) -> None:
        """Restore the disk's state after a loss of power."""
        chance = random.Random(self.at)
        self.at = -1
        for place in sorted({directory for directory, _ in self._undo}):
            changes = [undo for directory, undo in self._undo if directory == place]
            for undo in reversed(changes[chance.randint(0, len(changes)) :]):
                undo()
        for path in self._files():
            if os.lstat(path).st_ino not in self._old | self._synced and CATALOG not in path.name:
                os.truncate(path, 0)
        for path in self._files():
            if path.name == CLAIMS:
                data = path.read_bytes()
                path.write_bytes(chance.choice([b"", data[: chance.randrange(len(data) + 1)], chance.randbytes(2000)]))

    def _files(self) -> list[Path]:
        return [path for path in Path(self.root).rglob("*") if path.is_file()]


def _sql_failure(code: int) -> Exception:
    error = sqlite3.OperationalError("database or disk is full" if code == errno.ENOSPC else "disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL if code == errno.ENOSPC else sqlite3.SQLITE_IOERR
    return error


def struck(operation: Callable[[Path], None], store: Path, mode: str, at: int) -> tuple[int, int]:
    """Run an operation on the store at a path, struck at a step (0: never); its exit code, and the steps it came to."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = FAILED
        steps = Steps(store, mode, at)
        try:
            steps.install()
            operation(store)
            code = 0
        except (CkstoreError, OSError):
            code = REFUSED
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os.write(write, str(steps.count).encode())
            os._exit(code)
    os.close(write)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.read(read, 20)
    os.close(read)
    return code, int(said or b"0")
