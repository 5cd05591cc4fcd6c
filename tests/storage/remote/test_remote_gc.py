"""A gc in a bucket looks at the changes that its mirror has seen, and frees the same bytes as a walk over all."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckstore
from ckstore.errors import ConflictError, NotFoundError
from ckstore.gc import changed
from ckstore.gc import collect as collect_module
from ckstore.gc.changed import changes
from ckstore.gc.plan import plan_for
from ckstore.objects import units
from ckstore.recovery.recover import recover
from ckstore.storage import durable
from ckstore.storage import pack as packs
from ckstore.storage.remote import mirror
from tests.checkpoints import settled
from tests.gc.test_changed import History
from tests.plans import decisions, of_changes
from tests.storage.remote.simulated import SimulatedServer
from tests.test_flat import add_versions, read_by_gc

pytestmark = [pytest.mark.prompt, pytest.mark.local]

URL = "s3://models/team-a"


class Machines(History):
    """Two machines with a mirror each; one may commit while the other one collects."""

    def _made(self) -> ckstore.Store:
        ckstore.init(URL, cache=self.place / "0").close()
        self._stores = [ckstore.open(URL, cache=self.place / str(number)) for number in range(2)]
        return self._stores[0]

    def act(self) -> str:
        self.store = self._random.choice(self._stores)
        return super().act()

    def gc(self) -> None:
        planned, acts = collect_module.plan_for, self._random.choice([0, 0, 1, 2])

        def overtaken(*arguments: Any, **options: Any) -> Any:
            nonlocal acts
            plan = planned(*arguments, **options)
            if acts:
                left, acts = acts - 1, 0  # Its own collection is not overtaken: it waits for this one's end.
                self._act_elsewhere()
                acts = left
            return plan

        with mock.patch.object(collect_module, "plan_for", overtaken):
            super().gc()

    def _act_elsewhere(self) -> None:
        collecting = self.store
        [self.store] = [store for store in self._stores if store is not collecting]
        with suppress(ConflictError, NotFoundError):
            getattr(self, self._random.choice(["ingest", "forget", "for_good", "undo", "thin", "encode"]))()
        settled(self.store)
        self.store = collecting

    def recover(self) -> None:
        """Lose a mirror: the next one begins with a snapshot, or with the log."""
        number = int(self.store is self._stores[1])
        self.store.close()
        shutil.rmtree(self.place / str(number))
        self.store = self._stores[number] = ckstore.open(URL, cache=self.place / str(number))

    def stores(self) -> list[ckstore.Store]:
        """Return the stores of both machines, with all commits."""
        for store in self._stores:
            store._catalog.refresh()
        return self._stores


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_changes_alone_give_the_plan_of_the_whole_store(seed: int, server: SimulatedServer, tmp_path: Path) -> None:
    made = 0
    with (
        mock.patch.object(units, "SMALL", 200),
        mock.patch.object(packs, "_SMALL", 200),
        mock.patch.object(changed, "_SHARE", 1.0),
        mock.patch.object(mirror, "EVERY", 8),
    ):
        machines = Machines(tmp_path, seed)
        acts = []
        for _ in range(40):
            acts.append(machines.act())
            for store in machines.stores():
                found = of_changes(store, 0.0)
                if found is not None:
                    made += 1
                    whole = plan_for(store._repository, 0.0, whole=True)
                    assert decisions(found) == decisions(whole), acts
            if acts[-1] == "gc":
                assert machines.store.verify().problems == [], acts
        for store in machines.stores():
            store.gc(grace=0)
            assert plan_for(store._repository, 0.0, whole=True).is_empty
            assert store.verify().problems == []
            store.close()
    assert made > 40


def encoded_runs(directory: Path, versions: int) -> ckstore.Store:
    """Make a store of one run, encoded; return it after a collection."""
    generator = torch.Generator().manual_seed(0)
    store = ckstore.init(URL, cache=directory)
    for step in range(versions):
        store.ingest({"w": torch.randn(70_000, generator=generator)}, run="a", step=step, hot=0)
    settled(store).gc(grace=0)
    return store


def test_packs_that_an_encoding_left_are_predicted_without_a_plan(server: SimulatedServer, directory: Path) -> None:
    values = torch.randn(70_000)
    with encoded_runs(directory / "a", 2) as store:
        store.ingest({"w": values}, run="a", step=2)
        store.encode("a@2")
        with mock.patch.object(collect_module, "plan_for", None):
            predicted = store.gc(dry_run=True, grace=0)
            assert predicted.files == 2, "the raw pack, and that of the manifest"
            assert predicted.bytes > values.nbytes
            assert store.gc(grace=0) == predicted


def test_a_mirror_that_is_behind_learns_of_garbage_first(server: SimulatedServer, directory: Path) -> None:
    with encoded_runs(directory / "a", 8) as store, ckstore.open(URL, cache=directory / "b") as other:
        other.forget(["a@3"])
        assert changes(store._repository) == changed.Changes([], set())
        assert store.gc(dry_run=True, grace=0).removed == 1
        other.forget(["a@4"])
        assert store.gc(grace=0).removed == 2
        assert store.verify().problems == []


def test_a_collection_whose_mirror_dies_with_its_record_is_made_again(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror has not noted the packs that it looked at; the bucket has the record."""
    with encoded_runs(directory / "a", 8) as store:
        store.forget(["a@3"])

        def stop(step: str) -> None:
            if step == "record-there":
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(durable, "checkpoint", stop)
            with pytest.raises(KeyboardInterrupt):
                store.gc(grace=0)
    with ckstore.open(URL, cache=directory / "a") as store:
        found = of_changes(store, 0.0)
        assert found is not None
        assert decisions(found) == decisions(plan_for(store._repository, 0.0, whole=True))
        store.gc(grace=0)
        assert changes(store._repository) == changed.Changes([], set())
        assert store.verify().problems == []


