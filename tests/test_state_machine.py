"""A store holds the content of a dictionary after any operations, in any order and with any crashes."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ckstore
from ckstore.commit.join import join
from ckstore.errors import ConflictError, NotFoundError
from ckstore.gc.collect import held_since
from ckstore.gc.plan import plan_for
from ckstore.objects import units
from ckstore.policy import Policy, Retention
from ckstore.recovery.recover import recover
from ckstore.retention.encoder import BackgroundEncoder
from ckstore.storage import durable
from tests.checkpoints import listing, scratch, sha256
from tests.plans import decisions, of_changes

RUNS = ["a", "b", "c"]
TAGS = ["best", "last", "x"]
CHANGES = ["noise", "little", "nothing", "some", "fresh", "another shape", "fewer rows", "more rows"]
# As users have it, encoded at once, and as it was written until it is encoded.
HOT = [None, 0, 9]


def config_of(step: int) -> dict[str, int]:
    """Return the configuration of a version; some versions share it."""
    return {"stage": step // 3}


class Crash(BaseException):
    """The process dies."""


def first_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 30, generator=generator)
    return {"w": weight, "exp_avg": weight * 0.1, "half": weight.to(torch.bfloat16), "b": weight[0].clone()}


def changed(weights: dict[str, torch.Tensor], change: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if change == "fresh":
        return first_weights(seed)
    if change == "another shape":
        return {name: tensor.reshape(-1, 5) if tensor.dim() == 2 else tensor for name, tensor in weights.items()}
    if change == "fewer rows":
        weights = {name: tensor[:-3].clone() if len(tensor) > 9 else tensor for name, tensor in weights.items()}
    if change == "more rows":
        weights = {name: torch.cat([tensor, tensor[:2]]) for name, tensor in weights.items()}
    size = {"noise": 1e-2, "little": 1e-7, "nothing": 0.0}.get(change, 1e-2)
    found = {}
    for name, tensor in weights.items():
        noise = size * torch.randn(tensor.shape, generator=generator)
        if change == "some":
            noise *= torch.rand(tensor.shape, generator=generator) < 0.02
        found[name] = (tensor.float() + noise).to(tensor.dtype)
    return found


class StoreMachine(RuleBasedStateMachine):
    """The model: SHA-256, weights, run and step by version number; tags; and possible leftovers of a crash.

    Superseded versions are counted apart. Of thinned versions, digest and weights are those of the first restore; the
    ingested ones are kept next to them.
    """

    @initialize()
    def begin(self) -> None:
        self.closing = ExitStack()
        self.directory = self.closing.enter_context(scratch())
        # Objects of some hundred elements take all the ways that large ones take.
        self.closing.enter_context(mock.patch.object(units, "SMALL", 100))
        # A crash is one of the program's, and not of a thread behind it.
        self.closing.enter_context(mock.patch.object(BackgroundEncoder, "begin"))
        self.store = self._made()
        self.digests: dict[int, str] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.places: dict[int, tuple[str, int]] = {}
        self.tags: dict[str, int] = {}
        self.superseded: set[int] = set()
        self.left: dict[tuple[str, int], tuple[str, dict[str, torch.Tensor]]] = {}
        self.thinned: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
        # A thinning of them was killed: a recovery may finish it.
        self.begun: set[int] = set()
        # Versions pushed to another store, by id, as they were then: digest, weights, thinned weights, run and step.
        self.other = self.directory / "other"
        ckstore.init(self.other).close()
        self.sent: dict[str, tuple[str, dict[str, torch.Tensor], Any, tuple[str, int]]] = {}
        # Ids of the versions that the store has forgotten.
        self.forgotten: set[str] = set()
        # Versions that can come back, by change: digest, weights, run and step, thinned weights, mark and id by number;
        # None of versions that were thinned.
        self.undoable: list[dict[int, tuple[Any, ...] | None]] = []
        self.steps = 0

    def teardown(self) -> None:
        if hasattr(self, "closing"):
            try:
                self.everything()
            finally:
                self.store.close()
                self.closing.close()

    # Operations

    @rule(
        run=st.sampled_from(RUNS),
        change=st.sampled_from(CHANGES),
        seed=st.integers(0, 5),
        verify=st.booleans(),
        hot=st.sampled_from(HOT),
    )
    def ingest(self, run: str, change: str, seed: int, verify: bool, hot: int | None) -> None:
        weights = self._next(self._latest(run), change, seed)
        self.steps += 1
        latest = max(self._present(run), default=self._latest(run))
        self._go_back(run, latest)
        self._stored(weights, run, self.steps, verify=verify, hot=hot)

    @precondition(lambda self: self.digests)
    @rule(data=st.data())
    def encode(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.digests)))
        self.store.encode([number])
        assert not self.store[number].hot

    @rule()
    def join(self) -> None:
        join(self.store._repository, self.store._catalog.small_packs(9))

    @precondition(lambda self: self.digests)
    @rule(
        data=st.data(),
        run=st.sampled_from(RUNS),
        change=st.sampled_from(CHANGES),
        seed=st.integers(0, 5),
        hot=st.sampled_from(HOT),
    )
    def fork(self, data: st.DataObject, run: str, change: str, seed: int, hot: int | None) -> None:
        parent = data.draw(st.sampled_from(sorted(self.digests)))
        self.steps += 1
        weights = self._next(parent, change, seed)
        self._go_back(run, parent)
        self._stored(weights, run, self.steps, parent=parent, hot=hot)

    @precondition(lambda self: self.digests)
    @rule(data=st.data(), hot=st.sampled_from(HOT))
    def go_back(self, data: st.DataObject, hot: int | None) -> None:
        """Go on from any version of a run, at a new step or at one that the run has already."""
        parent = data.draw(st.sampled_from(sorted(self.digests)))
        run = self.places[parent][0]
        self.steps += 1
        # The killed ingest of a step would be there twice.
        steps = {step for other, step in self.places.values() if other == run and (run, step) not in self.left}
        step = data.draw(st.sampled_from(sorted({*steps, self.steps})))
        weights = self._next(parent, "noise", 100 + self.steps)
        before = set(self.superseded)
        self._go_back(run, parent)
        if step in {self.places[number][1] for number in self._present(run)}:
            self.superseded = before
            with pytest.raises(ConflictError, match="holds other content"):
                self.store.ingest(self._file(weights, step), run=run, step=step, parent=parent, config=config_of(step))
            return
        self._stored(weights, run, step, parent=parent, hot=hot)

    @precondition(lambda self: bool(set(self.digests) - self.superseded))
    @rule(data=st.data())
    def ingest_again(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.digests) - self.superseded)))
        run, step = self.places[number]
        digest, weights = self.thinned.get(number, (self.digests[number], self.weights[number]))
        report = self.store.ingest(self._file(weights, step), run=run, step=step, config=config_of(step))
        assert report.is_new == (number in self.thinned)
        if not report.is_new:
            assert report.version.number == number
            return
        # A thinned version is exact again, in its own place.
        self._remove(number)
        self._note(report.version.number, digest, weights, run, step)
        for tag, tagged in self.tags.items():
            if tagged == number:
                self.tags[tag] = report.version.number

    @precondition(lambda self: bool(set(self.digests) - self.superseded))
    @rule(
        data=st.data(),
        change=st.sampled_from(["noise", "fresh"]),
        seed=st.integers(6, 9),
        hot=st.sampled_from(HOT),
    )
    def replace(self, data: st.DataObject, change: str, seed: int, hot: int | None) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.digests) - self.superseded)))
        run, step = self.places[number]
        weights = self._next(number, change, seed)
        path = self._file(weights, step)
        if sha256(path) in (self.digests[number], self.thinned.get(number, ("",))[0]):
            return
        if number in self.tags.values():
            try:
                self.store.ingest(path, run=run, step=step, replace=True, config=config_of(step))
            except ConflictError:
                return
            raise AssertionError("a tagged version was replaced")
        self._stored(weights, run, step, replace=True, hot=hot)
        self._remove(number)

    @precondition(lambda self: self.digests)
    @rule(data=st.data(), tag=st.sampled_from(TAGS))
    def tag(self, data: st.DataObject, tag: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.digests)))
        self.store.tag(number, tag)
        self.tags[tag] = number

    @precondition(lambda self: self.tags)
    @rule(data=st.data())
    def untag(self, data: st.DataObject) -> None:
        tag = data.draw(st.sampled_from(sorted(self.tags)))
        self.store.untag(tag)
        del self.tags[tag]

    @precondition(lambda self: self.digests)
    @rule(data=st.data(), budget=st.sampled_from([None, 1.0, 1.2]))
    def rebase(self, data: st.DataObject, budget: float | None) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.digests)), min_size=1, max_size=3, unique=True))
        self.store.rebase(numbers, max_restore_cost=budget)
        for number in numbers:
            row = self.store._catalog.version(number)
            assert row.depth == 0 if budget is None else row.cost <= max(budget, 1.0) + 1e-3

    @precondition(lambda self: self.digests)
    @rule(data=st.data())
    def thin(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.digests)), min_size=1, max_size=4, unique=True))
        if any(number in self.tags.values() and number not in self.thinned for number in numbers):
            with pytest.raises(ConflictError, match="remove the tag first"):
                self.store.thin(numbers)
            return
        self.store.encode(numbers)  # Hot versions are encoded before they are thinned; a dry run does not.
        before = self._files()
        expected = self.store.thin(numbers, dry_run=True)
        assert self._files() == before
        report = self.store.thin(numbers)
        assert report == expected
        thinned = {item.version.number for item in report.versions}
        assert thinned.isdisjoint(self.thinned)
        assert thinned | set(report.skipped) == set(numbers)
        for number in thinned:
            self._note_thinned(number)
        self.undoable.append(dict.fromkeys(thinned))

    @precondition(lambda self: set(self.digests) - set(self.thinned) - set(self.tags.values()))
    @rule(
        data=st.data(),
        at=st.sampled_from(["pack-written", "pack-renamed", "log-written", "before-commit", "after-commit"]),
        nth=st.integers(1, 4),
    )
    def crash_thin(self, data: st.DataObject, at: str, nth: int) -> None:
        """Kill a thinning; its leftovers do no harm, and it can be done again."""
        exact = sorted(set(self.digests) - set(self.thinned) - set(self.tags.values()))
        numbers = data.draw(st.lists(st.sampled_from(exact), min_size=1, max_size=3, unique=True))
        seen: list[str] = []

        def stop(step: str) -> None:
            seen.append(step)
            if step == at and seen.count(step) == nth:
                raise Crash

        dead = (
            mock.patch.object(durable, "checkpoint", stop),
            mock.patch("ckstore.commit.change.remove_uncommitted"),
        )
        with suppress(Crash), dead[0], dead[1]:
            self.store.thin(numbers)
        self._begin_again()
        self.undoable.append({})
        for number in numbers:
            if self.store[number].fidelity == "coarse":
                self._note_thinned(number)
                self.undoable[-1][number] = None
            else:
                self.begun.add(number)

    @precondition(lambda self: self.digests)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.digests)), min_size=1, max_size=6, unique=True))
        with ckstore.open(self.other) as other:
            report = self.store.push(other, numbers)
            assert len(report.versions) + len(report.there) + len(report.failed) == len(numbers)
            for item in report.versions:
                assert item.arrived is not None
                number, uid = item.version.number, item.arrived.uid
                assert uid == item.version.uid
                before = self.thinned.get(number)
                self.sent[uid] = self.digests[number], self.weights[number], before, self.places[number]
            # It was replaced here since it was sent.
            assert all(isinstance(item.error, ConflictError) for item in report.failed)
            assert other.verify().problems == []
            assert {row.uid for row in other._catalog.versions()} == set(self.sent)
            for uid, (digest, *_) in self.sent.items():
                other[uid].checkout(self.directory / "out", force=True)
                assert sha256(self.directory / "out") == digest

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), verify=st.booleans(), restore=st.booleans())
    def pull(self, data: st.DataObject, verify: bool, restore: bool) -> None:
        """Pull versions that were forgotten or replaced here, with their tags where these are free."""
        ids = data.draw(st.lists(st.sampled_from(sorted(self.sent)), min_size=1, max_size=4, unique=True))
        with ckstore.open(self.other, "r") as other:
            report = self.store.pull(other, ids, verify=verify, restore=restore)
            assert {row.uid for row in report.forgotten} <= (set() if restore else self.forgotten)
            assert restore or self.forgotten.isdisjoint(item.version.uid for item in report.versions)
            assert all(isinstance(item.error, ConflictError) for item in report.failed)
            for item in report.versions:
                assert item.arrived is not None
                digest, weights, thinned, place = self.sent[item.version.uid]
                self._note(item.arrived.number, digest, weights, *place)
                if thinned is not None:
                    self.thinned[item.arrived.number] = thinned
            numbers = {place: number for number, place in self.places.items() if number not in self.superseded}
            known = {row.uid: row.number for row in self.store._catalog.versions()}
            self._take_marks()
            there = [*report.there, *(item.version for item in report.versions)]
            meant = {row.number: known.get(row.uid) or numbers[self.sent[row.uid][3]] for row in there}
            for tag, number in other._catalog.tags().items():
                if number in meant:
                    self.tags.setdefault(tag, meant[number])

    @precondition(lambda self: set(self.digests) - set(self.tags.values()))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        untagged = sorted(set(self.digests) - set(self.tags.values()))
        numbers = data.draw(st.lists(st.sampled_from(untagged), min_size=1, max_size=4, unique=True))
        self.undoable.append({number: self._known(number) for number in numbers})
        self.forgotten |= {row.uid for row in self.store.forget(numbers).versions}
        for number in numbers:
            self._remove(number, for_good=False)

    @rule()
    def undo(self) -> None:
        """Bring back the versions that were forgotten last, unless a run has another one there, or `gc` freed it.

        Or make the versions exact that were thinned last.
        """
        last = self.undoable[-1] if self.undoable else {}
        taken = {place for number, place in self.places.items() if number not in self.superseded}
        uids = {row.uid for row in self.store._catalog.versions()}
        if not last:
            with pytest.raises(NotFoundError):
                self.store.undo()
        elif None in last.values():
            assert {row.number for row in self.store.undo().versions} == set(last)
            self.undoable.pop()
            for number in last:
                self.digests[number], self.weights[number] = self.thinned.pop(number)
        elif any(
            uid in uids or (place in taken and not superseded) for _, _, place, _, superseded, uid in last.values()
        ):
            with pytest.raises(ConflictError):
                self.store.undo()
        else:
            rows = self.store.undo().versions
            assert {row.number for row in rows} == set(last)
            self.undoable.pop()
            self.forgotten -= {row.uid for row in rows}
            for number, (digest, weights, place, thinned, superseded, _) in last.items():
                self._note(number, digest, weights, *place)
                if thinned is not None:
                    self.thinned[number] = thinned
                if superseded:
                    self.superseded.add(number)

    @precondition(lambda self: self.digests)
    @rule(data=st.data(), exact=st.none() | st.integers(1, 3), keep=st.none() | st.integers(3, 5))
    def retain(self, data: st.DataObject, exact: int | None, keep: int | None) -> None:
        run, _ = self.places[data.draw(st.sampled_from(sorted(self.digests)))]
        every = sorted((step, number) for number, (of, step) in self.places.items() if of == run)
        there = [item for item in every if item[1] not in self.superseded]
        behind = [item for item in every if item[1] in self.superseded]
        followed = {row.parent for row in self.store._catalog.versions() if row.run != run}
        stays = {*self.tags.values(), *followed}
        numbers = sorted(number for _, number in there)
        late = [{n for _, n in there[-count:]} | set(numbers[-count:]) for count in (keep or 99, exact or 99)]
        for found, count in zip(late, (keep or 99, exact or 99), strict=True):
            if (room := count - len(there)) > 0:
                found |= {n for _, n in behind[-room:]} | set(sorted(n for _, n in behind)[-room:])
        gone = [number for _, number in behind + there if number not in stays | late[0]]
        may_thin = {number for _, number in every} - late[1] - stays - set(gone) - set(self.thinned)
        self.store.set_policy(Policy(hot=0, retention=Retention(exact_last=exact, keep_last=keep)), run)
        expected = self.store.retain(run, dry_run=True)
        report = self.store.retain(run)
        self.store.set_policy(None, run)
        assert [row.number for row in report.forgotten] == [row.number for row in expected.forgotten] == gone
        assert {row.number for row in expected.thinned} == may_thin
        self.forgotten |= {row.uid for row in report.forgotten}
        thinned = {row.number for row in report.thinned}
        assert thinned <= may_thin
        for number in gone:
            self._remove(number)
        for number in thinned:
            self._note_thinned(number)

    @rule(at_once=st.booleans())
    def gc(self, at_once: bool) -> None:
        before = self._files()
        expected = self.store.gc(grace=0 if at_once else 3600, dry_run=True)
        assert self._files() == before
        bytes_before = sum(before.values())
        report = self.store.gc(grace=0 if at_once else 3600)
        assert report.rewritten == expected.rewritten
        # A copy that a recovery took in may be the pack that its original is rewritten as.
        assert expected.removed - report.rewritten <= report.removed <= expected.removed
        logged = sum(size for name, size in self._files().items() if name.startswith("log"))
        logged -= sum(size for name, size in before.items() if name.startswith("log"))
        assert bytes_before - sum(self._files().values()) == report.bytes - logged
        if at_once:
            self.left = {}
            self.begun = set()
        assert self.store.gc(dry_run=True).bytes == 0
        # A collection that finds no garbage leaves nothing out.
        kept = set(self.store.log(forgotten=True).values("version"))
        assert at_once or kept == set().union(*self.undoable)
        self.undoable = [versions for versions in self.undoable if versions and versions.keys() <= kept]

    @rule(
        at=st.sampled_from(["pack-renamed", "log-written", "before-commit", "after-commit", "pack-removed"]),
        nth=st.integers(1, 3),
    )
    def crash_gc(self, at: str, nth: int) -> None:
        """Kill a gc; its leftovers do no harm, and the next one finishes."""
        seen: list[str] = []

        def stop(step: str) -> None:
            seen.append(step)
            if step == at and seen.count(step) == nth:
                raise Crash

        dead = (
            mock.patch.object(durable, "checkpoint", stop),
            mock.patch("ckstore.gc.collect.remove_uncommitted"),
        )
        with suppress(Crash), dead[0], dead[1]:
            self.store.gc()
        self._begin_again()

    @rule(crashed=st.booleans())
    def recover(self, crashed: bool) -> None:
        self._recovered(crashed=crashed)
        for number in self.begun & set(self.digests) - set(self.thinned):
            if self.store[number].fidelity == "coarse":
                self._note_thinned(number)
                if number in self.store.log(forgotten=True).values("version"):  # It was killed after the record.
                    self.undoable.append({number: None})
        self.begun = set()
        taken = set(self.places.values())
        for place, (digest, weights) in self.left.items():
            if place not in taken:
                catalog = self.store._catalog
                row = catalog.at_step(*place) or catalog.at_step(*place, superseded=True)
                assert row is not None, "a pack that was complete when its ingest was killed brings its version back"
                self._note(row.number, digest, weights, *place)
                self._take_marks()
        self.left = {}

    @rule(mode=st.sampled_from(["a", "r"]))
    def reopen(self, mode: Any) -> None:
        self.store.close()
        if mode == "r":
            with self._open("r") as reader:
                assert {row.number for row in reader.versions()} == set(self.digests)
        self.store = self._open()

    @rule(
        run=st.sampled_from(RUNS),
        change=st.sampled_from(CHANGES),
        at=st.sampled_from(["pack-written", "pack-synced", "pack-renamed", "before-commit", "after-commit"]),
        nth=st.integers(1, 2),
        hot=st.sampled_from(HOT),
    )
    def crash(self, run: str, change: str, at: str, nth: int, hot: int | None) -> None:
        """An ingest that dies at a step of its commit; the process that goes on is another one."""
        weights = self._next(self._latest(run), change, 10)
        self.steps += 1
        with suppress(NotFoundError):  # A run without versions.
            self.store.encode(run=run)  # Encodings on the way would have commits of their own.
        path = self._file(weights, self.steps)
        seen: list[str] = []

        def stop(step: str) -> None:
            # Transactions before the packs are the reservation's and the lease's.
            if step.startswith("pack-") or any(name.startswith("pack-") for name in seen):
                seen.append(step)
                if step == at and seen.count(step) == (nth if at.startswith("pack-") else 1):
                    raise Crash

        died = False
        with mock.patch.object(durable, "checkpoint", stop), mock.patch("ckstore.commit.change.remove_uncommitted"):
            try:
                config = config_of(self.steps)
                number = self.store.ingest(path, run=run, step=self.steps, hot=hot, config=config).version.number
            except Crash:
                died = True
        (self.store.path / "packs" / ".tmp-1-0123abcd").write_bytes(b"half a pack")
        self.store = self._open()
        place = run, self.steps
        row = self.store._catalog.at_step(*place)
        if not died or at == "after-commit":
            assert row is not None
            assert died or row.number == number
            self._note(row.number, sha256(path), weights, *place)
            return
        assert row is None
        # The coarse pack is the one that names the version; it is finished last.
        finished = at == "before-commit" or (at == "pack-renamed" and self._coarse_is_there(place))
        if finished:
            self.left[place] = sha256(path), weights

    # Invariants

    @invariant()
    def versions_and_tags(self) -> None:
        if not hasattr(self, "store"):
            return
        rows = self.store._catalog.versions()
        assert {row.number: (row.run, row.step) for row in rows} == self.places
        assert all(row.metrics["config"] == config_of(row.step or 0) for row in rows)
        assert {row.number for row in rows if row.superseded} == self.superseded
        for run in {run for run, _ in self.places.values()}:
            present = self._present(run) or {number for number, (of, _) in self.places.items() if of == run}
            assert self.store[run].number == max(present, key=lambda number: (self.places[number][1], number))
            latest = self.store._catalog.latest(run)
            assert latest is not None
            assert latest.number == max(present)
        assert {run.name for run in self.store._catalog.runs()} == {run for run, _ in self.places.values()}
        assert {row.number for row in rows if row.fidelity == "coarse"} == set(self.thinned)
        assert self.store._catalog.tags() == self.tags
        assert all(row.parent is None or row.parent in self.digests for row in rows)

    @invariant()
    def a_clean_store_has_no_garbage(self) -> None:
        if not hasattr(self, "store"):
            return
        held = held_since(self.store._repository)
        found = of_changes(self.store, 3600)
        if held is not None or found is not None:
            plan = plan_for(self.store._repository, 3600, whole=True)
            assert held is None or (plan.is_empty and plan.survey.held <= held)
            assert found is None or decisions(found) == decisions(plan)

    @precondition(lambda self: self.digests)
    @rule(data=st.data())
    def read_one(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.digests)))
        for name, tensor in self.weights[number].items():
            assert torch.equal(self.store[number][name].torch(), tensor)

    @rule()
    def everything(self) -> None:
        """All of it, by a process that has nothing cached."""
        with self._open("r") as reader:
            assert reader.verify().problems == []
            for number, digest in self.digests.items():
                reader[number].checkout(self.directory / "out", force=True)
                assert sha256(self.directory / "out") == digest

    def _made(self) -> ckstore.Store:
        return ckstore.init(self.directory / "store")

    def _open(self, mode: Any = "a") -> ckstore.Store:
        return ckstore.open(self.store.place, mode)

    def _files(self) -> dict[str, int]:
        """Return the sizes of the files that gc frees, and of the log, by names that are digests."""
        return listing(self.store.place)

    def _recovered(self, *, crashed: bool) -> None:
        if crashed:
            self.store.close()
            (self.store.path / "catalog.sqlite").unlink()
        assert recover(self.store.place).problems == []
        if crashed:
            self.store = self._open()

    def _present(self, run: str) -> set[int]:
        """Return the versions of a run that are not superseded."""
        return {number for number, (of, _) in self.places.items() if of == run} - self.superseded

    def _take_marks(self) -> None:
        """Take over the marks of the store: of versions that a pull or a recovery brings."""
        rows = self.store._catalog.versions()
        self.superseded = {row.number for row in rows if row.superseded}
        present = [(row.run, row.step) for row in rows if not row.superseded]
        assert len(set(present)) == len(present)

    def _go_back(self, run: str, parent: int | None) -> None:
        """Mark the versions of a run that goes on from a version, unless that is its tip."""
        present = self._present(run)
        if parent is None or self.places[parent][0] != run:
            return
        if present and parent in (max(present), max(present, key=lambda number: self.places[number][1])):
            return
        parents = {row.number: row.parent for row in self.store._catalog.versions()}
        back: set[int] = set()
        fork: int | None = parent
        while fork in self.superseded and self.places[fork][0] == run:
            back.add(fork)
            fork = parents[fork]
        if fork is None or self.places[fork][0] != run:
            fork = 0
        steps = {self.places[number][1] for number in back}
        later = {number for number in present if number > fork or self.places[number][1] in steps}
        self.superseded = (self.superseded - back) | later

    def _latest(self, run: str) -> int | None:
        return max((number for number, (other, _) in self.places.items() if other == run), default=None)

    def _next(self, number: int | None, change: str, seed: int) -> dict[str, torch.Tensor]:
        return first_weights(seed) if number is None else changed(self.weights[number], change, seed)

    def _file(self, weights: dict[str, torch.Tensor], step: int) -> Any:
        path = self.directory / "checkpoint.pt"
        torch.save(weights, path)
        return path

    def _stored(self, weights: dict[str, torch.Tensor], run: str, step: int, **options: Any) -> None:
        path = self._file(weights, step)
        report = self.store.ingest(path, run=run, step=step, config=config_of(step), **options)
        assert report.is_new
        self._note(report.version.number, sha256(path), weights, run, step)

    def _note(self, number: int, digest: str, weights: dict[str, torch.Tensor], run: str, step: int) -> None:
        assert number not in self.digests, "a number was given twice"
        self.digests[number] = digest
        self.weights[number] = weights
        self.places[number] = run, step

    def _note_thinned(self, number: int) -> None:
        """Note a thinned version's restored content, which is within its stated bounds."""
        exact = self.weights[number]
        self.thinned[number] = self.digests[number], exact
        said = self.store[number].deviations()
        found = {name: self.store[number][name].torch() for name in exact}
        for name, tensor in exact.items():
            off = float((found[name].double() - tensor.double()).abs().max())
            assert off <= said[name].max_abs if name in said else off == 0.0
        self.store[number].checkout(self.directory / "out", force=True)
        self.digests[number] = sha256(self.directory / "out")
        self.weights[number] = found

    def _begin_again(self) -> None:
        """Go on in another process; the lease of the dead one went with it."""
        self.store = self._open()
        with mock.patch.object(durable, "is_running", return_value=False), self.store._catalog.lease("begin"):
            pass

    def _known(self, number: int) -> tuple[Any, ...]:
        """Return the model's knowledge of a version, and its id."""
        is_superseded, uid = number in self.superseded, self.store._catalog.version(number).uid
        thinned = self.thinned.get(number)
        return self.digests[number], self.weights[number], self.places[number], thinned, is_superseded, uid

    def _remove(self, number: int, *, for_good: bool = True) -> None:
        if for_good:  # Its exact values go, too.
            self.undoable = [
                {other: known for other, known in versions.items() if known or other != number}
                for versions in self.undoable
            ]
        self.undoable = [versions for versions in self.undoable if versions]
        for record in (self.digests, self.weights, self.places):
            del record[number]
        self.thinned.pop(number, None)
        self.superseded.discard(number)

    def _coarse_is_there(self, place: tuple[str, int]) -> bool:
        packs = self.store._repository.packs.list_packs()
        documents = [self.store._repository.resolver.manifest(pack.name).document.described() for pack in packs]
        return any(document is not None and (document.run, document.step) == place for document in documents)


StoreMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestStore = pytest.mark.local(StoreMachine.TestCase)
