"""Paths on this machine's file systems: users', which are never URLs, and those inside a checkpoint's directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckstore.errors import UsageError

#: `pathlib` merges two slashes into one.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")

#: Rule for paths of files and directories, for the error about a URL.
_OF_FILES = "ckstore reads and writes local paths only: give the path of a mounted file system"

#: No system call takes a longer path, in bytes.
_LONGEST_PATH = 4095


def local_path(given: str | os.PathLike[str], rule: str = _OF_FILES) -> Path:
    """Return the given path; raise `UsageError` for a URL, which would become a directory with a colon in its name.

    `rule` is the rule for the path, for the error about a URL.
    """
    text = os.fspath(given)
    found = _URL.match(text)
    if found:
        raise UsageError(f"{text} is a URL ({found[1]}), and {rule}.")
    return Path(given)


def is_relative(path: object) -> bool:
    """Return whether a value is the text of a relative path of plain names, as those of a directory's entries are.

    Examples
    --------
    >>> is_relative("sub/model.pt"), is_relative("/etc/passwd"), is_relative("sub/../../x"), is_relative("a//b")
    (True, False, False, False)
    """
    if not isinstance(path, str) or "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        return False
    try:
        return len(path.encode()) <= _LONGEST_PATH
    except UnicodeEncodeError:
        return False


def leads_out(path: str, target: str, base: str, real_base: str) -> bool:
    """Return whether a link leaves its tree, as written or as resolved; `real_base` is `base` without links."""
    written = os.path.normpath(os.path.join(os.path.dirname(path), target))
    if os.path.isabs(target) or written == ".." or written.startswith("../"):
        return True
    real = os.path.realpath(os.path.join(base, path))
    return os.path.commonpath([real, real_base]) != real_base
