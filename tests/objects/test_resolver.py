"""Finding records while other threads make the resolver forget them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import ckstore
from ckstore.commit import change
from ckstore.errors import CkstoreError, IntegrityError
from ckstore.objects import resolver as module
from ckstore.objects.documents import BlobRef
from ckstore.objects.records import Record
from ckstore.storage import catalog, placements, rows

pytestmark = pytest.mark.encoded

#: Methods that find records by id.
LOOKUPS = ("known", "stored", "record", "find")


def test_records_are_found_whenever_another_thread_forgets_them(tmp_path: Path) -> None:
    """A failing ingest forgets so: before every line of a look-up."""
    generator = np.random.default_rng(0)
    state = {
        "w": generator.standard_normal((300, 300)).astype(np.float32),
        "half": generator.standard_normal((300, 300)).astype(np.float16),
    }
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(state, run="a", step=0)
        objects = store["a@0"]._stored.document.objects
        interruptions = []

        def interrupted(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename != module.__file__ or frame.f_code.co_name not in LOOKUPS:
                return None
            if event == "line":
                thread = Thread(target=store._repository.resolver.forget)
                thread.start()
                thread.join(0.05)  # it may have to wait for the look-up
                interruptions.append(frame.f_lineno)
            return interrupted

        tracing = sys.gettrace()
        sys.settrace(interrupted)
        try:
            known = store._repository.resolver.known(objects)
            found = [store._repository.resolver.find(identity) for identity in objects]
            records = [store._repository.resolver.record(identity).id for identity in objects]
        finally:
            sys.settrace(tracing)
        assert interruptions
        assert known == set(objects)
        assert [record and record.id for record in found] == records == list(objects)


def test_records_found_before_forgetting_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.init(tmp_path / "store") as store:
        resolver, find = store._repository.resolver, store._catalog.find_objects
        content = "a" * 40

        def interrupted(keys: list[int]) -> dict[int, tuple[str, int]]:
            found = find(keys)
            resolver.forget()
            return found

        monkeypatch.setattr(store._catalog, "find_objects", interrupted)
        assert resolver.find(content) is None
        asked = []

        def counted(keys: list[int]) -> dict[int, tuple[str, int]]:
            asked.append(keys)
            return find(keys)

        monkeypatch.setattr(store._catalog, "find_objects", counted)
        assert resolver.find(content) is None
        assert asked, "records found before the catalog changed may be wrong after it"


def test_a_generation_ends_when_all_records_are_changed(tmp_path: Path) -> None:
    """A result of the middle, from old and new records, carries the old number and is not kept."""
    with ckstore.init(tmp_path / "store") as store:
        version = store[store.ingest({"w": np.zeros((300, 300), "f4")}).version.number]
        resolver = store._repository.resolver
        record = resolver.record(version._stored.document.objects[0])
        before, seen = resolver.generation, []

        def records() -> Iterator[Record]:
            seen.append(resolver.generation)
            yield record
            seen.append(resolver.generation)

        resolver.add(records())
        assert seen == [before, before]
        assert resolver.generation > before


def test_a_cached_blob_is_not_taken_for_one_against_another(tmp_path: Path) -> None:
    """A reference with a wrong base is refused whether the right one was read before or not."""
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            torch.save({f"w{k}": torch.full((9,), float(step)) for k in range(40)}, tmp_path / "m.pt")
            store.ingest(tmp_path / "m.pt", run="a", step=step)
        first, second = store["a@0"]._stored, store["a@1"]._stored
        right = second.document.files[0].skeleton
        assert right.against is not None
        resolver = store._repository.resolver
        resolver.blob(right, second.row.pack)
        wrong = replace(right, against=BlobRef(first.document.files[0].skeleton.name + "x", first.row.pack))
        with pytest.raises(IntegrityError):
            resolver.blob(wrong, second.row.pack)
        with pytest.raises(IntegrityError):
            resolver.blob(replace(right, against=None), second.row.pack)
        with pytest.raises(IntegrityError):
            resolver.blob(right, second.row.pack, length=7)


@pytest.mark.parametrize("known", [False, True])
def test_an_object_that_shares_its_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """The catalog has one place for both: the version could not be read, and `gc` would free the object."""
    shared = {"one": np.zeros((300, 300), np.float32), "two": np.ones((300, 300), np.float32)}
    with ckstore.init(tmp_path / "store") as store:
        before = store.ingest({"one": shared["one"]} if known else {"other": np.ones(7)}, run="a", step=0).version
        for place in (rows, module):
            monkeypatch.setattr(place, "keys", lambda identities: dict.fromkeys(identities, 7))
        monkeypatch.setattr(placements.Placements, "find", lambda *_: {7: (before.pack, 0)} if known else {})
        with pytest.raises(CkstoreError, match="share the first 63 bits of their ids"):
            store.ingest({"two": shared["two"]} if known else shared, run="a", step=1)
        monkeypatch.undo()
        assert [row.step for row in store._catalog.versions()] == [0]
        assert store.verify().problems == []


def share_a_key(monkeypatch: pytest.MonkeyPatch, shared: set[str], others: Callable[[], Any]) -> None:
    """Give some ids one key, and let another process commit first once a change has looked for its objects."""
    commit, keys = change.Change._commit, rows.keys

    def keys_of(identities: Iterable[str]) -> dict[str, int]:
        return {one: 7 if one in shared else number for one, number in keys(identities).items()}

    def after_the_other(self: change.Change, made: Callable[[], Any]) -> Any:
        monkeypatch.setattr(change.Change, "_commit", commit)
        others()
        return commit(self, made)

    monkeypatch.setattr(change.Change, "_commit", after_the_other)
    for place in (rows, module, change):
        monkeypatch.setattr(place, "keys", keys_of)
    for place in (rows, change, catalog):
        monkeypatch.setattr(place, "key", lambda identity: keys_of([identity])[identity])


@pytest.mark.parametrize("hot", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_an_object_that_shares_its_key_with_one_of_an_ingest_at_once_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hot: tuple[int, int]
) -> None:
    """The other one is committed after this one has looked for its objects, and keeps its place."""
    states = [{name: np.full((300, 300), value, np.float32)} for name, value in (("one", 0), ("two", 1))]
    with ckstore.init(tmp_path / "ids") as store:
        shared = {store[store.ingest(state, run="a").version.number]._stored.document.objects[0] for state in states}
    with ckstore.init(tmp_path / "store") as store, ckstore.open(tmp_path / "store") as other:
        share_a_key(monkeypatch, shared, lambda: other.ingest(states[0], run="b", step=0, hot=hot[0]))
        with pytest.raises(CkstoreError, match="share the first 63 bits of their ids"):
            store.ingest(states[1], run="a", step=1, hot=hot[1])
        assert [row.name for row in store._catalog.versions()] == ["b@0"]
        np.testing.assert_array_equal(other["b@0"]["one"][:], states[0]["one"])


def test_a_thinned_object_that_shares_its_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that was stored since has the key of the coarse one."""
    generator = np.random.default_rng(0)
    state, late = ({name: generator.normal(size=(300, 300)).astype(np.float32)} for name in ("w", "late"))
    with ckstore.init(tmp_path / "ids") as store:
        store.ingest(state, run="a", step=0)
        store.thin([1], quality=1.0)
        numbers = [1, store.ingest(late, run="b").version.number]
        shared = {store[number]._stored.document.objects[0] for number in numbers}
    with ckstore.init(tmp_path / "store") as store, ckstore.open(tmp_path / "store") as other:
        store.ingest(state, run="a", step=0)
        share_a_key(monkeypatch, shared, lambda: other.ingest(late, run="b", step=0))
        with pytest.raises(CkstoreError, match="share the first 63 bits of their ids"):
            store.thin([1], quality=1.0)
        np.testing.assert_array_equal(other["b@0"]["late"][:], late["late"])
        np.testing.assert_array_equal(other["a@0"]["w"][:], state["w"])
