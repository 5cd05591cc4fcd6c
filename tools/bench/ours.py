"""A series stored by ckstore, every version encoded at once: its bytes, by cause, and its deepest version's cost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ckstore
from ckstore.codecs.integers import entropy_bits
from ckstore.codecs.lattice import ordinal_classes
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Codebook, Delta, Patches, Raw, Record
from ckstore.repository import Repository
from tools.bench.chains import time_ratio
from tools.bench.series import Series


@dataclass(frozen=True)
class Ours:
    """The sizes and costs of a series.

    Attributes
    ----------
    total
        Bytes of all files of the store, catalog and log included.
    later
        The part of it that came with the versions after the first.
    unbounded_later
        The same without a bound on restoring, as for the peers' pairs.
    factor
        Time to check out the deepest version over that of the same version in its own store, where it is full.
    predicted
        The factor that the store predicted.
    ledger
        Bytes by cause.
    coded, entropy
        Bytes of all payloads with their tables, and the order-0 entropy by group of the coded data, in bytes.
    """

    total: int
    later: int
    unbounded_later: int
    factor: float
    predicted: float
    ledger: dict[str, int]
    coded: int
    entropy: int


def measure(series: Series, work: Path) -> Ours:
    """Ingest every version, check that each is restored, and measure.

    Raises
    ------
    AssertionError
        If a version is not restored byte for byte.
    """
    work.mkdir(parents=True, exist_ok=True)
    run = "run"
    with tempfile.TemporaryDirectory(dir=work, prefix="store-") as scratch:
        root, full, free, out = (Path(scratch) / name for name in ("store", "full", "free", "out"))
        store = ckstore.init(root)
        totals = []
        for step, path in enumerate(series.versions):
            store.ingest(path, run=run, step=step, hot=0)
            totals.append(size_of(root))
        for step, path in enumerate(series.versions):
            store[f"{run}@{step}"].checkout(out, force=True)
            if _contents(out) != _contents(path):
                raise AssertionError(f"{path} is not restored byte for byte")
        rows = store._catalog.versions()
        deepest = max(rows, key=lambda row: (row.depth, row.number))
        with ckstore.init(full) as alone:
            alone.ingest(series.versions[rows.index(deepest)], run=run, step=0, hot=0)

        with ckstore.init(free) as unbounded:
            for step, path in enumerate(series.versions):
                unbounded.ingest(path, run=run, step=step, max_restore_cost=1e9, hot=0)
                if step == 0:
                    first = size_of(free)

        def prepare(path: Path, number: int) -> Callable[[], object]:
            # Opened for every call: a store caches chunks that it has decoded.
            return partial(ckstore.open(path, mode="r")[number].checkout, out, force=True)

        factor = time_ratio(partial(prepare, root, deepest.number), partial(prepare, full, rows[0].number))
        entropy, coded = _order0_bits(store._repository)
        return Ours(
            total=totals[-1],
            later=totals[-1] - totals[0],
            unbounded_later=size_of(free) - first,
            factor=factor,
            predicted=deepest.cost,
            ledger=dict(store.stats(ledger=True)["ledger"]),
            coded=coded // 8,
            entropy=round(entropy / 8),
        )


def size_of(directory: Path) -> int:
    """Return the bytes of all files under a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _order0_bits(repository: Repository) -> tuple[float, int]:
    """Return the order-0 entropy, per group, of all coded integers in bits, and the bits of their payloads."""
    entropy = 0.0
    stored = 0
    for pack in repository.catalog.packs():
        for slot in sorted(slot for _, slot in repository.catalog.objects_in(pack.name)):
            for bits, nbytes in _entropies(repository.reader, repository.resolver.manifest(pack.name).record(slot)):
                entropy += bits
                stored += 8 * nbytes
    return entropy, stored


def _entropies(reader: ObjectReader, record: Record) -> Iterator[tuple[float, int]]:
    """Yield the entropy in bits and the payload's bytes of each stored chunk; patches are not entropy-coded."""
    if isinstance(record, Raw | Patches):
        return
    for chunk, place in enumerate(reader.stored.index(record)):
        if place is None:
            continue
        context = None
        base = None if record.base is None else reader.resolver.record(record.base)
        if isinstance(record, Codebook) and isinstance(base, Codebook) and not record.additive:
            context = base.lattice.classes(base.lattice.indices(reader.numbers(base, chunk)))
        if isinstance(record, Delta) and base is not None and record.context:
            context = ordinal_classes(reader.ordinals(base, chunk), record.dtype)
        yield entropy_bits(reader.stored_integers(record, chunk, context), context), place[1]


def _contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
