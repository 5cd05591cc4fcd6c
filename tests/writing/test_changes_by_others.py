"""Changes by other processes that come while a version is read, checked or thinned: nothing of it is a loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.checking import verify as verifying
from ckstore.commit.change import Change
from ckstore.errors import ConflictError, IntegrityError
from ckstore.objects.chains import Chains
from ckstore.objects.resolver import CatalogResolver
from ckstore.objects.stored_chunks import StoredChunks
from ckstore.policy import Policy
from ckstore.storage.pack_reader import PackReader
from ckstore.writing import thin as thinning
from tests.checkpoints import change_pack, draw, packs_of

STEPS = 4


def state(step: int) -> dict[str, Any]:
    weight = draw(300, 256)
    for number in range(1, step + 1):
        weight = weight + 1e-4 * draw(300, 256, seed=number)
    return {"w": weight, "frozen": draw(200, 256, seed=99), "step": torch.tensor(step)}


@pytest.fixture
def place(directory: Path) -> Path:
    """A store with a run of encoded versions."""
    with ckstore.init(directory / "store") as store:
        for step in range(STEPS):
            store.ingest(state(step), run="a", step=step, hot=0, max_restore_cost=9)
    return directory / "store"


def first(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, action: Callable[[], Any]) -> list[bool]:
    """Do something before the first call of a method."""
    original, done = getattr(owner, name), []

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if not done:
            done.append(True)
            action()
        return original(self, *arguments, **named)

    monkeypatch.setattr(owner, name, call)
    return done


def nothing_remembered(store: ckstore.Store) -> None:
    """Bring the store to the state of a process that has neither read the version nor kept its pack open."""
    store._repository.reader.cache.clear()
    store._repository.resolver.forget()
    store._repository.packs.close()


def change(place: Path, act: Callable[[ckstore.Store], Any], *, gc: bool = True) -> Callable[[], None]:
    """Return an action of another opener of the store."""

    def call() -> None:
        with ckstore.open(place) as other:
            act(other)
            if gc:
                other.gc(grace=0)

    return call


CHANGES: dict[str, Callable[[ckstore.Store], Any]] = {
    "encode": lambda store: store.encode(),
    "rebase": lambda store: store.rebase(run="a"),
    "forget": lambda store: store.forget(["a@0"]),
    "thin first": lambda store: store.thin(["a@0..a@2"]),
    "thin": lambda store: store.thin(["a@0", "a@1"]),
    "thin all": lambda store: store.thin(run="a"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("at", [(PackReader, "digest"), (PackReader, "read_into"), (Chains, "_link")])
def test_verify_reports_no_loss(place: Path, name: str, at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.open(place) as store:
        store.ingest(state(STEPS), run="a", step=STEPS, hot=1)
        for row in store._catalog.versions():
            assert store[row.number]._stored.document.objects
        done = first(monkeypatch, *at, change(place, CHANGES[name]))
        assert store.verify().problems == []
        assert done
        assert store.verify().problems == []


def test_versions_that_were_listed_before_they_changed(place: Path) -> None:
    """The documents of these are read, and nothing else."""
    with ckstore.open(place) as store:
        store.ingest(state(STEPS), run="a", step=STEPS, hot=1)
        listed = [store[row.number]._stored for row in store._catalog.versions()]
        assert all(version.document.objects for version in listed)
        for name in ("encode", "forget", "thin all"):
            change(place, CHANGES[name])()
            report = verifying.verify(store._repository, listed)
            assert (report.problems, report.damaged) == ([], {}), name


def test_a_loss_is_reported_while_others_change_the_store(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = next(name for name in packs_of(place) if not name.endswith(".raw.zip"))
    with ckstore.open(place) as store, ckstore.open(place) as other:
        change_pack(place, lost, None)
        original, count = CatalogResolver._lookup, []

        def busy(self: Any, *arguments: Any) -> Any:
            count.append(1)
            other.tag("a@0", f"t{len(count)}")
            return original(self, *arguments)

        monkeypatch.setattr(CatalogResolver, "_lookup", busy)
        report = store.verify()
        assert any(lost in problem for problem in report.problems)
        assert report.damaged
        for number in report.damaged:
            with pytest.raises(IntegrityError, match="is missing from the store"):
                store[number].state_dict()


@pytest.mark.parametrize("name", ["encode", "rebase", "forget"])
@pytest.mark.parametrize("cached", [False, True])
def test_readers_continue_after_changes(place: Path, name: str, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document of the versions was read before, and their layout as well."""
    with ckstore.open(place) as store:
        store.ingest(state(STEPS), run="a", step=STEPS, hot=1)
        for step in (STEPS, STEPS - 1):
            version = store[f"a@{step}"]
            assert (version._stored.layout if cached else version._stored.document) is not None
            if step == STEPS:
                change(place, CHANGES[name])()
            assert torch.equal(version.state_dict()["w"], state(step)["w"])


