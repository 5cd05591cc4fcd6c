"""The cache directory of compiled kernels: next to the sources, the user's, or a temporary one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckstore

USE = """
import numpy as np
from ckstore.kernels import lattice
bits = np.arange(9, dtype=np.uint32)
bits.flags.writeable = False
print(lattice.magnitude_top(bits, 0, 5), sum(lattice.magnitude_top.stats.cache_hits.values()))
"""

#: Root may write everywhere, so the test declares read-only places itself.
READ_ONLY = """
from ckstore.kernels import compiled
compiled._is_writable = lambda path, ask=compiled._is_writable: {!r} not in path and ask(path)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory that holds the package, with nothing compiled."""
    package = tmp_path / "site" / "ckstore"
    shutil.copytree(Path(ckstore.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package.parent


def used(tree: Path, code: str = USE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a kernel of the tree in a process without a home."""
    (tree.parent / "tmp").mkdir(exist_ok=True)
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), os.devnull)
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    variables = {**kept, **nowhere, "TMPDIR": str(tree.parent / "tmp"), "PYTHONPATH": str(tree), **environment}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


def test_a_temporary_directory_serves_if_no_other_is_writable(tree: Path) -> None:
    (tree / "ckstore" / "kernels" / "__pycache__").touch()  # no directory: nothing can be written into it
    first = used(tree)
    assert first.stdout == "4 0\n", first.stderr
    [warning] = first.stderr.splitlines()
    assert warning.startswith(f"compiling kernels into {tree.parent / 'tmp'}")
    assert "NUMBA_CACHE_DIR" in warning
    again = used(tree)
    assert (again.stdout, again.stderr) == ("4 1\n", "")


def test_nothing_is_loaded_from_a_temporary_directory_that_others_write_to(tree: Path) -> None:
    (tree / "ckstore" / "kernels" / "__pycache__").touch()
    open_to_all = tree.parent / "tmp" / f"ckstore-{os.getuid()}"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    assert used(tree).stdout == "4 0\n"
    assert list(open_to_all.iterdir()) == []


@pytest.mark.parametrize("home", [True, False])
def test_kernels_compiled_in_an_image_are_found_by_read_only_users(tree: Path, home: bool) -> None:
    assert used(tree).stderr.startswith("compiling kernels for their first use")
    places = {"XDG_CACHE_HOME": str(tree.parent / "home")} if home else {}
    compiled = {path: path.stat().st_mtime_ns for path in tree.rglob("*.nb?")}
    for _ in range(2):
        done = used(tree, READ_ONLY.format(str(tree)) + USE, **places)
        assert (done.stdout, done.stderr) == ("4 1\n", "")
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*.nb?")} == compiled
    if not home:
        return
    # Later compilations go to the writable directory, and are found there.
    words = tree / "ckstore" / "kernels" / "entropy" / "words.py"
    words.write_text(words.read_text() + "\n# changed\n")
    found = [used(tree, READ_ONLY.format(str(tree)) + USE, **places).stdout for _ in range(2)]
    assert found == ["4 0\n", "4 1\n"]


def test_an_error_reports_that_no_directory_is_writable(tree: Path) -> None:
    code = READ_ONLY.format("/") + "from ckstore.cli import main\nmain(['warm-up'])"
    done = used(tree, code)
    assert done.returncode == 1
    assert done.stderr.startswith("ckstore: No directory for compiled kernels is writable: set NUMBA_CACHE_DIR")
    assert done.stderr.count("\n") == 1


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
