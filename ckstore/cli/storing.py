"""Stores one input of the command line: with a progress bar, a line that says what became of it, and its removal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckstore.cli.output import name_of, print_line, ratio_text, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.sources import Removable, check_restores
from ckstore.errors import CkstoreError, ConflictError, InputError, UsageError

if TYPE_CHECKING:
    from ckstore.operations.request import IngestOptions
    from ckstore.repository import Address
    from ckstore.runtime.threads import Executor
    from ckstore.scanning.folder import Proposed
    from ckstore.store import Store
    from ckstore.version import Version

#: The parent that is looked for among all versions.
AUTO = "auto"

NOT_REMOVED = "--delete-source is for exact versions: coarse ones do not bring the files back."


@dataclass(slots=True)
class Done:
    """One input that is stored: its version, whether that is a fresh one, its bytes and seconds."""

    path: Path
    version: Version
    is_new: bool
    seconds: float


@dataclass(slots=True)
class Failed:
    """One input that is not stored, and why."""

    path: Path
    kind: str
    exit_code: int
    message: str


def store_input(
    store: Store,
    path: Path,
    options: IngestOptions,
    delete: bool,
    *,
    shown: bool,
    bar: Callable[[int], None] | None = None,
) -> Done | Failed:
    """Store one input; what is wrong with the input is returned, what is wrong with the store raised.

    Parameters
    ----------
    options
        Of `Store.ingest`.
    delete
        Remove the input once its version was read back and compared.
    shown
        Show a progress bar, where somebody looks.
    bar
        Called with numbers of bytes instead.
    """
    from ckstore.scanning.source import tree_size

    try:
        _check_name(path)
        start = time.perf_counter()
        size = tree_size(path) if path.exists() else 0
        removable = Removable(path) if delete else None
        with progress_bar(path.name, (3 if options.verify else 2) * size, shown=shown) as progress:
            report = store.ingest(path, **options.given(), progress=bar or progress)
        seconds = time.perf_counter() - start
        version = store[report.version.number]
        if delete or (options.verify and not report.is_new):
            check_restores(store.place, version.row.number)
        hot = version.stored.document.hot
        if removable is not None and (version.row.fidelity != "exact" or (hot is not None and hot.asked.is_coarse)):
            # A policy was set meanwhile, or what was there was thinned.
            raise UsageError(f"{NOT_REMOVED} {path} is stored as version {version.row.number}, and stays.")
        if removable is not None:
            removable.remove()
        return Done(path, version, report.is_new, seconds)
    except (InputError, ConflictError) as error:
        message = str(error) if path.name in str(error) else f"{path}: {error}"
        return Failed(path, error.kind, error.exit_code, message)
    except CkstoreError:
        raise
    except OSError as error:
        return Failed(path, "error", 1, f"{error.filename or path}: {error.strerror or error}.")


def store_plan(
    store: Store,
    plan: Sequence[Proposed],
    options: IngestOptions,
    delete: bool,
    bar: Callable[[int], None] | None = None,
    executor: Executor | None = None,
) -> Iterator[Done | Failed]:
    """Store what a plan says, in its order; by an executor run by run, each run by one of the workers.

    The first version of a run is stored after the nearest one that is there. `options`, `delete` and `bar` are as for
    `store_input`; by an executor, `bar` is called when a run is done.
    """
    if executor is not None:
        yield from _store_by(executor, store, plan, options, delete, bar)
        return
    begun = {row.name for row in store.catalog.runs()}
    for item in plan:
        said = replace(options, run=item.run, step=item.step, parent=None if item.run in begun else AUTO)
        outcome = store_input(store, item.path, said, delete, shown=False, bar=bar)
        if isinstance(outcome, Done):
            begun.add(item.run)
        yield outcome


@dataclass(frozen=True, slots=True)
class _Part:
    """What one worker stores: the inputs of a run, by absolute paths; the rest is as for `store_plan`."""

    store: Address
    plan: list[Proposed]
    options: IngestOptions
    delete: bool


def _store_by(
    executor: Executor,
    store: Store,
    plan: Sequence[Proposed],
    options: IngestOptions,
    delete: bool,
    bar: Callable[[int], None] | None,
) -> Iterator[Done | Failed]:
    from ckstore.runtime.executors import spread
    from ckstore.scanning.source import tree_size

    runs: dict[str, list[Proposed]] = {}
    for item in plan:
        # A worker may be in another directory.
        runs.setdefault(item.run, []).append(replace(item, path=Path(os.path.abspath(item.path))))
    parts = [_Part(store.repository.address, items, options, delete) for items in runs.values()]
    sizes = [sum(tree_size(item.path) for item in part.plan if item.path.exists()) for part in parts]
    with closing(spread(executor, _store_part, parts)) as stored:
        for size, (outcomes, error) in zip(sizes, stored, strict=True):
            yield from outcomes
            if error is not None:
                raise error
            if bar is not None:
                bar((3 if options.verify else 2) * size)


def _store_part(part: _Part) -> tuple[list[Done | Failed], CkstoreError | None]:
    """What became of each input of a run; and what is wrong with the store, if anything."""
    from ckstore.storage.root import place
    from ckstore.store import Store

    address = part.store
    cache = None if address.cache is None else Path(address.cache)
    outcomes: list[Done | Failed] = []
    with Store(place(address.place), options=dict(address.options), cache=cache) as store:
        try:
            outcomes.extend(store_plan(store, part.plan, part.options, part.delete))
        except CkstoreError as error:
            return outcomes, error
    return outcomes, None


def _check_name(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"The name {str(path)!r} is not UTF-8; rename it, then ingest again.") from None


def line_of(item: Done) -> str:
    """What is said of an input that is stored."""
    row = item.version.row
    name = f"{name_of(row)} -> version {row.number}"
    if not item.is_new:
        return f"{name}  {size_text(row.original_bytes)}  unchanged"
    return f"{name}  {amounts_text(row.original_bytes, row.stored_bytes, item.seconds)}"


def amounts_text(original: int, stored: int, seconds: float) -> str:
    """Bytes that went in and are stored, their ratio, and the speed."""
    rate = original / seconds / 1e9
    return f"{size_text(original)} -> {size_text(stored)}  {ratio_text(original, stored)}  {rate:.2g} GB/s"


def tend(store: Store, runs: Iterable[str]) -> None:
    """Do what policies say of the older versions of some runs; what goes wrong there does not concern the latest."""
    for run in sorted(runs):
        try:
            store.retain(run)
        except CkstoreError as error:
            print_line(f"ckstore: Older versions of run {run} stay as they are: {error}", err=True)
