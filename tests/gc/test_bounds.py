"""A gc at its bounds: garbage of a MiB, copies of killed runs, packs of others, lost blobs, and writers in between."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.errors import IntegrityError, LockedError
from ckstore.gc import changed, collect, reachability
from ckstore.gc.plan import plan_for
from ckstore.gc.reachability import PackContents
from ckstore.gc.repack import repack
from ckstore.storage.catalog import key
from tests.checkpoints import draw, packs_of
from tests.plans import of_changes

pytestmark = [pytest.mark.prompt, pytest.mark.local]


def state(seed: int, count: int = 4000) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).standard_normal(count)}


@pytest.fixture
def run(tmp_path: Path) -> ckstore.Store:
    """Three versions of run a without a common object; the later ones name blobs of the earlier ones."""
    store = ckstore.init(tmp_path / "store")
    for step in range(3):
        store.ingest(state(step), run="a", step=step, hot=0)
    return store


def test_a_raw_pack_with_a_mebibyte_of_garbage_is_written_again(tmp_path: Path) -> None:
    """That is less than a tenth of it. Its hot version takes fewer bytes then."""
    large, small = np.arange(11 << 18, dtype=np.uint32), np.zeros((1 << 20) + 4096, np.uint8)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"large": large, "small": small}, run="a", step=1, hot=9)
        store.ingest({"small": small}, run="b", step=1, hot=0)
        before = store["a@1"].stored_bytes
        report = store.gc(grace=0)
        assert report.rewritten == 1
        assert report.bytes > small.nbytes
        assert store["a@1"].stored_bytes == before - report.bytes


def test_the_copy_of_a_killed_gc_needs_no_grace(run: ckstore.Store) -> None:
    with run as store:
        store.forget(["a@0"])
        [contents] = plan_for(store._repository, 0.0, whole=True).rewritten
        contents.wanted.clear()  # Another copy than the next one.
        copy = repack(store._repository, contents).pack.name
        assert copy in packs_of(store.place)
        report = store.gc()
        assert (report.rewritten, report.files) == (1, 1)
        assert copy not in packs_of(store.place)


def test_the_pack_of_another_store_is_logged_once_it_goes(run: ckstore.Store, tmp_path: Path) -> None:
    """Until then it stays, as that of a running ingest; its blobs are in a pack that nobody has."""
    with ckstore.init(tmp_path / "other") as other:
        for step in range(2):
            other.ingest(state(9 + step), run="b", step=step, hot=0)
        row = other["b@1"]._stored.row
        [other_pack] = {ref.pack for ref in other["b@1"]._stored.document.blobs()} - {None}
    with run as store:
        store.forget(["a@0"])
        shutil.copy(tmp_path / "other" / "packs" / row.pack, store.path / "packs")
        assert other_pack not in packs_of(store.place)
        assert store.gc().files == 0
        assert store.gc(grace=0).files == 1
        [*_, record] = [record for record in store._catalog.log_records() if record["change"] == "gc"]
        assert record["versions"] == [[row.uid, row.number, row.parent, row.created]]


def test_a_version_without_its_blobs_is_an_error(run: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with run as store:
        resolver = store._repository.resolver
        manifest = resolver.manifest
        [pack] = {ref.pack for ref in store["a@1"]._stored.document.blobs()} - {None}
        blobs = manifest(pack).blobs
        monkeypatch.setattr(manifest(pack), "blobs", {})
        store.forget(["a@0"])
        with pytest.raises(IntegrityError, match="Version 2 has lost objects"):
            store.gc(grace=0)
        monkeypatch.setattr(manifest(pack), "blobs", blobs)
        assert store.gc(grace=0).rewritten == 1


def test_a_bucket_that_keeps_changing_is_named_with_its_last_version(
    run: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers on other machines hold no lease here."""
    with run as store:
        store.forget(["a@0"])
        monkeypatch.setattr(type(store._catalog), "commit", lambda catalog, change: None)
        with pytest.raises(LockedError, match=r"\(last: version 3 of run a, 20.*\)"):
            collect.gc(store._repository, grace=0, patience=0)


@pytest.mark.parametrize("in_record", [True, False])
@pytest.mark.parametrize("needs_dead", [True, False])
def test_a_plan_holds_unless_a_new_version_needs_what_it_removes(
    run: ckstore.Store, monkeypatch: pytest.MonkeyPatch, in_record: bool, needs_dead: bool
) -> None:
    """A bucket's record tells the objects that a new pack names; without one, its manifest does."""
    with run as store:
        dead = [key(identity) for identity in store["a@0"]._stored.document.objects]
        store.forget(["a@0"])
        plan = plan_for(store._repository, 0.0, whole=True)
        assert plan.survey.dead == dead
        assert plan.holds(())
        store.ingest(state(0 if needs_dead else 7), run="b", step=0, hot=0)
        if in_record:
            new = store["b@0"]._stored
            named = {new.row.pack: ({*map(key, new.document.objects)}, new.document.blob_packs())}
            monkeypatch.setattr(type(store._catalog), "named_with", lambda catalog, pack: named[pack])
        assert plan.holds(()) != needs_dead


