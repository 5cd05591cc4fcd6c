"""Evaluation results, kept in files: an interrupted bench continues."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from blake3 import blake3

T = TypeVar("T")

#: Part of every key: raised when the same key means another figure.
REVISION = 1

#: Fields of a figure in a line about it.
_SHOWN = ("figure", "step", "seed")


class Results:
    """Figures by their keys, a file each; several processes may share the directory.

    Parameters
    ----------
    directory
        Created if absent.
    report
        Called with a line about every computed figure.
    """

    def __init__(self, directory: Path, report: Callable[[str], None] = lambda line: None) -> None:
        self.directory = directory
        self.report = report
        directory.mkdir(parents=True, exist_ok=True)

    def remember(self, compute: Callable[[], T], **key: Any) -> T:
        """Return the figure of a key; compute it if it does not exist.

        Parameters
        ----------
        compute
            Returns a JSON value.
        key
            Everything that the figure depends on, as JSON values. The build of torch and its number of threads are
            added, because they decide the order of sums.
        """
        whole = {"revision": REVISION, "torch": torch.__version__, "threads": torch.get_num_threads(), **key}
        text = json.dumps(whole, sort_keys=True)
        path = self.directory / f"{blake3(text.encode()).hexdigest(16)}.json"
        try:
            found: T = json.loads(path.read_text())["value"]
        except FileNotFoundError:
            self.report(" ".join(f"{name} {key[name]}" for name in _SHOWN if name in key))
            found = compute()
            _write(path, json.dumps({"key": whole, "value": found}))
        return found


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
