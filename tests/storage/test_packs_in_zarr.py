"""Packs that an ingest wrote are Zarr hierarchies that any Zarr reads where ckstore's codecs are installed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import ckstore
from ckstore.codecs.lattice import floats
from ckstore.objects.identity import array_name
from ckstore.objects.records import Delta, Linear, Record
from ckstore.policy import Policy
from ckstore.storage import pack

pytestmark = pytest.mark.local


@pytest.fixture(autouse=True)
def arrays_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays are Zarr arrays as well."""
    monkeypatch.setattr(pack, "_SMALL", 0)


#: Of arrays whose rows have exponents of their own, and that have several chunks.
WHOLE = "ignore:Combining a `sharding_indexed` codec"


def versions(
    path: Path, dtype: torch.dtype, shape: tuple[int, int] = (300, 1001), **options: Any
) -> tuple[ckstore.Store, list[Any]]:
    """Return a store with three versions of a weight and its moments, and these."""
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn(*shape, generator=generator)
    # Rows and columns of very different sizes have steps of their own.
    second = (torch.linspace(-2, 2, shape[0]).exp()[:, None] * torch.linspace(-1, 1, shape[1]).exp() * draw).square()
    store = ckstore.init(path / "store")
    trees = []
    for step in range(3):
        state = {0: {"exp_avg": (draw * second).to(dtype), "exp_avg_sq": second.to(dtype)}}
        model = {"w": draw.to(dtype), "half": draw.to(torch.bfloat16), "n": torch.arange(70_001)}
        trees.append({"model": model, "optimizer": {"state": state}})
        torch.save(trees[-1], path / "file.pt")
        store.ingest(path / "file.pt", run="r", step=step, **options)
        draw = draw + 0.01 * torch.randn(shape, generator=generator)
    store.encode()
    return store, trees


def arrays(store: ckstore.Store) -> Any:
    """Yield each layer's array in plain Zarr, and its record."""
    for info in store._catalog.packs():
        with zarr.storage.ZipStore(store.path / "packs" / info.name, mode="r") as opened:
            group = zarr.open_group(opened, mode="r")
            assert group.attrs["ckstore"]["kind"] == info.kind
            manifest = store._repository.resolver.manifest(info.name)
            for slot in range(len(manifest.document["records"])):
                record = manifest.record(slot)
                array = group[array_name(record.id)]
                assert isinstance(array, zarr.Array)
                yield array, record


def chunks_of(record: Record, read: Any) -> np.ndarray:
    return np.concatenate([read(record, chunk) for chunk in range(record.chunks)])


def residuals(store: ckstore.Store, record: Record) -> np.ndarray:
    """Return by how many steps the integers of a linear delta differ from its base's on its lattice."""
    assert isinstance(record, Linear)
    base = store._repository.resolver.record(record.base or "")
    assert isinstance(base, Linear)
    integers, before = (chunks_of(one, store._repository.reader.integers) for one in (record, base))
    return integers - record.lattice.project(base.lattice, before, 0)


@pytest.mark.filterwarnings(WHOLE)
@pytest.mark.parametrize(
    "options", [{}, {"policy": "coarse"}, {"policy": Policy("coarse", max_abs_error=1e-3)}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_array_of_every_pack_reads(tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]) -> None:
    store, _ = versions(tmp_path, dtype, **options)
    read: Counter[str] = Counter()
    for array, record in arrays(store):
        values = np.asarray(array[...])
        assert values.shape == (record.count,)
        assert (isinstance(record, Delta) and record.context) == (array.attrs["ckstore"].get("order") == "context")
        assert (record.base is not None) == array.attrs["ckstore"].get("delta", False)
        if not isinstance(record, Linear):
            assert values.dtype.kind == "i"
            read[record.kind] += 1
            continue
        assert "ckstore.quantized_residual" in str(array.metadata.to_dict()["codecs"])
        assert values.dtype == ("float64" if record.dtype == "float64" else "float32")
        if record.base is None:
            assert np.array_equal(values, floats(chunks_of(record, store._repository.reader.values), record.dtype))
        else:
            assert np.array_equal(values, residuals(store, record))
        place = record.count // 2
        assert array[place] == values[place]
        read["base" if record.base is None else "delta"] += 1
        read["rows"] += record.base is None and record.lattice.rows.size > 0 and record.chunks > 1
    assert read.total() >= 8
    if options:
        assert read["base"]
        assert read["delta"]
    if "fidelity" in options:
        assert read["rows"]


def test_a_base_shows_the_weights(tmp_path: Path) -> None:
    store, trees = versions(tmp_path, torch.float32, shape=(256, 300), policy=Policy("coarse", max_abs_error=1e-3))
    weight = trees[0]["model"]["w"].numpy().reshape(-1)
    shown = [array[...] for array, record in arrays(store) if record.count == weight.size and record.base is None]
    assert min(np.abs(values - weight).max() for values in shown) <= 1e-3


def test_an_array_without_a_change_has_no_bytes(tmp_path: Path) -> None:
    """An array of zeros is not stored, and reads as zeros."""
    store = ckstore.init(tmp_path / "store")
    torch.save({"mask": torch.zeros(70_000)}, tmp_path / "file.pt")
    store.ingest(tmp_path / "file.pt", run="r", step=0, hot=0)
    [(array, record)] = arrays(store)
    assert record.length == 0
    assert not array[...].any()
    assert store.verify().problems == []
    assert not store["r@0"]["mask"].numpy().any()
