"""Syncs of an ingest, counted in the C library, since SQLite's are not Python's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc, and LD_PRELOAD"),
]

COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>

static int count;

int syncs(void) { return count; }

static int counted(const char *name, int descriptor) {
    __sync_fetch_and_add(&count, 1);
    return ((int (*)(int)) dlsym(RTLD_NEXT, name))(descriptor);
}

int fsync(int descriptor) { return counted("fsync", descriptor); }
int fdatasync(int descriptor) { return counted("fdatasync", descriptor); }
"""

PROGRAM = """
import ctypes, sys
import numpy as np
import ckstore

syncs = ctypes.CDLL(None).syncs
state = lambda step: {"w": np.random.default_rng(step).standard_normal((int(sys.argv[2]), 64), np.float32)}
with ckstore.init(sys.argv[1]) as store:
    store.ingest(state(0), run="a", step=0, hot=9)
    before = syncs()
    store.ingest(state(1), run="a", step=1, hot=9)
    print(syncs() - before)
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that counts syncs."""
    source = tmp_path_factory.mktemp("counter") / "counter.c"
    source.write_text(COUNTER)
    library = source.with_suffix(".so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize(("rows", "expected"), [(128, 8), (8192, 9)], ids=["33 kB", "2 MB"])
def test_syncs_of_a_hot_ingest(counter: Path, directory: Path, rows: int, expected: int) -> None:
    """SQLite's commit takes five: of its journal, the journal's name, number of pages and removal, and the pages.

    Two packs take one each, and one for their names; a large one another while it grows.
    """
    command = [sys.executable, "-c", PROGRAM, str(directory / "store"), str(rows)]
    done = subprocess.run(
        command, env=os.environ | {"LD_PRELOAD": str(counter)}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == expected
