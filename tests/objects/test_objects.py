"""Reading objects: chains whose records contradict each other, and chunks that stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace

import ckstore
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.objects import stored_chunks
from ckstore.objects.reader import ChunkCache
from ckstore.objects.records import Full, Linear, Record
from ckstore.objects.stored_chunks import StoredChunks
from ckstore.runtime.blocks import empty
from tests.crafted import CraftedStore

pytestmark = pytest.mark.encoded

BASE = np.random.default_rng(0).standard_normal((300, 300)) * 0.02
MOVES = np.random.default_rng(1).standard_normal((300, 300)) * 1e-3


def state(step: int) -> dict[str, Any]:
    values = BASE + step * MOVES
    return {"w": values.astype(np.float32), "half": values.astype(ml_dtypes.bfloat16)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    """Two versions exactly and two coarsely, each second one stored against the first."""
    with ckstore.init(tmp_path / "store") as opened:
        for step in range(2):
            opened.ingest(state(step), run="a", step=step)
        for step in range(2, 4):
            opened.ingest(state(step), run="c", step=step, policy="coarse")
    with ckstore.open(tmp_path / "store") as opened:
        yield opened


def second(store: ckstore.Store, kind: str) -> Record:
    """Return the record of a second version's object of a kind."""
    version = store["a@1" if kind == "delta" else "c@3"]
    found = [
        record
        for record in map(store._repository.resolver.record, version._stored.document.objects)
        if record.kind == kind
    ]
    assert found[0].base is not None
    return found[0]


def pretend(store: ckstore.Store, record: Record) -> None:
    """Make the store's records contradict the stored bytes."""
    resolver = store._repository.resolver
    resolver._under_way.setdefault("pretended", []).append(record)  # A second look has them, too.
    resolver.add([record])


def otherwise(record: Record, changes: dict[str, Any]) -> Record:
    """Return a record with other fields, or with `other` one of another fidelity."""
    changes = dict(changes)
    if changes.pop("other", False):
        if record.is_exact:
            return Linear(**record.common, step=0, width=1)
        return Full(**record.common)
    width = changes.pop("width", None)
    if width is not None:
        assert isinstance(record, Linear)
        return replace(record, width=width)
    return replace(record, **changes)


CUTS: list[dict[str, Any]] = [
    {"count": 1 << 24, "chunk": 1 << 18},
    {"count": 80_000, "chunk": 80_000},
    {"chunk": 30_000},
    {"dtype": "float64"},
    {"other": True},
]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*(("linear", changes) for changes in [*CUTS, {"width": 7}]), *(("delta", changes) for changes in CUTS)],
    ids=str,
)
def test_a_base_of_another_cut_or_kind_is_refused(store: ckstore.Store, kind: str, changes: dict[str, Any]) -> None:
    record = second(store, kind)
    base = store._repository.resolver.record(record.base or "")
    pretend(store, otherwise(base, changes))
    # Whatever is in the cache of the base's chunks must not be trusted either.
    store._repository.reader.cache.keep((base.id, 0), np.zeros(1 << 20, f"i{ITEM_SIZES[record.dtype]}"))
    with pytest.raises(IntegrityError):
        store._repository.reader.bits(record.id, 0)


@pytest.mark.parametrize("path", ["w", "half"])
def test_an_object_whose_cut_contradicts_the_layout_is_refused(store: ckstore.Store, path: str) -> None:
    version = store["a@0"]
    for identity in version._stored.document.objects:
        pretend(store, replace(store._repository.resolver.record(identity), chunk=30_000))
    with pytest.raises(IntegrityError, match="cut into other chunks"):
        version[path][:]


@pytest.mark.parametrize("spec", ["a@1", "c@3"])
def test_an_object_of_another_fidelity_is_refused(store: ckstore.Store, spec: str) -> None:
    version = store[spec]
    pretend(store, otherwise(store._repository.resolver.record(version._stored.document.objects[0]), {"other": True}))
    with pytest.raises(IntegrityError, match="another fidelity"):
        version._stored.chunk(0, 0)
    assert any("another fidelity" in problem for problem in store.verify([spec]).problems)


@pytest.mark.local
def test_records_of_objects_stored_again_do_not_name_their_former_pack(store: ckstore.Store) -> None:
    assert second(store, "linear").base is not None
    before = {pack.name for pack in store._catalog.packs()}
    store.rebase("c@3", max_restore_cost=1)
    written = {pack.name for pack in store._catalog.packs()} - before
    records = [record for pack in written for record in CraftedStore(store.path).read(pack)[0]["records"]]
    assert "linear" in {record["kind"] for record in records}
    assert not any("pack" in record for record in records)


