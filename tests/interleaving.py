"""Two operations on one store, each in a process of its own, that take turns at their steps in a seed's order.

A process stops before every step (see `tests.points_of_death`) and goes on when it is told to. One that waits for the
other comes to no step; the other goes on then. One of the two may be killed at one of its steps.
"""

from __future__ import annotations

import os
import random
import select
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from ckstore.errors import CkstoreError
from tests.points_of_death import FAILED, KILL, REFUSED, Steps

#: Seconds after which a process that reaches no step counts as waiting for the other.
PATIENCE = 0.2

Operation = Callable[[Path], None]


class _Turns(Steps):
    """Waits before every step for its turn."""

    def __init__(self, root: Path, at: int, said: int, told: int) -> None:
        super().__init__(root, KILL, at)
        self._said = said
        self._told = told
        self._turn = Lock()

    def step(self, failure: Callable[[int], Exception]) -> None:
        """One step is about to be made."""
        with self._turn:
            os.write(self._said, b".")
            os.read(self._told, 1)
            super().step(failure)


class _Child:
    """A process that takes turns; `code` is None as long as it runs."""

    def __init__(self, operation: Operation, store: Path, at: int) -> None:
        self._said, said = os.pipe()
        told, self._told = os.pipe()
        self.code: int | None = None
        self.steps = 0
        self.pid = os.fork()
        if not self.pid:
            os.close(self._said)
            os.close(self._told)
            _run(operation, store, at, said, told)
        os.close(said)
        os.close(told)

    def comes(self, patience: float) -> bool:
        """Return whether it reaches a step, within some seconds; it may have ended instead."""
        if not select.select([self._said], [], [], patience)[0]:
            return False
        if os.read(self._said, 1):
            self.steps += 1
            return True
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._said)
        os.close(self._told)
        return False

    def go(self) -> None:
        """Allow it one step."""
        os.write(self._told, b".")


def _run(operation: Operation, store: Path, at: int, said: int, told: int) -> None:
    code = FAILED
    try:
        _Turns(store, at, said, told).install()
        operation(store)
        code = 0
    except (CkstoreError, OSError):
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def interleaved(first: Operation, second: Operation, store: Path, seed: int, dies: int = 0) -> tuple[int, int, int]:
    """Run two operations at once; their exit codes, and how often the turn went over from one to the other.

    Parameters
    ----------
    seed
        Decides whose turn it is wherever both have come to a step.
    dies
        Step at which the second process is killed; 0 for none.
    """
    chosen = random.Random(seed)
    children = [_Child(first, store, 0), _Child(second, store, dies)]
    ready: list[_Child] = []
    waits: list[_Child] = []
    last: _Child | None = None
    turns = 0
    while any(child.code is None for child in children):
        for child in children:
            if child.code is None and child not in ready:
                # A child that waits for the other one is not waited for while that one has a step to make.
                patience = 0.0 if child in waits and ready else PATIENCE
                if child.comes(patience):
                    ready.append(child)
                    waits = [other for other in waits if other is not child]
                elif child not in waits:
                    waits.append(child)
        if ready:
            child = chosen.choice(ready)
            ready.remove(child)
            turns += last is not None and last is not child
            last = child
            child.go()
    codes = [child.code for child in children]
    assert codes[0] is not None
    assert codes[1] is not None
    return codes[0], codes[1], turns
