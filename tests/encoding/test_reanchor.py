"""Re-encoded objects: the same values under the same ids, against an object that stays or in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.encoding.reanchor import Reencoded, reanchored
from ckstore.encoding.writer import ObjectWriter
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


def run_of(place: Path, kind: str, factor: float = 1.0) -> ckstore.Store:
    store = ckstore.init(place / "store")
    for step in range(4):
        # A generous budget: of one small object a chain of exact layers costs more than twice a full one.
        store.ingest({"w": KINDS[kind](values(step) * factor**step)}, run="r", step=step, budget=9)
    return store


def objects(store: ckstore.Store) -> list[tuple[str, str]]:
    """(Lattice id, content id) of the weight, by version."""
    found = []
    for row in store.catalog.versions():
        [(lattice, content)] = store[row.number].document.objects
        assert content is not None
        found.append((lattice, content))
    return found


def exact(store: ckstore.Store, item: tuple[str, str]) -> list[bytes]:
    chunks = store.resolver.lattice(item[0]).chunks
    return [store.reader.bits(item[1], chunk).tobytes() for chunk in range(chunks)]


def written(store: ckstore.Store, result: Reencoded) -> None:
    """Store a re-encoded object, as a commit without versions does."""
    with PackWriter(store.path, "coarse") as coarse, PackWriter(store.path, "exact") as layers:
        writer = ObjectWriter(coarse, layers)
        writer.put(result.content, result.record, result.parent, result.layers, factor=result.factor)
        packs, _ = writer.finish(None, {})
        lattices, contents, _ = writer.places(packs)
        store.repository.packs.publish([pack.name for pack in packs])
        with store.catalog.transaction():
            store.catalog.add_packs(packs)
            store.catalog.move_lattices(lattices)
            store.catalog.move_contents(contents)
    store.resolver.forget()
    store.reader.cache.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [(), (0,), (0, 2), (0, 1, 2)], ids=str)
def test_values_and_ids_stay(place: Path, kind: str, kept: tuple[int, ...]) -> None:
    with run_of(place, kind) as store:
        found = objects(store)
        before = exact(store, found[3])
        result = reanchored(store.reader, found[3], {found[step][1] for step in kept})
        assert (result.record.id, result.content) == found[3]
        allowed = {None, *(found[step][1] for step in kept)}
        assert result.parent in allowed
        assert result.record.kind != "ordinal" or result.record.base in allowed
        written(store, result)
        assert exact(store, found[3]) == before
        assert store.verify().problems == []
        records = {record.id for record in store.reader.records(*found[3])}
        if not kept:
            layer = store.resolver.content(found[3][1])
            assert (layer is None and records == {found[3][0]}) or (layer is not None and layer.mode == "own")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int32"])
def test_nearer_bases_take_fewer_bytes(place: Path, kind: str) -> None:
    with run_of(place, kind) as store:
        found = objects(store)
        sizes = {}
        for kept in ((), (0,)):
            layers = reanchored(store.reader, found[3], {found[step][1] for step in kept}).layers
            sizes[kept] = sum(len(chunk or b"") for chunk in [*layers.exact, *layers.coarse])
        assert sizes[0,] < 0.7 * sizes[()]


def test_the_nearest_that_stays_is_taken(place: Path) -> None:
    with run_of(place, "float32") as store:
        found = objects(store)
        layer = store.resolver.content(found[3][1])
        assert layer is not None
        chain = [record.id for record in store.reader.content_chain(layer)]
        assert len(chain) > 1
        assert reanchored(store.reader, found[3], set(chain[1:])).parent == chain[1]
        assert reanchored(store.reader, found[3], {chain[-1]}).parent == chain[-1]


def test_a_common_factor_is_found_again(place: Path) -> None:
    """Weight decay and nothing else: against an ancestor times a factor almost nothing is left."""
    with run_of(place, "bfloat16", factor=0.9) as store:
        found = objects(store)
        below = store.reader.chain(store.resolver.lattice(found[3][0]))
        before = exact(store, found[3])
        result = reanchored(store.reader, found[3], {below[-1].id})
        assert below[-1].id == result.record.base == found[0][1]
        assert result.record.factor == pytest.approx(0.9**3, rel=0.01)
        written(store, result)
        assert exact(store, found[3]) == before


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
        for kept in (set(), {found[0][1]}):
            written(store, reanchored(store.reader, found[2], kept))
            assert exact(store, found[2]) == before
        assert store.verify().problems == []