def test_an_object_that_was_lost_and_stored_again_stays(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the catalog says that the version which lacked it needs the object in its new pack."""
    values = torch.randn(70_000)
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest({"w": values}, run="lost", step=0, hot=0)
        for step in range(12):
            store.ingest({"v": torch.randn(70_000)}, run="b", step=step, hot=0)
        store.ingest({"v": torch.randn(70_000), "w": values}, run="a", step=0, hot=0, parent="b@0")
        settled(store).forget(["lost@0"])
        store.gc(grace=0)
        assert changes(store._repository) == changed.Changes([], set())
        [pack] = {pack.name for pack in store._catalog.packs()} - {row.pack for row in store._catalog.versions()}
        del server.objects[f"packs/{pack}"]
        monkeypatch.setenv("CKSTORE_CACHE", str(directory / "fresh"))
        assert recover(URL).problems
        store.ingest({"u": torch.randn(70_000), "w": values}, run="again", step=0, hot=0, parent="b@0")
        settled(store).gc(grace=0)
        store.forget(["again@0"])
        assert changes(store._repository) is None
        store.gc(grace=0)
        assert changes(store._repository) is None
        assert torch.equal(store["a@0"].state_dict()["w"], values)


def test_a_gc_reads_changed_packs(server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifests and requests do not depend on the other versions; of other packs only names are looked up."""
    found: dict[int, list[tuple[int, int]]] = {}
    requests: dict[int, Any] = {}
    for versions in (100, 1000):
        server.objects.clear()
        with large(directory / str(versions), versions, server) as store:
            server.requests.clear()
            found[versions] = list(read_by_gc(store, monkeypatch))
            requests[versions] = server.requests.copy()
    for (few_rows, few), (many_rows, many) in zip(found[100], found[1000], strict=True):
        print("gc", few_rows, many_rows, few, many)
        assert few == many
        assert many_rows - few_rows <= 6 * 900
    print(requests)
    assert requests[100] == requests[1000]


def large(cache: Path, versions: int, server: SimulatedServer) -> ckstore.Store:
    """Make a store with four real versions at the end of this many others, whose packs hold nothing."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(8000, generator=generator), torch.randn(70_000, generator=generator)
    store = ckstore.init(URL, cache=cache)
    for step in range(4):
        weight = weight + 1e-4 * torch.randn(8000, generator=generator)
        store.ingest({"w": weight, "bias": bias + step}, run="r0", step=10**6 + step, hot=0)
    settled(store)
    add_versions(store._repository.path / "catalog.sqlite", versions, 1, [], in_segments=False)
    for pack in store._catalog.packs():
        server.objects.setdefault(f"packs/{pack.name}", (b"", server.now()))

    def renumber() -> None:
        store._catalog.set_policy("", None)
        for row in store._catalog.last_versions(4):
            record = {"uid": row.uid, "from": row.number - versions, "version": row.number}
            store._catalog.note({"change": "renumber", **record})

    store._catalog.commit(renumber)
    return store
