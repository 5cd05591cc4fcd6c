"""Compiles all kernels for the levels of processors that wheels carry code for; `hatch_build.py` runs it.

usage: python -m tools.machine_code
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ckstore.policy import Policy

if TYPE_CHECKING:
    import numpy.typing as npt

#: Shape of a tensor that is large enough for its own object.
_SHAPE = (256, 257)

_RUNS = {
    "exact": Policy(),
    "lattice": Policy("coarse"),
    "bounded": Policy("coarse", max_rel_error=0.01),
    "lc": Policy("coarse", scheme="lc"),
    "dynaquant": Policy("coarse", scheme="dynaquant"),
}


def main() -> None:
    """Compile for each level that this processor has, in parallel, unless that is done for the present sources."""
    from ckstore.kernels.compiled import SHIPPED, levels, versions

    stamp, wanted = SHIPPED / "made", repr((*levels(), *versions()))
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(SHIPPED, ignore_errors=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", "from tools.machine_code import use_all_kernels as use; use()"],
            env={**os.environ, "NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(SHIPPED)},
        )
        for level in levels()
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("Kernels could not be compiled.")
    stamp.parent.mkdir(exist_ok=True)  # If no levels are known, all is compiled at first use.
    stamp.write_text(wanted)


def use_all_kernels() -> None:
    """Store a few small versions that use every kernel."""
    from ckstore.checking.verify import verify
    from ckstore.reading.stored_version import StoredVersion
    from ckstore.repository import Repository
    from ckstore.storage.catalog import Catalog
    from ckstore.writing.ingest import ingest
    from ckstore.writing.request import IngestOptions
    from ckstore.writing.thin import thin

    with TemporaryDirectory(prefix="ckstore-") as directory:
        place = Path(directory)
        for step, arrays in enumerate(_checkpoints()):
            _write(place / f"step{step}.safetensors", arrays)
        for run, policy in _RUNS.items():
            store = place / run  # One store each: known content would not be encoded again.
            Catalog.create(store).close()
            with Repository(store) as repository:
                for path in sorted(place.glob("step*")):
                    ingest(repository, path, IngestOptions(run=run, hot=0, policy=policy))
                if run == "exact":
                    thin(repository, repository.catalog.versions()[:2], Policy("coarse"))
                verify(repository, [StoredVersion(repository, row) for row in repository.catalog.versions()])
    _use_rare()


def _use_rare() -> None:
    """Call rarely used kernels: dithered values, and a patch that is applied."""
    import numpy as np

    from ckstore.codecs.lattice import LinearLattice
    from ckstore.codecs.patches import apply_patch, find_changes
    from ckstore.runtime.blocks import fixed

    before = np.zeros(64, np.uint32)
    after = before.copy()
    after[7] = 1
    patch = find_changes(fixed(after), fixed(before), is_float=True).patch()
    assert patch is not None
    apply_patch(memoryview(patch), before, is_float=True)

    LinearLattice("float32", -5, 2, np.zeros(2, np.int16), np.zeros(2, np.int16)).dithered(
        fixed(np.zeros(4, np.uint32)), 0
    )


def _checkpoints() -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield arrays by name, moving as in training: weights of every width, moments, counters."""
    import numpy as np

    rng = np.random.default_rng(0)
    weights = rng.normal(size=_SHAPE).astype(np.float32)
    # Arrays of another shape than the moments are not their weights; the moments' rows and steps differ.
    rows = np.exp2(np.arange(_SHAPE[0]) % 16).astype(np.float32)[:, None]
    table = weights
    for step in range(3):
        if step == 2:
            weights = weights * np.float32(0.5)
        weights = weights + np.float32(0.01) * rng.normal(size=_SHAPE).astype(np.float32) * np.float32(step < 2)
        flat = weights.reshape(-1)
        yield {
            "weight": weights,
            "float32": flat,
            "float64": flat.astype(np.float64),
            "float16": flat.astype(np.float16),
            "bfloat16": (flat.view(np.uint32) >> 16).astype(np.uint16),
            "int8": (flat * 40).astype(np.int8),
            "int64": np.full(flat.size, step),
            "small": weights[:9, :9],
            "table": np.where(np.arange(_SHAPE[0])[:, None] == step, weights, table),
            "exp_avg": weights * np.float32(1e-4) * rows,
            "exp_avg_sq": weights * weights * np.float32(1e-8) * rows,
        }


def _write(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    from ckstore.formats.flat_writers import write_safetensors

    items = [(name, name if name == "bfloat16" else array.dtype.name, array.shape) for name, array in arrays.items()]
    parts = list(arrays.values())
    with path.open("wb") as file:
        write_safetensors(file, items, lambda number: [parts[number].tobytes()])


if __name__ == "__main__":
    main()
