"""Paths that users give: of this machine's file systems, and no URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckstore.errors import UsageError

#: `pathlib` makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(given: str | os.PathLike[str]) -> Path:
    """The path that was given.

    Raises
    ------
    UsageError
        It is a URL, which would become a directory with a colon in its name.
    """
    text = os.fspath(given)
    found = _URL.match(text)
    if found:
        raise UsageError(
            f"{text} is a URL ({found[1]}), and ckstore reads and writes local paths only: give the path of a mounted "
            "file system."
        )
    return Path(given)
