"""Compiles all kernels beforehand: a store of a few small versions goes through everything that needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ckstore.policy import Policy

if TYPE_CHECKING:
    import numpy.typing as npt

#: Elements of a tensor: enough for an object of its own.
_SHAPE = (256, 257)

_RUNS = {
    "exact": Policy(),
    "lattice": Policy("coarse"),
    "bounded": Policy("coarse", max_rel_error=0.01),
    "lc": Policy("coarse", scheme="lc"),
    "dynaquant": Policy("coarse", scheme="dynaquant"),
}


def warm_up() -> None:
    """Compile all kernels that are not compiled yet, so that no later program waits for it.

    It takes about as many seconds as compiling does; once that was done, one or two. Where compiled code is kept,
    `docs/how-to/containers.md` says.
    """
    from ckstore.operations.ingest import ingest
    from ckstore.operations.request import IngestOptions
    from ckstore.operations.thin import thin
    from ckstore.operations.verify import verify
    from ckstore.reading.stored_version import StoredVersion
    from ckstore.repository import Repository
    from ckstore.storage.catalog import Catalog

    with TemporaryDirectory(prefix="ckstore-") as directory:
        place = Path(directory)
        for step, arrays in enumerate(_checkpoints()):
            _write(place / f"step{step}.safetensors", arrays)
        for run, policy in _RUNS.items():
            store = place / run  # One each: what one store has is not stored again.
            Catalog.create(store).close()
            with Repository(store) as repository:
                for path in sorted(place.glob("step*")):
                    ingest(repository, path, IngestOptions(run=run, hot=0, policy=policy))
                if run == "exact":
                    thin(repository, repository.catalog.versions()[:2], Policy("coarse"))
                verify(repository, [StoredVersion(repository, row) for row in repository.catalog.versions()])
    _warm_rare()


def _warm_rare() -> None:
    """What few checkpoints take: values near those of a lattice, and exact layers on one whose steps differ."""
    import numpy as np

    from ckstore.codecs.lattice import LinearLattice
    from ckstore.runtime.blocks import fixed

    bits, integers = fixed(np.zeros(4, np.uint32)), fixed(np.zeros(4, np.int32))
    lattice = LinearLattice("float32", -5, 2, np.zeros(2, np.int16), np.zeros(2, np.int16))
    lattice.dithered(bits, 0)
    lattice.own(integers, 0)
    lattice.chained(bits, integers, 0)


def _checkpoints() -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Arrays by name, as training would move them: weights of every width, moments, counters."""
    import numpy as np

    rng = np.random.default_rng(0)
    weights = rng.normal(size=_SHAPE).astype(np.float32)
    # What is of another shape than the moments is none of their weights; their rows differ, and so do its steps.
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
