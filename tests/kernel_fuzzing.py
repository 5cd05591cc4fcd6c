"""Coverage-guided fuzzing of the decoders in C with libFuzzer, and sanitizers of addresses and undefined behaviour.

    tools/fuzz-guided integers|patches|values [SECONDS]

It needs Clang with libFuzzer, as Debian's packages clang and libclang-rt-dev have it: $CLANG, or else `clang`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from ckstore.codecs.patches import find_changes

TARGETS = ("integers", "patches", "values")

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "ckstore" / "kernels"

_FLAGS = [
    *("-std=c17", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-unknown-attributes"),
    *("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined", "-DLEVEL=baseline", "-I."),
]


def compiled(program: Path) -> Path | None:
    """Compile the decoders; None without a Clang that has libFuzzer."""
    command = [os.environ.get("CLANG", "clang"), *_FLAGS]
    empty = "int LLVMFuzzerTestOneInput(const char *bytes, long size) { return bytes && size < 0; }"
    try:
        subprocess.run(
            [*command, "-x", "c", "-", "-o", program], input=empty, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    subprocess.run([*command, "level.c", HERE / "kernels" / "fuzz.c", "-o", program, "-lm"], cwd=KERNELS, check=True)
    return program


def seeds(target: str) -> list[bytes]:
    """Return valid initial inputs of a target."""
    if target == "integers":
        return [path.read_bytes() for path in sorted((HERE / "fixtures" / "payloads").glob("format-*.bin"))]
    rng = np.random.default_rng(1)
    if target == "values":
        grids = [bytes([kind, 30, 8, 0, 0, 4]) + (-14).to_bytes(8, "little", signed=True) for kind in range(24)]
        return [grid + rng.bytes(200) for grid in grids]
    found = []
    for code, size in enumerate((1, 2, 4, 8)):
        for chosen in (slice(200, 500), rng.choice(3000, 100, replace=False)):
            before = rng.integers(0, 100, 3000).astype(f"u{size}")
            after = before.copy()
            after[chosen] += rng.integers(1, 5, after[chosen].size).astype(after.dtype) ** 3
            for is_float in (False, True):
                patch = find_changes(after, before, is_float=is_float).patch()
                assert patch is not None
                found.append(bytes([code | is_float << 2]) + (3000).to_bytes(2, "little") + patch)
    return found


def fuzz(program: Path, target: str, corpus: Path, end: str) -> int:
    """Fuzz a target until it fails or libFuzzer's option `end`; interesting inputs stay in `corpus`.

    Return the exit code.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(target)):
        (corpus / f"seed-{number}").write_bytes(data)
    limits = [end, "-timeout=60", "-max_len=32768", f"-artifact_prefix={corpus}/"]
    # libFuzzer counts the most memory that its process ever had: of a shell here, not of the one that tests.
    command = ["sh", "-c", '"$@"; exit $?', "sh", program, *limits, corpus]
    # The program has its own sanitizers: a preloaded one would stop it.
    environment = {**os.environ, "TARGET": target, "LD_PRELOAD": ""}
    return subprocess.run(command, env=environment, check=False).returncode


def main(target: str, corpus: str, seconds: str) -> int:
    inputs = Path(corpus).absolute()
    inputs.mkdir(parents=True, exist_ok=True)
    program = compiled(inputs.with_suffix(".program"))
    if program is None:
        print("No Clang with libFuzzer: install one, or name it in CLANG.", file=sys.stderr)
        return 1
    return fuzz(program, target, inputs, f"-max_total_time={seconds}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
