"""Content that several hot versions have is stored once, for as long as one of them needs it."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.commit.change import Change
from ckstore.commit.costs import restore_cost, update_costs
from ckstore.policy import Policy
from ckstore.recovery.recover import recover
from tests.checkpoints import draw, lose_catalog, pack_bytes, packs_of, sha256


@pytest.fixture
def file(directory: Path) -> Path:
    torch.save({"w": draw(400, 256), "half": draw(300, 256).bfloat16(), "b": draw(7), "n": torch.arange(3)},
               directory / "file.pt")  # fmt: skip
    return directory / "file.pt"


def raw_packs(store: ckstore.Store) -> list[str]:
    return [name for name in packs_of(store.place) if name.endswith(".raw.zip")]


def restores(store: ckstore.Store, name: str, file: Path) -> bool:
    target = file.parent / "restored"
    store[name].checkout(target, force=True)
    return sha256(target) == sha256(file)


def test_zip_tools_find_raw_packs_whole(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        store.ingest({"chunks": draw(700, 1024), "w": draw(400, 256)}, run="a")
        [pack] = raw_packs(store)
        with zipfile.ZipFile(directory / "store" / "packs" / pack) as archive:
            assert archive.testzip() is None


def test_a_file_in_two_runs_takes_its_bytes_once(directory: Path, file: Path) -> None:
    with ckstore.init(directory / "store") as store:
        store.ingest(file, run="a", step=0, hot=1)
        before = pack_bytes(store.place)
        again = store.ingest(file, run="b", step=0, hot=1)
        assert again.version.hot
        assert pack_bytes(store.place) - before < 0.02 * file.stat().st_size
        assert len(raw_packs(store)) == 1
        assert restores(store, "a@0", file)
        assert restores(store, "b@0", file)
        assert store.verify().problems == []
        assert store["b@0"].state_dict(mmap=True)["w"].equal(draw(400, 256))
        store.encode()
        assert raw_packs(store) == []
        assert [row.hot for row in store._catalog.versions()] == [False, False]
        assert store.verify().problems == []
        lose_catalog(store.place)
    assert recover(directory / "store").problems == []
    with ckstore.open(directory / "store") as store:
        assert restores(store, "b@0", file)
        store.thin(["b@0"])
        store.gc(grace=0)
        assert restores(store, "a@0", file)
        assert store.verify().problems == []


def test_frozen_layers_of_versions_that_are_all_hot(directory: Path) -> None:
    frozen = draw(400, 256)
    with ckstore.init(directory / "store") as store:
        for step in range(4):
            store.ingest({"frozen": frozen, "w": draw(20, 256, seed=step)}, run="a", step=step, hot=9)
        assert pack_bytes(store.place) < 1.5 * frozen.nbytes
        store.forget(["a@0"])
        store.gc(grace=0)
        for step in range(1, 4):
            assert store[f"a@{step}"].state_dict()["frozen"].equal(frozen)
        store.encode()
        assert raw_packs(store) == []
        assert store.verify().problems == []


ACTIONS: dict[str, Callable[[ckstore.Store], Any]] = {
    "encode a": lambda store: store.encode(["a@0"]),
    "encode b": lambda store: store.encode(["b@0"]),
    "forget a": lambda store: store.forget(["a@0"]),
    "gc": lambda store: store.gc(grace=0),
    "recover": lambda store: lose_catalog(store.place),
}


@pytest.mark.long
@pytest.mark.parametrize("fidelity", ["exact", "coarse"])
@pytest.mark.parametrize("names", list(itertools.permutations(ACTIONS, 3)), ids=", ".join)
def test_each_outlasts_changes_of_the_other(directory: Path, file: Path, names: tuple[str, ...], fidelity: Any) -> None:
    """Version `a`, which wrote the objects, becomes exact or coarse; `b`, which shares them, is exact."""
    with ckstore.init(directory / "store") as store:
        store.set_policy(Policy(fidelity, hot=9), "a")
        store.ingest(file, run="a", step=0)
        store.ingest(file, run="b", step=0, hot=9)
    for name in names:
        with ckstore.open(directory / "store") as store:
            if name == "encode a" and "forget a" in names[: names.index(name)]:
                continue
            ACTIONS[name](store)
        if name == "recover":
            assert recover(directory / "store").problems == []
        with ckstore.open(directory / "store") as store:
            assert store.verify().problems == [], name
            assert restores(store, "b@0", file), name
    with ckstore.open(directory / "store") as store:
        store.encode()
        store.gc(grace=0)
        assert raw_packs(store) == []
        assert restores(store, "b@0", file)
        assert store.verify().problems == []


def test_the_last_that_needs_a_raw_pack_frees_it(directory: Path, file: Path) -> None:
    """Also where the version that wrote it was forgotten, without a `gc`."""
    with ckstore.init(directory / "store") as store:
        store.ingest(file, run="a", step=0, hot=9)
        for run in ("b", "c"):
            store.ingest(file, run=run, step=0, hot=9)
        store.forget(["a@0"])
        store.encode(["b@0"])
        assert raw_packs(store) == []
        assert restores(store, "c@0", file)
        store.encode(["c@0"])
        assert store.verify().problems == []


@pytest.mark.parametrize("fidelity", ["exact", "coarse"])
@pytest.mark.parametrize("where", ["before it is committed", "after it is committed"])
def test_an_encoding_that_comes_between(
    directory: Path, file: Path, fidelity: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that wrote the objects changes while another one refers to them, or after that one's look-up."""
    with ckstore.init(directory / "store") as store, ckstore.open(directory / "store") as other:
        store.set_policy(Policy(fidelity, hot=9), "a")
        store.ingest(file, run="a", step=0)
        step = "commit_version" if where == "before it is committed" else "commit_encoded"
        original, done = getattr(Change, step), []

        def commit(self: Change, *arguments: Any, **named: Any) -> Any:
            if not done:
                done.append(True)
                if where == "before it is committed":
                    other.encode(["a@0"])
                else:
                    other.ingest(file, run="b", step=0, hot=9)
            return original(self, *arguments, **named)

        monkeypatch.setattr(Change, step, commit)
        if where == "before it is committed":
            store.ingest(file, run="b", step=0, hot=9)
        else:
            store.encode(["a@0"])
        assert not store["a@0"].hot
        assert store["b@0"].hot
        assert restores(store, "b@0", file)
        assert store.verify().problems == []
        store.gc(grace=0)
        assert restores(store, "b@0", file)
        store.encode()
        store.gc(grace=0)
        assert raw_packs(store) == []
        assert restores(store, "b@0", file)


