"""`ckstore watch`: store checkpoints as they appear in a directory, until it is stopped."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ckstore.cli.output import print_line
from ckstore.cli.storing import NOT_REMOVED, Done, line_of, store_input, tend
from ckstore.cli.verb import RunName, open_store, verb
from ckstore.errors import DiskFullError, LockedError, NotFoundError, UsageError

if TYPE_CHECKING:
    from ckstore.scanning.steps import Planned
    from ckstore.scanning.watched import Traits, Watched
    from ckstore.store import Store

#: Seconds between polls, without and with notifications of changes.
_POLL, _SELDOM = 1.0, 30.0

#: Seconds before another attempt if the disk is full, or another process has locked the store.
_PATIENCE = 5.0


@verb(
    ("ckstore watch runs/gpt --run gpt", "store every new checkpoint as a version"),
    ("ckstore watch runs/gpt --run gpt --delete-source", "move them into the store"),
    ("ckstore watch runs/gpt --run gpt --once", "store the complete checkpoints and exit"),
    exit_codes=[12],
)
@click.argument(
    "folders",
    metavar="DIRECTORY...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
@click.option("--run", metavar="NAME", type=RunName(), help="Run of the versions.  [default: main]")
@click.option(
    "--step-from",
    type=click.Choice(["name", "content"]),
    help="Source of steps, as for `ckstore ingest`.  [default: contents if they differ, else names]",
)
@click.option("--delete-source", is_flag=True, help="Delete each checkpoint once it is stored and verified.")
@click.option("--once", is_flag=True, help="Store the complete checkpoints and exit.")
@click.option(
    "--settle",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="Treat a file as complete after SECONDS without change (directories: 5x).",
)
@click.option(
    "--poll",
    metavar="SECONDS",
    type=click.FloatRange(min=0.01),
    help=f"Poll every SECONDS, for network file systems.  [default: file events, else {_POLL:g}]",
)
@click.pass_context
def command(
    ctx: click.Context,
    folders: tuple[Path, ...],
    run: str | None,
    step_from: Literal["name", "content"] | None,
    delete_source: bool,
    once: bool,
    settle: float,
    poll: float | None,
) -> None:
    """Store checkpoints as they appear in a directory, until stopped.

    Each file or directory in DIRECTORY becomes one version once it is complete: it parses, holds tensors, and has not
    changed for a while. Temporary names (.tmp and the like), links and inputs without tensors are skipped. Inputs that
    are stored already are skipped by size and mtime, also after a restart, and so are steps that a policy would forget.
    When the disk is full, it waits.

    An interrupt stops it at once; SIGTERM lets it finish the current version. The store stays consistent, and the next
    start continues.
    """
    from ckstore.scanning.watched import Watched

    watched = Watched(folders, settle)
    with open_store(ctx, "a") as store, _waking(() if once or poll is not None else folders) as wake:
        keeper = _Keeper(store, watched, run, step_from, delete_source)
        while True:
            waits = keeper.store_all(watched.look(time.monotonic()), wake)
            for path, why in watched.abandoned(time.monotonic()):
                print_line(f"ckstore: {path} is left until it changes: {why}", err=True)
            if wake.is_over or (once and not waits and watched.settling == watched.growing):
                break
            often = poll or _POLL
            wake.wait(_PATIENCE if waits else _SELDOM if wake.is_told and not watched.settling else often)
        if once:
            _say_left(watched)
            if keeper.has_stored:
                tend(store, [keeper.run])


def _say_left(watched: Watched) -> None:
    for path in watched.growing:
        print_line(f"ckstore: {path} is still written to; watch again.", err=True)
    for path, why in watched.abandoned(time.monotonic(), 0.0):
        print_line(f"ckstore: {path} is left: {why}", err=True)


class _Keeper:
    """Stores complete inputs.

    Attributes
    ----------
    run
        Run of the versions.
    has_stored
        Whether an input has been stored.
    """

    def __init__(
        self,
        store: Store,
        watched: Watched,
        run: str | None,
        step_from: Literal["name", "content"] | None,
        delete: bool,
    ) -> None:
        from ckstore.commit.naming import DEFAULT_RUN, check_run, check_run_is_no_tag

        self.run = run or DEFAULT_RUN
        self.has_stored = False
        self._store = store
        self._watched = watched
        self._step_from = step_from
        self._delete = delete
        self._said = ""
        check_run(self.run)
        check_run_is_no_tag(store.catalog, self.run)
        if delete and store.policy(run).is_coarse:
            raise UsageError(f"{NOT_REMOVED} The policy of run {self.run} is coarse: set another one.")
        # An input to be deleted is always compared with its version first, even if size and mtime match.
        self._known = set() if delete else set(_stored(store, self.run))

    def store_all(self, ready: Sequence[Path], wake: _Wake) -> bool:
        """Store inputs in the order of their steps; return whether some have to wait."""
        planned = self._planned([path for path in ready if self._watched.traits(path) not in self._known])
        for number, item in enumerate(planned):
            if wake.is_over:
                return False
            try:
                self._store_one(item)
            except (DiskFullError, LockedError) as error:
                if str(error) != self._said:
                    print_line(f"ckstore: {error} Waiting until {item.path} can be stored.", err=True)
                self._said = str(error)
                for waiting in planned[number:]:
                    self._watched.again(waiting.path)
                return True
            self._said = ""
        return False

    def _store_one(self, item: Planned) -> None:
        from ckstore.retention.retain import outlived
        from ckstore.writing.request import IngestOptions

        if item.step is not None and outlived(self._store.repository, self.run, item.step):
            print_line(f"ckstore: {item.path} is left: the policy of run {self.run} keeps nothing so old.", err=True)
            return
        options = IngestOptions(run=self.run, step=item.step, verify=self._delete)
        try:
            outcome = store_input(self._store, item.path, options, self._delete, shown=True)
        except UsageError as error:
            print_line(f"ckstore: {error}", err=True)
            return
        if isinstance(outcome, Done):
            self.has_stored = True
            print_line(line_of(outcome))
        elif self._watched.is_as_it_was(item.path):  # An input that changed or vanished was not complete.
            print_line(f"ckstore: {outcome.message}", err=True)

    def _planned(self, paths: Sequence[Path]) -> list[Planned]:
        """Return inputs with their steps, in order, inferred together with all earlier inputs with such names."""
        from ckstore.scanning.steps import plan_steps
        from ckstore.scanning.watched import are_alike

        found: dict[Path, Planned] = {}
        for path in paths:
            if path not in found:
                known = {Path(source): step for source, step in self._sources() if are_alike(Path(source), path)}
                known |= self._watched.alike(path)
                for item in plan_steps(list(known), self._step_from, known=known):
                    found[item.path] = item
        wanted = [found[path] for path in paths]
        return sorted(wanted, key=lambda item: (item.step is None, item.step or 0))

    def _sources(self) -> Iterator[tuple[str, int | None]]:
        with suppress(NotFoundError):  # The run is new.
            for row in self._store.catalog.versions(self.run):
                if row.source:
                    yield row.source, row.step


def _stored(store: Store, run: str) -> Iterator[Traits]:
    """Yield the traits by which the inputs of a run's versions are recognised."""
    with suppress(NotFoundError):
        for row in store.catalog.versions(run):
            document = store.resolver.document(row)
            files = [(file.path, file.size, file.mtime_ns) for file in document.files]
            if row.source and all(mtime is not None for _, _, mtime in files):
                name = Path(row.source).name
                yield (
                    name,
                    frozenset((path if document.is_directory else "", size, mtime or 0) for path, size, mtime in files),
                )


