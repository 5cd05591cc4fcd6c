"""Stores checkpoints as they appear in directories."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ckstore.commit.naming import DEFAULT_RUN
from ckstore.errors import DiskFullError, InputError, LockedError, NotFoundError, UsageError
from ckstore.intake.intake import Batch, Ingested, Intake
from ckstore.retention.retain import outlived
from ckstore.scanning.steps import Planned, StepSource, plan_steps
from ckstore.scanning.watched import Complete, Traits, Watched, kind_of
from ckstore.steps import differ

#: Seconds between looks, without and with notifications of changes.
POLL, SELDOM = 1.0, 30.0

#: Seconds before another attempt if the disk is full, or another process has locked the store.
_PATIENCE = 5.0

#: Names are compared with those of as many earlier inputs.
_ALIKE = 32

#: Longest sleep in seconds: a signal, a stop or a change takes effect afterwards.
_NAP = 0.1


def watch(
    intake: Intake,
    folders: Sequence[Path],
    batch: Batch,
    *,
    step_from: StepSource | None,
    settle: float,
    poll: float | None,
    once: bool,
    stop: threading.Event,
) -> Iterator[Ingested]:
    """Store checkpoints as they appear; yield each outcome. See `Store.watch`."""
    watched = Watched(folders, settle)
    watcher = _Watcher(intake, watched, batch, step_from, poll or POLL)
    has_stored = False
    closed: dict[Path, str] = {}
    with _changes(() if once or poll is not None else folders) as changes:
        while True:
            ready = watched.look(time.monotonic())
            before, closed = closed, watched.closed
            for folder, why in closed.items() - before.items():
                if once:
                    raise UsageError(f"{folder} is {why}; name a directory that can be read.")
                yield Ingested(folder, note=f"{why}; waiting for it.")
            for path, how in watched.lost():
                yield _lost(path, how)
            for item in watcher.store_all(ready, stop):
                has_stored |= item.version is not None
                yield item
            for path, why in watched.abandoned(time.monotonic()):
                yield Ingested(path, note=f"left until it changes: {why}")
            if stop.is_set() or (once and not watcher.waits and watched.settling == watched.growing):
                break
            often = SELDOM if changes.are_told and not watched.settling else poll or POLL
            changes.wait(_PATIENCE if watcher.waits else often, stop)
    if once:
        for path in watched.growing:
            yield Ingested(path, note="still written to; watch again.")
        for path, why in watched.abandoned(time.monotonic(), 0.0):
            yield Ingested(path, note=f"left: {why}")
        if has_stored:
            intake.retain([watcher.run])


def _lost(path: Path, how: str) -> Ingested:
    return Ingested(path, note=f"left: a complete checkpoint there was {how} before it could be stored.")


class _Watcher:
    """Stores complete inputs in one run.

    `waits` tells whether the last attempt failed because the disk was full or the store locked.
    """

    def __init__(
        self, intake: Intake, watched: Watched, batch: Batch, step_from: StepSource | None, poll: float
    ) -> None:
        self.run = DEFAULT_RUN if batch.options.run is None else batch.options.run
        self._intake = intake
        self._watched = watched
        self._batch = batch
        self._step_from = step_from
        self._poll = poll
        self._said = ""
        self._held: list[Ingested] = []
        self.waits = False
        #: Paths and steps of the inputs of the run's versions by kind, up to the last one's number.
        self._sources: dict[tuple[Path, str], dict[str, int | None]] = {}
        self._last = 0
        intake.check_run(self.run, batch)
        self._note_sources()
        # An input to be deleted is always compared with its version first, even if size and mtime match.
        self._known = set() if batch.deletes else set(self._stored())

    def store_all(self, ready: Sequence[Complete], stop: threading.Event) -> Iterator[Ingested]:
        """Store inputs in the order of their steps; yield their outcomes, and once why it has to wait.

        Inputs that appear in the meantime are noticed, even if they are overwritten before their turn.
        """
        self.waits = False
        found = {one.path: one for one in ready if one.traits not in self._known}
        planned = self._planned(list(found))
        with self._watched.looking(self._poll):
            for number, item in enumerate(planned):
                if stop.is_set():
                    return
                try:
                    outcome = self._store_one(item, found[item.path])
                except (DiskFullError, LockedError, NotFoundError) as error:  # The policy may have forgotten a parent.
                    for waiting in planned[number:]:
                        self._watched.again(waiting.path)
                    self.waits = True
                    if str(error) != self._said:
                        self._said = str(error)
                        yield Ingested(
                            item.path, error=type(error)(f"{error} Waiting until {item.path} can be stored.")
                        )
                    return
                self._said = ""
                how = found[item.path].change if outcome.error is not None else ""
                self._held += [outcome] if outcome._source else []
                yield _lost(item.path, how) if how else outcome
        if self._held:
            self._intake.retain([self.run])
            self._intake.remove_whole(self._held)

    def _store_one(self, item: Planned, found: Complete) -> Ingested:
        def opened() -> None:
            if how := found.change:
                raise InputError(f"{item.path} was {how} before it was read; ingest it again.")

        if item.step is not None and outlived(self._intake.repository, self.run, item.step):
            return Ingested(item.path, note=f"left: the policy of run {self.run} keeps nothing so old.")
        options = replace(self._batch.options, run=self.run, step=item.step)
        try:
            return self._intake.store_input(item.path, options, deletes=self._batch.deletes, opened=opened)
        except UsageError as error:
            return Ingested(item.path, error=error)

    def _planned(self, paths: Sequence[Path]) -> list[Planned]:
        """Return inputs with their steps, in order, inferred together with all earlier inputs of such names.

        Steps in contents are compared with all; names with the latest ones.
        """
        self._note_sources()
        kinds: dict[tuple[Path, str], list[Path]] = {}
        for path in paths:
            kinds.setdefault(kind_of(path), []).append(path)
        found: dict[Path, Planned] = {}
        for kind, own in kinds.items():
            known = self._sources.get(kind, {}) | self._watched.alike(kind)
            some = [*map(str, own), *islice(reversed(known), _ALIKE)]
            near = {Path(text): known.get(text) for text in some}
            distinct = differ(list(known.values()))
            for item in plan_steps(list(near), self._step_from, known=near, distinct=distinct):
                found[item.path] = Planned(item.path, item.step, item.step_from, self.run)
        wanted = [found[path] for path in paths]
        return sorted(wanted, key=lambda item: (item.step is None, item.step or 0))

    def _note_sources(self) -> None:
        """Note the inputs of the run's versions that were added since the last call."""
        for row in self._intake.repository.catalog.after(self.run, self._last):
            self._last = row.number
            if row.source:
                source = Path(row.source)
                self._sources.setdefault(kind_of(source), {})[str(source)] = row.step

    def _stored(self) -> Iterator[Traits]:
        """Yield the traits by which the inputs of the run's versions are recognised."""
        for row in self._intake.versions(self.run):
            document = self._intake.repository.resolver.document(row)
            files = [(file.path, file.size, file.mtime_ns) for file in document.files]
            if row.source and all(mtime is not None for _, _, mtime in files):
                yield (
                    Path(row.source).name,
                    frozenset((path if document.is_directory else "", size, mtime or 0) for path, size, mtime in files),
                )


