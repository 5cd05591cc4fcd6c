"""Files: temporary names, permissions, fsync, rename, and errors for a full disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from ckstore.errors import CkstoreError, DiskFullError, IntegrityError
from ckstore.runtime.access import DENIED, Explained, denial, denied

_TEMPORARY = re.compile(r"\.tmp-(\d+)-[0-9a-f]+")
#: Name of a file that marks a directory as the mirror of a store in a bucket.
MIRROR = "mirror"


def checkpoint(step: str) -> None:
    """Mark a step of the commit protocol: a no-op that tests replace to stop the process there."""


def timestamp() -> str:
    """Return the time in UTC, ISO 8601 with microseconds: of fixed width, so that text order is time order."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def sync_file(descriptor: int) -> None:
    """Make a file durable. An fsync of macOS leaves it in the memory of the drive, F_FULLFSYNC does not."""
    if sys.platform == "darwin":
        import fcntl

        with suppress(OSError):  # The file system does not support it.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_contents(descriptor: int) -> None:
    """Make a file's contents durable: its times may be lost."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        sync_file(descriptor)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Does nothing on file systems that cannot fsync a directory."""
    descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        sync_file(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def temporary_path(directory: Path) -> Path:
    """Return a unique name in `directory` that `sweep_temporaries` recognises."""
    return directory / f".tmp-{os.getpid()}-{os.urandom(8).hex()}"


def is_shared(directory: Path) -> bool:
    """Return whether a group shares a directory: it is writable by the group, and has the set-group-id bit."""
    mode = directory.stat().st_mode
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def share(made: Path) -> None:
    """Let the group read and write a new file or directory if the group shares its directory, whatever the umask is."""
    if is_shared(made.parent):
        own = made.stat().st_mode
        wanted = stat.S_IMODE(own) | (0o2770 if stat.S_ISDIR(own) else 0o660)
        if wanted != stat.S_IMODE(own):
            with suppress(PermissionError):  # The file system has permissions of its own.
                made.chmod(wanted)


def new_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Create a file, and open it for writing."""
    file = path.open("xb", buffering)
    try:
        share(path)
    except BaseException:
        file.close()
        raise
    return file


def touch(path: Path) -> None:
    """Create an empty file, or set the time of an existing one."""
    try:
        new_file(path).close()
    except FileExistsError:
        os.utime(path)


def new_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory, and those above it; an existing one stays as it is."""
    if path.is_dir():
        return
    if path.parent != path:
        new_directory(path.parent, mode)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        share(path)


def write_explained(directory: Path, needed: int) -> Explained:
    """Turn "no space left", or a file beyond its limit, into one sentence with the number of bytes that are needed.

    Turn missing permission to write in the directory into `AccessError`. It may be a file that is written.
    """
    return Explained(unwritten, directory, needed)


def unwritten(error: BaseException, directory: Path, needed: int) -> CkstoreError | None:
    """Return the error of `write_explained`; None for one that it keeps."""
    if not isinstance(error, OSError) or isinstance(error, CkstoreError):
        return None
    if error.errno == errno.EFBIG:
        return CkstoreError(
            f"A file in {directory} would exceed the size limit, with at least {needed:,} bytes"
            " (`ulimit -f`, or a limit of the file system); raise the limit and try again."
        )
    if error.errno == errno.EDQUOT:
        return DiskFullError(
            f"The quota for {directory} is used up, and at least {needed:,} more bytes are needed; free some and"
            " try again."
        )
    return full_error(directory, needed) if error.errno == errno.ENOSPC else denial(error, directory, True)


def full_error(directory: Path, needed: int) -> DiskFullError:
    """Return the error for a full disk: `needed` bytes were to be written at or below `directory`."""
    free = "an unknown number of"
    with suppress(OSError):
        status = os.statvfs(directory if directory.exists() else directory.parent)
        free = f"{status.f_bavail * status.f_frsize:,}"
    is_cache = any((place / MIRROR).is_file() for place in (directory, directory.parent))
    elsewhere = ", or set $CKSTORE_CACHE to a directory on another disk," if is_cache else ""
    there = f"at least {needed:,} more bytes are needed and {free} are free" if needed > 1 else f"{free} bytes are free"
    return DiskFullError(f"No space for {directory}: {there}; free some{elsewhere} and try again.")


def write_file(path: Path, data: bytes, *, absent: bool = False) -> bool:
    """Write a small file durably: in full, or not at all.

    With `absent`, leave an existing file as it is and return False.

    Raises
    ------
    CkstoreError
        The disk is full; no file is left.
    """
    temporary = temporary_path(path.parent)
    try:
        with write_explained(path.parent, len(data)):
            with new_file(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            checkpoint("file-written")
            if absent:
                is_written = place_absent(temporary, path)
            else:
                os.replace(temporary, path)
                is_written = True
            try:
                sync_directory(path.parent)
            except BaseException:
                if absent and is_written:
                    path.unlink(missing_ok=True)  # Nobody relies on it yet.
                raise
        return is_written
    finally:
        with suppress(OSError):  # It is swept later.
            temporary.unlink(missing_ok=True)


def write_cached(path: Path, data: bytes) -> None:
    """Write a file that can be fetched again: in full or not at all, but not durably."""
    temporary = temporary_path(path.parent)
    try:
        with new_file(temporary) as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def place_absent(temporary: Path, path: Path) -> bool:
    """Link a file to a path; return False if that exists. The caller removes the temporary name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        if path.exists():
            return False
        # File systems without hard links: callers hold a lock, or must not do so at the same time.
        os.replace(temporary, path)
    return True


def open_file(path: Path) -> tuple[int, int]:
    """Return a descriptor for reading a regular file, and its size in bytes; refuse devices and pipes.

    Raises
    ------
    IntegrityError
        The path is not a regular file.
    AccessError
        The user may not read the file.
    CkstoreError
        The file cannot be read for another reason.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in DENIED:
            raise denied(path, error) from error
        raise CkstoreError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk.") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise IntegrityError(f"{path} is not a file; remove it, and restore the file from a copy.")
    return descriptor, status.st_size


def find_temporaries(directory: Path, grace: float = 3600.0) -> list[Path]:
    """Return the temporary files and directories of dead processes in a directory, without those below it.

    They have not changed for `grace` seconds: the process may run on another host.
    """
    found = []
    oldest = time.time() - grace
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _TEMPORARY.match(entry.name)
            if match is None or is_running(int(match[1])):
                continue
            with suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime <= oldest:
                    found.append(Path(entry.path))
    return found


def sweep_temporaries(directory: Path, grace: float = 3600.0) -> list[Path]:
    """Remove the paths that `find_temporaries` returns; return the removed ones."""
    removed = []
    for path in find_temporaries(directory, grace):
        with suppress(FileNotFoundError):
            remove(path)
            removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Remove a file, or a directory with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory; 0 if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        return sum(size_of(entry) for entry in path.iterdir())
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def host() -> str:
    """Return the name of this host, by which claims of processes are known."""
    import socket

    return socket.gethostname()


def is_running(process: int) -> bool:
    """Return whether a process with this id runs on this host; a zombie does not."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:
        # The state follows the name, which may contain any characters. Threads may outlive the first one.
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state not in (b"Z", b"X") or len(os.listdir(f"/proc/{process}/task")) > 1
    except (OSError, IndexError):
        return True
