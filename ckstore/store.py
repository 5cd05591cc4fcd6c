"""The store: opens a directory or a bucket, ingests checkpoints, finds versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ckstore.errors import NotFoundError, UsageError
from ckstore.policy import QUALITY, Fidelity, Policy, Retention
from ckstore.repository import CACHE_BYTES, Address, Mode, Repository
from ckstore.runtime.arguments import NAME, PATH, PATHS, TEXT, WHOLE, checked, plain, shown
from ckstore.runtime.local_path import local_path
from ckstore.steps import by_step
from ckstore.storage import root
from ckstore.storage.catalog import RECENT, Catalog, VersionRow
from ckstore.storage.opening import create_store, ensure_store

if TYPE_CHECKING:
    import threading
    from concurrent.futures import Future

    from ckstore.checking.verify import VerifyReport
    from ckstore.following.follow import Followed
    from ckstore.formats.torch.live_state import OnUnknown
    from ckstore.gc.collect import GcReport
    from ckstore.intake.intake import Ingested, Intake
    from ckstore.intake.tier import Tier
    from ckstore.reading.average import AverageReport
    from ckstore.reading.comparison import DiffReport, Sort
    from ckstore.reading.stored_version import StoredVersion
    from ckstore.report.report import Report
    from ckstore.retention.forget import ForgetReport
    from ckstore.retention.retain import RetainReport
    from ckstore.run import Run
    from ckstore.runtime.threads import Executor
    from ckstore.saving.publisher import Publisher
    from ckstore.saving.saver import Saver
    from ckstore.scanning.steps import Planned, StepSource
    from ckstore.table import Table
    from ckstore.transfer.transfer import TransferReport
    from ckstore.version import Version
    from ckstore.writing.encode import EncodeReport
    from ckstore.writing.ingest import IngestReport
    from ckstore.writing.rebase import RebaseReport
    from ckstore.writing.request import IngestOptions
    from ckstore.writing.thin import ThinReport
    from ckstore.writing.tuning import Search

    #: Names of versions, ranges of them, or a single one.
    Versions = str | int | Version | Sequence[str | int | Version]
    Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    Inputs = Paths | Sequence[Planned] | Sequence[Path | Planned]

Result = TypeVar("Result")

#: Limit of the cache of a store that a program opens, as a fraction of the machine's memory and in bytes. A version
#: whose chunks fit is not decoded again when the next version is stored after it.
_MEMORY_SHARE = 1 / 16
_LARGEST_CACHE = 4 << 30

#: Versions of a run in front of a bucket stay unencoded: the bucket's are encoded.
_UNENCODED = 1 << 16


def _name_of(version: Any) -> Any:
    """Return the number of a `Version`, or the name itself."""
    return getattr(version, "number", version)


def _names_of(versions: Any) -> list[str | int]:
    """Return names of versions, which are checked: of a single one, or of several."""
    return versions if isinstance(versions, list) else [versions]


def _store(value: Any) -> Store:
    if not isinstance(value, Store):
        raise TypeError
    return value


_STORE = (_store, "a ckstore.Store")


class Store(Mapping[str | int, "Version"]):
    """A store: a mapping of version names to versions. Made by `ckstore.open` and `ckstore.init`.

    Iteration yields the numbers of all versions, in order; a lookup takes any name of a version.

    Parameters
    ----------
    place
        The directory of the store, or its URL in an object store.
    mode
        `r` (read only) or `a` (read and write).
    cache_bytes
        Limit of the cache of decoded chunks.
    options, cache
        See `open`.

    Examples
    --------
    >>> store["gpt@200"], store["best"] == store["gpt@200"]
    (<ckstore.Version 2 gpt@200>, True)
    >>> list(store), "gpt@400" in store
    ([1, 2, 3], False)
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
        self._repository = Repository(place, mode, cache_bytes, options=options, cache=cache)
        self._intake: Intake | None = None
        self._tier: Tier | None = None

    def __getstate__(self) -> tuple[Address, Mode, int]:
        return self._repository.address, self.mode, self._repository.cache_bytes

    def __setstate__(self, state: tuple[Address, Mode, int]) -> None:
        """Open the store in another process."""
        address, mode, cache_bytes = state
        self._repository = address.open(mode, cache_bytes)
        self._intake = self._tier = None

    def __repr__(self) -> str:
        return f"<ckstore.Store {str(self.place)!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store, after a running background encoding; later calls raise `ClosedError`.

        In front of a bucket it first waits for the versions that the bucket lacks, unless that is out of reach.

        Examples
        --------
        >>> store.close()
        """
        if self._intake is not None:
            self._intake.close()
        if self._tier is not None:
            self._tier.close()
        self._repository.close()

    @property
    def place(self) -> Path | str:
        """The directory of the store, or its URL in an object store."""
        return self._repository.place

    @property
    def path(self) -> Path:
        """The directory of the store, or of the local mirror of a store in an object store."""
        return self._repository.path

    @property
    def mode(self) -> Mode:
        """`r` (read only) or `a` (read and write)."""
        return self._repository.mode

    @property
    def _catalog(self) -> Catalog:
        """The catalog; that of a store in an object store is at most a second old."""
        return self._followed().catalog

    def _followed(self) -> Repository:
        self._repository.catalog.refresh(within=RECENT)
        return self._repository

    def _require_all(self) -> None:
        """Raise an error unless changes of all versions can be made here: those of a bucket are not all on its disk."""
        self._repository.require_writable()
        if self._tier is not None:
            raise UsageError(
                f"This is a disk in front of {self._tier.place}; open that store itself for such a change."
            )

    @checked(name=NAME)
    def __getitem__(self, name: str | int | Version) -> Version:
        """Return the version of a name; raise `NotFoundError` with near matches."""
        from ckstore.version import Version

        return Version(self._stored(self._resolve(_name_of(name))))

    def _resolve(self, name: str | int) -> VersionRow:
        if self._tier is not None and isinstance(name, str):
            name = self._tier.find(name)
        return self._catalog.resolve(name)

    def __contains__(self, name: object) -> bool:
        try:
            self._resolve(plain("name", name, NAME))
        except (NotFoundError, UsageError):
            return False
        return True

    def __iter__(self) -> Iterator[int]:
        return iter([row.number for row in self._catalog.versions()])

    def __len__(self) -> int:
        return self._catalog.totals().versions

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self._repository.address.place == other._repository.address.place

    def __hash__(self) -> int:
        return hash(self._repository.address.place)

    @checked(name=TEXT)
    def run(self, name: str) -> Run:
        """Return a run with its present versions, without superseded ones; raise `NotFoundError` for an unknown name.

        Examples
        --------
        >>> store.run("gpt")[100]
        <ckstore.Version 1 gpt@100>
        """
        from ckstore.run import Run

        return Run(name, _present(self.versions(name)))

    def runs(self) -> list[Run]:
        """Return all runs, oldest first.

        Examples
        --------
        >>> store.runs()
        [<ckstore.Run gpt, 3 versions>]
        """
        from ckstore.run import Run

        found: dict[str, list[Version]] = {row.name: [] for row in self._catalog.runs()}
        for version in self.versions():
            found.setdefault(version.run, []).append(version)
        return [Run(name, _present(versions)) for name, versions in found.items()]

    @checked(run=TEXT, name=TEXT)
    def rename_run(self, run: str, name: str) -> Run:
        """Give a run another name; its versions keep their ids, numbers, tags, parents and its policy.

        Trainings and followers that use the old name do not follow: a version ingested under it begins another run.
        Copies in other stores keep the old name.

        Raises
        ------
        ConflictError
            There is a run of the other name.
        NotFoundError
            The run does not exist.

        Examples
        --------
        >>> store.rename_run("gpt", "small")
        <ckstore.Run small, 3 versions>
        """
        from ckstore.commit.naming import rename_run

        self._require_all()
        rename_run(self._followed(), run, name)
        return self.run(name)

    @checked()
    def versions(self, run: str | None = None) -> list[Version]:
        """Return all versions, or those of one run, by number; raise `NotFoundError` for an unknown run.

        Examples
        --------
        >>> [version.step for version in store.versions("gpt")]
        [100, 200, 300]
        """
        from ckstore.version import Version

        return [Version(self._stored(row)) for row in self._catalog.versions(run)]

    def tags(self) -> dict[str, Version]:
        """Return the tagged versions by tag, sorted by tag.

        Examples
        --------
        >>> store.tags()
        {'best': <ckstore.Version 2 gpt@200>}
        """
        from ckstore.version import Version

        found = {}
        for tag, number in self._catalog.tags().items():
            with suppress(NotFoundError):  # Another process has forgotten it since.
                found[tag] = Version(self._stored(self._catalog.version(number)))
        return found

    @checked()
    def log(self, run: str | None = None, *, forgotten: bool = False) -> Table:
        """Return a table of all versions, or of one run's, by number, with the columns of `ckstore log --json`.

        With `forgotten`, a table of the forgotten and thinned versions that `undo` can bring back, as they were.

        Examples
        --------
        >>> store.log("gpt").where("val_loss<3").columns("step", "val_loss")
        [{'step': 200, 'val_loss': 2.7}, {'step': 300, 'val_loss': 2.8}]
        """
        if not forgotten:
            return self._table(self._catalog.versions(run))
        from ckstore.retention.forget import undoable

        return self._table(row for row in undoable(self._repository) if run in (None, row.run))

    def _table(self, rows: Iterable[VersionRow]) -> Table:
        """Return a table of versions."""
        from ckstore.table import Table, version_record

        tags: dict[int, list[str]] = {}
        for tag, number in self._catalog.tags().items():
            tags.setdefault(number, []).append(tag)
        return Table(version_record(row, tags.get(row.number, [])) for row in rows)

    @checked(sample=WHOLE)
    def report(
        self,
        *runs: str | Run,
        metric: str | None = None,
        globs: Sequence[str] = (),
        sample: int = 1 << 20,
    ) -> Report:
        """Return a report on runs: odd findings, measures of each tensor over the versions, metrics, sizes, lineage.

        Measures are cached in the user's cache directory: the next report decodes only newer versions. Integers,
        booleans and packed 4-bit floats are only compared. Singular values are those of the six largest weight matrices
        of at most 2^22 elements.

        Parameters
        ----------
        runs
            Runs, parts of runs, or names of runs; by default all runs.
        metric
            The metric to show first; by default the first one with numbers.
        globs
            Globs over the paths of tensors.
        sample
            Read about this many elements of a larger tensor; the report gives their share.

        Raises
        ------
        NotFoundError
            A run or the metric does not exist.

        Examples
        --------
        >>> store.report("gpt", metric="val_loss").save("gpt.json")
        """
        from ckstore.report.report import report

        chosen = [self.run(run) if isinstance(run, str) else run for run in runs] if runs else self.runs()
        versions = {run.name: [version._stored for version in run] for run in chosen}
        return report(self._followed(), versions, metric, globs, sample)

    def _repr_html_(self) -> str:
        from html import escape

        from ckstore.report.sparkline import sparkline
        from ckstore.table import Table

        runs = [run for run in self.runs() if run.versions]
        rows = Table(
            {"run": run.name, "versions": len(run), "latest": run.latest.name,
             "stored MB": sum(version.stored_bytes for version in run) / 1e6}
            for run in runs
        )  # fmt: skip
        lines = [f"<p>{escape(run.name)}</p>{line}" for run in runs[:10] if (line := sparkline(run.metrics))]
        return f"<p>{escape(str(self.place))}</p>{rows._repr_html_()}{''.join(lines)}"

    @checked()
    def diff(
        self,
        before: str | int | Version,
        after: str | int | Version,
        globs: Sequence[str] = (),
        *,
        sort: Sort = "drift",
    ) -> DiffReport:
        """Compare two versions tensor by tensor, bit for bit: their structure, and how far values moved.

        Parameters
        ----------
        globs
            Globs over the paths of tensors.
        sort
            Order of tensors with other values: `drift`, `share` or `rms`, largest first, or `path`, as in `after`.

        Raises
        ------
        NotFoundError
            A version does not exist, or neither has a tensor that a glob matches.
        UsageError
            `sort` is unknown.

        Examples
        --------
        >>> [(change.path, change.change) for change in store.diff("gpt@100", "gpt@300").changes]
        [('model/weight', 'values')]
        """
        from ckstore.reading.comparison import compare

        return compare(self[before]._stored, self[after]._stored, globs, sort=sort)

    @checked()
    def average(
        self,
        versions: Versions,
        target: str | os.PathLike[str],
        *,
        ema: float | None = None,
        force: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> AverageReport:
        """Write the mean of versions, in the format of the last one or the target's suffix, without loading them.

        Floats of 16 bits and more and complex numbers are summed in float64 and rounded once. Other tensors, plain
        values and the names of files are those of the last version.

        Parameters
        ----------
        versions
            Names of versions or ranges, in order.
        target
            The file or directory to write. It becomes visible when it is complete.
        ema
            Weight of the mean so far, such as 0.99, in an exponential moving average that begins with the first
            version. By default all versions weigh the same.
        force
            Overwrite an existing target; an existing directory is replaced as a whole.
        progress
            Called with numbers of processed bytes.

        Raises
        ------
        ConflictError
            Versions differ in tensors, shapes, dtypes or the arrangement of files, or the target exists without
            `force`.
        UsageError
            There are fewer than two versions, `ema` is not between 0 and 1, or nothing is converted to the suffix.

        Examples
        --------
        >>> store.average(["gpt@100", "gpt@300"], "mean.pt", ema=0.9).versions
        [1, 3]
        """
        from ckstore.reading.average import average

        chosen = [stored for name in _names_of(versions) for stored in self._chosen([name], None)]
        return average(chosen, Path(target), ema=ema, force=force, progress=progress)

    @checked()
    def verify(
        self,
        versions: Versions | None = None,
        *,
        run: str | None = None,
        sample: float | None = None,
        progress: Callable[[int], None] | None = None,
        signed_by: str | os.PathLike[str] | None = None,
    ) -> VerifyReport:
        """Compare packs with their names and objects with their ids; damage is reported, not raised.

        Parameters
        ----------
        versions, run
            Check only these versions and their packs; by default everything.
        sample
            Fraction of the packs and objects to check, drawn at random; by default all.
        progress
            Called with numbers of processed bytes.
        signed_by
            Also report versions that were not signed with a key; see `Version.require_signed`.

        Examples
        --------
        >>> store.verify().problems
        []
        """
        from ckstore.checking.verify import verify

        self._catalog.refresh()
        chosen = self._chosen(versions, run)
        report = verify(self._repository, chosen, sample=sample, progress=progress)
        if signed_by is not None:
            from ckstore.reading.signature import unsigned

            report.problems += unsigned(chosen, Path(signed_by))
        return report

    @checked()
    def map(
        self,
        function: Callable[[Version], Result],
        versions: Versions | None = None,
        *,
        run: str | None = None,
        executor: Executor | None = None,
    ) -> Iterator[Result]:
        """Call a function with each version; yield its results in the order of the versions.

        Parameters
        ----------
        function
            Takes a `Version`. Processes need a function at the top level of a module.
        versions, run
            Names of versions, ranges, or a run; by default all versions.
        executor
            A `ProcessPoolExecutor`, or ``Client.get_executor()`` of dask. Each worker opens the store once; at most 128
            calls run ahead of the results taken. By default this thread makes one call for each result taken.

        Raises
        ------
        UsageError
            The function cannot be pickled.
        CkstoreError
            A worker died. Errors of the function are raised unchanged.

        Examples
        --------
        >>> list(store.map(lambda version: version.metrics["val_loss"]))
        [3.1, 2.7, 2.8]
        """
        from ckstore.runtime.executors import spread
        from ckstore.version import Version, called

        # In the order of the names, where versions are named.
        selections = [None] if versions is None else [[name] for name in _names_of(versions)]
        chosen = [Version(stored) for names in selections for stored in self._chosen(names, run)]
        if executor is None:
            return map(function, chosen)
        items = [(version.id, version.number) for version in chosen]
        return spread(executor, partial(called, function, self._repository.address), items)

    @checked()
    def rebase(
        self,
        versions: Versions | None = None,
        *,
        run: str | None = None,
        max_restore_cost: float | None = None,
        dry_run: bool = False,
    ) -> RebaseReport:
        """Store objects of versions in full again, so that restoring the versions costs less; no value changes.

        Parameters
        ----------
        versions, run
            Names of versions, ranges, or a run; by default all versions.
        max_restore_cost
            Largest restore cost of a version, as a multiple of a full copy's; by default every object is stored in
            full.
        dry_run
            Change nothing; only report.

        Examples
        --------
        >>> store.rebase("gpt@300").versions, store["gpt@300"].depth
        ([3], 0)
        """
        from ckstore.writing.rebase import rebase

        if not dry_run:
            self._repository.require_writable()
        return rebase(self._followed(), self._chosen(versions, run), budget=max_restore_cost, dry_run=dry_run)

    @checked()
    def policy(self, run: str | None = None) -> Policy:
        """Return the policy of a run: its own, else the store's, else the default (exact, keep everything).

        Examples
        --------
        >>> store.policy("gpt").fidelity
        'exact'
        """
        from ckstore.commit.naming import policy_of

        return policy_of(self._catalog, run)

    @checked()
    def set_policy(self, policy: Policy | None, run: str | None = None, *, search: Search | None = None) -> None:
        """Set the policy of a run, or of all runs without a policy of their own.

        Parameters
        ----------
        policy
            None removes the policy.
        run
            Name of the run; by default the whole store. A run without a version is named in a warning of the logger
            `ckstore`: the policy counts from its first one.
        search
            Search for the coarsest quality of a coarse policy, on the last version of the run.

        Raises
        ------
        UsageError
            No quality passes the search, or the last version is coarse.

        Examples
        --------
        >>> store.set_policy(ckstore.Policy("coarse", quality=1.0), run="gpt")
        >>> store.policy("gpt").quality
        1.0
        """
        from ckstore.commit.naming import set_policy

        self._require_all()
        if search is not None:
            from ckstore.writing.ingest import tuned

            if policy is None or not policy.is_coarse or policy.is_bounded or run is None:
                raise UsageError("A search is for the coarse policy of a run, without error bounds.")
            policy = tuned(self._followed(), policy, run, search)
        set_policy(self._followed(), policy, run)

    def policies(self) -> dict[str, Policy]:
        """Return the policies that are set, by run; that of the store under the empty name.

        Examples
        --------
        >>> store.policies()
        {}
        """
        return {name: Policy.from_text(text) for name, text in self._catalog.policies().items()}

    @checked()
    def retain(
        self,
        run: str | None = None,
        *,
        retention: Retention | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> RetainReport:
        """Apply the retention policies of all runs, or of one run, now. An ingest applies them in the background.

        Parameters
        ----------
        run
            Name of the run; by default all runs.
        retention
            With `dry_run`: report on this retention in place of the policies'.
        dry_run
            Change nothing; only report.
        progress
            Called with numbers of processed bytes.

        Raises
        ------
        NotFoundError
            The run does not exist.

        Examples
        --------
        >>> store.set_policy(ckstore.Policy(retention=ckstore.Retention(keep_last=2)), run="gpt")
        >>> store.retain(dry_run=True).forgotten
        [<ckstore.VersionRow 1 gpt@100>]
        """
        from ckstore.retention.retain import expected, retain

        self._rows(None, run)
        if dry_run:
            return expected(self._followed(), run, retention)
        if retention is not None:
            raise UsageError("`retention` needs `dry_run`; `set_policy` sets it.")
        self._require_all()
        return retain(self._followed(), run, progress=progress)

    @checked()
    def stats(self, *, ledger: bool = False) -> dict[str, Any]:
        """Return totals of the store.

        Parameters
        ----------
        ledger
            Add the bytes of its files by cause, under `ledger`, which takes a while in a large store. `held` are bytes
            of forgotten versions: garbage, and data that present versions need until a `rebase`.

        Examples
        --------
        >>> store.stats()["versions"]
        3
        """
        from ckstore.checking.ledger import stats

        return stats(self._followed(), with_ledger=ledger)

    def _stored(self, row: VersionRow) -> StoredVersion:
        from ckstore.reading.stored_version import StoredVersion

        return StoredVersion(self._repository, row)

    @checked()
    def select(
        self,
        versions: Versions | None = None,
        *,
        run: str | None = None,
        keep_last: int | str | None = None,
        keep_every: int | str | None = None,
        keep_tagged: bool = False,
    ) -> list[Version]:
        """Return versions by number, selected as by every method that takes `versions` and `run`.

        Parameters
        ----------
        versions
            Names of versions, and ranges such as `gpt@100..gpt@900`: both ends and all versions of their run between
            them, without superseded ones; `3..9` has these, too. An end may have been forgotten.
        run
            Select all versions of this run.
        keep_last, keep_every, keep_tagged
            Leave out the last N of each run (or of a time: `30d`), the first of every N steps (or `1d`, `1h:24,1d:7`),
            and tagged versions. Superseded versions do not count among the former two.

        Raises
        ------
        NotFoundError
            A name or a run does not exist.
        UsageError
            Both `versions` and `run` are given, or a range has ends in two runs or runs backwards.

        Examples
        --------
        >>> store.select(["gpt@200..gpt@300"])
        [<ckstore.Version 2 gpt@200>, <ckstore.Version 3 gpt@300>]
        """
        from ckstore.version import Version

        rows = self._rows(versions, run, keep_last, keep_every, keep_tagged)
        return [Version(self._stored(row)) for row in rows]

    def _rows(
        self,
        versions: Versions | None,
        run: str | None,
        keep_last: int | str | None = None,
        keep_every: int | str | None = None,
        keep_tagged: bool = False,
        *,
        required: bool = False,
    ) -> list[VersionRow]:
        """Return the rows of the selected versions; all versions if none are selected, unless that is `required`."""
        from ckstore.retention.selection import select_versions

        if required and versions is None and run is None:
            raise UsageError("Name versions, ranges such as gpt@100..gpt@900, or a `run`.")
        names = None if versions is None else _names_of(versions)
        return select_versions(self._followed().catalog, names, run, keep_every, keep_last, keep_tagged)

    def _chosen(self, versions: Versions | None, run: str | None) -> list[StoredVersion]:
        return [self._stored(row) for row in self._rows(versions, run)]

    @checked(name=TEXT)
    def tag(self, version: str | int | Version, name: str) -> None:
        """Point a tag at a version; raise `UsageError` where a run has that name.

        Examples
        --------
        >>> store.tag("gpt@300", "candidate")
        >>> store["candidate"]
        <ckstore.Version 3 gpt@300>
        """
        from ckstore.commit.naming import tag

        self._repository.require_writable()
        tag(self._followed(), self._catalog.resolve(_name_of(version)), name)

    @checked(name=TEXT)
    def untag(self, name: str) -> None:
        """Remove a tag.

        Examples
        --------
        >>> store.untag("best")
        >>> store.tags()
        {}
        """
        from ckstore.commit.naming import untag

        self._repository.require_writable()
        untag(self._followed(), name)

    @checked()
    def set_metrics(
        self, version: str | int | Version, metrics: Mapping[str, Any] | None = None, *, remove: Sequence[str] = ()
    ) -> None:
        """Add metrics to a version, replacing those of the same names, and remove others.

        Parameters
        ----------
        metrics
            JSON values by name.

        Raises
        ------
        UsageError
            A metric is not a plain value.
        NotFoundError
            The version does not exist, or has no metric to remove.

        Examples
        --------
        >>> store.set_metrics("gpt@300", {"accuracy": 0.6})
        >>> store["gpt@300"].metrics
        {'val_loss': 2.8, 'accuracy': 0.6}
        """
        from ckstore.commit.naming import set_metrics
        from ckstore.writing.request import checked_metrics, plain_metrics

        self._repository.require_writable()
        row = self._followed().catalog.resolve(_name_of(version))
        set_metrics(self._repository, row, plain_metrics(checked_metrics(metrics)), remove)

    @checked()
    def sign(self, version: str | int | Version, key: str | os.PathLike[str]) -> None:
        """Sign the files of a version; `Version.require_signed` and followers check it.

        The signature is a Sigstore bundle as of OpenSSF model signing, which needs the extra `sign` and no network. It
        covers the files' names and their BLAKE3, which the version has: no file is read.

        Parameters
        ----------
        key
            PEM file with an elliptic private key, perhaps with its certificate and its issuers'.

        Raises
        ------
        UsageError
            The key cannot sign, or the version is coarse or has links.

        Examples
        --------
        >>> store.sign("best", "private.pem")
        Traceback (most recent call last):
        ...
        ckstore.errors.UsageError: The key private.pem cannot be read ...
        """
        from ckstore.commit.naming import set_metrics
        from ckstore.reading.signature import sign
        from ckstore.reading.stored_version import StoredVersion
        from ckstore.runtime.provenance import SIGNATURE

        self._repository.require_writable()
        stored = StoredVersion(self._repository, self._followed().catalog.resolve(_name_of(version)))
        set_metrics(self._repository, stored.row, {SIGNATURE: sign(stored, Path(key))}, ())

    @checked()
    def forget(
        self,
        versions: Versions | None = None,
        *,
        run: str | None = None,
        keep_last: int | str | None = None,
        keep_every: int | str | None = None,
        keep_tagged: bool = False,
        prune: bool = False,
        dry_run: bool = False,
    ) -> ForgetReport:
        """Forget versions: they leave the store, and `gc` frees the bytes that nothing else needs after seven days.

        Until then `undo` brings them back.

        Parameters
        ----------
        versions, run, keep_last, keep_every, keep_tagged
            See `select`.
        prune
            Forget them for good, and free their bytes now.
        dry_run
            Change nothing; only report.

        Raises
        ------
        ConflictError
            A chosen version is tagged; then none is forgotten.
        NotFoundError
            A name or a run does not exist.

        Examples
        --------
        >>> [row.step for row in store.forget("gpt@100").versions]
        [100]
        >>> list(store)
        [2, 3]
        """
        from ckstore.retention.forget import forget

        if not dry_run:
            self._require_all()
        rows = self._rows(versions, run, keep_last, keep_every, keep_tagged, required=True)
        report = forget(self._repository, rows, dry_run=dry_run, for_good=prune)
        if prune and not dry_run:
            report = replace(report, freed=self.gc().bytes)
        return report

    @checked()
    def undo(self) -> ForgetReport:
        """Bring back the versions that were forgotten last, or make the versions exact that were thinned last.

        A call again brings back those before. Bits, numbers, metrics and children are as before. Versions that a policy
        or `prune` forgot or thinned do not return.

        Raises
        ------
        ConflictError
            A run has another version at the step of one; then none returns.
        NotFoundError
            No version was forgotten or thinned, or `gc` has freed them since.

        Examples
        --------
        >>> forgotten = store.forget("gpt@100")
        >>> store.undo().versions
        [<ckstore.VersionRow 1 gpt@100>]
        >>> list(store)
        [1, 2, 3]
        """
        from ckstore.retention.forget import undo

        self._require_all()
        return undo(self._followed())

    @checked()
    def gc(self, *, grace: float | None = None, dry_run: bool = False) -> GcReport:
        """Collect garbage: delete bytes that no version needs.

        Forgotten versions, and the exact values of thinned ones, stay for seven days, so that `undo` can bring them
        back, or until the disk lacks the room for another version; files that a killed process left behind, for an
        hour.

        Parameters
        ----------
        grace
            Seconds for both. Zero frees all at once.
        dry_run
            Change nothing; only report.

        Raises
        ------
        IntegrityError
            The store is damaged; nothing is deleted.
        LockedError
            Other processes write all the time.

        Examples
        --------
        >>> forgotten = store.forget("gpt@300")
        >>> store.gc(grace=0).versions
        1
        """
        from ckstore.gc.collect import gc

        if not dry_run:
            self._repository.require_writable()
        return gc(self._followed(), grace=grace, dry_run=dry_run)

    @checked()
    def thin(
        self,
        versions: Versions | None = None,
        *,
        run: str | None = None,
        keep_last: int | str | None = None,
        keep_every: int | str | None = None,
        keep_tagged: bool = False,
        quality: float = QUALITY,
        prune: bool = False,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> ThinReport:
        """Make versions coarse; `gc` frees most of their bytes after seven days, until which `undo` makes them exact.

        Their values become approximate; `Version.deviations` tells the errors. All other versions stay bit-exact.

        Parameters
        ----------
        versions, run, keep_last, keep_every, keep_tagged
            See `select`.
        quality
            As in `Policy`.
        prune
            Make them coarse for good, and free their bytes now.
        dry_run
            Change nothing; only report.
        progress
            Called with numbers of processed bytes.

        Raises
        ------
        ConflictError
            A version that would lose its exact values is tagged; remove the tag first, or keep it with `keep_tagged`.

        Examples
        --------
        >>> report = store.thin("gpt@100")
        >>> store["gpt@100"].fidelity, round(report.versions[0].relative, 2)
        ('coarse', 0.04)
        """
        from ckstore.writing.encode import encode
        from ckstore.writing.thin import thin

        if not dry_run:
            self._require_all()
        rows = self._rows(versions, run, keep_last, keep_every, keep_tagged, required=True)
        self._catalog.check_untagged(row.number for row in rows if row.fidelity == "exact")
        if not dry_run:
            encode(self._repository, [row for row in rows if row.hot])
        coarse = Policy("coarse", quality=quality)
        report = thin(self._repository, rows, coarse, dry_run=dry_run, may_return=not prune, progress=progress)
        if prune and not dry_run:
            report.freed = self.gc().bytes
        return report

    @checked(other=_STORE)
    def push(
        self,
        other: Store,
        versions: Versions | None = None,
        *,
        run: str | None = None,
        dry_run: bool = False,
        verify: bool = False,
        restore: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> TransferReport:
        """Send versions to another store, which receives only the bytes that it lacks.

        Parameters
        ----------
        versions, run
            Names of versions, ranges, or a run; by default all versions.
        dry_run
            Change nothing; only report.
        verify
            Decode and compare everything before it becomes visible.
        restore
            Also send versions that the other store has forgotten.
        progress
            Called with numbers of bytes, which add up to the sum of `original_bytes`.

        Examples
        --------
        >>> with ckstore.open("copy", create=True) as copy:
        ...     report = store.push(copy, "best")
        ...     print(report.versions[0].arrived, report.there, report.failed)
        <ckstore.VersionRow 1 gpt@200> [] []
        """
        from ckstore.transfer.transfer import transfer

        if not dry_run:
            other._repository.require_writable()
        rows = self._rows(versions, run)
        return transfer(
            self._repository, other._followed(), rows, dry_run=dry_run, verify=verify, restore=restore,
            progress=progress,
        )  # fmt: skip

    @checked(other=_STORE)
    def pull(
        self,
        other: Store,
        versions: Versions | None = None,
        *,
        run: str | None = None,
        dry_run: bool = False,
        verify: bool = False,
        restore: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> TransferReport:
        """Fetch versions from another store, under the names that they have there; see `push`.

        Examples
        --------
        >>> with ckstore.open("copy", create=True) as copy:
        ...     report = copy.pull(store)
        ...     print(list(copy))
        [1, 2, 3]
        """
        return other.push(self, versions, run=run, dry_run=dry_run, verify=verify, restore=restore, progress=progress)

    @checked(version=NAME)
    def pushed(self, version: str | int | Version) -> Future[VersionRow]:
        """Return the second stage of a save in front of a bucket: done once that has the version.

        The result is the version's row in the bucket. A `ConflictError` says that the run went on there without it, a
        `NotFoundError` that it was forgotten here first.

        Raises
        ------
        UsageError
            The store was opened without `local`.

        Examples
        --------
        >>> store.pushed("gpt@600")
        Traceback (most recent call last):
        ckstore.errors.UsageError: This store is in front of no bucket; open the bucket with `local`.
        """
        if self._tier is None:
            raise UsageError("This store is in front of no bucket; open the bucket with `local`.")
        return self._tier.pushed(_name_of(version))

    @checked()
    def encode(
        self,
        versions: Versions | None = None,
        *,
        run: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> EncodeReport:
        """Encode versions that are stored unencoded; values and ids stay.

        Parameters
        ----------
        versions, run
            Names of versions, ranges, or a run; by default all versions.
        progress
            Called with numbers of processed bytes.

        Examples
        --------
        >>> store.ingest({"weight": np.ones(8)}, run="toy").version.hot, store.encode(run="toy").versions
        (True, [4])
        """
        from ckstore.writing.encode import encode

        self._repository.require_writable()
        if versions is None:
            rows = self._followed().catalog.hot(run)
        else:
            rows = [row for row in self._rows(versions, run) if row.hot]
        return encode(self._repository, rows, progress=progress)

    @checked()
    def ingest(
        self,
        source: str | os.PathLike[str] | Any,
        *,
        run: str | None = None,
        step: int | None = None,
        parent: str | int | Version | None = None,
        metrics: dict[str, Any] | None = None,
        config: Any = None,
        replace: bool = False,
        verify: bool = False,
        force: bool = False,
        max_restore_cost: float | None = None,
        policy: Policy | Fidelity | None = None,
        search: Search | None = None,
        gradients: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        on_unknown: OnUnknown = "raise",
        hot: int | None = None,
        allow_empty: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> IngestReport:
        """Store a checkpoint as the next version of a run.

        Parameters
        ----------
        source
            Path of a file or directory, or a state dict: nested containers of tensors, plain values and objects of
            the types that `Version.state_dict` restores.
        run
            Name of the run; `main` by default.
        step
            Training step; by default the step in the file or its name.
        parent
            Name of the version before this one; by default the run's at the step below, else its last, or for a new run
            a version with similar values, if there is one. An earlier version of the run supersedes the versions after
            it, whose steps are free then. `auto` chooses the nearest stored version of any run: same names and shapes,
            least different values.
        metrics
            JSON values by name; NaN and infinities become text that `float` reads. An existing version of the same
            content gets them, too.
        config
            The configuration of the training: a mapping, a namespace or a dataclass, whose values become JSON. Values
            that are named as secrets (token, key, password) are left out.
        replace
            Replace the version at the same run and step.
        verify
            Decode and compare everything before it becomes visible.
        force
            Accept damaged files and files without tensors, as opaque bytes, and incomplete directories.
        max_restore_cost
            Largest restore cost, as a multiple of a full, exact copy's; 2 by default.
        policy
            `exact`, `coarse` or a `Policy`; by default the policy of the run or the store, else exact.
        search
            A `Search` for the coarsest setting, in place of a quality.
        gradients
            Gradients for the scheme `dynaquant`, which ranks elements by magnitude and by |g w|: by path, nested as in
            the state, or a file of either that `ingest` reads. By default it takes Adam's second moments.
        on_unknown
            Treatment of other objects in a state dict: `raise` names the first one before anything is stored; `pickle`
            keeps pickles, for `torch.load`, which imports their classes, and `Version.state_dict` with `allow`.
        hot
            Number of the run's latest versions that stay unencoded; a background thread encodes older ones. 0 encodes
            the version at once. By default the policy's number, else 1; 0 for a coarse `policy`, a `search` or
            `gradients`.
        allow_empty
            Accept a state dict, or a file, without tensors; also an empty file.
        progress
            Called with numbers of bytes, by one thread at a time. They add up to at most twice the size, or with
            `verify` three times.

        Returns
        -------
        IngestReport
            The committed version, or the existing one of the same content.

        Raises
        ------
        InputError
            The source is damaged or incomplete, holds no tensors, or changed while it was read.
        ConflictError
            The run has other content at this step.
        UsageError
            An argument is invalid, `policy` and `search` contradict each other, or the state dict holds no tensor, or
            an object that cannot be stored.

        Examples
        --------
        >>> from tempfile import TemporaryDirectory
        >>> import ckstore, numpy
        >>> with TemporaryDirectory() as directory, ckstore.open(f"{directory}/store", create=True) as store:
        ...     report = store.ingest({"weight": numpy.zeros(8)}, run="toy", step=3, metrics={"loss": 0.5})
        ...     store["toy@3"].metrics
        {'loss': 0.5}
        """
        from ckstore.writing.request import IngestOptions

        options = IngestOptions(
            run, step, _name_of(parent), metrics or {}, replace, verify, force, max_restore_cost,
            policy, search, gradients, on_unknown, hot, allow_empty, config,
        )  # fmt: skip
        return self._taking().ingest(source, options, progress)

    @checked()
    def plan(
        self,
        paths: Paths,
        *,
        run: str | None = None,
        step_from: StepSource | None = None,
        recursive: bool = False,
        force: bool = False,
    ) -> list[Planned]:
        """Return the runs and steps of many checkpoints, in the order in which `ingest_many` stores them.

        Parameters
        ----------
        paths
            A file or directory, or several.
        run
            Name of the run; `main` by default.
        step_from
            Source of steps: `name` (numbers in names), `content` (values in files), or `order` (the order of names,
            after the run's highest step). By default contents if they differ, else names.
        recursive
            Scan folders; group checkpoints into runs and steps. Other files are left out, with a note.
        force
            Accept damaged files, as opaque bytes.

        Examples
        --------
        >>> for step in (1, 2):
        ...     np.save(f"net_{step}.npy", np.full(4, step))
        >>> [item.step for item in store.plan(["net_1.npy", "net_2.npy"], run="net", step_from="name")]
        [1, 2]
        """
        return self._taking().plan(_paths(paths), run=run, step_from=step_from, recursive=recursive, force=force)

    @checked(options=None)
    def ingest_many(
        self,
        inputs: Inputs,
        options: IngestOptions | None = None,
        *,
        run: str | None = None,
        step_from: StepSource | None = None,
        tag: str | None = None,
        delete_source: bool = False,
        executor: Executor | None = None,
        progress: Callable[[int], None] | None = None,
        each: Callable[[Ingested], None] | None = None,
    ) -> list[Ingested]:
        """Store many checkpoints in the order of their steps; return the outcome of each.

        An input that cannot be stored has an `error`, and does not stop the others.

        Parameters
        ----------
        inputs
            Paths of checkpoints, or the result of `plan` with its runs and steps. In a plan, the first version of a new
            run follows the nearest stored version.
        options
            The keywords of `ingest`, for all inputs.
        run
            Name of the run; `main` by default.
        step_from
            See `plan`.
        tag
            Tag for the last version.
        delete_source
            Delete each input once its version is compared with it, if the policy keeps that whole.
        executor
            Its workers store the versions, a task for each run.
        progress
            Called with numbers of processed bytes.
        each
            Called with each outcome as soon as it is known.

        Raises
        ------
        UsageError
            The run, the tag or an option is invalid, or `delete_source` is given for coarse versions.
        CkstoreError
            The store is damaged, locked, full or out of reach.

        Examples
        --------
        >>> from tempfile import TemporaryDirectory
        >>> import ckstore, numpy
        >>> with TemporaryDirectory() as directory, ckstore.open(f"{directory}/store", create=True) as store:
        ...     for number in (1, 2):
        ...         numpy.save(f"{directory}/net_{number}.npy", numpy.full(4, number))
        ...     paths = [f"{directory}/net_1.npy", f"{directory}/net_2.npy"]
        ...     [item.version.step for item in store.ingest_many(paths, run="net", step_from="name")]
        [1, 2]
        """
        from ckstore.commit.naming import DEFAULT_RUN
        from ckstore.intake.intake import Batch
        from ckstore.scanning.steps import Planned
        from ckstore.writing.request import IngestOptions

        if not isinstance(options, IngestOptions | None):
            raise UsageError(f"`options` takes ckstore.IngestOptions, not {shown(options)}.")
        options = options or IngestOptions()
        run = next((name for name in (run, options.run) if name is not None), DEFAULT_RUN)
        several = isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes | os.PathLike)
        given: list[Any] = list(inputs) if several else [inputs]  # type: ignore[arg-type]
        planned = [item for item in given if isinstance(item, Planned)]
        follows = bool(planned)
        if not planned:
            paths = _paths(plain("inputs", given, PATHS))
            if len(paths) > 1 or step_from is not None:
                planned = self.plan(paths, run=run, step_from=step_from, force=options.force)
            else:  # The ingest reads the step of a single input itself.
                planned = [Planned(path, options.step, run=run) for path in paths]
        single = options.step is not None or options.metrics or options.gradients is not None
        if single and len(planned) > 1:
            raise UsageError("`step`, `metrics` and `gradients` are for a single checkpoint; leave them out.")
        if options.hot is None and (follows or len(planned) > 1):
            # The latest of many is seldom resumed from at once: it is encoded with the others.
            options = replace(options, hot=0)
        planned = [item for item in planned if item.run or item.refused or not follows]
        batch = Batch(replace(options, verify=options.verify or delete_source), delete_source, follows)
        outcomes = []
        for item in self._taking().ingest_many(planned, batch, name=tag, executor=executor, progress=progress):
            outcomes.append(item)
            if each is not None:
                each(item)
        return outcomes

    @checked()
    def watch(
        self,
        folders: Paths,
        *,
        run: str | None = None,
        step_from: StepSource | None = None,
        delete_source: bool = False,
        settle: float = 2.0,
        poll: float | None = None,
        once: bool = False,
        stop: threading.Event | None = None,
    ) -> Iterator[Ingested]:
        """Store checkpoints as they appear in directories; yield each outcome.

        A file or directory is stored once it is complete: it parses, holds tensors, and has not changed for a while.
        Stored inputs and steps that the run's policy would forget are skipped. When the disk is full, or a directory is
        missing, it waits. The outcome of a checkpoint that was overwritten or deleted before its turn is a note.

        Parameters
        ----------
        folders
            A directory, or several.
        run
            Name of the run; `main` by default.
        step_from
            See `plan`.
        delete_source
            Delete each input once its version is compared with it, if the policy keeps that whole.
        settle
            Seconds without change after which a file is complete; five times as long for a directory.
        poll
            Seconds between looks; by default file events, else 1.
        once
            Store the complete inputs and return.
        stop
            An event that ends the iteration after the current version.

        Raises
        ------
        UsageError
            The run is invalid, `delete_source` is given for coarse versions, or a directory is a file, or missing with
            `once`.

        Examples
        --------
        >>> np.save("net_1.npy", np.zeros(4))
        >>> [item.version for item in store.watch(".", run="net", once=True, settle=0)]
        [<ckstore.VersionRow 4 net@1>]
        """
        import threading

        from ckstore.intake.intake import Batch
        from ckstore.intake.watching import watch
        from ckstore.writing.request import IngestOptions

        batch = Batch(IngestOptions(run=run, verify=delete_source), delete_source)
        self._repository.require_writable()
        yield from watch(
            self._taking(), _paths(folders), batch, step_from=step_from, settle=settle, poll=poll, once=once,
            stop=stop or threading.Event(),
        )  # fmt: skip

    @checked(name=NAME, directory=PATH)
    def follow(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        once: bool = False,
        poll: float = 1.0,
        stop: threading.Event | None = None,
        swap: bool = False,
        include: Sequence[str] = (),
        every: int = 1,
        signed_by: str | os.PathLike[str] | None = None,
    ) -> Iterator[Followed]:
        """Keep a directory at the newest version of a name; yield each version once the directory holds it.

        An update reads the changes since the version that the directory has, and writes the chunks that differ, in
        place: stop reading the files before you ask for the next version, which then counts as applied. Versions in
        between are left out. Followers of one directory share the work. Errors that may pass, such as an unreachable
        store, are logged, and the loop goes on.

        Parameters
        ----------
        name
            A run, for its highest step, or another name of a version; it may appear later.
        directory
            A directory of its own, which `.ckstore-version` marks.
        once
            Update to the present version and return.
        poll
            Seconds between looks: a request of a store in an object store.
        stop
            An event that ends the iteration.
        swap
            Write the directories `DIRECTORY.a` and `DIRECTORY.b` in turn, and make `directory` a link to the complete
            one: for readers that map the files. Takes twice the space.
        include
            Globs of files, as for `Version.checkout`; all by default.
        every
            Follow steps that are multiples of this number alone.
        signed_by
            Wait for a version that was signed with a key, before anything is written; see `Version.require_signed`.
            Files change in a copy, which replaces them once it is the signed one.

        Raises
        ------
        ConflictError
            The directory holds something else.
        NotFoundError
            With `once`: there is no such version.

        Examples
        --------
        >>> [followed.name for followed in store.follow("gpt", "served", once=True)]
        ['gpt@300']
        """
        from ckstore.following.follow import follow

        if not poll > 0:
            raise UsageError(f"`poll` must be above 0, not {poll}.")
        if every < 1:
            raise UsageError(f"`every` must be 1 or more, not {every}.")
        yield from follow(
            self._repository, name, Path(directory), once=once, poll=poll, stop=stop, swap=swap, include=include,
            every=every, signed_by=None if signed_by is None else Path(signed_by),
        )  # fmt: skip

    def _taking(self) -> Intake:
        if self._intake is None:
            from ckstore.intake.intake import Intake

            self._intake = Intake(self._repository)
        return self._intake

    @checked()
    def saver(self, run: str | None = None, *, workers: int = 1, nbytes: int | None = None) -> Saver:
        """Start a process that stores the states of a run while this program trains on.

        Parameters
        ----------
        run
            Name of the run; `main` by default.
        workers
            Threads of that process that encode older versions between saves.
        nbytes
            Memory to allocate up front, in bytes: the size of a state. By default the latest version's; in a new run
            the first save takes longer.

        Raises
        ------
        UsageError
            The run is invalid, `workers` is below 1, or memory lacks room for a copy of a state.

        Examples
        --------
        >>> with store.saver("gpt") as saver:
        ...     saving = saver.save({"weight": np.zeros(8)}, step=400)
        >>> saving.result().version.number
        4
        """
        from ckstore.saving.saver import Saver

        self._repository.require_writable()
        name = self._checked_run(run)
        if workers < 1:
            raise UsageError(f"`workers` must be 1 or more, not {workers}.")
        if nbytes is not None and nbytes < 0:
            raise UsageError(f"`nbytes` must be 0 or more, not {nbytes}.")
        latest = self._catalog.latest(name)
        known = 0 if latest is None else latest.original_bytes
        return Saver(self._repository.address, name, workers, known if nbytes is None else nbytes)

    @checked(like=PATH, dtype=TEXT)
    def publish(
        self, run: str | None = None, *, like: str | os.PathLike[str], dtype: str | None = None, workers: int = 1
    ) -> Publisher:
        """Start a process that publishes weights for followers, each version encoded at once.

        Parameters
        ----------
        run
            Name of the run; `main` by default.
        like
            A Hugging Face directory with safetensors files. Versions have its shards, index, configuration and
            tokenizer, with the weights that are saved.
        dtype
            dtype of weights that are floats, such as `bfloat16`; by default those of the directory.
        workers
            Threads that encode.

        Raises
        ------
        UsageError
            The run is invalid, the directory has no safetensors file, or memory lacks room for a copy.

        Examples
        --------
        >>> from safetensors.numpy import save_file
        >>> Path("model").mkdir()
        >>> save_file({"w": np.zeros(8, np.float32)}, "model/model.safetensors")
        >>> with store.publish("policy", like="model") as publisher:
        ...     saving = publisher.save({"w": np.ones(8, np.float32)}, step=1)
        >>> store["policy"]
        <ckstore.Version 4 policy@1>
        """
        from ckstore.saving.publisher import Publisher

        self._repository.require_writable()
        if workers < 1:
            raise UsageError(f"`workers` must be 1 or more, not {workers}.")
        return Publisher(self._repository.address, self._checked_run(run), workers, Path(like), dtype)

    def _checked_run(self, run: str | None) -> str:
        """Return the run to ingest into; raise `UsageError` for an invalid one, before a training begins."""
        from ckstore.commit.naming import DEFAULT_RUN, check_run, check_run_is_no_tag

        name = DEFAULT_RUN if run is None else run
        check_run(name)
        check_run_is_no_tag(self._catalog, name)
        return name


def _present(versions: list[Version]) -> list[Version]:
    """Return the versions of a run that are not superseded, in order of step; all if all are."""
    return by_step([version for version in versions if not version.superseded] or versions)


def _paths(paths: Any) -> list[Path]:
    """Return the paths of one input, or of several."""
    return [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


@checked(path=PATH, name=NAME, directory=PATH)
def follow(
    path: str | os.PathLike[str],
    name: str,
    directory: str | os.PathLike[str],
    *,
    once: bool = False,
    poll: float = 1.0,
    stop: threading.Event | None = None,
    swap: bool = False,
    include: Sequence[str] = (),
    every: int = 1,
    signed_by: str | os.PathLike[str] | None = None,
) -> Iterator[Followed]:
    """Open a store for reading, and keep a directory at the newest version of a name; see `Store.follow`.

    Examples
    --------
    >>> [followed.version for followed in ckstore.follow(store.place, "gpt", "served", once=True)]
    [<ckstore.VersionRow 3 gpt@300>]
    """
    with open(path, "r") as store:
        yield from store.follow(
            name, directory, once=once, poll=poll, stop=stop, swap=swap, include=include, every=every,
            signed_by=signed_by,
        )  # fmt: skip


@checked(path=PATH)
def init(
    path: str | os.PathLike[str],
    *,
    shared: bool = False,
    options: Mapping[str, str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Store:
    """Create a store in an empty or absent directory, or in an object store, and open it.

    Parameters
    ----------
    path
        A directory, or a URL: ``s3://bucket/prefix``, ``gs://…``, ``az://…`` or ``hf://owner/name``.
    shared
        Let the directory's group write to the store, whatever the umask of its members is.
    options, cache
        See `open`.

    Raises
    ------
    ConflictError
        The directory is not empty, belongs to another group, or the bucket has a store above or below the prefix.
    UsageError
        The object store lacks conditional writes, or is to be `shared`.

    Examples
    --------
    >>> ckstore.init("new").path.name
    'new'
    """
    place = root.place(path)
    create_store(place, options, None if cache is None else Path(cache), shared=shared)
    return open(place, options=options, cache=cache)


@checked(path=PATH, local=PATH)
def open(
    path: str | os.PathLike[str] | None = None,
    mode: Mode = "a",
    cache_bytes: int | None = None,
    *,
    create: bool = False,
    options: Mapping[str, str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    local: str | os.PathLike[str] | None = None,
) -> Store:
    """Open a store: by default `$CKSTORE`, or the nearest `.ckstore` upwards.

    Parameters
    ----------
    path
        Directory or URL of the store, as for `init`.
    mode
        `r` (read only) or `a` (read and write).
    cache_bytes
        Limit of the cache of decoded chunks; by default a sixteenth of the memory, at most 4 GiB. Ingests are faster if
        it holds 1.5 times a version.
    create
        Create a missing store; several processes may do so at once.
    options
        Client options of an object store, such as ``{"endpoint": "https://…"}``; this machine remembers them.
        Credentials come from the environment.
    cache
        Directory for mirrors of remote stores; by default `$CKSTORE_CACHE`, or ``~/.cache/ckstore``.
    local
        Directory of a store on a local disk, made if needed: versions are durable there first, and sent to `path` in
        the background; `Store.pushed` tells when. It keeps versions that `path` lacks, and the latest two of each run.

    Raises
    ------
    NoStoreError
        No store was found.
    ConflictError
        With `create`, the directory holds something else.
    UsageError
        `mode` is invalid, or `create` is given without a path or with mode `r`.
    FormatVersionError
        A later version of ckstore wrote the store.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> import ckstore, numpy
    >>> with TemporaryDirectory() as directory, ckstore.open(f"{directory}/store", create=True) as store:
    ...     report = store.ingest({"weight": numpy.zeros((8, 4))}, run="toy", step=3)
    ...     store["latest"]["weight"].shape
    (8, 4)
    """
    limit = _cache_of_a_program() if cache_bytes is None else cache_bytes
    mirrors = None if cache is None else Path(cache)
    if create:
        if path is None or mode == "r":
            raise UsageError("`create` makes a store to write to; give its path, and leave `mode` out.")
        ensure_store(root.place(path), options, mirrors)
    place = root.find_store() if path is None else root.place(path)
    if isinstance(place, Path):
        place = place.absolute()  # A program may change its directory later.
    if local is not None:
        address = Address(str(place), tuple((options or {}).items()), None if mirrors is None else str(mirrors))
        return _in_front(local_path(local).absolute(), mode, limit, address)
    return Store(place, mode, limit, options=options, cache=mirrors)


def _in_front(path: Path, mode: Mode, limit: int, address: Address) -> Store:
    """Open a local store in front of another one, which may be away unless the local store is new."""
    from ckstore.intake.tier import Tier, reached

    if mode == "r":
        raise UsageError("A local store takes versions for another one; leave `mode` out.")
    remote = reached(path, address)
    store = Store(path, mode, limit)
    if not store.policies():
        store.set_policy(Policy(hot=_UNENCODED))
    store._tier = Tier(store._repository, address, remote)
    return store


def _cache_of_a_program() -> int:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return CACHE_BYTES
    return min(max(int(memory * _MEMORY_SHARE), CACHE_BYTES), _LARGEST_CACHE)
