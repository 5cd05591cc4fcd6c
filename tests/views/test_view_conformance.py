"""Zarr's own tests for stores, as far as they do not write; and the rest as a comparison with a store in memory."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.core.sync import _collect_aiterator, sync
from zarr.storage import MemoryStore
from zarr.testing.store import StoreTests

import ckstore
from ckstore.views.nodes import ArrayNode
from ckstore.views.zarr_store import ViewStore

#: Tests of `StoreTests` that begin by writing a value, and their substitutes here.
WRITE_FIRST = {
    "test_clear": "test_everything_that_writes_is_refused",
    "test_delete": "test_everything_that_writes_is_refused",
    "test_delete_dir": "test_everything_that_writes_is_refused",
    "test_delete_nonexistent_key_does_not_raise": "test_everything_that_writes_is_refused",
    "test_exists": "test_exists_as_in_memory",
    "test_get": "test_get_as_in_memory",
    "test_get_bytes": "test_get_as_in_memory",
    "test_get_bytes_sync": "test_get_as_in_memory",
    "test_get_json": "test_documents_are_json",
    "test_get_json_sync": "test_documents_are_json",
    "test_get_many": "test_get_many_as_in_memory",
    "test_get_not_open": "test_get_from_a_store_that_is_not_open",
    "test_get_partial_values": "test_get_partial_values_as_in_memory",
    "test_get_raises": "test_wrong_byte_ranges_are_refused",
    "test_get_sync": "test_get_as_in_memory",
    "test_getsize": "test_getsize_as_in_memory",
    "test_getsize_prefix": "test_getsize_as_in_memory",
    "test_is_empty": "test_listings_as_in_memory",
    "test_list": "test_list_as_in_memory",
    "test_list_dir": "test_listings_as_in_memory",
    "test_list_empty_path": "test_list_as_in_memory",
    "test_list_prefix": "test_listings_as_in_memory",
    "test_serializable_store": "test_a_pickled_store_gives_the_same",
    "test_set": "test_everything_that_writes_is_refused",
    "test_set_if_not_exists": "test_everything_that_writes_is_refused",
    "test_set_many": "test_everything_that_writes_is_refused",
    "test_set_not_open": "test_everything_that_writes_is_refused",
    "test_store_open_read_only": "test_only_reading_is_possible",
    "test_store_read_only": "test_only_reading_is_possible",
}

#: Tests of stores that write without an event loop, which this one does not.
NOT_OURS = {"test_set_sync", "test_delete_sync", "test_delete_sync_missing"}

#: Tests of `StoreTests` that a read-only store must pass as they are.
MUST_PASS = {
    "test_get_sync_missing",
    "test_getsize_raises",
    "test_read_only_store_raises",
    "test_store_context_manager",
    "test_store_eq",
    "test_store_repr",
    "test_store_supports_listing",
    "test_store_supports_partial_writes",
    "test_store_supports_writes",
    "test_store_type",
    "test_with_read_only_store",
}


def synchronous(test: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine test as a plain one."""

    @functools.wraps(test)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        asyncio.run(test(self, *args, **kwargs))

    return run


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewStore]:
    torch.manual_seed(7)
    state = {
        "model": {
            "w": torch.randn(700, 600),
            "b": torch.randn(5).bfloat16(),
            "c": torch.tensor(1),
            "e": torch.empty(0),
        },
        "c": {"0": torch.tensor(2.0), "1": {"c": torch.randn(2, 3, 1)}},
        "state": {0: {"step": torch.tensor(3.0)}},
        "model2": torch.randn(3),
    }
    with ckstore.init(tmp_path_factory.mktemp("conformance") / "store") as store:
        store.ingest(state)
        made = store["latest"].arrays.store
        assert isinstance(made, ViewStore)
        yield made


@pytest.fixture(scope="module")
def memory(view: ViewStore) -> MemoryStore:
    """A copy of the view."""

    async def copy() -> MemoryStore:
        values = {key: await view.get(key, default_buffer_prototype()) async for key in view.list()}
        return await MemoryStore.open(values)

    return sync(copy())


