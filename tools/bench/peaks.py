"""Peak anonymous memory of ingest and checkout, each in its own process, observed from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ckstore.policy import FIDELITIES
from tools.bench.speed_figures import Section, digits
from tools.bench.speed_frame import Bench

#: Tensors are square matrices with this number of rows: 64 MiB each, like the larger ones of a language model.
ROWS = 4096

#: Size in MB (10^6 bytes) of the checkpoints of the speed benchmark's row.
MEGABYTES = 1000

#: Seconds between two samples of a process.
INTERVAL = 0.002

INIT = "import sys, ckstore; ckstore.init(sys.argv[1])"
INGEST = "import sys, ckstore; ckstore.open(sys.argv[1]).ingest(sys.argv[2], run='a', policy=sys.argv[3])"
CHECKOUT = "import sys, ckstore; ckstore.open(sys.argv[1], 'r')[sys.argv[2]].checkout(sys.argv[3])"


def weights(seed: int, version: int) -> npt.NDArray[np.float32]:
    """Return a matrix whose versions are a random walk with steps of 5 % of its size."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((ROWS, ROWS), np.float32) * np.float32(0.02)
    for _ in range(version):
        values += generator.standard_normal((ROWS, ROWS), np.float32) * np.float32(0.001)
    return values


def write_safetensors(path: Path, count: int, version: int) -> None:
    """Write `count` matrices without holding more than one of them."""
    nbytes = 4 * ROWS * ROWS
    header = {
        f"layers.{number}.weight": {
            "dtype": "F32",
            "shape": [ROWS, ROWS],
            "data_offsets": [number * nbytes, (number + 1) * nbytes],
        }
        for number in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(count):
            file.write(weights(number, version).data)


def watch(command: list[str]) -> int:
    """Return the peak anonymous memory of a command in bytes; raise if it fails."""
    largest = 0
    with subprocess.Popen(command) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            largest = max(largest, _anonymous(status))
            time.sleep(INTERVAL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return largest


def _anonymous(status: Path) -> int:
    try:
        text = status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap") if name in fields)


def measure(megabytes: int, work: Path, fidelity: str) -> Iterator[tuple[str, float]]:
    """Yield each phase and its peak in MB (10^6 bytes): ingests of two versions, and a checkout of the second."""
    count = max(1, round(megabytes * 1e6 / (4 * ROWS * ROWS)))
    store, path = work / "store", work / "step.safetensors"
    python = [sys.executable, "-c"]
    yield "imports, an empty store", watch([*python, INIT, str(store)]) / 1e6
    for version, name in enumerate(["first version in", "second version in"]):
        write_safetensors(path, count, version)
        yield name, watch([*python, INGEST, str(store), str(path), fidelity]) / 1e6
        path.unlink()
    yield "second version out", watch([*python, CHECKOUT, str(store), "latest", str(work / "out")]) / 1e6


def memory(bench: Bench) -> Section:
    """The table as a row of the speed benchmark, for both fidelities."""
    rows = [["measurement", "exact, MB", "coarse, MB"]]
    found = []
    for fidelity in FIDELITIES:
        bench.report(f"memory, {fidelity}")
        with tempfile.TemporaryDirectory(dir=bench.work) as work:
            found.append(list(measure(MEGABYTES, Path(work), fidelity)))
    for (phase, exact), (_, coarse) in zip(*found, strict=True):
        rows.append([phase, digits(exact), digits(coarse)])
    return Section(
        "Memory",
        f"Peak anonymous memory of a process, imports included, for checkpoints of {MEGABYTES} MB of float32 weights.",
        [rows],
    )
