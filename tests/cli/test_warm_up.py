"""`ckstore.warm_up` and the verb compile every kernel that is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.local  # The stores that it makes are its own, in a directory.

UNUSED = """
import importlib, pkgutil, sys
import ckstore, ckstore.kernels
from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher

ckstore.warm_up()
for info in pkgutil.walk_packages(ckstore.kernels.__path__, "ckstore.kernels."):
    module = importlib.import_module(info.name)
    for name, value in vars(module).items():
        if isinstance(value, CPUDispatcher) and isinstance(value._cache, FunctionCache) and not value.signatures:
            print(info.name, name)
"""


def test_no_kernel_is_left_to_be_compiled() -> None:
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    # Called by other kernels alone, these are loaded as parts of them.
    within = {"ckstore.kernels.coarse _order", "ckstore.kernels.codebook _first_cells"}
    assert set(done.stdout.splitlines()) <= within


def test_warm_up_reports_its_end(ckstore) -> None:
    assert ckstore("warm-up").out.startswith("All kernels are compiled (")
