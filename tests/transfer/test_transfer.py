"""Versions go from one store into another: whole or not at all, once, and as they were."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ckstore
from ckstore.checking import verify as verify_module
from ckstore.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from ckstore.objects import units
from ckstore.policy import Policy
from ckstore.recovery.recover import recover
from ckstore.repository import Repository
from ckstore.transfer import missing as missing_module
from ckstore.transfer import transfer as transfer_module
from ckstore.transfer.transfer import TransferReport, transfer
from tests.checkpoints import change_pack, described, draw, flip, listing, lose_catalog, pack_bytes, scratch, sha256
from tests.crafted import CraftedStore
from tests.points_of_death import DIED, KILL, POWER, struck
from tests.test_points_of_death import ALL, SEED

REPOSITORY = Path(__file__).resolve().parents[2]

#: Points at which a push of all versions is killed, unless all are asked for.
SAMPLE = 4

PUSH = """
import sys, ckstore
source, target, *versions = sys.argv[1:]
with ckstore.open(source, "r") as store, ckstore.open(target) as other:
    print("ready", flush=True)
    sys.stdin.readline()
    report = store.push(other, versions or None)
    assert not report.failed, report.failed
"""


def state(step: int, seed: int = 0) -> dict[str, Any]:
    """Return moving weights, second moments, short floats, a table with a changing row, and a constant tensor."""
    weight, table = draw(40, 32, seed=seed), draw(64, 16, seed=seed + 50)
    for number in range(1, step + 1):
        weight = weight + draw(40, 32, seed=seed + number, scale=1e-3)
        table[number % 64] += 1
    model = {
        "weight": weight, "half": weight[:20].bfloat16(), "table": table, "frozen": draw(40, 16, seed=99),
        "complex": torch.complex(weight[:5], weight[5:10]), "bias": torch.ones(7) * step,
        "mask": torch.arange(5) > step,
    }  # fmt: skip
    moments = {"exp_avg": draw(40, 32, seed=80 + step, scale=1e-4), "exp_avg_sq": draw(40, 32, seed=step).square()}
    return {"model": model, "optimizer": {0: moments}, "step": step}


@pytest.fixture(scope="module")
def origin() -> Iterator[Path]:
    """A store of 22 versions of all kinds, and below `in` the files that they were."""
    with scratch() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "SMALL", 128)
        (directory / "in").mkdir()
        with ckstore.init(directory / "store") as store:

            def ingest(run: str, step: int, content: Any, **options: Any) -> None:
                path = directory / "in" / f"{run}@{step}"
                torch.save(content, path)
                store.ingest(path, run=run, step=step, **{"hot": 0, **options})

            for step in range(9):
                ingest("gpt", step, state(step), metrics={"loss": 1 / (step + 1)})
            ingest("fork", 5, state(4) | {"lr": 0.1}, parent="gpt@4")
            ingest("fork", 6, state(5) | {"lr": 0.2})
            for step in range(3):
                ingest("coarse", step, state(step, seed=7), policy="coarse")
            for step in range(2):
                ingest("dynaquant", step, state(step, seed=8), policy=Policy("coarse", scheme="dynaquant"))
            ingest("lc", 0, state(0, seed=9), policy=Policy("coarse", scheme="lc"))
            tree = directory / "in" / "tree@1"
            (tree / "sub").mkdir(parents=True)
            torch.save(state(1), tree / "sub" / "model.pt")
            torch.save({"rest": draw(9, 9)}, tree / "rest.pt")
            (tree / "link").symlink_to("sub/model.pt")
            store.ingest(tree, run="tree", step=1, hot=0)
            ingest("hot", 0, state(0, seed=30), hot=9)
            ingest("hot", 1, state(1, seed=30), hot=9)
            store.ingest({"w": draw(50, 50, seed=3)}, run="main", hot=0)
            store.ingest({"w": draw(50, 50, seed=4)}, run="main", hot=0)
            store.thin(["gpt@2", "gpt@5"])
            store.rebase(["gpt@7"])
            store.gc(grace=0)
            for tag, version in {"best": "gpt@3", "last": "gpt@8", "start": "hot@0"}.items():
                store.tag(version, tag)
            assert store.verify().problems == []
            assert len(store._catalog.versions()) == 22
            kinds = {(row.fidelity, row.hot) for row in store._catalog.versions()}
            assert kinds == {("exact", False), ("exact", True), ("coarse", False)}
        yield directory


def pushed(source: Path, target: Path, versions: Any = None, **options: Any) -> TransferReport:
    with ckstore.open(source, "r") as store, ckstore.open(target) as other:
        return store.push(other, versions, **options)


def restored(path: Path, out: Path) -> dict[str, Any]:
    """Return rows and restored content of all versions, by id; compare everything with its ids, too."""
    found = {}
    with ckstore.open(path, "r") as store:
        assert store.verify().problems == []
        names = {row.number: row.uid for row in store._catalog.versions()}
        tags = {tag: names[number] for tag, number in store._catalog.tags().items()}
        for row in store._catalog.versions():
            shutil.rmtree(out, ignore_errors=True)
            out.unlink(missing_ok=True)
            store[row.number].checkout(out)
            document = store[row.number]._stored.document
            found[row.uid] = (
                row.run, row.step, row.created, row.fidelity, row.hot, row.metrics, row.source, row.elements,
                names.get(row.parent or 0), document.facts, document.coarse, contents(out),
                sorted(tag for tag, uid in tags.items() if uid == row.uid),
            )  # fmt: skip
    return found


def contents(path: Path) -> dict[str, Any]:
    """Return the files at a path, without times: state dicts come back with that of the checkout."""
    return {name: entry[:3] for name, entry in described(path).items()}


def layers(path: Path) -> dict[str, int]:
    """Return the bytes of each layer that is in a pack of the catalog, by kind of pack and id."""
    with Repository(path, "r") as repository:
        found: dict[str, int] = {}
        for pack in repository.catalog.packs():
            for record in repository.resolver.manifest(pack.name).document.records:
                name = f"{pack.kind} {record.id}"
                assert name not in found, "a layer was sent twice"
                found[name] = record.nbytes
        return found


@pytest.fixture(scope="module")
def whole(origin: Path) -> Path:
    """A store that everything was pushed to."""
    ckstore.init(origin / "whole").close()
    counted: list[int] = []
    report = pushed(origin / "store", origin / "whole", progress=counted.append)
    assert not report.failed
    assert len(report.versions) == 22
    assert sum(counted) == sum(item.version.original_bytes for item in report.versions)
    assert min(counted) >= 0
    return origin / "whole"


@pytest.mark.long
def test_everything_comes_back_with_ids_lineage_metrics_and_tags(origin: Path, whole: Path) -> None:
    there = restored(whole, origin / "out")
    assert there == restored(origin / "store", origin / "out")
    originals = [path for path in (origin / "in").iterdir() if path.is_file()]
    exact = {(said[0], said[1]): said[11] for said in there.values() if said[3] == "exact"}
    compared = 0
    for path in originals:
        run, step = path.name.split("@")
        if (run, int(step)) in exact:
            assert exact[run, int(step)][""][1] == sha256(path)
            compared += 1
    assert compared == 11
    assert exact["tree", 1] == contents(origin / "in" / "tree@1")


def test_a_pulled_store_is_rebuilt_and_collected_like_an_ingested_one(
    origin: Path, whole: Path, directory: Path
) -> None:
    shutil.copytree(whole, directory / "store")
    before = restored(whole, directory / "out")
    lose_catalog(directory / "store")
    assert recover(directory / "store").problems == []
    assert restored(directory / "store", directory / "out") == before
    with ckstore.open(directory / "store") as store:
        assert store.gc(grace=0).bytes == 0
        store.encode()
        store.ingest(state(9), run="gpt", step=9, verify=True, hot=0)
        assert store["gpt@9"].depth > 0, "it is stored against the versions that came"
        assert store.verify().problems == []


def test_when_nothing_is_missing_nothing_is_done(origin: Path, whole: Path) -> None:
    with ckstore.open(whole, "r") as store:
        before = listing(whole), (store.path / "catalog.sqlite").read_bytes()
    report = pushed(origin / "store", whole)
    assert (len(report.there), report.versions, report.failed) == (22, [], [])
    with ckstore.open(whole, "r") as store:
        assert (listing(whole), (store.path / "catalog.sqlite").read_bytes()) == before


def test_a_dry_run_predicts_the_sent_bytes(origin: Path, whole: Path, directory: Path) -> None:
    ckstore.init(directory / "store").close()
    with ckstore.open(origin / "store", "r") as store, ckstore.open(directory / "store", "r") as other:
        before = (other.path / "catalog.sqlite").read_bytes()
        report = store.push(other, dry_run=True)
        assert (other.path / "catalog.sqlite").read_bytes() == before
    assert not listing(directory / "store")
    assert [item.version.number for item in report.versions] == list(range(1, 23))
    assert all(item.arrived is None for item in report.versions)
    # Objects that are encoded in full are predicted from a sample.
    assert report.bytes == pytest.approx(sum(layers(whole).values()), rel=1e-3)


@pytest.mark.parametrize("worth", [0.0, 0.9])
def test_versions_by_name_bring_their_bases_and_nothing_else(
    origin: Path, directory: Path, worth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that they are stored against, or where that takes fewer bytes in full."""
    monkeypatch.setattr(missing_module, "_WORTH_ENCODING", worth)
    with ckstore.init(directory / "store") as store, ckstore.open(origin / "store", "r") as other:
        report = store.pull(other, ["gpt@4", "hot@1"])
        assert [item.arrived.number for item in report.versions if item.arrived] == [1, 2]
        assert [row.parent for row in store._catalog.versions()] == [None, None]
        report = store.pull(other, ["fork@6", "gpt@8", "gpt@0"], verify=True)
        found = {f"{row.run}@{row.step}": row for row in store._catalog.versions()}
        # The nearest existing ancestor; earlier versions stay as they are when an ancestor comes later.
        assert found["fork@6"].parent == found["gpt@8"].parent == found["gpt@4"].number
        assert found["gpt@0"].parent is None
        assert {row.uid for row in found.values()} <= {row.uid for row in other._catalog.versions()}
        sent = sum(item.bytes for item in report.versions)
        assert sent < pack_bytes(origin / "store") / 2
    everything = restored(origin / "store", directory / "out")
    for uid, said in restored(directory / "store", directory / "out").items():
        assert said[:8] == everything[uid][:8]
        assert said[11] == everything[uid][11]
    layers(directory / "store")


