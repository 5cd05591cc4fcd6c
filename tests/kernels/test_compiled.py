"""Machine code of kernels: of wheels, or compiled at first use and kept in one directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckstore
from ckstore.kernels.compiled import levels
from tools import machine_code

USE = """
import numpy as np
from ckstore.kernels import lattice
bits = np.arange(9, dtype=np.uint32)
bits.flags.writeable = False
print(lattice.magnitude_top(bits, 0, 5), sum(lattice.magnitude_top.stats.cache_hits.values()))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory that holds the package as a wheel has it."""
    machine_code.main()
    package = tmp_path / "site" / "ckstore"
    shutil.copytree(Path(ckstore.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package.parent


def used(tree: Path, *, program: str = USE, **environment: str) -> tuple[str, bool]:
    """Run a kernel of the tree in a process without a home; return its output, and whether it reported compiling."""
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), os.devnull)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    variables = {**kept, **nowhere, "PYTHONPATH": str(tree), **environment}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=variables, check=True
    )
    assert done.stderr == "" or done.stderr.startswith("compiling kernels, once: ")
    return done.stdout, bool(done.stderr)


def test_a_wheel_compiles_nothing_on_any_level(tree: Path) -> None:
    assert used(tree) == ("4 1\n", False)
    for level in levels():
        assert used(tree, NUMBA_CPU_NAME=level, NUMBA_CPU_FEATURES="") == ("4 1\n", False)


def test_parts_that_only_compile_are_not_imported(tree: Path) -> None:
    program = USE + "import sys; print({'scipy.linalg', 'numba.np.arraymath'}.isdisjoint(sys.modules))"
    assert used(tree, program=program) == ("4 1\nTrue\n", False)


@pytest.mark.parametrize("place", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def test_code_for_other_processors_is_compiled_once(tree: Path, tmp_path: Path, place: str) -> None:
    other = {"NUMBA_CPU_NAME": "generic", place: str(tmp_path / "kept")}
    assert [used(tree, **other) for _ in range(2)] == [("4 0\n", True), ("4 1\n", False)]
    # Kernels contain code of one another: a change of one makes that of all invalid.
    words = tree / "ckstore" / "kernels" / "entropy" / "words.py"
    words.write_text(words.read_text() + "\n# changed\n")
    assert [used(tree, **other) for _ in range(2)] == [("4 0\n", True), ("4 1\n", False)]
    assert used(tree) == ("4 0\n", True)


def test_kernels_run_where_no_directory_is_writable(tree: Path) -> None:
    assert [used(tree, NUMBA_CPU_NAME="generic") for _ in range(2)] == [("4 0\n", True)] * 2


@pytest.mark.parametrize("damage", ["empty", "cut", "writable by others"])
def test_kept_code_that_is_damaged_or_open_to_others_is_compiled_again(tree: Path, tmp_path: Path, damage: str) -> None:
    other = {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    used(tree, **other)
    for path in (tmp_path / "kept").iterdir():
        if damage == "writable by others":
            path.chmod(0o666)
        else:
            path.write_bytes(path.read_bytes()[: -100 if damage == "cut" else 0])
    assert [used(tree, **other) for _ in range(2)] == [("4 0\n", True), ("4 1\n", False)]


def test_a_wheel_without_the_highest_level_is_used(tree: Path) -> None:
    more = (
        "from ckstore.kernels import compiled\nlevels = compiled.levels\ncompiled.levels = lambda: ['v9', *levels()]\n"
    )
    assert used(tree, program=more + USE) == ("4 1\n", False)


UNUSED = """
import importlib, pkgutil, sys
import ckstore.kernels
from ckstore.kernels.compiled import MachineCode
from numba.core.registry import CPUDispatcher
from tools.machine_code import use_all_kernels

use_all_kernels()
for info in pkgutil.walk_packages(ckstore.kernels.__path__, "ckstore.kernels."):
    module = importlib.import_module(info.name)
    for name, value in vars(module).items():
        if isinstance(value, CPUDispatcher) and isinstance(value._cache, MachineCode):
            if not value.signatures or value.stats.cache_misses:
                print(info.name, name)
"""


@pytest.mark.local  # The stores that it makes are its own, in a directory.
def test_no_kernel_is_left_to_be_compiled() -> None:
    machine_code.main()
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    assert done.stdout == ""


#: Imports numba in two threads at once, in one of them through the kernels.
AT_ONCE = """
import importlib, threading
begin, failed = threading.Barrier(2), []
def work(name):
    begin.wait()
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=[name]) for name in ("ckstore.kernels.compiled", "numba")]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
"""


def test_another_thread_may_import_numba_concurrently() -> None:
    subprocess.run([sys.executable, "-c", AT_ONCE], check=True)
