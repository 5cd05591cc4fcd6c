"""Stores checkpoints: one at a time, or many in the order of their steps; applies the policies of their runs.

ingest(source, options)         # writing.ingest; a thread then encodes and retains older versions
plan(paths)                     # runs and steps of many inputs; scanning.steps, or scanning.folder for folders
ingest_many(paths or plan)      # one after another, or a task of an executor for each run
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckstore.checking.verify import check_restores
from ckstore.commit.change import remove_uncommitted
from ckstore.commit.naming import DEFAULT_RUN, check_run, check_run_is_no_tag, check_tag_is_no_run, policy_of, tag
from ckstore.errors import CkstoreError, ConflictError, InputError, NotFoundError, UsageError
from ckstore.formats.directory import is_part
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Address, Repository
from ckstore.retention.retain import note_changes, retain
from ckstore.runtime.access import DENIED, denied
from ckstore.scanning.folder import propose
from ckstore.scanning.inputs import tree_size
from ckstore.scanning.marked import distinct_tags
from ckstore.scanning.steps import Planned, StepSource, plan_steps
from ckstore.writing.ingest import IngestReport, ingest
from ckstore.writing.request import AUTO, IngestOptions

if TYPE_CHECKING:
    from ckstore.retention.encoder import BackgroundEncoder
    from ckstore.runtime.threads import Executor
    from ckstore.storage.pack import PackInfo
    from ckstore.storage.rows import VersionRow
    from ckstore.writing.ranks import Written


class Removable:
    """A file or directory tree before its ingest, to be removed afterwards if unchanged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[Path, tuple[int, int, int]] = {}
        self._links: dict[Path, str] = {}
        self._directories: list[Path] = []
        if path.is_dir():
            self._note_directory(path)
        elif path.exists():
            self._files[path] = _stamp(path)

    def _note_directory(self, directory: Path) -> None:
        for entry in directory.iterdir():
            if entry.is_symlink():
                self._links[entry] = os.readlink(entry)
            elif entry.is_dir():
                self._note_directory(entry)
            else:
                self._files[entry] = _stamp(entry)
        # After its contents: directories are removed in this order.
        self._directories.append(directory)

    def remove(self) -> None:
        """Remove files, links and then empty directories; later additions stay.

        Raise `InputError` if a file has changed; this file and later ones stay.
        """
        for file, stamp in self._files.items():
            if _stamp(file) != stamp:
                raise InputError(f"{file} changed while it was stored; it was not removed.")
            file.unlink()
        for link, target in self._links.items():
            with suppress(OSError):
                if os.readlink(link) == target:
                    link.unlink()
        for directory in self._directories:
            with suppress(OSError):
                directory.rmdir()


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.lstat()
    return status.st_size, status.st_mtime_ns, status.st_ino


_log = logging.getLogger("ckstore")

_NOT_REMOVED = "Sources are deleted after an exact ingest only: coarse versions cannot restore the files."


@dataclass(frozen=True, slots=True)
class Ingested:
    """The outcome of one input of a batch.

    Attributes
    ----------
    path
        Path of the input.
    version
        Row of the stored version, or of the existing one of the same content; None without one.
    is_new
        Whether the version is new.
    seconds
        Duration of the ingest.
    error
        The error of an input that could not be stored.
    note
        The reason for leaving an input out, or the note of its `IngestReport`.

    Examples
    --------
    >>> np.save("net_1.npy", np.zeros(4))
    >>> [item] = store.ingest_many(["net_1.npy"], run="net")
    >>> item.version, item.is_new, item.error
    (<ckstore.VersionRow 4 net@1>, True, None)
    """

    path: Path
    version: VersionRow | None = None
    is_new: bool = False
    seconds: float = 0.0
    error: CkstoreError | None = None
    note: str = ""
    #: The source, to be deleted once the policies are applied.
    _source: Removable | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """The treatment of all inputs of a batch.

    With `deletes`, an input is deleted once its version is compared with it. With `follows`, the first version of a new
    run follows the nearest stored version.
    """

    options: IngestOptions = field(default_factory=IngestOptions)
    deletes: bool = False
    follows: bool = False