def test_bases_in_a_pack_of_their_dependents_may_move(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pack of a deep version holds its bases, which earlier versions share when they come later."""
    monkeypatch.setattr(missing_module, "_WORTH_ENCODING", 0.0)
    with ckstore.init(directory / "a") as store, ckstore.init(directory / "b") as other:
        weight = draw(300, 300)
        for step in range(4):
            weight = weight + draw(300, 300, seed=step + 1, scale=1e-5)
            other.ingest({"w": weight}, run="r", step=step, max_restore_cost=9.0, hot=0)
        store.pull(other, ["r@3"])
        store.pull(other, ["r@2"])
        depth = store._catalog.version(1).depth
        assert store.rebase("r@2").objects == 1
        assert store.verify().problems == []
        assert store._catalog.version(2).depth == 0 < store._catalog.version(1).depth < depth


def test_a_deep_version_by_itself_is_encoded_again_where_that_takes_fewer_bytes(directory: Path) -> None:
    with ckstore.init(directory / "a") as store, ckstore.init(directory / "b") as other:
        weight = draw(300, 300, scale=0.02)
        for step in range(4):
            weight = weight + draw(300, 300, seed=step + 1, scale=1e-5)
            store.ingest(
                {"w": weight, "exp_avg": draw(300, 300, seed=9 + step)}, run="a", step=step, hot=0, max_restore_cost=9
            )
        assert store["a@3"].depth > 1
        [predicted] = other.pull(store, ["a@3"], dry_run=True).versions
        [sent] = other.pull(store, ["a@3"]).versions
        assert other["a@3"].depth == 0
        assert sent.bytes < 1.1 * store["a@0"].stored_bytes
        assert predicted.bytes == pytest.approx(sent.bytes, rel=0.05)
        [sent] = other.pull(store, ["a@2"]).versions
        assert sent.bytes < 1.1 * store["a@0"].stored_bytes
        for step in (2, 3):
            assert torch.equal(other[f"a@{step}"].state_dict()["w"], store[f"a@{step}"].state_dict()["w"])
        assert other.verify().problems == []
        store.thin(["a@3"])
        with ckstore.init(directory / "c") as third:
            third.pull(store, ["a@3"])
            third.pull(store, verify=True)
            assert third.verify().problems == []
            for step in range(4):
                found, said = third[f"a@{step}"].state_dict(), store[f"a@{step}"].state_dict()
                assert all(torch.equal(found[name], said[name]) for name in said)


@pytest.mark.long
@pytest.mark.local  # It forks, which the client of an object store does not survive.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", [KILL, POWER])
def test_killed_at_any_moment_and_repeated_it_sends_the_rest(
    origin: Path, whole: Path, directory: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, sizes = restored(whole, directory / "out"), layers(whole)
    bytes_of_packs = pack_bytes(whole)
    target = directory / "store"

    def push(path: Path) -> None:
        assert not pushed(origin / "store", path).failed

    ckstore.init(target).close()
    code, steps = struck(push, target, mode, 0)
    assert code == 0
    points = list(range(1, steps + 1))
    if not ALL:
        points = sorted(random.Random(f"{SEED} push {mode}").sample(points, SAMPLE))
    for point in points:
        shutil.rmtree(target)
        ckstore.init(target).close()
        code, _ = struck(push, target, mode, point)
        assert code in (0, DIED), point
        found = restored(target, directory / "out")
        assert found.items() <= expected.items() or _without_tags(found).items() <= _without_tags(expected).items()
        push(target)
        assert restored(target, directory / "out") == expected
        assert layers(target) == sizes
        with ckstore.open(target) as store:
            store.gc(grace=0)
            # Numbers in manifests are other ones.
            assert abs(sum(pack.bytes for pack in store._catalog.packs()) - bytes_of_packs) < 44 * 32
        assert restored(target, directory / "out") == expected
        if point % 2:
            lose_catalog(target)
        assert recover(target).problems == []
        assert restored(target, directory / "out") == expected
    if ALL:
        with capsys.disabled():
            print(f"\npush, {mode}: {len(points)} points")


def _without_tags(found: dict[str, Any]) -> dict[str, Any]:
    """Tags of a version come in a transaction after its own."""
    return {uid: said[:-1] for uid, said in found.items()}


@pytest.mark.long
@pytest.mark.local  # It forks, too.
def test_a_copy_that_a_killed_push_left_is_the_same_version(origin: Path, directory: Path) -> None:
    """Its pack is whole, and it was not committed; the push that was repeated has sent it again."""
    target = directory / "store"
    left = 0
    for point in range(1, 60):
        shutil.rmtree(target, ignore_errors=True)
        ckstore.init(target).close()
        code, _ = struck(lambda path: pushed(origin / "store", path, ["gpt@1"]) and None, target, KILL, point)
        if code != DIED:
            break
        with ckstore.open(target, "r") as store:
            names = {info.name for info in store._repository.packs.list_packs()}
            if not names or store._catalog.versions():
                continue
        left += 1
        assert len(pushed(origin / "store", target, ["gpt@1"]).versions) == 1
        with ckstore.open(target) as store:
            store.tag("gpt@1", "kept")
        shutil.copytree(target, directory / "lost")
        lose_catalog(directory / "lost")
        for path in (target, directory / "lost"):
            assert recover(path).problems == []
            with ckstore.open(path) as store:
                [row] = store._catalog.versions()
                assert (row.run, row.step) == ("gpt", 1)
                assert store["kept"]._stored.row == row
                store.gc(grace=0)
                assert store.verify().problems == []
            assert recover(path).versions == 1
        shutil.rmtree(directory / "lost")
    assert left


@pytest.mark.long
def test_two_pushes_at_once(origin: Path, whole: Path, directory: Path) -> None:
    ckstore.init(directory / "store").close()
    command = [sys.executable, "-c", PUSH, str(origin / "store"), str(directory / "store")]
    processes = [
        subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    expected = restored(whole, directory / "out")
    assert restored(directory / "store", directory / "out") == expected
    with ckstore.open(directory / "store") as store:
        assert store._catalog.reservations() == []
        assert store._catalog.leases() == []
        store.gc(grace=0)
    assert restored(directory / "store", directory / "out") == expected
    assert recover(directory / "store").problems == []
    assert restored(directory / "store", directory / "out") == expected


def test_content_that_the_target_has_otherwise_is_not_sent_again(origin: Path, directory: Path) -> None:
    """Other parents, other lattices, other chains: objects with a known content id stay as they are."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ckstore.init(directory / "store") as store,
        ckstore.open(origin / "store", "r") as other,
    ):
        patch.setattr(units, "SMALL", 128)
        for step in (8, 3, 0):
            store.ingest(origin / "in" / f"gpt@{step}", run="own", step=step, hot=0)
        alone = pack_bytes(directory / "store")
        report = store.pull(other, ["gpt@3", "gpt@4", "gpt@8"])
        assert not report.failed
        three, four, eight = (item.bytes for item in report.versions)
        assert three < 0.2 * alone / 3, "the target has its content"
        assert eight < 0.2 * alone / 3
        assert four > three
        for step in (3, 4, 8):
            store[f"gpt@{step}"].checkout(directory / "out", force=True)
            assert sha256(directory / "out") == sha256(origin / "in" / f"gpt@{step}")
        assert store.verify().problems == []
    lose_catalog(directory / "store")
    assert recover(directory / "store").problems == []


