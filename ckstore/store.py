"""The store: opens, ingests, finds versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ckstore.errors import ConflictError, NoStoreError, NotFoundError, UsageError
from ckstore.policy import QUALITY, Fidelity, Policy
from ckstore.repository import CACHE_BYTES, Address, Mode, Repository
from ckstore.storage import root
from ckstore.storage.catalog import RECENT, Catalog, VersionRow
from ckstore.storage.pack_reader import PackReader

if TYPE_CHECKING:
    from ckstore.formats.torch.state_dict import OnUnknown
    from ckstore.objects.reader import ObjectReader
    from ckstore.objects.resolver import CatalogResolver
    from ckstore.operations.compact import CompactReport
    from ckstore.operations.compactor import Compactor
    from ckstore.operations.forget import ForgetReport
    from ckstore.operations.gc.collect import GcReport
    from ckstore.operations.ingest import IngestReport
    from ckstore.operations.rebase import RebaseReport
    from ckstore.operations.retain import RetainReport
    from ckstore.operations.thin import ThinReport
    from ckstore.operations.transfer import TransferReport
    from ckstore.operations.tuning import Search
    from ckstore.operations.verify import VerifyReport
    from ckstore.reading.comparison import DiffReport
    from ckstore.reading.stored_version import StoredVersion
    from ckstore.run import Run
    from ckstore.runtime.threads import Executor
    from ckstore.saving.saver import Saver
    from ckstore.table import Table
    from ckstore.version import Version

Result = TypeVar("Result")

#: Limit of the cache of a store that a program opens, as a part of the machine's memory and in bytes: a version whose
#: chunks fit is not decoded again when the next one is stored after it.
_MEMORY_SHARE = 1 / 16
_LARGEST_CACHE = 4 << 30


class Store(Mapping[str | int, "Version"]):
    """A store: a mapping of version names to versions. Made by `ckstore.open` and `ckstore.init`.

    Iteration yields the numbers of all versions, in order. A lookup takes any name of a version: its number, a tag,
    `latest`, `run@step`, `run@latest`, a run, or the beginning of its id.

    Parameters
    ----------
    place
        The store's directory, or the URL of one in an object store.
    mode
        `r` reads only; `a` reads and writes.
    cache_bytes
        Limit of the cache of decoded chunks.
    options, cache
        Of a remote store; see `Repository`.
    """

    def __init__(
        self,
        place: Path | str,
        mode: Mode = "a",
        cache_bytes: int = CACHE_BYTES,
        *,
        options: Mapping[str, str] | None = None,
        cache: Path | None = None,
    ) -> None:
        self.repository = Repository(place, mode, cache_bytes, options=options, cache=cache)
        self._compactor: Compactor | None = None

    def __getstate__(self) -> tuple[Address, Mode, int]:
        return self.repository.address, self.mode, self.repository.cache_bytes

    def __setstate__(self, state: tuple[Address, Mode, int]) -> None:
        """Open the store in another process."""
        address, mode, cache_bytes = state
        self.repository = address.open(mode, cache_bytes)
        self._compactor = None

    def __repr__(self) -> str:
        return f"<ckstore.Store {str(self.place)!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close catalog and packs, once a version that is being compacted behind the program is done."""
        if self._compactor is not None:
            self._compactor.close()
        self.repository.close()

    @property
    def place(self) -> Path | str:
        """The store's directory, or the URL of a remote store: what opens it once more."""
        return self.repository.place

    @property
    def path(self) -> Path:
        """The store's directory; of a remote store that of its mirror."""
        return self.repository.path

    @property
    def mode(self) -> Mode:
        """`r` reads only; `a` reads and writes."""
        return self.repository.mode

    @property
    def catalog(self) -> Catalog:
        """The index; of a remote store with what other machines had committed a second ago."""
        return self._followed().catalog

    def _followed(self) -> Repository:
        self.repository.catalog.refresh(within=RECENT)
        return self.repository

    @property
    def packs(self) -> PackReader:
        """The bytes."""
        return self.repository.packs

    @property
    def resolver(self) -> CatalogResolver:
        """Finds records by id."""
        return self.repository.resolver

    @property
    def reader(self) -> ObjectReader:
        """Decodes objects."""
        return self.repository.reader

    def __getitem__(self, name: str | int) -> Version:
        """Return the version of a name; raise `NotFoundError` with near matches."""
        from ckstore.version import Version

        return Version(self._stored(self.catalog.resolve(name)))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str | int):
            return False
        try:
            self.catalog.resolve(name)
        except (NotFoundError, UsageError):
            return False
        return True

    def __iter__(self) -> Iterator[int]:
        return iter([row.number for row in self.catalog.versions()])

    def __len__(self) -> int:
        return len(self.catalog.versions())

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.repository.address == other.repository.address

    def __hash__(self) -> int:
        return hash(self.repository.address.place)

    def run(self, name: str) -> Run:
        """Return a run with its present versions; raise `NotFoundError` for an unknown name."""
        from ckstore.run import Run

        return Run(name, self.versions(name))

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        from ckstore.run import Run

        found: dict[str, list[Version]] = {row.name: [] for row in self.catalog.runs()}
        for version in self.versions():
            found.setdefault(version.run, []).append(version)
        return [Run(name, versions) for name, versions in found.items()]

    def versions(self, run: str | None = None) -> list[Version]:
        """Return all versions, or those of one run, by number; raise `NotFoundError` for an unknown run."""
        from ckstore.version import Version

        return [Version(self._stored(row)) for row in self.catalog.versions(run)]

    def tags(self) -> dict[str, Version]:
        """Return the tagged versions by tag, sorted by tag."""
        versions = {version.number: version for version in self.versions()}
        return {tag: versions[number] for tag, number in self.catalog.tags().items() if number in versions}

    def log(self, run: str | None = None) -> Table:
        """Return a table of all versions, or of those of one run, by number: a row per version, a column per fact.

        The columns are those of `ckstore log --json`. `Table.to_pandas` makes a data frame of it.
        """
        from ckstore.table import Table, version_record

        tags: dict[int, list[str]] = {}
        for tag, number in self.catalog.tags().items():
            tags.setdefault(number, []).append(tag)
        return Table(version_record(row, tags.get(row.number, [])) for row in self.catalog.versions(run))

    def diff(
        self, before: str | int, after: str | int, globs: Sequence[str] = (), *, values: bool = False
    ) -> DiffReport:
        """Compare two versions tensor by tensor, bit for bit.

        Parameters
        ----------
        before, after
            Names of versions.
        globs
            Globs over the paths of tensors; without any, all tensors are compared.
        values
            Decode tensors whose values differ, to tell how far they moved.

        Raises
        ------
        NotFoundError
            A version does not exist, or neither has a tensor that a glob matches.
        """
        from ckstore.reading.comparison import compare

        return compare(self[before].stored, self[after].stored, globs, values=values)

    def verify(
        self,
        versions: Sequence[str | int] | None = None,
        *,
        sample: float | None = None,
        executor: Executor | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> VerifyReport:
        """Check packs and the objects of all or some versions; see `ckstore.operations.verify.verify`."""
        from ckstore.operations.verify import verify

        self.catalog.refresh()
        chosen = self._chosen(versions, None)
        return verify(self.repository, chosen, sample=sample, executor=executor, progress=progress)

    def map(
        self,
        function: Callable[[Version], Result],
        versions: Sequence[str | int] | None = None,
        *,
        run: str | None = None,
        executor: Executor | None = None,
    ) -> Iterator[Result]:
        """Call a function with versions; yields what it returns, in their order.

        Parameters
        ----------
        function
            Takes a `Version`. Processes import it: it is defined at the top level of a module.
        versions
            Names; by default all versions, or those of `run`.
        executor
            Its workers call the function: a `ProcessPoolExecutor`, or ``Client.get_executor()`` of dask. They open
            the store by its address, each once. At most 128 calls are under way or done and not yet taken. Without,
            this thread calls it, when the next result is asked for.

        Raises
        ------
        UsageError
            The function cannot be handed to another process.
        CkstoreError
            A worker is gone. What the function raises comes as it is.
        """
        from ckstore.runtime.executors import spread
        from ckstore.version import Version, called

        chosen = [Version(stored) for stored in self._chosen(versions, run)]
        if executor is None:
            return map(function, chosen)
        items = [(version.row.uid, version.row.number) for version in chosen]
        return spread(executor, partial(called, function, self.repository.address), items)

    def rebase(
        self,
        versions: Sequence[str | int] | None = None,
        *,
        run: str | None = None,
        budget: float | None = None,
        dry_run: bool = False,
    ) -> RebaseReport:
        """Store objects of all or some versions in full again; see `ckstore.operations.rebase.rebase`."""
        from ckstore.operations.rebase import rebase

        if not dry_run:
            self.repository.require_writable()
        return rebase(self._followed(), self._chosen(versions, run), budget=budget, dry_run=dry_run)

    def policy(self, run: str | None = None) -> Policy:
        """How faithful the next version of a run is to be, and what becomes of older ones.

        What was set for the run, else for the store, else exact, and all stays.
        """
        from ckstore.operations.naming import policy_of

        return policy_of(self.catalog, run)

    def set_policy(self, policy: Policy | None, run: str | None = None) -> None:
        """Let the versions to come of a run, or of all runs that have no policy of their own, be this faithful.

        Parameters
        ----------
        policy
            None removes what was set.
        run
            The run; by default the store.
        """
        from ckstore.operations.naming import set_policy

        set_policy(self._followed(), policy, run)

    def retain(
        self, run: str | None = None, *, dry_run: bool = False, progress: Callable[[int], None] | None = None
    ) -> RetainReport:
        """Do what policies say of the older versions of all runs, or of one; ingests have it done behind the program.

        See `ckstore.operations.retain.retain`.
        """
        from ckstore.operations.retain import expected, retain

        if dry_run:
            return expected(self._followed(), run)
        self.repository.require_writable()
        return retain(self._followed(), run, progress=progress)

    def stats(self) -> dict[str, Any]:
        """Totals, and under `ledger` the bytes of all files of the store by cause."""
        from ckstore.operations.ledger import stats

        return stats(self._followed())

    def _stored(self, row: VersionRow) -> StoredVersion:
        from ckstore.reading.stored_version import StoredVersion

        return StoredVersion(self.repository, row)

    def _chosen(self, versions: Sequence[str | int] | None, run: str | None) -> list[StoredVersion]:
        rows = self.catalog.versions(run) if versions is None else [self.catalog.resolve(name) for name in versions]
        return [self._stored(row) for row in rows]

    def tag(self, spec: str | int, name: str) -> None:
        """Let a tag mean a version; `UsageError` where a run has that name."""
        from ckstore.operations.naming import tag

        tag(self._followed(), self.catalog.resolve(spec), name)

    def untag(self, name: str) -> None:
        """Remove a tag."""
        from ckstore.operations.naming import untag

        untag(self._followed(), name)

    def forget(
        self,
        versions: Sequence[str | int] = (),
        *,
        run: str | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_tagged: bool = False,
        dry_run: bool = False,
    ) -> ForgetReport:
        """Take versions out of the store; `gc` frees what nothing else needs.

        See `ckstore.operations.selection.select_versions` for which, and `ckstore.operations.forget.forget`.
        """
        from ckstore.operations.forget import forget
        from ckstore.operations.selection import select_versions

        if not dry_run:
            self.repository.require_writable()
        rows = select_versions(self.catalog, versions, run, keep_every, keep_last, keep_tagged)
        return forget(self.repository, rows, dry_run=dry_run)

    def gc(self, *, grace: float = 3600.0, dry_run: bool = False) -> GcReport:
        """Free what no version needs; see `ckstore.operations.gc.collect.gc`."""
        from ckstore.operations.gc.collect import gc

        if not dry_run:
            self.repository.require_writable()
        return gc(self._followed(), grace=grace, dry_run=dry_run)

    def thin(
        self,
        versions: Sequence[str | int] = (),
        *,
        run: str | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_tagged: bool = False,
        quality: float = QUALITY,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> ThinReport:
        """Let versions give up their exact layers: most of their bytes go with the next `gc`, and their values change.

        All other versions stay as they are, bit for bit. How far a thinned version is off, `Version.deviations` says.

        Parameters
        ----------
        versions, run, keep_last, keep_every, keep_tagged
            Which; see `ckstore.operations.selection.select_versions`.
        quality
            Of the coarse layers of objects that have none: moments, and floats of 16 bits.
        dry_run
            Change nothing; only say what would be done.
        progress
            Called with numbers of bytes of versions that are done.
        """
        from ckstore.operations.compact import compact
        from ckstore.operations.selection import select_versions
        from ckstore.operations.thin import thin

        if not dry_run:
            self.repository.require_writable()
        rows = select_versions(self.catalog, versions, run, keep_every, keep_last, keep_tagged)
        if not dry_run:
            compact(self.repository, [row for row in rows if row.hot])
        return thin(self.repository, rows, Policy("coarse", quality=quality), dry_run=dry_run, progress=progress)

    def push(
        self,
        other: Store,
        versions: Sequence[str | int] = (),
        *,
        run: str | None = None,
        dry_run: bool = False,
        verify: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> TransferReport:
        """Let another store have versions of this one; what it has already is not sent.

        Parameters
        ----------
        other
            The store that they go to.
        versions, run
            Names of versions, and ranges, or a run of this store; without either, all versions.
        dry_run
            Change nothing; only say what would be sent.
        verify
            Decode every version that arrived and compare, before it becomes visible.
        progress
            Called with numbers of bytes of versions that are done; they add up to the sum of `original_bytes`.
        """
        from ckstore.operations.selection import select_versions
        from ckstore.operations.transfer import transfer

        if not dry_run:
            other.repository.require_writable()
        chosen = bool(versions) or run is not None
        rows = select_versions(self.catalog, versions, run) if chosen else self.catalog.versions()
        return transfer(self.repository, other._followed(), rows, dry_run=dry_run, verify=verify, progress=progress)

    def pull(
        self,
        other: Store,
        versions: Sequence[str | int] = (),
        *,
        run: str | None = None,
        dry_run: bool = False,
        verify: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> TransferReport:
        """Let this store have versions of another one; `versions` and `run` are names there. See `push`."""
        return other.push(self, versions, run=run, dry_run=dry_run, verify=verify, progress=progress)

    def compact(
        self,
        versions: Sequence[str | int] | None = None,
        *,
        run: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> CompactReport:
        """Encode hot versions: all, those of a run, or the given ones; see `ckstore.operations.compact.compact`."""
        from ckstore.operations.compact import compact, due

        self.repository.require_writable()
        rows = due(self._followed(), run, keep=0)
        if versions is not None:
            rows = [self.catalog.resolve(spec) for spec in versions]
        return compact(self.repository, rows, progress=progress)

    def ingest(
        self,
        source: str | os.PathLike[str] | Any,
        *,
        run: str | None = None,
        step: int | None = None,
        parent: str | int | None = None,
        metrics: dict[str, Any] | None = None,
        replace: bool = False,
        verify: bool = False,
        force: bool = False,
        budget: float | None = None,
        policy: Policy | Fidelity | None = None,
        search: Search | None = None,
        gradients: Mapping[str, Any] | None = None,
        on_unknown: OnUnknown = "raise",
        hot: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> IngestReport:
        """Store a checkpoint as the next version of a run.

        Parameters
        ----------
        source
            Path of a file or directory, or a state dict: nested containers of tensors, plain values and objects of
            the types that `Version.state_dict` makes again.
        run
            Name of the run; `main` by default.
        step
            Step of the run; by default the one that the file or its name tells, if any.
        parent
            The version that this one is stored after; by default the one that the run ingested last. `auto` finds the
            nearest stored version of any run: same names and shapes, least different values.
        metrics
            Numbers to keep with the version, under names: whatever JSON has; NaN and infinities as text that `float`
            reads. A version that is there already gets them in addition.
        replace
            Replace the version at the same run and step.
        verify
            Decode everything and compare before the version becomes visible.
        force
            Store damaged files as opaque bytes instead of refusing them.
        budget
            Restoring the version may cost this many times what it would cost stored exactly and in full; 2 by
            default. Where objects that the store has already cost more than that, they are stored in full again.
        policy
            Fidelity of this version: `exact`, `coarse`, or a `Policy` with the quality or the error bounds of a coarse
            one. By default the policy of the run or the store, else exact. `Version.deviations` tells the errors of a
            coarse version.
        search
            Find the coarsest setting that an evaluation of the model tolerates, in place of a quality.
        gradients
            Of tensors by path: what the scheme `dynaquant` ranks elements by beside their magnitude, |g w|. Without
            them it takes Adam's second moments, where there are any.
        on_unknown
            What becomes of other objects in a state dict: `raise` names the first one's place, before anything is
            stored; `pickle` keeps the bytes of their pickles, which `torch.load` opens in a program that has their
            classes, and `Version.state_dict` for the classes that it is allowed.
        hot
            How many of the run's latest versions stay as they are written, at the speed of the medium; older ones are
            encoded by a thread of low priority while the program goes on. With 0 the version is encoded at once. By
            default what the policy says, else 1; 0 for a coarse `policy`, a `search` or `gradients`.
        progress
            Called with numbers of bytes that were read, coded or, with `verify`, decoded; they add up to at most twice
            the size, three times with `verify`. By several threads, one after the other.

        Raises
        ------
        InputError
            The source is damaged, holds no checkpoint or changed while it was read.
        ConflictError
            Run and step are taken by other content.
        UsageError
            The run cannot be called so, the step is no integer of 64 bits, the metrics are not JSON-able, the budget
            is below 1, the fidelity's parameters are not what a `Policy` can hold, or the state dict holds what
            cannot be stored.
        """
        from ckstore.operations.ingest import ingest
        from ckstore.operations.naming import DEFAULT_RUN
        from ckstore.operations.request import IngestOptions

        options = IngestOptions(
            run, step, parent, metrics or {}, replace, verify, force, budget, policy, search, gradients or {},
            on_unknown, hot,
        )  # fmt: skip
        name = DEFAULT_RUN if run is None else run
        report = ingest(self.repository, source, options, progress)
        said = self.policy(name)
        if report.version.hot or said.retention:
            keep = said.kept_hot if hot is None else hot
            compactor = self._compactor_of_hot()
            compactor.catch_up(name, keep)
            compactor.begin(name, keep)
        return report

    def saver(self, run: str | None = None, *, workers: int = 1, nbytes: int | None = None) -> Saver:
        """Start a process that stores the states of a run while this program goes on training.

        Parameters
        ----------
        run
            Name of the run; `main` by default.
        workers
            Threads of that process that encode older versions while nothing is to be saved.
        nbytes
            Size of the states to come, in bytes, for which memory is had at once; by default that of the run's latest
            version. Without either, the first save takes longer than those that follow.

        Raises
        ------
        UsageError
            The run cannot be called so, there are no workers, or there is not enough memory for a copy of a state.
        """
        from ckstore.operations.naming import DEFAULT_RUN, check_run, check_run_is_no_tag
        from ckstore.saving.saver import Saver

        self.repository.require_writable()
        name = DEFAULT_RUN if run is None else run
        check_run(name)
        check_run_is_no_tag(self.catalog, name)
        if workers < 1:
            raise UsageError(f"The number of workers must be 1 or more, not {workers}.")
        latest = self.catalog.latest(name)
        known = 0 if latest is None else latest.original_bytes
        return Saver(self.repository.address, name, workers, known if nbytes is None else nbytes)

    def _compactor_of_hot(self) -> Compactor:
        from ckstore.operations.compactor import Compactor

        if self._compactor is None:
            self._compactor = Compactor(self.repository)
        return self._compactor


def init(
    path: str | os.PathLike[str],
    *,
    options: Mapping[str, str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Store:
    """Make a store in an empty or absent directory, or in an object store.

    Parameters
    ----------
    path
        A directory, or a URL: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``.
    options, cache
        Of a store in an object store; see `open`.

    Raises
    ------
    ConflictError
        Something is there already, or in an object store another store lies above or below.
    UsageError
        The object store does not honour what a store needs of it.
    """
    place = root.place(path)
    if isinstance(place, str):
        from ckstore.storage.remote.mirror import create

        create(place, options, None if cache is None else Path(cache))
    else:
        Catalog.create(place).close()
    return open(place, options=options, cache=cache)


def open(
    path: str | os.PathLike[str] | None = None,
    mode: Mode = "a",
    cache_bytes: int | None = None,
    *,
    create: bool = False,
    options: Mapping[str, str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Store:
    """Open a store: by default `$CKSTORE`, or the nearest `.ckstore` upwards.

    Parameters
    ----------
    path
        The store's directory, or the URL of one in an object store: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``.
    mode
        `r` reads only; `a` reads and writes.
    cache_bytes
        Limit of the cache of decoded chunks; by default a sixteenth of the machine's memory, at most 4 GiB. Where it
        holds one and a half times a version, storing the next one after it takes less time.
    create
        Make the store at `path` first where there is none: a script may run again, and in several processes at once.
    options
        What the client of an object store is told, such as ``{"endpoint": "https://…"}``; it is remembered on this
        machine. Credentials come from the environment.
    cache
        Directory for the mirrors of remote stores; by default `$CKSTORE_CACHE`, or ``~/.cache/ckstore``.

    Raises
    ------
    NoStoreError
        There is none.
    ConflictError
        With `create`, something else stands there.
    UsageError
        There is no such mode; or with `create`, no path is given, or one that is only to be read.
    FormatVersionError
        A later ckstore wrote it.
    """
    limit = _cache_of_a_program() if cache_bytes is None else cache_bytes
    if create:
        if path is None or mode == "r":
            raise UsageError("create=True makes a store that can be written to; give its path, and no mode.")
        _make_sure(root.place(path), options, cache)
    place = root.find_store() if path is None else root.place(path)
    return Store(place, mode, limit, options=options, cache=None if cache is None else Path(cache))


def _make_sure(place: Path | str, options: Mapping[str, str] | None, cache: str | os.PathLike[str] | None) -> None:
    """Make a store where there is none, be it that another process does so meanwhile."""
    if isinstance(place, str):
        try:
            Store(place, options=options, cache=None if cache is None else Path(cache)).close()
        except NoStoreError:
            with suppress(ConflictError):
                init(place, options=options, cache=cache).close()
        return
    try:
        if not (place / root.CATALOG).is_file():
            Catalog.create(place).close()
    except ConflictError:
        if not (place / root.CATALOG).is_file():
            raise


def _cache_of_a_program() -> int:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return CACHE_BYTES
    return min(max(int(memory * _MEMORY_SHARE), CACHE_BYTES), _LARGEST_CACHE)
