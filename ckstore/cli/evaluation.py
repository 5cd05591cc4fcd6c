"""Users' evaluation commands: run without a shell, they print a number."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ckstore.errors import CkstoreError, UsageError

#: The placeholder of the checkpoint's path.
_PLACE = "{}"

#: A number outside a word: `written to model_v2.json` and `more information` contain none.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|(?:nan|inf(?:inity)?)\b)", re.IGNORECASE)


def evaluator(command: str) -> Callable[[Path], float]:
    """Return a function that runs an evaluation command on a checkpoint and returns its last number."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"The evaluation command {command!r} cannot be read ({error}); check its quotes.") from error
    if not any(_PLACE in word for word in words[1:]):
        raise UsageError(f"The evaluation command {command!r} has no {_PLACE} for the checkpoint's path; add it.")

    return partial(_evaluate, words)


def _evaluate(words: Sequence[str], path: Path) -> float:
    line = [words[0], *(word.replace(_PLACE, str(path)) for word in words[1:])]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be run: {error.strerror}; check the evaluation command.") from error
    if done.returncode:
        raise CkstoreError(f"The evaluation command ended with exit code {done.returncode}; nothing was stored.")
    found = _NUMBER.findall(done.stdout.decode(errors="replace"))
    if not found:
        raise CkstoreError("The evaluation command printed no number; make it print the loss last.")
    value = float(found[-1])
    return value if math.isfinite(value) else math.nan
