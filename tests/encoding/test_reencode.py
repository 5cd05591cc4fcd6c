"""Re-encoded objects: the same values under the same ids, against an object that stays or in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.encoding.estimate import Encoded
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.encoding.reencode import in_full, without_lost
from ckstore.objects.records import Record
from ckstore.storage.catalog import key
from ckstore.storage.pack import PackWriter
from tests.checkpoints import scratch

pytestmark = pytest.mark.encoded

KINDS: dict[str, Any] = {
    "float32": lambda values: values,
    "float64": lambda values: values.double() * np.pi,
    "bfloat16": lambda values: values.bfloat16(),
    "float16": lambda values: values.half(),
    "int32": lambda values: (values * 1e6).int(),
    "complex64": lambda values: torch.complex(values, -values),
}


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as path:
        yield path


def values(step: int) -> torch.Tensor:
    """Of a run in which most elements never change, so that everything is stored against the version before."""
    found = torch.randn(530, 520, generator=torch.Generator().manual_seed(0))
    for number in range(1, step + 1):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(530, 520, generator=generator) * 1e-3
        found = found + noise * (torch.rand(530, 520, generator=generator) < 0.2)
    return found


def run_of(place: Path, kind: str) -> ckstore.Store:
    store = ckstore.init(place / "store")
    for step in range(4):
        # A generous budget: of one small object a chain costs more than twice a full one.
        store.ingest({"w": KINDS[kind](values(step))}, run="r", step=step, max_restore_cost=9)
    return store


def objects(store: ckstore.Store) -> list[Record]:
    """Return the record of the weight, by version."""
    return [
        store._repository.resolver.record(store[row.number]._stored.document.objects[0])
        for row in store._catalog.versions()
    ]


def exact(store: ckstore.Store, record: Record) -> list[bytes]:
    return [store._repository.reader.bits(record.id, chunk).tobytes() for chunk in range(record.chunks)]


def write(store: ckstore.Store, encoded: Encoded) -> None:
    """Store a re-encoded object, as a commit without versions does."""
    with PackWriter(store.path, "encoded") as pack:
        writer = ObjectWriter(pack)
        writer.put(encoded)
        packs, _ = writer.finish(None, {})
        store._repository.packs.publish([pack.name for pack in packs])
        base = encoded.record.base
        with store._catalog.transaction():
            places = {} if base is None else store._catalog.find_objects([key(base)])
            store._catalog.add_packs(packs, {pack for pack, _ in places.values()})
            store._catalog.move_objects(writer.places(packs)[0])
    store._repository.resolver.forget()
    store._repository.reader.cache.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [(), (0,), (0, 2), (0, 1, 2)], ids=str)
def test_values_and_ids_stay(place: Path, kind: str, kept: tuple[int, ...]) -> None:
    with run_of(place, kind) as store:
        found = objects(store)
        before = exact(store, found[3])
        ids = {found[step].id for step in kept}
        again = without_lost(store._repository.reader, found[3], ids)
        assert again.record.id == found[3].id
        assert again.record.base in {None, *ids}
        write(store, again)
        assert exact(store, found[3]) == before
        assert store.verify().problems == []
        assert len(store._repository.reader.chains.records(found[3].id)) == 1 or kept


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int32"])
def test_nearer_bases_take_fewer_bytes(place: Path, kind: str) -> None:
    with run_of(place, kind) as store:
        found = objects(store)
        near = without_lost(store._repository.reader, found[3], {found[0].id})
        assert near.nbytes < 0.7 * in_full(store._repository.reader, found[3]).nbytes


def test_the_nearest_that_stays_is_taken(place: Path) -> None:
    with run_of(place, "float32") as store:
        record = objects(store)[3]
        chain = [level.id for level in store._repository.reader.chains.levels(record)]
        assert len(chain) > 1
        assert without_lost(store._repository.reader, record, set(chain[1:])).record.base == chain[1]
        assert without_lost(store._repository.reader, record, {chain[-1]}).record.base == chain[-1]


def test_odd_floats_are_unchanged(place: Path) -> None:
    """NaN payloads, infinities, negative zeros and subnormals, where the ancestor has others in their places."""
    odd = np.array([0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x80000001, 0x007FFFFF], np.uint32)
    with ckstore.init(place / "store") as store:
        for step in range(3):
            weight = values(step).numpy().copy()
            weight.reshape(-1)[step * 1000 : step * 1000 + 8] = odd.view(np.float32)
            store.ingest({"w": torch.from_numpy(weight)}, run="r", step=step)
        found = objects(store)
        before = exact(store, found[2])
        for kept in (set(), {found[0].id}):
            write(store, without_lost(store._repository.reader, found[2], kept))
            assert exact(store, found[2]) == before
        assert store.verify().problems == []