def test_known_versions_are_skipped_and_conflicts_are_named(origin: Path, directory: Path) -> None:
    with ckstore.init(directory / "store") as store, ckstore.open(origin / "store", "r") as other:
        store.ingest(origin / "in" / "gpt@3", run="gpt", step=3)
        store.ingest(origin / "in" / "tree@1", run="tree", step=1)
        store.ingest(origin / "in" / "gpt@8", run="gpt", step=4)
        report = store.pull(other, ["gpt@3..gpt@5", "tree@1"])
        assert [row.run for row in report.there] == ["gpt", "tree"]
        assert [item.version.step for item in report.versions] == [5]
        # Version 1 has the content of its grandparent.
        assert store["gpt@5"].parent == 1
        [failed] = report.failed
        assert isinstance(failed.error, ConflictError)
        assert "gpt@4 holds other content" in str(failed.error)
        assert store["gpt@4"].number == 3
        (directory / "other").mkdir()
        shutil.copytree(origin / "in" / "tree@1", directory / "other" / "tree", symlinks=True)
        (directory / "other" / "tree" / "rest.pt").chmod(0o600)
        store.forget(["tree@1"])
        store.ingest(directory / "other" / "tree", run="tree", step=1)
        [failed] = store.pull(other, ["tree@1"]).failed
        assert isinstance(failed.error, ConflictError)