class _Wake:
    """Ends a wait early: at a change, or at a signal to stop.

    Attributes
    ----------
    is_over
        Whether that signal was received.
    is_told
        Whether the system reports changes.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.is_told = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def ring(self) -> None:
        """End the present wait, or the next one."""
        with suppress(BlockingIOError):
            os.write(self._write, b".")

    def end(self, *_: object) -> None:
        """Note the signal."""
        self.is_over = True
        self.ring()

    def wait(self, seconds: float) -> None:
        """Wait."""
        if select.select([self._read], [], [], seconds)[0]:
            os.read(self._read, 1 << 16)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)


@contextmanager
def _waking(folders: Sequence[Path]) -> Iterator[_Wake]:
    """Yield a wake-up for SIGTERM, and for changes in directories if the system reports them."""
    wake, stop = _Wake(), threading.Event()
    listener = threading.Thread(target=_listen, args=(folders, wake, stop), daemon=True)
    before = signal.signal(signal.SIGTERM, wake.end)
    listener.start()
    try:
        yield wake
    finally:
        signal.signal(signal.SIGTERM, before)
        stop.set()
        listener.join()
        wake.close()


def _listen(folders: Sequence[Path], wake: _Wake, stop: threading.Event) -> None:
    """Ring at changes; without `watchfiles`, or if the system refuses, polling remains."""
    if not folders:
        return
    with suppress(ImportError, OSError, RuntimeError):
        from watchfiles import watch

        changes = watch(
            *folders, watch_filter=None, stop_event=stop, rust_timeout=200, yield_on_timeout=True, raise_interrupt=False
        )
        for change in changes:
            wake.is_told = True
            if change:
                wake.ring()
    wake.is_told = False
