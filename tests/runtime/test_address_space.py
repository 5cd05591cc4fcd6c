"""A process with too little address space gets an error before a library ends it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from ckstore.runtime.address_space import check
check()
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, resource.RLIM_INFINITY))
try:
    check()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_too_little_address_space_is_reported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    assert all(line.startswith("CkstoreError A limit of ") and "ulimit -v" in line for line in lines)
