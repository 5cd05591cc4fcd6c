"""A remote store holds the content of a dictionary after any operations from two machines, with any crashes."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

import ckstore
from ckstore.errors import NotFoundError
from ckstore.storage import durable
from ckstore.storage.remote import mirror
from tests.checkpoints import sha256
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer
from tests.test_state_machine import CHANGES, HOT, RUNS, Crash, StoreMachine, config_of

pytestmark = pytest.mark.local

URL = "s3://models/team-a"
#: Points of an ingest at which it is not committed yet, and at which it is.
BEFORE = ["pack-written", "pack-synced", "pack-renamed", "pack-put", "record-put"]
AFTER = ["record-there", "before-commit", "after-commit"]


class RemoteStoreMachine(StoreMachine):
    """The same model; two machines, each with its mirror, take turns."""

    def _made(self) -> ckstore.Store:
        self.server, self.machine = SimulatedServer(), 0
        self.closing.enter_context(mock.patch.object(mirror, "ObstoreBucket", self._bucket))
        return ckstore.init(URL, cache=self.directory / "0")

    def _bucket(self, url: str, options: Any) -> SimulatedBucket:
        return SimulatedBucket(self.server)

    def _open(self, mode: Any = "a") -> ckstore.Store:
        return ckstore.open(URL, mode, cache=self.directory / str(self.machine))

    def _files(self) -> dict[str, bytes]:
        return {name: data for name, (data, _) in self.server.objects.items() if name.startswith("packs/")}

    def _recovered(self, *, crashed: bool) -> None:
        self.store.close()
        if crashed:
            shutil.rmtree(self.directory / str(self.machine))
        self.store = self._open()

    @rule()
    def another_machine(self) -> None:
        self.store.close()
        self.machine = 1 - self.machine
        self.store = self._open()

    @rule(at_once=st.booleans())
    def gc(self, at_once: bool) -> None:
        before = self._files()
        self.store.gc(grace=0 if at_once else 3600, dry_run=True)
        assert self._files() == before
        self.store.gc(grace=0 if at_once else 3600)
        known = {f"packs/{pack.name}" for pack in self.store._catalog.packs()}
        assert known <= set(self._files())
        if at_once:
            assert known == set(self._files())
            self.begun = set()

    @rule(
        run=st.sampled_from(RUNS),
        change=st.sampled_from(CHANGES),
        at=st.sampled_from(BEFORE + AFTER),
        nth=st.integers(1, 2),
        hot=st.sampled_from(HOT),
    )
    def crash(self, run: str, change: str, at: str, nth: int, hot: int | None) -> None:
        """Kill an ingest: the record makes the version, with or without the mirror's own transaction."""
        weights = self._next(self._latest(run), change, 10)
        self.steps += 1
        with suppress(NotFoundError):  # A run without versions.
            self.store.encode(run=run)  # Encodings on the way would have commits of their own.
        path = self._file(weights, self.steps)
        seen: list[str] = []

        def stop(step: str) -> None:
            if step.startswith("pack-") or any(name.startswith("pack-") for name in seen):
                seen.append(step)
                if step == at and seen.count(step) == (nth if at.startswith("pack-") else 1):
                    raise Crash

        died = False
        with mock.patch.object(durable, "checkpoint", stop), mock.patch("ckstore.commit.change.remove_uncommitted"):
            try:
                self.store.ingest(path, run=run, step=self.steps, hot=hot, config=config_of(self.steps))
            except Crash:
                died = True
        self.store = self._open()
        row = self.store._catalog.at_step(run, self.steps)
        assert (row is None) == (died and at in BEFORE)
        if row is not None:
            self._note(row.number, sha256(path), weights, run, self.steps)


RemoteStoreMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
TestRemoteStore = RemoteStoreMachine.TestCase
