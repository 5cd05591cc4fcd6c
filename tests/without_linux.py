"""A plugin of pytest that deletes the names that only Linux has, and its directories of processes and settings.

pytest -p tests.without_linux
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from typing import Any

_LINUX = {
    os: (
        "O_DIRECTORY", "copy_file_range", "eventfd", "fdatasync", "getrandom", "memfd_create",
        "pidfd_open", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity",
        "sched_setscheduler", "splice",
    ),
    fcntl: ("F_OFD_SETLK", "F_OFD_SETLKW", "F_ADD_SEALS"),
    mmap: ("MADV_HUGEPAGE", "MADV_POPULATE_WRITE"),
}  # fmt: skip

for module, names in _LINUX.items():
    for name in names:
        vars(module).pop(name, None)

_open, _listdir, _stat = io.open, os.listdir, os.stat


def _check(path: Any) -> None:
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _open_elsewhere(path: Any, *arguments: Any, **options: Any) -> Any:
    _check(path)
    return _open(path, *arguments, **options)


def _list_elsewhere(path: Any = ".") -> list[str]:
    _check(path)
    return _listdir(path)


def _stat_elsewhere(path: Any, **options: Any) -> os.stat_result:
    _check(path)
    return _stat(path, **options)


io.open, os.listdir, os.stat = _open_elsewhere, _list_elsewhere, _stat_elsewhere