class TestStore(StoreTests[ViewStore, cpu.Buffer]):
    store_cls = ViewStore
    buffer_cls = cpu.Buffer

    async def set(self, store: ViewStore, key: str, value: Buffer) -> None:
        raise NotImplementedError("no test that must pass may write")

    async def get(self, store: ViewStore, key: str) -> Buffer:
        raise NotImplementedError("no test that must pass may look behind the store")

    @pytest.fixture
    def store_kwargs(self, view: ViewStore) -> dict[str, Any]:
        return {"hierarchy": view.hierarchy, "identity": view.identity}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> Store:
        return asyncio.run(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> Store:
        return self.store_cls(**store_kwargs)

    def test_store_repr(self, store: ViewStore) -> None:
        assert repr(store).startswith("<ckstore.ViewStore ")

    def test_store_supports_writes(self, store: ViewStore) -> None:
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store: ViewStore) -> None:
        assert store.supports_listing


for _name, _test in inspect.getmembers(StoreTests, inspect.isfunction):
    if _name in WRITE_FIRST or _name in NOT_OURS:
        setattr(TestStore, _name, None)
    elif _name.startswith("test_") and inspect.iscoroutinefunction(_test):
        setattr(TestStore, _name, synchronous(_test))


def test_every_test_of_zarr_is_accounted_for() -> None:
    theirs = {name for name, _ in inspect.getmembers(StoreTests, inspect.isfunction) if name.startswith("test_")}
    assert theirs == MUST_PASS | set(WRITE_FIRST) | NOT_OURS
    assert {name for name in MUST_PASS if callable(getattr(TestStore, name))} == MUST_PASS
    assert all(callable(globals().get(name)) for name in WRITE_FIRST.values())


def collected(iterator: Any) -> list[str]:
    return sorted(sync(_collect_aiterator(iterator)))


def value(store: Store, key: str, byte_range: Any = None) -> bytes | None:
    found = sync(store.get(key, default_buffer_prototype(), byte_range))
    return None if found is None else found.to_bytes()


RANGES = [None, RangeByteRequest(1, 4), RangeByteRequest(0, 1 << 30), OffsetByteRequest(3), SuffixByteRequest(2)]
PREFIXES = [
    "", "m", "model", "model/", "model/w", "model/w/", "model/w/c", "model/w/c/", "model/w/c/1", "model/w/c/1/", "c",
    "c/0", "c/0/", "c/0/c", "c/1/c/c", "c/1/c/c/0", "c/1/c/c/0/0", "c/1/c/c/7", "model/e", "model/e/c", "model/c",
    "model/c/c", "state/[0]", "nothing", "nothing/", "zarr.json", "model/w/c/x",
]  # fmt: skip
ABSENT = [
    "nothing", "model", "model/w", "model/w/c", "model/w/c/0", "model/w/c/9/0", "model/w/c/00/0", "model/w/c/0/0/0", "",
    "model/w/c/-1/0", "model/w/c/\u00b2/0", "/zarr.json", "model//zarr.json", "c/0/c/0", "model/e/c/0", "zarr.json/",
    "model/w/zarr.json/c",
]  # fmt: skip


def test_list_as_in_memory(view: ViewStore, memory: MemoryStore) -> None:
    keys = collected(view.list())
    assert keys == collected(memory.list())
    assert len(keys) == len(set(keys)) == 14 + 8  # documents and chunks
    assert "model/w/c/1/0" in keys


@pytest.mark.parametrize("prefix", PREFIXES)
def test_listings_as_in_memory(view: ViewStore, memory: MemoryStore, prefix: str) -> None:
    assert collected(view.list_prefix(prefix)) == collected(memory.list_prefix(prefix))
    assert collected(view.list_dir(prefix)) == collected(memory.list_dir(prefix))
    assert sync(view.is_empty(prefix)) == sync(memory.is_empty(prefix))


def test_exists_as_in_memory(view: ViewStore, memory: MemoryStore) -> None:
    for key in [*collected(memory.list()), *ABSENT]:
        assert sync(view.exists(key)) == sync(memory.exists(key)), key


