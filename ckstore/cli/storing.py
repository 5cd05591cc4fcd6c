"""Stores one input of the command line: progress bar, a line with the outcome, removal of the source."""

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
    from ckstore.repository import Address
    from ckstore.runtime.threads import Executor
    from ckstore.scanning.folder import Proposed
    from ckstore.store import Store
    from ckstore.version import Version
    from ckstore.writing.request import IngestOptions

#: Name of a parent that is searched among all versions.
AUTO = "auto"

NOT_REMOVED = "--delete-source needs exact versions: coarse ones cannot restore the files."


@dataclass(slots=True)
class Done:
    """One stored input: its version, whether that is new, its bytes and seconds."""

    path: Path
    version: Version
    is_new: bool
    seconds: float


@dataclass(slots=True)
class Failed:
    """One input that could not be stored, with its error."""

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
    """Store one input; return an error of the input, raise an error of the store.

    Parameters
    ----------
    options
        Options of `Store.ingest`.
    delete
        Remove the input once its version has been decoded and compared.
    shown
        Show a progress bar on a terminal.
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
            # The policy changed during the ingest, or the existing version was thinned.
            raise UsageError(f"{NOT_REMOVED} {path} is stored as version {version.row.number}, and was not removed.")
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
    """Store the versions of a plan in order; with an executor, one task for each run.

    The parent of a new run's first version is the nearest stored one. `options`, `delete` and `bar` are as for
    `store_input`; with an executor, `bar` is called once for each run.
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
    """The task of one worker: the inputs of a run, by absolute paths; the rest is as for `store_plan`."""

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
        # A worker may have another working directory.
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
    """Return the outcome of each input of a run, and the error of the store, if any."""
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
    """Return the line for a stored input."""
    row = item.version.row
    name = f"{name_of(row)} -> version {row.number}"
    if not item.is_new:
        return f"{name}  {size_text(row.original_bytes)}  unchanged"
    return f"{name}  {amounts_text(row.original_bytes, row.stored_bytes, item.seconds)}"


def amounts_text(original: int, stored: int, seconds: float) -> str:
    """Return original and stored bytes, their ratio, and the speed."""
    rate = original / seconds / 1e9
    return f"{size_text(original)} -> {size_text(stored)}  {ratio_text(original, stored)}  {rate:.2g} GB/s"


def tend(store: Store, runs: Iterable[str]) -> None:
    """Apply the policies of some runs; report errors as warnings, since the new versions are stored."""
    for run in sorted(runs):
        try:
            store.retain(run)
        except CkstoreError as error:
            print_line(f"ckstore: Older versions of run {run} remain unchanged: {error}", err=True)
