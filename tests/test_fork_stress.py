"""Children that are forked while threads store, encode, save and watch: a few seconds of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.local,  # The client of an object store does not survive a fork.
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_few_forks() -> None:
    """`CKSTORE_TEST_FORKS` gives their number."""
    # In a program of its own, so that a child which hangs ends with it.
    command = [sys.executable, "-m", "tests.fork_stress", os.environ.get("CKSTORE_TEST_FORKS", "24"), "0", "120"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\n0 hangs, 0 mixtures, 0 LockedErrors\n0 faults" in ended.stdout
    counted = re.search(r"(\d+) forks in .*\nversions stored in between: \{(.*)\}", ended.stdout)
    assert counted is not None
    assert int(counted[1]) > 0
    assert "'hot'" in counted[2]