class _Events:
    """Changes in directories; `are_told` tells whether the system reports them."""

    def __init__(self) -> None:
        self.are_told = False
        self.event = threading.Event()

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Wait for a change or a stop, at most for some seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.event.is_set() and not stop.is_set():
            time.sleep(min(left, _NAP))
        self.event.clear()


@contextmanager
def _changes(folders: Sequence[Path]) -> Iterator[_Events]:
    """Yield the changes in directories; without `watchfiles`, or if the system refuses, none are reported."""
    changes, stop = _Events(), threading.Event()
    listener = threading.Thread(target=_listen, args=(folders, changes, stop), daemon=True)
    listener.start()
    try:
        yield changes
    finally:
        stop.set()
        listener.join()


def _listen(folders: Sequence[Path], changes: _Events, stop: threading.Event) -> None:
    """Report changes; begin again after a directory was deleted and made again."""
    with suppress(ImportError):
        from watchfiles import Change, watch

        watched = set(map(os.path.abspath, folders))
        while folders and not stop.is_set():
            with suppress(OSError, RuntimeError):
                places = _places(folders)
                for change in watch(
                    *folders, watch_filter=None, stop_event=stop, rust_timeout=200, yield_on_timeout=True,
                    raise_interrupt=False,
                ):  # fmt: skip
                    # A directory that was made again may have the inode of the deleted one.
                    is_gone = any(kind is Change.deleted and os.path.abspath(path) in watched for kind, path in change)
                    changes.are_told = not is_gone and _places(folders) == places
                    if not changes.are_told:
                        break
                    if change:
                        changes.event.set()
            changes.are_told = False
            changes.event.set()
            stop.wait(POLL)


def _places(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Return device and inode of each directory; raise `OSError` if one is missing."""
    return [(status.st_dev, status.st_ino) for status in map(os.stat, folders)]