def test_a_version_that_will_be_coarse_shares_nothing(directory: Path) -> None:
    """Else the pack of the first one would stay as long as the run goes on."""
    frozen = draw(400, 256)
    with ckstore.init(directory / "store") as store:
        store.set_policy(Policy("coarse", hot=9), "a")
        for step in range(4):
            store.ingest({"frozen": frozen, "w": draw(20, 256, seed=step)}, run="a", step=step)
            store.encode([row.number for row in store._catalog.versions()[:-1] if row.hot])
            assert len(raw_packs(store)) == 1
        assert np.array_equal(store["a@3"]["frozen"][...], frozen)


def states(count: int) -> list[dict[str, Any]]:
    """Return states that each differ a little from the one before."""
    found = [{"w": draw(256, 512).numpy()}]
    for number in range(1, count):
        found.append({"w": found[-1]["w"] + 1e-3 * draw(256, 512, seed=number).numpy()})
    return found


def test_nothing_is_stored_against_a_hot_ancestor(directory: Path) -> None:
    """Its encoding, under a coarse policy, leaves no exact object."""
    first, second, third = states(3)
    with ckstore.init(directory / "store") as store:
        store.ingest(first, run="r", step=1, hot=0)
        hot = store.ingest(second, run="r", step=2, hot=1, policy=Policy("coarse")).version
        assert hot.hot
        store.ingest(first, run="r", step=3, hot=1)
        store.thin(["r@3"])
        store.ingest(third, run="r", step=4, hot=0)
        store.encode(["r@2"])
        assert [row.hot for row in store._catalog.versions()] == [False] * 4
        assert store.verify().problems == []
        np.testing.assert_array_equal(store["r@4"]["w"].numpy(), third["w"])
        assert recover(store.place).problems == []


def test_no_cycle_comes_from_the_encoding_of_a_hot_ancestor(directory: Path) -> None:
    """The new version has content of the ancestor's parent: each could be stored against the other."""
    first, second, third = states(3)
    with ckstore.init(directory / "store") as store:
        store.ingest(first, run="r", step=1, hot=0)
        for step, state in enumerate([third, second, first], 2):
            store.ingest(state, run="r", step=step, hot=2)
        store.thin(["r@4"])
        store.ingest(third, run="r", step=5, hot=0)
        store.encode()
        assert not any(row.hot for row in store._catalog.versions())
        assert store.verify().problems == []
        np.testing.assert_array_equal(store["r@5"]["w"].numpy(), third["w"])
        np.testing.assert_array_equal(store["r@3"]["w"].numpy(), second["w"])


def test_costs_of_hot_versions_whose_objects_others_encode_are_no_problem(directory: Path) -> None:
    first, second = draw(300, 256), draw(400, 256)
    with ckstore.init(directory / "store") as store:
        store.ingest({"v": first, "w": second}, run="a", step=0, hot=0)
        later = {"v": first + 1e-4 * draw(300, 256), "w": second + 1e-4 * draw(400, 256)}
        store.ingest(later, run="b", step=0, hot=2)
        store.ingest({"v": later["v"], "w": second}, run="a", step=1, hot=0)
        update_costs(store._repository)
        store.ingest(later, run="a", step=2, hot=0)
        version = store["b@0"]._stored
        assert version.row.hot
        assert restore_cost(version) != (version.row.cost, version.row.depth)
        assert store.verify().problems == []
