"""Prints SHA-256s of every kernel's output and of a store's packs, at one level of processors, on a number of threads.

    python -m tests.kernels.digests LEVEL THREADS

Libraries of two compilers return the same bytes if their lines are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import numpy as np

from ckstore.kernels import native


def main(level: str, threads: str) -> None:
    native.level = level  # Before modules of kernels look their functions up.
    from ckstore.runtime.threads import limit_workers
    from tools.bench.kernel_times import CASES

    limit_workers(int(threads))
    for name, case in CASES.items():
        print(name, *(sha256(case(size)[1]()).hexdigest() for size in (4096, 33280)))
    with TemporaryDirectory() as directory:
        make_store(Path(directory))
        packs = Path(directory, "store", "packs").iterdir()
        print(*sorted("pack " + " ".join(sorted(members(path))) for path in packs), sep="\n")


def members(pack: Path) -> Iterator[str]:
    """Yield digests of a pack's members, but for the manifest, which has times."""
    with ZipFile(pack) as file:
        for name in file.namelist():
            if name != "manifest":
                yield sha256(file.read(name)).hexdigest()


def make_store(directory: Path) -> None:
    """Store three versions of several dtypes exactly, coarsely, and by each scheme, in chunks for several threads."""
    import ckstore
    from ckstore import Policy
    from tests.checkpoints import write_safetensors

    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((400, 500)) * 0.02).astype(np.float32)
    policies = {scheme: Policy("coarse", scheme=scheme) for scheme in ("lattice", "lc", "dynaquant")}
    with ckstore.init(directory / "store") as store:
        for step in range(3):
            weight += (rng.standard_normal(weight.shape) * 1e-4).astype(np.float32)
            half = (weight.view(np.uint32) >> 16).astype(np.uint16)
            tensors = {
                "weight": ("float32", weight.shape, weight),
                "half": ("bfloat16", weight.shape, half),
                "short": ("float16", weight.shape, weight.astype(np.float16)),
                "count": ("int64", weight.shape, (weight * 1e5).astype(np.int64)),
            }
            write_safetensors(directory / "file", tensors)
            for run, policy in {"exact": Policy(), **policies}.items():
                store.ingest(directory / "file", run=run, step=step, hot=0, policy=policy)


if __name__ == "__main__":
    main(*sys.argv[1:])
