"""Guided fuzzing of the decoders in C, for a moment; `tools/fuzz-guided` does it for longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import kernel_fuzzing

SECONDS = os.environ.get("CKSTORE_FUZZ_SECONDS")
END = f"-max_total_time={SECONDS}" if SECONDS else "-runs=3000"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = kernel_fuzzing.compiled(tmp_path_factory.mktemp("fuzzing") / "program")
    return found or pytest.skip("no Clang with libFuzzer")


@pytest.mark.parametrize("target", kernel_fuzzing.TARGETS)
def test_decoders(program: Path, target: str, tmp_path: Path) -> None:
    assert kernel_fuzzing.fuzz(program, target, tmp_path / "inputs", END) == 0
    assert len(list((tmp_path / "inputs").iterdir())) > len(kernel_fuzzing.seeds(target))
