"""What reviews of coarse versions, thinning and `gc` found: cases between two features that neither's tests had."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.cli.program import run
from ckstore.cli.storage_facts import StorageFacts
from ckstore.codecs.schemes.dynaquant import DynaQuantSettings
from ckstore.errors import UsageError
from ckstore.operations.recover import recover
from ckstore.policy import Policy

from .coarse_checks import same_bits, stored, values_of


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moving(step: int) -> dict[str, torch.Tensor]:
    """A weight that moves a little, and a table that changes altogether."""
    return {"w": draw(300, 256) + 1e-3 * draw(300, 256, seed=step + 1), "table": torch.arange(100_000) * (step + 1)}


@pytest.mark.parametrize("of_run", [False, True])
def test_sources_are_not_removed_where_the_policy_is_coarse(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], of_run: bool
) -> None:
    source = tmp_path / "step1.pt"
    torch.save(moving(1), source)
    place = ["--store", str(tmp_path / "store")]
    assert run(["init", str(tmp_path / "store")]) == 0
    assert run([*place, "policy", "--fidelity", "coarse", *(["--run", "gpt"] if of_run else [])]) == 0
    assert run([*place, "ingest", str(source), "--run", "gpt", "--verify", "--delete-source"]) == 2
    assert "--fidelity exact" in capfd.readouterr().err
    assert source.exists()
    with ckstore.open(tmp_path / "store") as store:
        assert store.versions() == []
    assert (
        run([*place, "ingest", str(source), "--run", "gpt", "--fidelity", "exact", "--verify", "--delete-source"]) == 0
    )
    assert not source.exists()


def test_a_source_stays_where_a_policy_is_set_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "step1.pt"
    torch.save(moving(1), source)
    with ckstore.init(tmp_path / "store"):
        pass
    ingest = ckstore.Store.ingest

    def later(self: ckstore.Store, *arguments: Any, **options: Any) -> object:
        self.set_policy(Policy("coarse"))
        return ingest(self, *arguments, **options)

    monkeypatch.setattr(ckstore.Store, "ingest", later)
    assert run(["--store", str(tmp_path / "store"), "ingest", str(source), "--verify", "--delete-source"]) == 2
    assert source.exists()


def test_a_version_with_another_number_outlasts_thin_gc_and_recover(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest(moving(1), run="a", step=1)
    shutil.copy(path / "catalog.sqlite", tmp_path / "older.sqlite")
    with ckstore.open(path) as store:
        store.ingest(moving(2), run="a", step=2)
    shutil.copy(tmp_path / "older.sqlite", path / "catalog.sqlite")
    with ckstore.open(path) as store:
        store.ingest(moving(3), run="b", step=3)
    assert "both claim number 2" in recover(path).problems[0]
    with ckstore.open(path) as store:
        store.thin([3])
        assert store.gc(grace=0).versions == 0
        names = {(row.number, row.run, row.step) for row in store.versions()}
        before = values_of(store[3])
    assert names == {(1, "a", 1), (2, "b", 3), (3, "a", 2)}
    for _ in range(2):
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            assert {(row.number, row.run, row.step) for row in store.versions()} == names
            assert store.versions()[2].fidelity == "coarse"
            assert all(same_bits(before[name], value) for name, value in values_of(store[3]).items())
            store.gc(grace=0)
            assert not store.verify().problems


def test_a_search_that_is_killed_leaves_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    seen: list[Path] = []

    def evaluate(file: Path) -> float:
        seen.append(file)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return 1.0

    # Who is killed takes nothing back.
    monkeypatch.setattr("ckstore.operations.commit.remove_uncommitted", lambda *_: None)
    with ckstore.init(path) as store:
        store.ingest(moving(0), run="a", step=0)
        committed = set((path / "packs").iterdir())
        with pytest.raises(KeyboardInterrupt):
            store.ingest(moving(1), run="a", step=0, replace=True, max_degradation=0.01, evaluate=evaluate)
    left = set((path / "packs").iterdir()) - committed
    assert left
    for _ in range(2):
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            assert [(row.number, row.fidelity) for row in store.versions()] == [(1, "exact")]
            assert all(same_bits(moving(0)[name], value) for name, value in values_of(store[1]).items())
            assert store.gc(grace=0).files in (0, len(left))
    assert set((path / "packs").iterdir()) == committed


@pytest.mark.parametrize(
    ("first", "then", "is_new"),
    [
        ({"quality": 4.0}, {"quality": 4.0}, False),
        ({"quality": 4.0}, {"quality": 8.0}, False),
        ({"quality": 4.0}, {"quality": 1.0}, True),
        ({"quality": 4.0}, {"max_abs_error": 1e-4}, True),
        ({"max_abs_error": 1e-4}, {"max_abs_error": 1e-4}, False),
        ({"max_abs_error": 1e-4}, {"max_abs_error": 1e-3}, False),
        ({"max_abs_error": 1e-4}, {"max_rel_error": 1e-4}, True),
        ({"max_abs_error": 1e-4}, {"max_abs_error": 1e-5}, True),
        ({"max_abs_error": 1e-4}, {"fidelity": "exact"}, True),
        ({"fidelity": "exact"}, {"max_abs_error": 1e-5}, False),
        ({"quality": 4.0}, {"max_degradation": 0.1, "evaluate": lambda _: 1.0}, True),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_the_same_content_is_stored_again_where_it_is_to_be_more_faithful(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], is_new: bool
) -> None:
    with ckstore.init(tmp_path / "store") as store:
        before = store.ingest(moving(1), run="a", step=1, **first).version
        store.tag(before.number, "best")
        report = store.ingest(moving(1), run="a", step=1, **then)
        assert report.is_new == is_new
        assert [row.number for row in store.versions()] == [report.version.number]
        assert store["best"].row.number == report.version.number
        if "max_abs_error" in then:
            errors = [item.max_abs for item in store["best"].deviations().values()]
            assert max(errors, default=0.0) <= then["max_abs_error"]


def test_a_name_by_itself_is_not_its_characters(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(12):
            store.ingest({"w": [step]}, run="a", step=step)
        assert [row.number for row in store.forget("12").versions] == [12]
        assert [row.number for row in store.forget("2..3", dry_run=True).versions] == [2, 3]
        assert store.thin("11", dry_run=True).skipped == [11]
        assert len(store.versions()) == 11


def test_a_policy_with_settings_is_kept_and_said(tmp_path: Path) -> None:
    policy = Policy("coarse", "dynaquant", settings=DynaQuantSettings(levels=8, metric="sensitivity"))
    assert Policy.from_text(policy.to_text()) == policy
    assert "levels 8" in str(policy)
    assert "metric sensitivity" in str(policy)
    with ckstore.init(tmp_path / "store") as store:
        store.set_policy(policy)
        assert store.policy() == policy
    with pytest.raises(UsageError, match="dynaquant"):
        Policy("coarse", settings=DynaQuantSettings())


@pytest.mark.parametrize("options", [{}, {"scheme": "lc"}, {"scheme": "dynaquant"}], ids=str)
def test_the_nearest_version_may_be_coarse(tmp_path: Path, options: dict[str, Any]) -> None:
    with ckstore.init(tmp_path / "store") as store:
        stored(store, {"w": draw(300, 256, seed=9)}, run="other", **options)
        near = stored(store, {"w": draw(300, 256)}, run="first", **options)
        fork = stored(store, {"w": draw(300, 256) + 1e-3}, run="fork", parent="auto", **options)
        assert fork.row.parent == near.row.number


def test_second_moments_in_float16_do_not_become_zero(tmp_path: Path) -> None:
    second = ((3e-3 * draw(300, 256)) ** 2).half()
    state = {0: {"exp_avg": draw(300, 256, seed=1).half(), "exp_avg_sq": second}}
    with ckstore.init(tmp_path / "store") as store:
        version = stored(store, {"model": {"w": draw(300, 256, seed=2).half()}, "optimizer": {"state": state}})
        assert "model/w" in version.deviations()
        assert same_bits(version["optimizer/state/[0]/exp_avg_sq"].torch(), second)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_what_stays_exact_does_so_beside_a_weight_of_the_same_bytes(tmp_path: Path, names: str) -> None:
    parts = draw(300, 256, 2)
    tree = dict(sorted({names[0]: parts, names[1]: torch.view_as_complex(parts.clone())}.items()))
    with ckstore.init(tmp_path / "store") as store:
        version = stored(store, tree)
        assert version.deviations() == {}
        assert version.row.fidelity == "exact"
        assert all(same_bits(tree[name], value) for name, value in values_of(version).items())


def test_what_a_codebook_keeps_aside_counts(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        version = stored(store, {"w": draw(300, 256)}, scheme="dynaquant")
        said = StorageFacts(version).summary()
        record = store.resolver.lattice(version.document.objects[0][0])
        assert said["codebook"] == 1
        assert said["coarse_bytes"] == record.length + sum(record.aside[1:]) > record.length


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("packs", [1, 2])
def test_a_pack_that_was_named_but_not_synced_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], packs: int
) -> None:
    """`recover` would take it for a version's."""
    from ckstore.storage import durable

    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": draw(300, 300)}, step=0)
        before = set((path / "packs").iterdir())
        sync = durable.sync_directory
        calls: list[Path] = []

        def failing(directory: Path) -> None:
            calls.append(directory)
            if len(calls) == packs:
                raise error
            sync(directory)

        monkeypatch.setattr(durable, "sync_directory", failing)
        with pytest.raises(error):
            store.ingest({"w": draw(300, 300, seed=1)}, step=1)
        assert set((path / "packs").iterdir()) == before
        monkeypatch.setattr(durable, "sync_directory", sync)
    assert recover(path).problems == []
    with ckstore.open(path) as store:
        assert len(store.versions()) == 1
        store.ingest({"w": draw(300, 300, seed=1)}, step=1)


def test_a_lease_ends_although_its_end_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc` in the same process would wait for it."""
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            store.ingest({"w": draw(300, 300, seed=step)}, step=step)
        connection = store.catalog._connection
        execute = connection.execute

        def interrupted(statement: str, *arguments: Any) -> Any:
            if statement.startswith("DELETE FROM leases"):
                monkeypatch.setattr(connection, "execute", execute)
                raise KeyboardInterrupt
            return execute(statement, *arguments)

        monkeypatch.setattr(connection, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.ingest({"w": draw(300, 300, seed=7)}, step=7)
        assert store.catalog.leases() == []
        store.forget([1])
        store.gc(grace=0)
        assert store.verify().problems == []
