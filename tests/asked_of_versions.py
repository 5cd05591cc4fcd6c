"""Functions that worker processes call on versions: importing them loads neither torch nor the tests' helpers."""

from __future__ import annotations

import os

import numpy as np

from ckstore.runtime.threads import worker_count
from ckstore.version import Version


def step_of(version: Version) -> int | None:
    return version.step


def sum_of(version: Version) -> float:
    return float(np.asarray(version["model/a"][:]).sum(dtype=np.float64))


def weight_sum(version: Version) -> float:
    return float(np.asarray(version["weight"][:]).sum())


def itself(version: Version) -> Version:
    return version


def store_of(version: Version) -> tuple[int, int]:
    """Return the process, and the store that it has open."""
    return os.getpid(), id(version._stored.repository)


def threads_of(version: Version) -> int:
    return worker_count()


def refuse(version: Version) -> None:
    version["model/nothing"]


def end(version: Version) -> None:
    os._exit(1)