def test_tags_are_taken_where_they_are_free(origin: Path, directory: Path) -> None:
    with ckstore.init(directory / "store") as store, ckstore.open(origin / "store", "r") as other:
        store.ingest({"w": draw(3, 3)}, run="start", step=1)
        store.tag("start@1", "best")
        store.pull(other, ["gpt@3", "gpt@8", "hot@0"])
        assert store._catalog.tags() == {"best": 1, "last": store["gpt@8"].number}
        store.untag("best")
        assert len(store.pull(other, ["gpt@3"]).there) == 1
        assert store._catalog.tags()["best"] == store["gpt@3"].number
        assert store.verify().problems == []


def test_later_metrics_arrive_where_they_are_free(directory: Path) -> None:
    with ckstore.init(directory / "store") as store, ckstore.init(directory / "other") as other:
        store.ingest({"w": draw(3, 3)}, run="toy", step=1, metrics={"loss": 1.0})
        assert len(store.push(other).versions) == 1
        store.set_metrics("toy@1", {"loss": 2.0, "accuracy": 0.5, "by": "a"})
        other.set_metrics("toy@1", {"by": "b"})
        assert len(store.push(other, dry_run=True).there) == 1
        assert dict(other["toy@1"].metrics) == {"loss": 1.0, "by": "b"}
        assert len(store.push(other).there) == 1
        assert dict(other["toy@1"].metrics) == {"loss": 1.0, "by": "b", "accuracy": 0.5}
        records = len(list(other._catalog.log_records()))
        store.push(other)
        assert len(list(other._catalog.log_records())) == records


