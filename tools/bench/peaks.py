"""Peak anonymous memory of ingest and checkout, each in its own process, observed from outside."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ckstore.policy import FIDELITIES
from tools.bench.speed_bench import Bench
from tools.bench.speed_figures import Section, digits

#: Tensors are square matrices with this number of rows: 64 MiB each, like the larger ones of a language model.
ROWS = 4096

#: Size in MB (10^6 bytes) of the checkpoints of the speed benchmark's row.
MEGABYTES = 1000

#: Seconds between two samples of a process.
INTERVAL = 0.002

INIT = "import sys, ckstore; ckstore.init(sys.argv[1])"
INGEST = "import sys, ckstore; ckstore.open(sys.argv[1]).ingest(sys.argv[2], run='a', policy=sys.argv[3])"
CHECKOUT = "import sys, ckstore; ckstore.open(sys.argv[1], 'r')[sys.argv[2]].checkout(sys.argv[3])"


@dataclass(frozen=True)
class Peak:
    """The peak of one process: anonymous memory in MB (10^6 bytes), seconds with imports, GB/s of the file."""

    phase: str
    megabytes: float
    seconds: float
    rate: float


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


def write_torch(path: Path, count: int, version: int) -> None:
    """Write `count` matrices as `torch.save` does."""
    import torch

    state = {f"layers.{number}.weight": torch.from_numpy(weights(number, version)) for number in range(count)}
    torch.save({"model": state, "step": version}, path)


def watch(command: list[str]) -> tuple[int, float]:
    """Return the peak anonymous memory of a command in bytes, and its seconds; raise if it fails."""
    begin = time.perf_counter()
    largest = 0
    with subprocess.Popen(command) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            largest = max(largest, _anonymous(status))
            time.sleep(INTERVAL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return largest, time.perf_counter() - begin


def _anonymous(status: Path) -> int:
    try:
        text = status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap") if name in fields)


def measure(megabytes: int, container: str, work: Path, fidelity: str = "exact") -> Iterator[Peak]:
    """Ingest two versions, and check out the second; the files are made first and removed with `work`."""
    count = max(1, round(megabytes * 1e6 / (4 * ROWS * ROWS)))
    write = write_safetensors if container == "safetensors" else write_torch
    suffix = "safetensors" if container == "safetensors" else "pt"
    store = work / "store"
    python = [sys.executable, "-c"]
    yield _peak("imports, an empty store", [*python, INIT, str(store)], 0)
    for version, name in enumerate(["first version in", "second version in"]):
        path = work / f"step{version}.{suffix}"
        write(path, count, version)
        size = path.stat().st_size
        yield _peak(name, [*python, INGEST, str(store), str(path), fidelity], size)
        path.unlink()
    yield _peak("second version out", [*python, CHECKOUT, str(store), "latest", str(work / "out")], size)


def memory(bench: Bench) -> Section:
    """The table as a row of the speed benchmark, for both fidelities."""
    rows = [["measurement", "exact, MB", "coarse, MB"]]
    found = []
    for fidelity in FIDELITIES:
        bench.report(f"memory, {fidelity}")
        with tempfile.TemporaryDirectory(dir=bench.work) as work:
            found.append(list(measure(MEGABYTES, "safetensors", Path(work), fidelity)))
    rows += [
        [exact.phase, digits(exact.megabytes), digits(coarse.megabytes)] for exact, coarse in zip(*found, strict=True)
    ]
    return Section(
        "Memory",
        f"Peak anonymous memory of a process, imports included, for checkpoints of {MEGABYTES} MB of float32 weights.",
        [rows],
    )


def _peak(phase: str, command: list[str], size: int) -> Peak:
    largest, seconds = watch(command)
    return Peak(phase, round(largest / 1e6, 1), round(seconds, 2), round(size / 1e9 / seconds, 3))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/bench/memory", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="size of a checkpoint")
    parser.add_argument("--container", choices=["safetensors", "pt"], default="safetensors")
    parser.add_argument("--work", type=Path, help="directory for files: three times their size is needed")
    arguments = parser.parse_args()
    print(f"{'':24} {'peak, MB':>9} {'seconds':>8} {'GB/s':>6}")
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        for peak in measure(arguments.megabytes, arguments.container, Path(work)):
            print(f"{peak.phase:24} {peak.megabytes:9.1f} {peak.seconds:8.2f} {peak.rate:6.3f}", flush=True)


if __name__ == "__main__":
    main()
