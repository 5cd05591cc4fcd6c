"""A process with too little address space for the compiler gets an error before LLVM ends it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from pathlib import Path
from ckstore.runtime.address_space import check, check_before_compiling
check()
check_before_compiling()
used = int(Path("/proc/self/statm").read_bytes().split()[0]) * 4096
for checked, allowed in ((check, 400 << 20), (check_before_compiling, used + (60 << 20))):
    resource.setrlimit(resource.RLIMIT_AS, (allowed, resource.RLIM_INFINITY))
    try:
        checked()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_too_little_address_space_is_reported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("CkstoreError A limit of ") and "ulimit -v" in line for line in lines)