def test_the_cache_keeps_no_more_in_memory_than_it_counts() -> None:
    whole = np.frombuffer(bytes(1 << 20), np.uint8)
    cache = ChunkCache(1 << 16)
    views: list[Callable[[], Any]] = [
        lambda: whole[:1024],
        lambda: whole.view(np.uint32)[:256],
        lambda: np.frombuffer(memoryview(bytes(1 << 20))[:1024], np.uint8),
        lambda: np.zeros(1 << 20, np.uint8)[5:1029].view(np.int32),
    ]
    for number, view in enumerate(views):
        cache.keep((str(number), 0), view())
        kept = cache.get((str(number), 0))
        assert kept is not None
        assert kept.base is None, "a copy"
        assert not kept.flags.writeable
        assert np.array_equal(kept, view())


def test_views_of_whole_arrays_are_not_copied() -> None:
    cache = ChunkCache(1 << 16)
    own, seen = np.zeros(100, np.int32), np.zeros(100, np.uint32).view(np.int32)
    for name, array in (("own", own), ("seen", seen), ("bytes", np.frombuffer(bytes(400), np.uint32))):
        cache.keep((name, 0), array)
        assert cache.get((name, 0)) is array


def test_chunks_that_share_memory_are_dropped_together() -> None:
    """Else chunks that are often read would each keep the memory of their object."""
    chunk, parts = 1 << 18, 4
    cache = ChunkCache(8 * parts * chunk)
    for number in range(40):
        whole = empty(parts * chunk - 3, np.uint8)
        whole[:] = number
        for part in range(parts):
            cache.keep_part((str(number), part), whole[part * chunk : (part + 1) * chunk])
        for read in range(number):
            cache.get((str(read), read % parts))
    found = [cache.get((str(number), part)) for number in range(40) for part in range(parts)]
    arrays = [array for array in found if array is not None]
    assert len(arrays) >= 7 * parts
    assert len({id(array.base) for array in arrays}) <= 9
    large = empty(16 * parts * chunk, np.uint8)
    cache.keep_part(("large", 0), large[:chunk])
    kept = cache.get(("large", 0))
    assert kept is not None
    assert not np.shares_memory(kept, large)


def test_shard_indexes_are_dropped_beyond_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_chunks, "_INDEXES", 2)
    store = ckstore.init(tmp_path / "store")
    for step in range(2):
        # Objects of one chunk have no index.
        values = np.arange(600_000, dtype=np.float32).reshape(2, -1) + step
        store.ingest({"a": values, "b": -values}, run="a", step=step)
    stored = StoredChunks(store._repository.packs)
    records = [
        store._repository.resolver.record(one) for row in (0, 1) for one in store[f"a@{row}"]._stored.document.objects
    ]
    assert len(records) > 2
    first = [stored.index(record) for record in records]
    assert len(stored._indexes) == 2
    assert [stored.index(record) for record in records] == first


def test_records_of_a_hostile_pack_that_begin_at_one_place_have_indexes_of_their_own(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"a": np.arange(600_000, dtype=np.float32)}, run="a", step=0)
        [identity] = store["a@0"]._stored.document.objects
        record = store._repository.resolver.record(identity)
        stored = StoredChunks(store._repository.packs)
        assert record.chunks > 2
        assert len(stored.index(record)) == record.chunks
        with pytest.raises(IntegrityError):
            stored.index(replace(record, count=2 * record.chunk))


def test_dropped_chunks_no_longer_count() -> None:
    cache = ChunkCache(1 << 16)
    for number in range(2000):
        cache.keep((str(number), 0), np.zeros(1 << 13, np.uint32))
        cache.drop((str(number), 0))
        cache.drop(("other", 0))
    arrays = [np.full(1 << 12, number, np.uint32) for number in range(4)]
    for number, array in enumerate(arrays):
        cache.keep((str(number), 0), array)
    assert all(cache.get((str(number), 0)) is array for number, array in enumerate(arrays))


@pytest.mark.parametrize("kind", ["linear", "delta"])
def test_chunks_are_decoded_to_where_they_are_wanted(store: ckstore.Store, kind: str) -> None:
    record = second(store, kind)

    def read(out: Any) -> Any:
        return store._repository.reader.bits(record.id, 0, keep=False, out=out)

    expected = read(None).copy()
    out = np.full_like(expected, 77)
    assert read(out) is out
    np.testing.assert_array_equal(out, expected)
    short = np.full(expected.size - 1, 77, expected.dtype)
    with pytest.raises(IntegrityError):
        read(short)
    assert (short == 77).all()
