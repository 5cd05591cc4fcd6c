"""Reproductions of findings of a review: each fails until its finding is settled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ckstore
import ckstore.recover as recovery
from ckstore.errors import ConflictError, IntegrityError
from ckstore.recover import recover


def weights(step: int, rows: int = 300) -> npt.NDArray[np.float32]:
    """Weights that move a little with every step."""
    values = np.random.default_rng(0).standard_normal((rows, 300)) * 0.02
    for number in range(step):
        values += np.random.default_rng(number + 1).standard_normal((rows, 300)) * 1e-3
    return values.astype(np.float32)


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def exact_pack(store: ckstore.Store, number: int) -> Path:
    """The pack of exact layers that a version was committed with."""
    content = store[number].document.objects[0][1]
    assert content is not None
    record = store.resolver.content(content)
    assert record is not None
    return store.path / "packs" / record.pack


def test_commit_during_recover_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": weights(0)}, run="a", step=0)
    read_all = recovery.log.read_all
    done: list[int] = []

    def interposed(store_path: Path) -> list[dict[str, Any]]:
        if not done:
            done.append(1)
            with ckstore.open(path) as other:
                try:
                    other.ingest({"w": weights(1)}, run="a", step=1)
                except ckstore.errors.LockedError:
                    done.append(2)  # also right: writers are kept out
        return read_all(store_path)

    monkeypatch.setattr(recovery.log, "read_all", interposed)
    recover(path)
    with ckstore.open(path) as store:
        assert [row.step for row in store.versions()] == ([0] if 2 in done else [0, 1])


def test_recover_keeps_the_committed_one_of_two_that_claim_a_step(tmp_path: Path) -> None:
    path = tmp_path / "store"
    ckstore.init(path).close()
    script = textwrap.dedent(
        f"""
        import os
        import numpy as np
        import ckstore
        from ckstore.ingest import Ingest
        from ckstore.storage.catalog import Catalog

        commit = Ingest._commit

        def interposed(self, *arguments):
            Ingest._commit = commit
            with ckstore.open({str(path)!r}) as other:
                other.ingest({{"w": np.ones((300, 300), "f4")}}, run="a", step=10)
            Catalog.commit_version = lambda *given, **named: os._exit(9)
            return commit(self, *arguments)

        Ingest._commit = interposed
        with ckstore.open({str(path)!r}) as store:
            store.ingest({{"w": np.zeros((300, 300), "f4")}}, run="a", step=10)
        """
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    with ckstore.open(path) as store:
        committed = [row.uid for row in store.versions()]
    assert len(committed) == 1
    recover(path)
    with ckstore.open(path) as store:
        assert committed[0] in [row.uid for row in store.versions()]


def test_init_where_the_catalog_was_lost_loses_no_version(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": weights(0)}, run="a", step=0)
    (path / "catalog.sqlite").unlink()
    try:
        ckstore.init(path).close()
    except ConflictError:
        return  # the right answer: `ckstore recover`
    with ckstore.open(path) as store:
        store.ingest({"w": weights(5)}, run="b", step=0)
    recover(path)
    with ckstore.open(path) as store:
        assert sorted(row.run for row in store.versions()) == ["a", "b"]


def test_ingesting_the_same_file_again_heals_a_version(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": weights(0)}, run="a", step=0)
        store.ingest({"w": weights(1)}, run="a", step=1)
        pack = exact_pack(store, 2)
    damage(pack)
    recover(path)
    with ckstore.open(path) as store:
        store.ingest({"w": weights(1)}, run="a", step=1)
        restored = np.asarray(store.run("a").versions[-1]["w"][:])
    assert restored.tobytes() == weights(1).tobytes()


def test_a_run_goes_on_after_its_parent_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": weights(0)}, run="a", step=0)
        store.ingest({"w": weights(1)}, run="a", step=1)
        pack = exact_pack(store, 2)
    damage(pack)
    recover(path)
    with ckstore.open(path) as store:
        report = store.ingest({"w": weights(2)}, run="a", step=2)
        assert np.asarray(store[report.version.number]["w"][:]).tobytes() == weights(2).tobytes()


def test_a_version_of_known_objects_keeps_the_budget(tmp_path: Path) -> None:
    """The weights of a checkpoint, stored again without its optimiser."""
    generator = np.random.default_rng(1)
    values = (generator.standard_normal((600, 600)) * 0.02).astype(np.float32)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(8):
            state = {
                "model": {"w": values},
                "optimizer": {
                    "exp_avg": (generator.standard_normal((600, 600)) * 1e-4).astype(np.float32),
                    "exp_avg_sq": (generator.random((600, 600)) * 1e-8).astype(np.float32),
                },
            }
            whole = store.ingest(state, run="a", step=step).version
            assert whole.cost <= 2.0
            part = store.ingest({"w": values}, run=f"w{step}", step=0).version
            assert part.cost <= 2.0, f"step {step}: {part.cost}"
            moved = generator.random((600, 600)) < 0.16
            change = (generator.standard_normal((600, 600)) * 1e-4).astype(np.float32)
            values = np.where(moved, values + change, values)


def test_a_tag_never_falls_back_to_what_it_meant_before(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": weights(0)}, run="a", step=0)
        store.ingest({"w": weights(1)}, run="a", step=1)
        store.tag(1, "best")
        store.tag(2, "best")
        pack = store[2].row.pack
    damage(path / "packs" / pack)
    recover(path)
    with ckstore.open(path) as store:
        assert store.catalog.tags().get("best") != 1


def test_recover_with_a_damaged_log_record_brings_versions_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": weights(0)}, run="a", step=0)
        store.tag(1, "best")
    damage(next((path / "log").iterdir()))
    (path / "catalog.sqlite").unlink()
    report = recover(path)
    assert report.problems
    assert report.versions == 1


def test_checkout_makes_no_link_through_a_link(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3)}, source / "m.pt")
    with ckstore.init(tmp_path / "store") as store:
        version = store[store.ingest(source).version.number]
        links = (("a", os.fspath(outside)), ("a/b", "anything"))
        version.__dict__["document"] = replace(version.document, links=links)
        with pytest.raises(IntegrityError):
            version.checkout(tmp_path / "target")
    assert not os.listdir(outside)


def test_a_record_that_is_cut_otherwise_than_its_base_is_refused(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        from dataclasses import replace
        import ml_dtypes, numpy as np, torch
        import ckstore
        from ckstore.errors import IntegrityError

        def state(step):
            base = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
            return {{"w": (base + step * 1e-4).bfloat16()}}

        with ckstore.init({str(tmp_path / "store")!r}) as store:
            store.ingest(state(0), run="a", step=0)
            store.ingest(state(1), run="a", step=1)
            lattice, _ = store["a@1"].document.objects[0]
            record = store.resolver.lattice(lattice)
            assert record.base is not None
            base = store.resolver.lattice(record.base)
            wrong = replace(base, count=1 << 24, chunk=1 << 24)
            store.resolver._lattices[base.id] = wrong
            store.reader.cache.clear()
            store.reader.cache.limit = 1 << 30
            store.reader.cache.put((base.id, 0), np.zeros(1 << 24, np.uint16))
            try:
                for _ in range(50):
                    store.reader.cache._arrays.pop((record.id, 0), None)
                    store.reader.ordinals(replace(record, context=False), 0)
            except IntegrityError:
                raise SystemExit(4)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr


def test_scaled_float64_parents_are_decoded_alike_with_flush_to_zero(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = torch.randn(70000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[35123] = (2 - 2**-52) * 2.0**-1022  # half of it is a tie between the largest subnormal and the least normal
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": values}, run="a", step=0)
        store.ingest({"w": values * 0.5}, run="a", step=1)
    script = f"import torch, ckstore; torch.set_flush_denormal(True); ckstore.open({str(path)!r})['a@1']['w'][:]"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-300:]
    shutil.rmtree(path)
