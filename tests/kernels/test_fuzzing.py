"""Guided fuzzing of the decoders in C, for a moment; `tools/fuzz-guided` does it for longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import kernel_fuzzing

SECONDS = os.environ.get("CKSTORE_FUZZ_SECONDS")
END = f"-max_total_time={SECONDS}" if SECONDS else "-runs=3000"


@pytest.mark.long
@pytest.mark.timeout(180 + len(kernel_fuzzing.TARGETS) * int(SECONDS or 0))
def test_decoders(tmp_path: Path) -> None:
    """One test, so that one process compiles the program."""
    program = kernel_fuzzing.compiled(tmp_path / "program") or pytest.skip("no Clang with libFuzzer")
    for target in kernel_fuzzing.TARGETS:
        inputs = tmp_path / target
        assert kernel_fuzzing.fuzz(program, target, inputs, END) == 0, target
        assert len(list(inputs.iterdir())) > len(kernel_fuzzing.seeds(target))