def test_a_hot_version_that_becomes_coarse_while_it_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory / "file.pt"
    torch.save(state(1), path)
    place = directory / "store"
    with ckstore.init(place) as store:
        store.set_policy(Policy("coarse", hot=1))
        store.ingest(path, run="a", step=1)
        before = store["a@1"]
        tensor = before["w"]
        assert torch.equal(tensor.torch(), state(1)["w"])
        assert before.hot
        change(place, CHANGES["encode"])()
        nothing_remembered(store)
        with pytest.raises(ConflictError, match="take it from the store again"):
            tensor.torch()
        assert 0 < (store["a@1"]["w"].torch() - state(1)["w"]).abs().max() < 0.1


@pytest.mark.parametrize("reading", ["state_dict", "checkout"])
def test_a_read_restarts_when_its_version_becomes_coarse(
    directory: Path, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hot version that becomes coarse half-way through a read is read again from the start."""
    path, place = directory / "file.pt", directory / "store"
    torch.save(state(1), path)
    with ckstore.init(place) as store:
        store.set_policy(Policy("coarse", hot=1))
        store.ingest(path, run="a", step=1)
        version = store["a@1"]

        def encode() -> None:
            change(place, CHANGES["encode"])()
            nothing_remembered(store)

        done = first(monkeypatch, StoredChunks, "raw", encode)
        if reading == "state_dict":
            found = version.state_dict()
        else:
            version.checkout(directory / "out.pt")
            found = torch.load(directory / "out.pt")
        assert done
        assert version.fidelity == "coarse"
        assert 0 < (found["w"] - state(1)["w"]).abs().max() < 0.1
        assert torch.equal(found["w"], version["w"].torch())


def test_a_version_that_gets_a_tag_stays_exact(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act = change(place, lambda store: store.tag("a@1", "best"), gc=False)
    done = first(monkeypatch, thinning._Thinning, "_commit", act)
    with ckstore.open(place) as store:
        with pytest.raises(ConflictError, match="best"):
            store.thin(["a@1"])
        assert done
        assert store["best"].fidelity == "exact"
        assert store.verify().problems == []


def test_a_version_that_was_written_wrong_is_not_stored(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Change.finish

    def damaged(change: Change, *arguments: Any, **named: Any) -> None:
        finish(change, *arguments, **named)
        [pack] = change.packs
        data = bytearray((place / "packs" / pack.name).read_bytes())
        data[len(data) // 2] ^= 1
        (place / "packs" / pack.name).write_bytes(data)

    with ckstore.open(place) as store:
        before = packs_of(place)
        with monkeypatch.context() as patched:
            patched.setattr(Change, "finish", damaged)
            with pytest.raises(IntegrityError):
                store.ingest(state(STEPS), run="a", step=STEPS, hot=0, verify=True)
        assert packs_of(place) == before


def test_two_that_thin_one_version(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first(monkeypatch, thinning._Thinning, "_commit", change(place, lambda store: store.thin(["a@1", "a@2"]), gc=False))
    with ckstore.open(place) as store:
        report = store.thin(["a@0..a@2"])
        assert [row.fidelity for row in store._catalog.versions()] == ["coarse", "coarse", "coarse", "exact"]
        assert [item.version.step for item in report.versions] == [0]
        assert report.skipped == [2, 3]
        assert store.verify().problems == []
        store.gc(grace=0)
        store["a@3"].checkout(place / "../out")
    assert torch.equal(torch.load(place / "../out")["w"], state(3)["w"])


def test_a_chain_that_leads_elsewhere_while_it_is_followed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingest asks for what its parent's objects cost; others free what these were stored against."""
    with ckstore.open(place) as store:
        objects = store["a@3"]._stored.document.objects
        assert any(store._repository.reader.chains.records(identity)[1:] for identity in objects)
        nothing_remembered(store)
        done = first(monkeypatch, Chains, "_base", change(place, CHANGES["thin first"]))
        for identity in objects:
            store._repository.reader.chains.records(identity)
        assert done
        assert torch.equal(store["a@3"].state_dict()["w"], state(3)["w"])


@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("policy", [Policy(hot=0), Policy(hot=9), Policy("coarse", hot=0)], ids=str)
def test_another_process_stores_the_step_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, *, is_equal: bool
) -> None:
    """The same content is unchanged, as if it had come later; other content conflicts."""

    def store_first() -> None:
        with ckstore.open(place) as other:
            other.ingest(state(5 if is_equal else 6), run="a", step=5, policy=policy)

    with ckstore.open(place) as store:
        done = first(monkeypatch, Change, "commit_version", store_first)
        if is_equal:
            report = store.ingest(state(5), run="a", step=5, policy=policy, metrics={"loss": 1})
            assert not report.is_new
            assert store["a@5"].metrics == {"loss": 1}
        else:
            with pytest.raises(ConflictError, match="already version"):
                store.ingest(state(5), run="a", step=5, policy=policy)
        assert done
        assert len(store) == STEPS + 1
        assert store.verify().problems == []
