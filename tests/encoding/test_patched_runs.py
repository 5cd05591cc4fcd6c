"""Runs that change few elements: versions are patches of those before, come back bit for bit, and stay cheap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ckstore
from ckstore.encoding.estimate import Estimate, Way
from ckstore.encoding.exact import ObjectEncoder
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.encoding.reencode import without_lost
from ckstore.lineage.cost import cost
from ckstore.lineage.planner import Candidates
from ckstore.objects.records import Patches, Record
from ckstore.recovery.recover import recover
from ckstore.storage.pack import PackWriter
from tests.checkpoints import lose_catalog, scratch

ROWS, WIDTH, VERSIONS = 9000, 64, 8
DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "int8"]

Bits = npt.NDArray[Any]

#: Bits of float32 that training leaves behind now and then: NaNs with payloads, infinities, negative zero, a subnormal.
ODD = np.array([0x7FC12345, 0xFFC00001, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF], np.uint32)


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as path:
        yield path


def states(dtype: str, odd: Bits = ODD) -> Iterator[torch.Tensor]:
    """A table of three chunks; every version changes other rows, the third chunk only in the last version."""
    generator = np.random.default_rng(0)
    table = torch.from_numpy(generator.standard_normal((ROWS, WIDTH)).astype(np.float32))
    for step in range(VERSIONS):
        if step:
            last = ROWS if step == VERSIONS - 1 else ROWS - 900
            rows = torch.from_numpy(generator.permutation(last)[:90])
            change = (1 if dtype.startswith("int") else 0.05) * generator.standard_normal((90, WIDTH)).astype(
                np.float32
            )
            table[rows] += torch.from_numpy(change)
            table[step, : odd.size] = torch.from_numpy(odd.view(np.float32).copy())
        if dtype.startswith("int"):
            yield (torch.nan_to_num(table, 0, 0, 0).clamp(-9, 9) * (14 if dtype == "int8" else 1e9)).to(
                getattr(torch, dtype)
            )
        else:
            yield table.to(getattr(torch, dtype)).clone()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def filled(place: Path, dtype: str, odd: Bits = ODD) -> tuple[ckstore.Store, list[bytes]]:
    store = ckstore.init(place / "store")
    expected = []
    for step, table in enumerate(states(dtype, odd)):
        store.ingest({"table": table}, run="r", step=step, hot=0)
        expected.append(bytes_of(table))
    return store, expected


def record_of(store: ckstore.Store, step: int) -> Record:
    return store._repository.resolver.record(store[f"r@{step}"]._stored.document.objects[0])


def check(store: ckstore.Store, expected: list[bytes]) -> None:
    for step, data in enumerate(expected):
        assert bytes_of(store[f"r@{step}"].state_dict()["table"]) == data
    assert store.verify().problems == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_version_comes_back(place: Path, dtype: str) -> None:
    store, expected = filled(place, dtype)
    with store:
        assert all(record_of(store, step).kind == "patches" for step in range(1, VERSIONS))
        check(store, expected)
    with ckstore.open(place / "store") as store:
        for step in reversed(range(VERSIONS)):
            table = np.asarray(store[f"r@{step}"]["table"][step : step + 40])
            size = len(expected[step]) // ROWS
            assert table.tobytes() == expected[step][step * size : (step + 40) * size]
        check(store, expected)


def test_where_the_same_elements_change_a_patch_of_an_ancestor_ends_a_chain(place: Path) -> None:
    generator = np.random.default_rng(0)
    table = torch.from_numpy(generator.standard_normal((ROWS, WIDTH)).astype(np.float32))
    rows = torch.from_numpy(generator.permutation(ROWS)[:90])
    expected = []
    with ckstore.init(place / "store") as store:
        for step in range(20):
            store.ingest({"table": table}, run="r", step=step, hot=0, max_restore_cost=1.6)
            expected.append(bytes_of(table))
            table[rows] += 0.05 * torch.from_numpy(generator.standard_normal((90, WIDTH)).astype(np.float32))
        records = [record_of(store, step) for step in range(20)]
        versions = store._catalog.versions()
        assert [record.kind for record in records[1:]] == 19 * ["patches"]
        assert any(record.base != before.id for before, record in itertools.pairwise(records))
        assert max(version.cost for version in versions) <= 1.6
        assert max(version.stored_bytes for version in versions[1:]) < 1.15 * 4 * 90 * WIDTH + 4000
        check(store, expected)


def test_a_chunk_that_is_as_before_takes_nothing(place: Path) -> None:
    store, _ = filled(place, "float32")
    with store:
        for step in range(2, VERSIONS):
            record = record_of(store, step)
            assert isinstance(record, Patches)
            assert len(record.sizes) == record.chunks == 3
            assert (record.sizes[-1] == 0) == (step < VERSIONS - 1)


def test_the_size_of_versions_follows_their_changes(place: Path) -> None:
    store, _ = filled(place, "float32")
    with store:
        rows = store._catalog.versions()
        changed = 4 * 90 * WIDTH
        assert all(row.stored_bytes < 1.15 * changed + 4000 for row in rows[1:])
        assert all(row.cost <= 2 for row in rows)
        assert rows[-1].depth == VERSIONS - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_versions_between_may_go(place: Path, dtype: str) -> None:
    store, expected = filled(place, dtype)
    with store:
        store.forget(["r@3", "r@4"])
        store.gc()
        for step in (0, 1, 2, 5, 6, 7):
            assert bytes_of(store[f"r@{step}"].state_dict()["table"]) == expected[step]
        assert record_of(store, 5).kind == "patches"
        store.rebase(["r@6"], max_restore_cost=1)
        assert record_of(store, 6).kind == "full"
        assert bytes_of(store["r@7"].state_dict()["table"]) == expected[7]
        assert store.verify().problems == []
    lose_catalog(place / "store")
    recover(place / "store")
    with ckstore.open(place / "store") as store:
        for step in (0, 1, 2, 5, 6, 7):
            assert bytes_of(store[f"r@{step}"].state_dict()["table"]) == expected[step]


def test_patches_outlast_a_thinned_version(place: Path) -> None:
    store, expected = filled(place, "float32", ODD[:0])
    with store:
        store.thin(["r@5"])
        assert record_of(store, 5).kind == "linear"
        assert record_of(store, 6).kind == "patches"
        store.gc(grace=0)
        for step in (4, 6, 7):
            assert bytes_of(store[f"r@{step}"].state_dict()["table"]) == expected[step]
        assert store.verify().problems == []


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_patch_is_made_again_against_an_ancestor(place: Path, dtype: str) -> None:
    store, _ = filled(place, dtype)
    with store:
        before = record_of(store, 2).id
        again = without_lost(store._repository.reader, record_of(store, 4), {before}).record
        assert (again.kind, again.base) == ("patches", before)
        assert without_lost(store._repository.reader, record_of(store, 4), set()).record.kind == "full"


def test_the_cost_of_a_level_follows_its_changes(place: Path) -> None:
    store, _ = filled(place, "float32")
    with store:
        works = [store._repository.reader.chains.work(record_of(store, step)) for step in (1, VERSIONS - 1)]
        assert cost(works[1]) - cost(works[0]) < 0.05 * (VERSIONS - 2) * cost(works[0])
        assert works[1].plain_chunks == works[0].plain_chunks


def test_the_parents_bits_under_another_id(tmp_path: Path) -> None:
    """Without a change there is no patch: it is a delta of zeros."""
    weight = torch.randn(300, 512, generator=torch.Generator().manual_seed(3))
    with ckstore.init(tmp_path / "store") as store:
        version = store[store.ingest({"weight": weight}, hot=0).version.number]
        (unit,), (identity,) = version._stored.layout.units, version._stored.document.objects
        record = store._repository.resolver.record(identity)
        bits = np.concatenate([version._stored.chunk(0, chunk) for chunk in range(record.chunks)])
        estimate = Estimate(unit, Candidates(()), {}, 0.0, 0)
        way = Way(record, patched=True)
        encoded = ObjectEncoder(store._repository.reader).encode(
            "d" * 40, estimate, way, lambda first, last: bits[first:last], 0
        )
        assert (encoded.record.kind, encoded.nbytes) == ("delta", 0)
        with PackWriter(store.path, "encoded") as pack:
            writer = ObjectWriter(pack)
            writer.put(encoded)
            packs, _ = writer.finish(None, {})
            store._repository.packs.publish([pack.name for pack in packs])
            store._repository.resolver.add(writer.placed(packs))
        assert np.array_equal(store._repository.reader.bits("d" * 40, 0), version._stored.chunk(0, 0))


def test_a_run_continues_after_damage_beyond_the_sample(place: Path) -> None:
    table = torch.from_numpy(np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32))
    with ckstore.init(place / "store") as store:
        store.ingest({"table": table}, run="r", step=0, hot=0)
        base = record_of(store, 0)
    (pack,) = (place / "store").rglob(f"*{base.pack}*")
    damaged = bytearray(pack.read_bytes())
    damaged[base.offset + 1000] ^= 1  # In the first chunk; sizes are estimated from the second one.
    pack.chmod(0o600)
    pack.write_bytes(damaged)
    with ckstore.open(place / "store") as store:
        store.ingest({"table": table * 1.001}, run="r", step=1, hot=0)
        assert record_of(store, 1).base is None
        assert bytes_of(store["r@1"].state_dict()["table"]) == bytes_of(table * 1.001)
