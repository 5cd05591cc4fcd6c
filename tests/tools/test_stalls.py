"""The table of stalls: contenders take turns, and one that fails is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tools.bench import stalls


def test_the_table_compares_all_saves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        name = command[-2]
        asked.append(name)
        seconds = {"ckstore": [0.1, 0.02, 0.03], "moonclip": [0.2, 0.05, 0.05]}.get(name)
        return subprocess.CompletedProcess(command, seconds is None, f"a warning\n{json.dumps(seconds)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["stalls", "--megabytes", "58", "--repeat", "2"])
    stalls.main()
    names = list(stalls.CONTENDERS)
    assert asked == [*reversed(names), *names]
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| ckstore | 58 | 100 (100 to 100) ms | 25 (20 to 30) ms | 1.00 |",
        "| moonclip | 58 | 200 (200 to 200) ms | 50 (50 to 50) ms | 2.00 |",
    ]


def test_a_run_times_every_save() -> None:
    assert all(0 < seconds < 60 for seconds in stalls._run("ckstore", 1, 2))
