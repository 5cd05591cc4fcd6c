"""A gc that looks at the changes alone frees the same bytes as a walk over the whole store."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckstore
from ckstore.commit.change import Change
from ckstore.errors import ConflictError, IntegrityError, NotFoundError
from ckstore.gc import changed
from ckstore.gc.changed import changes
from ckstore.gc.plan import plan_for
from ckstore.objects import units
from ckstore.storage import pack as packs
from ckstore.writing.drop import drop
from tests.catalog_edits import edit
from tests.checkpoints import settled
from tests.plans import decisions, of_changes

pytestmark = [pytest.mark.prompt, pytest.mark.local]

State = dict[str, torch.Tensor]


class History:
    """A store, and operations on it that a random generator draws."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place = place
        self.store = self._made()
        self._random = random.Random(seed)
        self._torch = torch.Generator().manual_seed(seed)
        self._still = self._draw(900)
        self._states: dict[str, State] = {}
        self._steps = self._names = 0

    def _made(self) -> ckstore.Store:
        return ckstore.init(self.place)

    def act(self) -> str:
        """Make one change; return its name."""
        names = [*["ingest"] * 6, *["forget"] * 4, "for_good", "undo", "thin", "rebase", "encode", "tag", "untag"]
        names += ["rename", "drop", "replace", "fork", "gc", "gc", "recover"]
        name = self._random.choice(names)
        with suppress(ConflictError, NotFoundError):
            getattr(self, name)()
        settled(self.store)
        return name

    def ingest(self, run: str | None = None, **options: object) -> None:
        run = run or self._random.choice(["a", "b"])
        state = self._states.setdefault(run, {"w": self._draw(1200), "v": self._draw(400), "still": self._still})
        state["w"] = state["w"] + self._random.choice([1e-4, 1e-2, 1.0]) * self._draw(1200)
        state["v"] = self._random.choice([state["v"], self._draw(400)])
        self._steps += 1
        hot = self._random.choice([0, 0, 1, 3])
        self.store.ingest(dict(state), run=run, **{"step": self._steps, "hot": hot, **options})  # type: ignore[arg-type]

    def replace(self) -> None:
        row = self._any()
        self.ingest(row.run, step=row.step, replace=True)

    def fork(self) -> None:
        self._names += 1
        self.ingest(f"fork{self._names}", parent=self._any().number)

    def forget(self) -> None:
        numbers = [row.number for row in self._rows()]
        self.store.forget(self._random.sample(numbers, min(len(numbers), self._random.choice([1, 1, 3]))))

    def for_good(self) -> None:
        run = self._any().run
        self.store.forget(run=run, keep_last=3, prune=True)

    def undo(self) -> None:
        self.store.undo()

    def thin(self) -> None:
        self.store.thin(self._any().number)

    def rebase(self) -> None:
        self.store.rebase(self._any().number)

    def drop(self) -> None:
        drop(self.store._repository, [self._any()], ["v"])

    def encode(self) -> None:
        self.store.encode()

    def tag(self) -> None:
        self.store.tag(self._any().number, self._random.choice(["one", "two"]))

    def untag(self) -> None:
        self.store.untag(self._random.choice(["one", "two"]))

    def rename(self) -> None:
        self._names += 1
        run = self._any().run
        self.store.rename_run(run, f"name{self._names}")
        if run in self._states:
            self._states[f"name{self._names}"] = self._states[run]

    def gc(self) -> None:
        self.store.gc(grace=self._random.choice([0, 0, None]))

    def recover(self) -> None:
        self.store.close()
        if self._random.random() < 0.5:
            (self.place / "catalog.sqlite").unlink()
        assert ckstore.recover(self.place).problems == []
        self.store = ckstore.open(self.place)

    def _rows(self) -> list[ckstore.VersionRow]:
        return self.store._catalog.versions()

    def _any(self) -> ckstore.VersionRow:
        rows = self._rows()
        if not rows:
            raise NotFoundError("No version.")
        return self._random.choice(rows)

    def _draw(self, count: int) -> torch.Tensor:
        return torch.randn(count, generator=self._torch)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_changes_alone_give_the_plan_of_the_whole_store(seed: int, tmp_path: Path) -> None:
    made = 0
    with (
        mock.patch.object(units, "SMALL", 200),
        mock.patch.object(packs, "_SMALL", 200),
        mock.patch.object(changed, "_SHARE", 1.0),
    ):
        history = History(tmp_path / "store", seed)
        acts = []
        for _ in range(40):
            acts.append(history.act())
            for grace in (None, 0.0):
                found = of_changes(history.store, grace)
                if found is not None:
                    made += 1
                    whole = plan_for(history.store._repository, grace, whole=True)
                    assert decisions(found) == decisions(whole), (acts, grace)
            if acts[-1] == "gc":
                assert history.store.verify().problems == []
        history.store.gc(grace=0)
        assert plan_for(history.store._repository, 0.0, whole=True).is_empty
        assert history.store.verify().problems == []
        history.store.close()
    assert made > 40