def test_a_push_brings_back_nothing_that_was_forgotten(origin: Path, directory: Path) -> None:
    """By name, by a policy, after `gc`, and without the catalog that did so; another ingest is not held back."""
    target = directory / "store"
    with ckstore.init(target) as store:
        pushed(origin / "store", target, run="gpt")
        store.forget(["gpt@1"])
        store.set_policy(Policy(retention=ckstore.Retention(keep_last=5)), "gpt")
        assert [row.step for row in store.retain().forgotten] == [0, 2]
        store.gc(grace=0)
    for dry_run in (True, False):
        report = pushed(origin / "store", target, run="gpt", dry_run=dry_run)
        assert [row.step for row in report.forgotten] == [0, 1, 2]
        assert ([row.step for row in report.there], report.versions) == ([3, 4, 5, 6, 7, 8], [])
    lose_catalog(target)
    recover(target)
    counted: list[int] = []
    with ckstore.open(origin / "store", "r") as source, ckstore.open(target) as store:
        report = store.pull(source, run="gpt", progress=counted.append)
        assert [row.step for row in report.forgotten] == [0, 1, 2]
        assert sum(counted) == sum(version.original_bytes for version in source.versions("gpt"))
        store.ingest(origin / "in" / "gpt@0", run="gpt", step=0, hot=0)
        store.set_policy(None, "gpt")
        assert [row.step for row in store.pull(source, "gpt@0..gpt@2").there] == [0]
        sent = store.pull(source, run="gpt", restore=True)
        assert ([item.version.step for item in sent.versions], sent.forgotten) == ([1, 2], [])
        assert store.verify().problems == []
        assert sorted(version.step or 0 for version in store.versions("gpt")) == list(range(9))


@pytest.mark.parametrize("collected", [False, True])
def test_a_version_that_was_forgotten_comes_again_on_demand(origin: Path, directory: Path, collected: bool) -> None:
    target = directory / "store"
    ckstore.init(target).close()
    pushed(origin / "store", target, ["gpt@0", "gpt@1"])
    with ckstore.open(target) as store:
        store.forget(["gpt@1"])
        if collected:
            store.gc(grace=0)
    held = pushed(origin / "store", target, ["gpt@0", "gpt@1"])
    assert ([row.step for row in held.forgotten], held.versions, held.failed) == ([1], [], [])
    pushed(origin / "store", target, ["gpt@1"], restore=True)
    expected = restored(target, directory / "out")
    assert [said[1] for said in expected.values()] == [0, 1]
    with ckstore.open(target) as store:
        store.gc(grace=0)
    for _ in range(2):
        assert recover(target).problems == []
        assert restored(target, directory / "out") == expected
        lose_catalog(target)
    recover(target)
    with ckstore.open(target) as store:
        store.forget(["gpt@1"])
        store.gc(grace=0)
    lose_catalog(target)
    recover(target)
    assert [said[1] for said in restored(target, directory / "out").values()] == [0]


def test_hot_versions_share_encoded_objects_of_the_target(directory: Path) -> None:
    frozen = draw(300, 300, seed=5)
    with ckstore.init(directory / "a") as store, ckstore.init(directory / "b") as other:
        store.ingest({"frozen": frozen, "w": draw(300, 300)}, run="a", step=0, hot=0)
        store.ingest({"frozen": frozen, "w": draw(300, 300, seed=1)}, run="a", step=1, hot=9)
        [hot] = other.pull(store, ["a@1"], verify=True).versions
        assert hot.bytes > 720_000, "both are stored as they are"
        assert other["a@1"].hot
        other.pull(store, ["a@0"])
        other.encode()
        assert not other["a@1"].hot
        assert other.verify().problems == []
    with ckstore.init(directory / "c") as other, ckstore.open(directory / "a", "r") as store:
        _, second = other.pull(store).versions
        assert second.bytes < 400_000, "known objects are not sent"
        other.encode()
        assert other.verify().problems == []
        assert torch.equal(other["a@1"].state_dict()["frozen"], frozen)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["objects", "manifest"])
