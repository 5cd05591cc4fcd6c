"""Processes that use one store at random and are killed: a few seconds of it, and whether faults would be found."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ckstore
from tests import stressing
from tests.stressing import Journal, Worker, expected, stress

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="there is no /proc"),
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stressing, "BETWEEN_KILLS", 0.5)
    outcome = stress(5, 0, ("writer1", "writer2", "reader1", "forker1", "keeper1", "collector1", "rebuilder1"))
    assert outcome.faults == [], str(outcome)
    assert outcome.kills > 0
    assert outcome.done["conclusion"] == 3
    assert "0 faults" in str(outcome)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            store.ingest(expected("a", step), run="a", step=step)
    journal = Journal(tmp_path / "journal")
    for step in range(2):
        journal.tell("done", "a", step, step + 1)
    return Worker(tmp_path / "store", journal, "reader1", 0)


def faults(worker: Worker) -> list[str]:
    return [line[1] for line in worker.journal.read() if line[0] == "fault"]


def test_correct_states_are_no_fault(worker: Worker) -> None:
    with ckstore.open(worker.store) as store:
        worker.journal.tell("thinning", "a", 0)
        store.thin(["a@0"])
        worker.journal.tell("forgetting", "a", 1)
        store.forget(["a@1"])
    for step in range(2):
        with worker._watched("read"):
            worker.check("a", step)
    outcome = stressing.Outcome()
    stressing._conclude(worker.store, worker.journal, outcome)
    assert outcome.faults == []


def test_a_wrong_value(worker: Worker) -> None:
    state = expected("a", 2)
    state["w"][3, 4] = np.nextafter(state["w"][3, 4], np.float32(9))
    with ckstore.open(worker.store) as store:
        store.ingest(state, run="a", step=2)
    worker.check("a", 2)
    assert "w of a@2 is off by" in faults(worker)[0]


def test_a_version_that_is_lost_coarse_or_back(worker: Worker) -> None:
    with ckstore.open(worker.store) as store:
        store.thin(["a@1"])
        store.forget(["a@0"])
    with worker._watched("read"):
        worker.check("a", 0)
    worker.check("a", 1)
    lost, *coarse = faults(worker)
    assert lost.startswith("read: NotFoundError")
    assert "a@1 is coarse" in coarse
    worker.journal.tell("forgot", "a", 1)
    outcome = stressing.Outcome()
    stressing._conclude(worker.store, worker.journal, outcome)
    assert any("is back" in fault for fault in outcome.faults)


def test_errors_and_waits(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker._watched("thin"):
        raise ckstore.CkstoreError("Something is wrong.")
    assert "thin: CkstoreError: Something is wrong." in faults(worker)[-1]
    worker.journal.tell("forgetting", "a", 1)
    before = len(faults(worker))
    with worker._watched("thin"), ckstore.open(worker.store) as store:
        store.forget(["a@1"])
        store.thin(["a@1"])
    assert len(faults(worker)) == before, "a version that another process forgot is rightly missed"
    monkeypatch.setattr(stressing, "LONGEST", -1.0)
    with worker._watched("read"):
        pass
    assert "read waited" in faults(worker)[-1]
    monkeypatch.setattr(stressing, "_lives", lambda pid: False)
    with ckstore.open(worker.store) as store, store._catalog.lease("rebase"), worker._watched("gc"):
        pass
    assert f"process {os.getpid()} (rebase) is gone" in faults(worker)[-1]