def test_get_as_in_memory(view: ViewStore, memory: MemoryStore) -> None:
    for key in [*collected(memory.list()), *ABSENT]:
        for byte_range in RANGES:
            expected = value(memory, key, byte_range)
            assert value(view, key, byte_range) == expected, (key, byte_range)
            found = view.get_sync(key, byte_range=byte_range)
            assert (None if found is None else found.to_bytes()) == expected
    with pytest.raises(FileNotFoundError):
        view._get_bytes_sync("nothing", prototype=default_buffer_prototype())


def test_get_many_as_in_memory(view: ViewStore, memory: MemoryStore) -> None:
    keys = collected(memory.list())
    wanted = [(key, default_buffer_prototype(), None) for key in keys]
    found = dict(sync(_collect_aiterator(view._get_many(wanted))))
    assert {key: buffer.to_bytes() for key, buffer in found.items()} == {key: value(memory, key) for key in keys}


def test_get_partial_values_as_in_memory(view: ViewStore, memory: MemoryStore) -> None:
    wanted = [(key, byte_range) for key in [*collected(memory.list()), "nothing"] for byte_range in RANGES]
    found = sync(view.get_partial_values(default_buffer_prototype(), wanted))
    expected = sync(memory.get_partial_values(default_buffer_prototype(), wanted))
    assert [one and one.to_bytes() for one in found] == [one and one.to_bytes() for one in expected]
    assert sync(view.get_partial_values(default_buffer_prototype(), [])) == []


def test_getsize_as_in_memory(view: ViewStore, memory: MemoryStore) -> None:
    for key in collected(memory.list()):
        assert sync(view.getsize(key)) == sync(memory.getsize(key)), key
    for prefix in ("", "model", "model/w/c"):
        assert sync(view.getsize_prefix(prefix)) == sync(memory.getsize_prefix(prefix))


def test_sizes_are_known_without_decoding(view: ViewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrayNode, "chunk", None)
    assert sync(view.getsize("model/w/c/0/0")) == 436 * 600 * 4


def test_get_from_a_store_that_is_not_open(view: ViewStore, memory: MemoryStore) -> None:
    closed = ViewStore(view.hierarchy, view.identity)
    assert not closed._is_open
    assert value(closed, "model/b/c/0") == value(memory, "model/b/c/0")


def test_documents_are_json(view: ViewStore) -> None:
    document = view._get_json_sync("model/b/zarr.json", prototype=default_buffer_prototype())
    assert document["node_type"] == "array"
    assert document["attributes"] == {"dtype": "bfloat16"}


def test_wrong_byte_ranges_are_refused(view: ViewStore) -> None:
    with pytest.raises(ValueError, match=r"Unexpected byte_range, got.*"):
        value(view, "model/b/c/0", (0, 2))


def test_a_pickled_store_gives_the_same(view: ViewStore, memory: MemoryStore) -> None:
    copy = pickle.loads(pickle.dumps(view))
    assert copy == view
    assert hash(copy) == hash(view)
    assert copy.read_only
    assert {key: value(copy, key) for key in collected(copy.list())} == {
        key: value(memory, key) for key in collected(memory.list())
    }


def test_everything_that_writes_is_refused(view: ViewStore, memory: MemoryStore) -> None:
    buffer = cpu.Buffer.from_bytes(b"x")
    for attempt in (
        lambda: view.set("k", buffer),
        lambda: view.set_if_not_exists("k", buffer),
        lambda: view._set_many([("k", buffer)]),
        lambda: view.delete("model/b/c/0"),
    ):
        with pytest.raises(ValueError, match="read-only mode"):
            sync(attempt())
    with pytest.raises(NotImplementedError):
        sync(view.delete_dir("model"))
    with pytest.raises(NotImplementedError):
        sync(view.clear())
    assert collected(view.list()) == collected(memory.list())


def test_only_reading_is_possible(view: ViewStore) -> None:
    assert view.read_only
    with pytest.raises(AttributeError):
        view.read_only = False  # type: ignore[misc]
    with pytest.raises(ValueError, match="never changes"):
        ViewStore(view.hierarchy, view.identity, read_only=False)
    with pytest.raises(NotImplementedError, match="with_read_only is not implemented"):
        view.with_read_only(False)
    assert view.with_read_only(True) == view
