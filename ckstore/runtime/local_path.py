"""Paths that users give: of this machine's file systems, and no URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckstore.errors import UsageError

#: `pathlib` makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


#: What is said of a URL where a file or a directory of files is meant.
_OF_FILES = "ckstore reads and writes local paths only: give the path of a mounted file system"


def local_path(given: str | os.PathLike[str], rule: str = _OF_FILES) -> Path:
    """The path that was given.

    Parameters
    ----------
    rule
        What is to be given instead of a URL.

    Raises
    ------
    UsageError
        It is a URL, which would become a directory with a colon in its name.
    """
    text = os.fspath(given)
    found = _URL.match(text)
    if found:
        raise UsageError(f"{text} is a URL ({found[1]}), and {rule}.")
    return Path(given)