def test_damage_in_the_source_is_noticed_and_the_rest_arrives(origin: Path, directory: Path, kind: str) -> None:
    source, target = directory / "source", directory / "store"
    shutil.copytree(origin / "store", source)
    ckstore.init(target).close()
    with ckstore.open(source, "r") as store:
        pack = store["gpt@4"]._stored.row.pack
    if kind == "manifest":
        data = change_pack(source, pack, None)
        change_pack(source, pack, data[: data.rindex(b"CKM1")] + b"CKM0" + data[data.rindex(b"CKM1") + 4 :])
    else:
        flip(source, pack, lambda length: length // 2)
    report = pushed(source, target)
    assert report.failed
    assert "gpt@4" in [f"{item.version.run}@{item.version.step}" for item in report.failed]
    assert all(isinstance(item.error, IntegrityError) for item in report.failed)
    assert len(report.versions) + len(report.failed) == 22
    found = restored(target, directory / "out")
    assert len(found) == len(report.versions) >= 12
    shutil.rmtree(source)
    shutil.copytree(origin / "store", source)
    assert len(pushed(source, target).versions) == len(report.failed)
    everything = restored(origin / "store", directory / "out")
    for uid, said in restored(target, directory / "out").items():
        assert said[11] == everything[uid][11]


def test_objects_that_move_in_the_source_during_a_pull(origin: Path, directory: Path) -> None:
    source = directory / "source"
    shutil.copytree(origin / "store", source)
    ckstore.init(directory / "store").close()
    with ckstore.open(source, "r") as store, ckstore.open(directory / "store") as other:
        for row in store._catalog.versions():
            store[row.number]._stored.layout  # noqa: B018 - every record is known to it
        with ckstore.open(source) as second:
            second.forget(["gpt@0", "gpt@1", "fork@5"])
            second.encode()
            second.rebase(["gpt@6"])
            second.gc(grace=0)
        report = store.push(other, [row.number for row in rows_of(source)])
        assert not report.failed, [str(item.error) for item in report.failed]
    everything = restored(source, directory / "out")
    found = restored(directory / "store", directory / "out")
    assert {uid: said[11] for uid, said in found.items()} == {uid: said[11] for uid, said in everything.items()}


def test_versions_that_the_source_encodes_or_forgets_during_a_pull(origin: Path, directory: Path) -> None:
    source = directory / "source"
    shutil.copytree(origin / "store", source)
    with ckstore.open(source, "r") as store, ckstore.init(directory / "store") as other:
        rows = store._catalog.versions("hot") + store._catalog.versions("lc")
        with ckstore.open(source) as second:
            second.encode()
            second.forget(["lc@0"])
            second.gc(grace=0)
        report = transfer(store._repository, other._repository, rows)
        assert [item.version.run for item in report.versions] == ["hot", "hot"]
        [failed] = report.failed
        assert isinstance(failed.error, NotFoundError)
        assert not any(row.hot for row in other._catalog.versions())
        for step in range(2):
            other[f"hot@{step}"].checkout(directory / "out", force=True)
            assert sha256(directory / "out") == sha256(origin / "in" / f"hot@{step}")
        assert other.verify().problems == []


def rows_of(path: Path) -> list[Any]:
    with ckstore.open(path, "r") as store:
        return store._catalog.versions()


def interposed(patch: pytest.MonkeyPatch, change: Callable[[], object]) -> list[int]:
    """Make one change between the search for missing objects and the commit; return a list with an item a search."""
    looked, looks = transfer_module.find_missing, []

    def find_missing(*arguments: Any, **options: Any) -> Any:
        found = looked(*arguments, **options)
        looks.append(1)
        if len(looks) == 1:
            change()
        return found

    patch.setattr(transfer_module, "find_missing", find_missing)
    return looks


def test_a_version_that_the_target_thins_during_a_push(
    origin: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is stored against exact objects that another one gives up before the commit."""
    source, target = origin / "store", directory / "store"
    ckstore.init(target).close()
    pushed(source, target, ["gpt@3"])

    def thin() -> None:
        with ckstore.open(target) as second:
            second.untag("best")
            second.thin(["gpt@3"])

    interposed(monkeypatch, thin)
    assert not pushed(source, target, ["gpt@4"]).failed
    with ckstore.open(target) as store:
        store.gc(grace=0)
        assert store["gpt@3"].fidelity == "coarse"
        store["gpt@4"].checkout(directory / "out")
        assert sha256(directory / "out") == sha256(origin / "in" / "gpt@4")
        assert store.verify().problems == []


def test_a_version_or_parent_that_comes_or_goes_during_a_push(
    origin: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = origin / "store", directory / "store"
    ckstore.init(target).close()
    with pytest.MonkeyPatch.context() as patch:
        looks = interposed(patch, lambda: pushed(source, target, ["gpt@1"]))
        report = pushed(source, target, ["gpt@1"])
        assert (len(report.there), report.versions, report.failed) == (1, [], [])
        assert len(looks) == 2, "the other one's, and this one's"
    with pytest.MonkeyPatch.context() as patch, ckstore.open(target) as second:
        looks = interposed(patch, lambda: second.forget(["gpt@1"]))
        [sent] = pushed(source, target, ["gpt@2"]).versions
        assert len(looks) == 2
        assert sent.arrived is not None
        assert sent.arrived.parent is None
    with pytest.MonkeyPatch.context() as patch, ckstore.open(target) as second:
        interposed(patch, lambda: second.ingest(state(0), run="gpt", step=3, hot=0))
        [failed] = pushed(source, target, ["gpt@3"]).failed
        assert isinstance(failed.error, ConflictError)
        assert second.verify().problems == []
        assert second._catalog.reservations() == []


def test_names_that_the_target_cannot_take(origin: Path, directory: Path) -> None:
    with ckstore.init(directory / "store") as store, ckstore.open(origin / "store", "r") as other:
        store.ingest({"w": draw(3, 3)}, run="x", step=1)
        store.tag("x@1", "fork")
        [failed] = store.pull(other, ["fork@5"]).failed
        assert isinstance(failed.error, UsageError)
        assert "fork is a tag" in str(failed.error)
        with pytest.raises(UsageError, match="reading only"):
            store.push(other)


def first_record(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["records"][0].update(changes)


def version_field(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["version"].update(changes)


def own_base(document: dict[str, Any]) -> None:
    document["records"][0] |= {"kind": "delta", "base": document["records"][0]["id"]}


def swapped_objects(document: dict[str, Any]) -> None:
    document["version"]["objects"].reverse()


def outside(document: dict[str, Any]) -> None:
    document["version"]["files"][0][0] = "../../escaped"


@pytest.mark.local  # The crafted store is a directory.
@pytest.mark.parametrize(
    "lie",
    [
        first_record(at=[100, 1 << 40]),
        first_record(count=1 << 40),
        first_record(chunk=7),
        first_record(id="0" * 40),
        own_base,
        swapped_objects,
        outside,
        version_field(run="x@1"),
        version_field(run="latest"),
        version_field(parent=9),
        version_field(layout={"name": "nothing"}),
        version_field(objects=[]),
    ],
)
def test_a_store_that_lies_is_refused_by_the_gate(
    store: ckstore.Store, directory: Path, lie: Callable[[dict[str, Any]], None]
) -> None:
    """Packs are signed again: their names match their content. Without `--verify` nothing is decoded."""
    with ckstore.init(directory / "source") as source:
        source.ingest({"w": draw(300, 300), "v": draw(70_000), "n": 3}, run="a", step=1, hot=0)
    crafted = CraftedStore(directory / "source")
    [pack] = [name for name in crafted.packs() if "version" in crafted.read(name)[0]]
    crafted.change(pack, lie)
    store.ingest({"w": draw(9, 9)}, run="own", step=1, hot=0)
    before = listing(store.place)
    try:
        with ckstore.open(directory / "source", "r") as other:
            assert len(store.pull(other).failed) == 1
    except ckstore.CkstoreError:
        pass
    assert len(store._catalog.versions()) == 1
    assert listing(store.place) == before
    assert store.verify().problems == []
    assert store._catalog.reservations() == []
    assert store._catalog.leases() == []


@pytest.mark.local  # The crafted store is a directory.
@pytest.mark.parametrize("scheme", ["exact", "lattice", "lc", "factors"])
def test_a_forged_base_does_not_come_along(directory: Path, scheme: Any) -> None:
    """The base of a stranger's version has the id of other content, which the receiving store ingests later."""
    weight, other = draw(300, 300), draw(300, 300, seed=7)
    moved = weight.clone()
    moved[0, :9] += 0.5
    policy = Policy("exact") if scheme == "exact" else Policy("coarse", scheme=scheme)
    with ckstore.init(directory / "source") as source, ckstore.init(directory / "honest") as honest:
        first_policy = Policy("exact") if scheme == "factors" else policy
        for step, values in enumerate([weight, moved]):
            asked = policy if step else first_policy
            source.ingest({"w": values}, run="a", step=step, policy=asked, hot=0, max_restore_cost=9)
        honest.ingest({"w": other}, run="b", step=0, policy=first_policy, hot=0)
        [forged] = honest["b@0"]._stored.document.objects
        first, second = (source[f"a@{step}"]._stored.row.pack for step in range(2))
        record, _ = source._repository.reader.chains.records(source["a@1"]._stored.document.objects[0])
        if record.is_sum:  # Its id depends on its base's.
            record = replace(
                record, id=verify_module._lattice_id(source._repository.reader, replace(record, base=forged))
            )
    crafted = CraftedStore(directory / "source")

    def forge_base(document: dict[str, Any]) -> None:
        document["records"][0]["id"] = forged
        document["stands_for"] = [first]

    def forge(document: dict[str, Any]) -> None:
        document["records"][0] |= {"id": record.id, "base": forged}
        document["version"]["objects"] = [record.id]

    crafted.change(first, forge_base)
    crafted.change(second, forge)
    lose_catalog(directory / "source")
    recover(directory / "source")
    with ckstore.init(directory / "target") as store, ckstore.open(directory / "source", "r") as source:
        report = store.pull(source, ["a@1"], verify=True)
        assert bool(report.failed) == (scheme in ("lc", "factors")), "only sums need their bases"
        assert store._repository.resolver.find(forged) is None
        store.ingest({"w": other}, run="b", step=0, policy=first_policy, hot=0)
        assert store.verify().problems == []
        for version, values in {"a@1": moved, "b@0": other}.items():
            assert scheme != "exact" or torch.equal(store[version].state_dict()["w"], values)


def test_a_verified_pull_takes_the_exact_base_of_factors(directory: Path) -> None:
    weight = draw(300, 300)
    tuned = weight + 0.01 * draw(300, 2, seed=1) @ draw(2, 300, seed=2)
    with ckstore.init(directory / "source") as source, ckstore.init(directory / "target") as target:
        source.ingest({"w": weight}, run="a", step=0, hot=0)
        source.ingest({"w": tuned}, run="a", step=1, hot=0, policy=Policy("coarse", "factors"))
        assert not target.pull(source, ["a@1"], verify=True).failed
        assert torch.equal(target["a@1"].state_dict()["w"], source["a@1"].state_dict()["w"])
        assert target.verify().problems == []


def test_a_verified_pull_encodes_again_what_is_stored_on_forgotten_versions(directory: Path) -> None:
    weight = draw(300, 300)
    with ckstore.init(directory / "source") as source, ckstore.init(directory / "target") as target:
        for step in range(7):
            source.ingest({"w": weight}, run="a", step=step, hot=0, max_restore_cost=20)
            weight = weight + draw(300, 300, seed=step + 1, scale=1e-7)
        source.forget(["a@1", "a@2", "a@4", "a@5"])
        source.gc(grace=0)
        first, *others = target.pull(source, verify=True).versions
        assert [item.version.step for item in others] == [3, 6]
        assert all(item.bytes < 0.5 * first.bytes for item in others)
        assert target._catalog.objects() == 3
        assert target.verify().problems == []
        for step in (0, 3, 6):
            assert torch.equal(target[f"a@{step}"].state_dict()["w"], source[f"a@{step}"].state_dict()["w"])


def test_an_encoding_during_the_search_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_missing, encoding = transfer_module.find_missing, []

    def found(version: Any, *arguments: Any, **options: Any) -> Any:
        if encoding:  # As if the version's manifest had been read after, and its objects before the commit.
            with encoding.pop() as other:
                other.encode()
            raise IntegrityError("Version 1 needs an object that is lost; run `ckstore verify 1`.")
        return find_missing(version, *arguments, **options)

    monkeypatch.setattr(transfer_module, "find_missing", found)
    states = [{"weight": draw(300, 256, seed=1) + draw(300, 256, seed=2 + step, scale=1e-3)} for step in range(3)]
    ckstore.init(tmp_path / "a").close()
    ckstore.init(tmp_path / "b").close()
    with ckstore.open(tmp_path / "a") as source, ckstore.open(tmp_path / "b") as target:
        for step, state in enumerate(states):
            source.ingest(state, run="r", step=step, hot=3)
        rows = source._catalog.versions()
        encoding.append(ckstore.open(tmp_path / "a"))
        report = transfer(source._repository, target._repository, rows)
        assert report.failed == []
        assert len(report.versions) == 3
        for step, state in enumerate(states):
            assert bool((target[f"r@{step}"].state_dict()["weight"] == state["weight"]).all())


def test_a_version_whose_content_lies_deep_in_the_target_is_rebased(directory: Path) -> None:
    weights = [draw(512, 512)]
    for seed in range(1, 8):
        weights.append(weights[-1] + draw(512, 512, seed=seed, scale=1e-4))
    with ckstore.init(directory / "source") as source, ckstore.init(directory / "target") as target:
        for step, weight in enumerate(weights):
            target.ingest({"w": weight}, run="deep", step=step, hot=0, max_restore_cost=100.0)
        assert target["deep@7"].cost > 2
        source.ingest({"w": weights[7]}, run="a", step=0, hot=0)
        source.push(target)
        assert target["a@0"].cost <= 2
        assert target["deep@7"].cost <= 2, "it has the same object"
        assert torch.equal(target["a@0"]["w"].torch(), weights[7])
        assert target.verify().problems == []
