"""A coarse ingest stores a coarse version next to an exact one of the same content, or says why it is exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ckstore
from ckstore.policy import Policy
from tests.checkpoints import draw, scratch, settled

STATE: dict[str, Any] = {"w": draw(300, 256), "v": draw(280, 256, seed=1), "count": torch.arange(70_000)}


@pytest.fixture
def store() -> Iterator[ckstore.Store]:
    with scratch() as path, ckstore.init(path / "store") as opened:
        yield opened


@pytest.mark.parametrize("hot", [0, 1])
@pytest.mark.parametrize("twin", ["encoded", "hot", "thinned", "partial"])
def test_a_twin_does_not_make_it_exact(store: ckstore.Store, twin: str, hot: int) -> None:
    exact = Policy("exact", hot=1 if twin == "hot" else 0)
    store.ingest({"w": STATE["w"]} if twin == "partial" else STATE, run="twin", step=1, policy=exact)
    if twin == "thinned":
        store.thin("twin@1")
    # The first version of a run is stored against the one with similar values; nothing is said of exactness.
    note = store.ingest(STATE, run="r", step=1, policy=Policy("coarse", hot=hot)).note
    assert note == ("" if twin == "partial" else "Against twin@1, by likeness.")
    store.encode("r")
    version = store["r@1"]
    assert version.fidelity == "coarse"
    assert version.deviations().keys() == {"w", "v"}
    assert version.stored_bytes < version.original_bytes / 4
    assert torch.equal(version["count"].torch(), STATE["count"])
    settled(store).forget("twin@1")
    store.gc(grace=0)
    assert store["r@1"].fidelity == "coarse"
    assert store.verify().problems == []
    assert sum(pack.bytes for pack in store._repository.catalog.packs()) < version.original_bytes / 4


def test_a_policy_of_the_run_is_a_request_as_well(store: ckstore.Store) -> None:
    store.ingest(STATE, run="twin", step=1, policy=Policy("exact", hot=0))
    store.set_policy(Policy("coarse"), run="r")
    store.ingest(STATE, run="r", step=1)
    store.encode("r")
    assert store["r@1"].fidelity == "coarse"
    assert store["twin@1"].fidelity == "exact"
    assert torch.equal(store["twin@1"]["w"].torch(), STATE["w"])


def test_the_same_twice_is_one_version(store: ckstore.Store) -> None:
    store.ingest(STATE, run="twin", policy=Policy("exact", hot=0))
    assert store.ingest(STATE, run="r", policy="coarse").is_new
    again = store.ingest(STATE, run="r", policy="coarse")
    assert (again.is_new, again.note) == (False, "")
    assert store.ingest(STATE, run="other", policy="coarse").version.stored_bytes < 5000
    assert store.verify().problems == []


def test_tensors_that_stay_exact_are_shared(store: ckstore.Store) -> None:
    infinite = draw(300, 300, seed=3)
    infinite[0, 0] = float("inf")
    state = {**STATE, "infinite": infinite}
    store.ingest(state, run="twin", step=1, policy=Policy("exact", hot=0))
    store.ingest(state, run="r", step=1, policy="coarse")
    assert store["r@1"].fidelity == "coarse"
    assert store["r@1"].deviations().keys() == {"w", "v"}
    assert store["r@1"].stored_bytes < infinite.nbytes
    objects = {version.number: set(version._stored.document.objects) for version in (store["twin@1"], store["r@1"])}
    assert len(set.intersection(*objects.values())) == 2
    assert store.verify().problems == []


def test_an_exact_version_at_the_step_stays_and_says_so(store: ckstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    store.ingest(STATE, run="r", step=1, policy=Policy("exact", hot=0))
    report = store.ingest(STATE, run="r", step=1, policy="coarse")
    assert not report.is_new
    assert report.note == "Version 1 has this content exactly and keeps it; `ckstore thin 1` makes it coarse."
    assert report.note in caplog.text
    assert store["r@1"].fidelity == "exact"
    store.thin("r@1")
    assert store.ingest(STATE, run="r", step=1, policy="coarse").note == ""


def test_a_version_that_cannot_be_coarse_says_so(store: ckstore.Store) -> None:
    report = store.ingest({"count": STATE["count"]}, run="r", step=1, policy="coarse")
    assert report.note == "No tensor can be coarse under this policy, so version 1 is exact."
    bound = Policy("coarse", max_abs_error=1e-30)
    assert store.ingest(STATE, run="r", step=2, policy=bound).note.startswith("No tensor can be coarse")
    assert store.ingest(STATE, run="r", step=4, policy=Policy("coarse", hot=1)).note == ""
    assert store.ingest(STATE, run="r", step=4, policy=Policy("coarse", hot=1)).note == ""
