"""Writers on a bucket behind a network with faults, killed at random: a few seconds of it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.local

pytest.importorskip("ministack")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_few_seconds() -> None:
    # In a program of its own: it forks, which clients with threads do not survive.
    command = [sys.executable, "-m", "tests.bucket_stress", "6", "0", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\n0 faults" in ended.stdout
    counted = re.search(r"(\d+) commits .*\n(\d+) processes killed", ended.stdout)
    assert counted is not None
    assert int(counted[1]) > 0
    assert int(counted[2]) > 0