def test_a_plan_holds_unless_a_new_version_needs_blobs_that_it_removes(
    run: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run as store:
        store.forget(["a@0"])
        plans = [plan_for(store._repository, 0.0, whole=True) for _ in range(2)]
        [gone] = plans[1].rewritten
        gone.wanted.clear()
        store.ingest(state(7), run="a", step=3, hot=0)
        new = store["a@3"]._stored
        assert gone.name in new.document.blob_packs()
        named = {new.row.pack: ({*map(key, new.document.objects)}, new.document.blob_packs())}
        monkeypatch.setattr(type(store._catalog), "named_with", lambda catalog, pack: named[pack])
        assert [plan.holds(()) for plan in plans] == [True, False]


def test_a_plan_for_changes_holds_until_a_file_appears(run: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed, "_SHARE", 1.0)
    with run as store:
        store.gc(grace=0)
        store.forget(["a@0"])
        plan = of_changes(store, 0.0)
        assert plan is not None
        assert plan.holds(())
        copy = repack(store._repository, plan.rewritten[0]).pack.name
        assert not plan.holds(())
        assert plan.holds({copy})
        monkeypatch.setattr(type(store._catalog), "is_only", False)
        assert plan.holds(()), "in a bucket, where a commit checks its bases itself"


def test_a_plan_settles_nothing_once_the_store_was_changed(run: ckstore.Store) -> None:
    with run as store:
        plan = plan_for(store._repository, 0.0, whole=True)
        assert plan.settled({}).keys() == {pack.name for pack in store._catalog.packs()}
        store.forget(["a@0"])
        assert plan.settled({}) == {}


@pytest.mark.parametrize(("original", "chosen"), [(190, {1}), (189, {1, 3})])
def test_objects_are_stored_in_full_at_any_price_in_a_store_that_is_larger_than_its_files(
    original: float, chosen: set[int]
) -> None:
    """Object 1 in full takes 80 bytes and frees 110, object 3 takes 105."""
    sizes, alone = [100, 10, 100, 10], [100, 80, 100, 105]
    graph = reachability._Graph({0: None, 1: 0, 2: None, 3: 2}, placed={"pack": dict(enumerate(range(4)))})
    needs = reachability._Needs(graph)
    for number in (1, 3):
        needs.add(number)
    packs = {"pack": PackContents("pack", "encoded", 220, (1, ""), sizes, alone, {}, None)}
    assert reachability._to_store_in_full(graph, needs, packs, original) == chosen


@pytest.mark.encoded
def test_the_origin_of_the_branch_that_goes_on_is_kept(tmp_path: Path) -> None:
    """The latest version of the run is superseded, and began with another object."""
    weight = draw(300, 256, seed=1)
    with ckstore.init(tmp_path / "store") as store:
        for step, name in enumerate("wwvvw"):
            state = {name: weight + draw(300, 256, seed=2, scale=1e-2) * step}
            store.ingest(state, run="c", step=step, policy="coarse", parent="c@1" if step == 4 else None)
        store.rebase(["c@4"])
        store.forget(["c@0..c@2"])
        store.gc(grace=0)
        [superseded, present] = store._catalog.versions()
        assert (superseded.step, present.step) == (3, 4)
        [record] = map(store._repository.resolver.record, store["c@4"]._stored.document.objects)
        assert record.base is None
        assert record.origin is not None
        assert store._repository.resolver.find(record.origin) is not None


def test_a_version_whose_pack_stays_is_logged_once(tmp_path: Path) -> None:
    """Another version has its object, and its manifest alone is too small to write the pack again."""
    with ckstore.init(tmp_path / "store") as store:
        for run, seed in (("a", 0), ("c", 0), ("b", 1), ("d", 2)):
            store.ingest(state(seed, 90_000), run=run, step=0, hot=0)
        row = store["a@0"]._stored.row
        uids = [row.uid, store["b@0"]._stored.row.uid, store["d@0"]._stored.row.uid]
        for names in (["a@0", "b@0"], ["d@0"]):
            store.forget(names)
            store.gc(grace=0)
        assert row.pack in packs_of(store.place)
        found = [record["versions"] for record in store._catalog.log_records() if record["change"] == "gc"]
        assert [[uid for uid, *_ in versions] for versions in found] == [uids[:2], uids[2:]]