class Intake:
    """Stores checkpoints in a store, which stays open when the intake is closed."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self._encoder: BackgroundEncoder | None = None

    def close(self) -> None:
        """Wait for a running background encoding."""
        if self._encoder is not None:
            self._encoder.close()

    def ingest(
        self,
        source: str | os.PathLike[str] | Any,
        options: IngestOptions,
        progress: Callable[[int], None] | None = None,
        opened: Callable[[], None] | None = None,
        written: Written | None = None,
    ) -> IngestReport:
        """Store one checkpoint; see `Store.ingest`, and `writing.ingest.ingest` for `written`."""
        report = ingest(self.repository, source, options, progress, opened, written)
        run = report.version.run
        policy = policy_of(self.repository.catalog, run)
        if report.version.hot or policy.retention:
            keep = policy.kept_hot if options.hot is None else options.hot
            if self._encoder is None:
                from ckstore.retention.encoder import BackgroundEncoder

                self._encoder = BackgroundEncoder(self.repository)
            self._encoder.begin(run, keep, report.version)
            self._encoder.wait(run)
        return report

    def ingest_parts(self, written: Written, options: IngestOptions) -> IngestReport:
        """Store a version that ranks have written; remove the packs that it does not need."""
        repository, packs = self.repository, [pack for pack, _ in written.packs]
        try:
            _check_all_there(repository, packs)
            with repository.resolver.under_way() as hold:
                hold(record for _, records in written.packs for record in records)
                try:
                    return self.ingest(written.filled(repository), options, written=written)
                except ConflictError:
                    run = DEFAULT_RUN if options.run is None else options.run
                    if options.step is None or repository.catalog.at_step(run, options.step) is None:
                        raise
                    # Another job has saved this step since: perhaps the same content.
                    return self.ingest(written.filled(repository), options, written=written)
        finally:
            repository.resolver.forget()
            with suppress(CkstoreError):  # A later `gc` deletes them.
                if len(repository.catalog.known_packs([pack.name for pack in packs])) < len(packs):
                    remove_uncommitted(repository, packs)

    def plan(
        self,
        paths: Sequence[Path],
        *,
        run: str | None = None,
        step_from: StepSource | None = None,
        recursive: bool = False,
        force: bool = False,
    ) -> list[Planned]:
        """Return many inputs with their runs and steps, in the order of the ingest; see `Store.plan`."""
        if recursive:
            catalog = self.repository.catalog
            owners = {name: catalog.version(number).run for name, number in catalog.tags().items()}
            return distinct_tags(propose(paths, force=force), owners, [known.name for known in catalog.runs()])
        name = DEFAULT_RUN if run is None else run
        check_run(name)
        there = {row.step: row.number for row in self.versions(name) if row.step is not None and not row.superseded}
        first = max(there, default=-1) + 1 if step_from == "order" else 0
        taken: dict[int, Path] = {}
        planned = []
        for item in plan_steps(paths, step_from, first=first, force=force):
            note = item.note
            if item.step is not None and item.step in there:
                note = f"version {there[item.step]} exists"
            elif item.step is not None and taken.setdefault(item.step, item.path) is not item.path:
                note = f"same step as {taken[item.step].name}"
            planned.append(replace(item, run=name, note=note))
        return planned

    def ingest_many(
        self,
        inputs: Sequence[Planned],
        batch: Batch,
        *,
        name: str | None = None,
        executor: Executor | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[Ingested]:
        """Store the inputs of a plan in order; yield each outcome. A failed input does not stop the others.

        Inputs without a run are refused ones, whose errors come last.

        `name` is a tag for the last version. The workers of an `executor` store the versions, a task for each run;
        `progress` is then called once for each.
        """
        repository = self.repository
        repository.require_writable()
        refused = [item for item in inputs if item.refused and not item.run]
        inputs = [item for item in inputs if item.run or not item.refused]
        for run in sorted({item.run for item in inputs}):
            self.check_run(run, batch)
            if name is not None:
                check_tag_is_no_run(repository.catalog, name, run)
            if self._encoder is not None:
                self._encoder.forget_changed(run)  # Those of earlier ingests are not this batch's.
        stored: list[VersionRow] = []
        held: list[Ingested] = []
        tags = {os.path.abspath(item.path): item.tags for item in inputs if item.tags}
        each = self.store_all(inputs, batch, progress) if executor is None else _spread(
            executor, repository.address, inputs, batch, progress
        )  # fmt: skip
        for item in each:
            if item.version is not None:
                stored.append(item.version)
                held += [item] if item._source else []
                for found in tags.get(os.path.abspath(item.path), ()):
                    self._tag(item.version, found)
            yield item
        yield from (Ingested(item.path, error=InputError(with_path(item.path, item.note))) for item in refused)
        repository.catalog.refresh()
        if name is not None and stored:
            tag(repository, stored[-1], name)
        self.retain(row.run for row in stored)
        self.remove_whole(held)

    def remove_whole(self, held: list[Ingested]) -> None:
        """Remove sources whose versions the policies have not forgotten, thinned or pruned; empty the list."""
        for item in held:
            row, source = item.version, item._source
            assert row is not None
            assert source is not None
            found = self.repository.catalog.with_uid(row.uid)
            try:
                if not any(now.fidelity == "exact" and not now.dropped for now in found):
                    raise InputError(
                        f"{source.path} stays: the policy of run {row.run} does not keep version {row.number} whole;"
                        " remove the source yourself."
                    )
                source.remove()
            except (CkstoreError, OSError) as error:
                _log.warning("%s", error)
        held.clear()

    def _tag(self, row: VersionRow, name: str) -> None:
        """Point the tag of a plan at a version, unless it does so already."""
        catalog = self.repository.catalog
        catalog.refresh()
        if catalog.tagged(name) != row.number:
            tag(self.repository, row, name)

    def check_run(self, run: str, batch: Batch) -> None:
        """Raise `UsageError` for an invalid run, or one whose policy contradicts the batch."""
        check_run(run)
        check_run_is_no_tag(self.repository.catalog, run)
        policy = batch.options.asked or policy_of(self.repository.catalog, run)
        if batch.deletes and (policy.is_coarse or batch.options.search is not None):
            raise UsageError(f"{_NOT_REMOVED} The policy of run {run} is coarse; give `policy` exact.")

    def retain(self, runs: Iterable[str]) -> None:
        """Apply the policies of some runs; log effects, and errors since the new versions are stored."""
        for run in sorted(set(runs)):
            try:
                report = retain(self.repository, run)
            except CkstoreError as error:
                _log.warning("Older versions of run %s remain unchanged: %s", run, error)
                continue
            changed = {} if self._encoder is None else self._encoder.take_changed(run)
            note_changes(changed, report)
            forgotten, thinned, dropped = changed["forgotten"], changed["thinned"], changed["dropped"]
            counts = {"forgot": forgotten, "thinned": thinned - forgotten, "dropped tensors of": dropped - forgotten}
            if done := [f"{verb} {len(numbers)}" for verb, numbers in counts.items() if numbers]:
                _log.info("The policy of run %s %s of its older versions.", run, ", ".join(done))

    def store_all(
        self, inputs: Iterable[Planned], batch: Batch, progress: Callable[[int], None] | None
    ) -> Iterator[Ingested]:
        """Store inputs in order; yield each outcome."""
        begun: set[str] = set()
        parent = batch.options.parent
        for item in inputs:
            is_begun = item.run in begun or self.repository.catalog.has_run(item.run)
            after = AUTO if batch.follows and not is_begun else parent
            options = replace(batch.options, run=item.run, step=item.step, parent=after)
            outcome = self.store_input(item.path, options, progress, deletes=batch.deletes)
            if outcome.version is not None:
                begun.add(item.run)
                parent = AUTO if parent == AUTO else None
            yield outcome

    def store_input(
        self,
        path: Path,
        options: IngestOptions,
        progress: Callable[[int], None] | None = None,
        *,
        deletes: bool = False,
        opened: Callable[[], None] | None = None,
    ) -> Ingested:
        """Store one input; return an error of the input, raise an error of the store.

        Under a policy for older versions, the source is left for `remove_whole`. `opened` is called once the input is
        open: a later change of its files is an error.
        """
        try:
            _check_name(path)
            start = time.perf_counter()
            removable = Removable(path) if deletes else None
            report = self.ingest(path, options, progress, opened)
            seconds = time.perf_counter() - start
            row = report.version
            if deletes or (options.verify and not report.is_new):
                # Opened again, without the caches of the ingest.
                with self.repository.reopened("r") as reopened:
                    check_restores(StoredVersion(reopened, row))
            if removable is not None:
                # The policy may have changed during the ingest, or the existing version may have been thinned.
                hot = self.repository.resolver.document(row).hot
                if row.fidelity != "exact" or (hot is not None and hot.asked.is_coarse):
                    raise UsageError(f"{_NOT_REMOVED} {path} is stored as version {row.number}, and was not removed.")
                if path.is_file() and is_part(path):
                    raise InputError(
                        f"{path} is stored, and was not removed: it is a part of the checkpoint {path.parent}."
                    )
                if path.is_symlink():
                    raise InputError(f"{path} is stored, but it is a link; remove its target yourself.")
                if not any(policy_of(self.repository.catalog, run).retention for run in ("", row.run)):
                    removable.remove()
                    removable = None
            return Ingested(path, row, report.is_new, seconds, note=report.note, _source=removable)
        except (InputError, ConflictError) as error:
            return Ingested(path, error=type(error)(with_path(path, str(error))))
        except CkstoreError:
            raise
        except OSError as error:
            if error.errno in DENIED:
                return Ingested(path, error=denied(error.filename or path, error))
            return Ingested(path, error=CkstoreError(f"{error.filename or path}: {error.strerror or error}."))

    def versions(self, run: str) -> list[VersionRow]:
        """Return the versions of a run; none for a new one."""
        try:
            return self.repository.catalog.versions(run)
        except NotFoundError:
            return []


def with_path(path: Path, message: str) -> str:
    """Return a message about an input; it begins with the path, unless that is in it."""
    return message if str(path) in message else f"{path}: {message}"


def bytes_of(inputs: Iterable[Planned], options: IngestOptions) -> int:
    """Return the number of bytes that the ingest of some inputs reports to its `progress` at most."""
    sizes = sum(tree_size(item.path) for item in inputs if item.run)
    return (3 if options.verify else 2) * sizes


def _spread(
    executor: Executor, store: Address, inputs: Sequence[Planned], batch: Batch, progress: Callable[[int], None] | None
) -> Iterator[Ingested]:
    """Store inputs by the workers of an executor."""
    from ckstore.runtime.executors import spread

    runs: dict[str, list[Planned]] = {}
    for item in inputs:
        # A worker may have another working directory.
        runs.setdefault(item.run, []).append(replace(item, path=Path(os.path.abspath(item.path))))
    parts = [(store, items, batch) for items in runs.values()]
    sizes = [bytes_of(items, batch.options) for items in runs.values()]
    with closing(spread(executor, _store_part, parts)) as stored:
        for size, (outcomes, error) in zip(sizes, stored, strict=True):
            yield from outcomes
            if error is not None:
                raise error
            if progress is not None:
                progress(size)


def _store_part(part: tuple[Address, Sequence[Planned], Batch]) -> tuple[list[Ingested], CkstoreError | None]:
    """Return the outcome of each input of a run, and the error of the store, if any."""
    store, inputs, batch = part
    outcomes: list[Ingested] = []
    with store.open("a") as repository, closing(Intake(repository)) as intake:
        try:
            outcomes.extend(intake.store_all(inputs, batch, None))
        except CkstoreError as error:
            return outcomes, error
    return outcomes, None


def _check_all_there(repository: Repository, packs: Sequence[PackInfo]) -> None:
    """Raise `UsageError` unless the packs of all ranks are in a store's directory."""
    for pack in packs if repository.catalog.is_only else ():  # A bucket has confirmed them.
        if not repository.packs.is_there(pack.name, pack.bytes):
            raise UsageError(
                f"A rank wrote its pack elsewhere: not all ranks reach {repository.place}; give a directory that they"
                " share, or the bucket without `local` and with a `Staging`."
            )


def _check_name(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"The name {str(path)!r} is not UTF-8; rename it, then ingest again.") from None
