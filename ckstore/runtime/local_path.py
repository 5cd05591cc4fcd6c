"""Users' paths: on this machine's file systems, never URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckstore.errors import UsageError

#: `pathlib` merges two slashes into one.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


#: Rule for paths of files and directories, for the error about a URL.
_OF_FILES = "ckstore reads and writes local paths only: give the path of a mounted file system"


def local_path(given: str | os.PathLike[str], rule: str = _OF_FILES) -> Path:
    """Return the given path; raise `UsageError` for a URL, which would become a directory with a colon in its name.

    `rule` is the rule for the path, for the error about a URL.
    """
    text = os.fspath(given)
    found = _URL.match(text)
    if found:
        raise UsageError(f"{text} is a URL ({found[1]}), and {rule}.")
    return Path(given)
