"""Shell completion: the scripts, and the names that they are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def asked(*words: str) -> dict[str, str]:
    """Return the variables by which bash asks for completions of the last of these words."""
    return {
        "_CKSTORE_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["ckstore", *words]),
        "COMP_CWORD": str(len(words)),
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(ckstore, shell: str) -> None:
    assert "_CKSTORE_COMPLETE" in ckstore("completion", shell).out
    assert "tcsh" in ckstore("completion", "tcsh", code=2).sentence


def test_names(ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(*words: str) -> list[str]:
        with monkeypatch.context() as patch:
            for name, value in asked(*words).items():
                patch.setenv(name, value)
            done = ckstore()
        assert done.err == ""
        return [line.removeprefix("plain,") for line in done.out.splitlines() if line]

    assert completed("in") == ["init", "ingest"]
    assert set(completed("show", "")) == {"latest", "best", "gpt", "gpt@0", "gpt@10", "gpt@20"}
    assert completed("checkout", "gpt@1") == ["gpt@10"]
    assert completed("tag", "--delete", "b") == ["best"]
    assert completed("log", "g") == ["gpt"]
    assert completed("push", "ot") == completed("pull", "ot") == ["file,ot"]  # Bash looks for it.
    assert completed("push", "s3://models/team-a", "b") == ["best"]
    assert "--require-exact" in completed("checkout", "--")


def test_nothing_where_there_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKSTORE", raising=False)
    command = [sys.executable, "-m", "ckstore"]
    done = subprocess.run(command, env=os.environ | asked("show", ""), capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")