@pytest.mark.long
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE version_packs SET objects = ''",
        "UPDATE version_packs SET blobs = 0",
        "DELETE FROM version_packs",
        "DELETE FROM pack_bases",
        "UPDATE packs SET uses = 0",
        "UPDATE packs SET held = 0",
        "UPDATE packs SET held = NULL",
        "DELETE FROM recent_objects WHERE key % 2",
        "UPDATE recent_objects SET pack = (SELECT MAX(id) FROM packs) WHERE key % 2",
    ],
)
def test_a_damaged_index_frees_no_needed_byte(statement: str, tmp_path: Path) -> None:
    place = tmp_path / "store"
    generator = torch.Generator().manual_seed(0)
    weight, still = torch.randn(20_000, generator=generator), torch.randn(18_000, generator=generator)
    with mock.patch.object(changed, "_SHARE", 1.0), ckstore.init(place) as store:
        for step in range(8):
            weight = weight + 1e-3 * torch.randn(20_000, generator=generator)
            store.ingest({"w": weight, "still": still}, run="a", step=step, hot=0)
        states = {step: store[f"a@{step}"].state_dict() for step in (1, 2, 4, 5, 7)}
        store.forget(["a@0", "a@3", "a@6"])
        edit(place / "catalog.sqlite", statement)
        with suppress(IntegrityError):
            store.gc(grace=0)
    assert ckstore.recover(place).problems == []
    with ckstore.open(place) as store:
        assert store.verify().problems == []
        for step, state in states.items():
            found = store[f"a@{step}"].state_dict()
            assert all(torch.equal(found[name], value) for name, value in state.items())


def test_a_base_that_another_push_brought_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pushes send one base; the later one's object, a sum, lies in another pack than it."""
    weight, policy = torch.randn(300, 256), ckstore.Policy("coarse", "lc")
    with ckstore.init(tmp_path / "source") as source, ckstore.init(tmp_path / "target") as target:
        for step in range(3):
            moments = {"exp_avg": 0.001 * weight, "exp_avg_sq": weight**2}
            state = {"model": {"weight": weight}, "optimizer": {"state": {0: moments}}}
            source.ingest(state, run="a", step=step, hot=0, policy=policy)
            weight = weight + 0.1 * torch.randn(300, 256)
        settled(source)
        commit = Change.commit_version

        def after_another(change: Change, *arguments: Any, **options: Any) -> int:
            monkeypatch.setattr(Change, "commit_version", commit)
            with ckstore.open(source.place, "r") as again, ckstore.open(target.place) as other:
                other.pull(again, ["a@1"])
            return commit(change, *arguments, **options)

        monkeypatch.setattr(changed, "_SHARE", 1.0)
        monkeypatch.setattr(Change, "commit_version", after_another)
        assert len(source.push(target, ["a@2"]).versions) == 1
        assert target["a@2"]._stored.row.depth
        assert target.verify().problems == []
        target.gc(grace=0)
        target.forget(["a@1"])
        found = changes(target._repository)
        assert found is not None
        assert found.packs
        target.gc(grace=0)
        assert target.verify().problems == []
        assert target["a@2"].sha256() == source["a@2"].sha256()


def test_an_object_that_was_lost_and_stored_again_stays(tmp_path: Path) -> None:
    """Nothing in the catalog says that the version which lacked it needs the object in its new pack."""
    values, others = torch.randn(70_000), [torch.randn(70_000) for _ in range(60)]
    place = tmp_path / "store"
    with ckstore.init(place) as store:
        store.ingest({"w": values}, run="lost", step=0, hot=0)
        [pack] = (place / "packs").glob("*.zip")
        for step, other in enumerate(others):
            store.ingest({"v": other}, run="b", step=step, hot=0)
        store.ingest({"v": others[0], "w": values}, run="a", step=0, hot=0, parent="b@0")
        settled(store)
    pack.unlink()
    assert ckstore.recover(place).problems
    with ckstore.open(place) as store:
        store.ingest({"u": others[1], "w": values}, run="again", step=0, hot=0, parent="b@0")
        settled(store)
        assert torch.equal(store["a@0"].state_dict()["w"], values)
        store.gc(grace=0)
        store.forget(["again@0"])
        assert changes(store._repository) is None
        store.gc(grace=0)
        assert torch.equal(store["a@0"].state_dict()["w"], values)
    assert ckstore.recover(place).problems == []
    with ckstore.open(place) as store:
        assert not store._catalog.is_incomplete()
        assert store.verify().problems == []


def test_a_version_that_was_renumbered_before_the_last_gc_is_not_gone(tmp_path: Path) -> None:
    """Its former number is that of another version, which is forgotten; the record of both is read."""
    place = tmp_path / "store"
    for run, path in (("a", place), ("b", tmp_path / "other")):
        with ckstore.init(path) as store:
            store.ingest({"w": torch.randn(70_000)}, run=run, step=0, hot=0)
            settled(store)
    for pack in (tmp_path / "other" / "packs").glob("*.zip"):
        shutil.copy(pack, place / "packs")
    [problem] = ckstore.recover(place).problems
    assert "both claim number 1" in problem
    with mock.patch.object(changed, "_SHARE", 1.0), ckstore.open(place) as store:
        store.gc(grace=0)
        [forgotten, other] = store._catalog.versions()
        assert (forgotten.number, other.number) == (1, 2)
        store.thin(2)
        store.forget([1])
        plan = of_changes(store, 0.0)
        assert plan is not None
        assert decisions(plan) == decisions(plan_for(store._repository, 0.0, whole=True))
        assert store.gc(grace=0).versions == 1
        gone = [version for record in store._catalog.log_records() for version in record.get("versions", [])]
        assert [version[:2] for version in gone if isinstance(version, list)] == [[forgotten.uid, 1]]
