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
from ckstore.codecs.lattice import STEP_RANGE, floats
from ckstore.objects.identity import array_name
from ckstore.objects.records import Codebook, Delta, Linear, Record
from ckstore.policy import Policy
from ckstore.storage import pack

pytestmark = pytest.mark.local


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
    """Yield each object's array in plain Zarr, and its record; small exact objects have none."""
    for info in store._catalog.packs():
        with zarr.storage.ZipStore(store.path / "packs" / info.name, mode="r") as opened:
            group = zarr.open_group(opened, mode="r")
            assert group.attrs["ckstore"]["kind"] == info.kind
            manifest = store._repository.resolver.manifest(info.name)
            for slot in range(len(manifest.document.records)):
                record = manifest.record(slot)
                array = group.get(array_name(record.id))
                if array is None:
                    assert record.is_exact
                    assert record.nbytes < pack._SMALL
                else:
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


def expected(store: ckstore.Store, record: Record) -> np.ndarray:
    """Return the values of an object in full, or the change of an additive one, as Zarr shows them."""
    reader = store._repository.reader
    if isinstance(record, Codebook) and record.additive:
        return floats(record.lattice.values(chunks_of(record, reader.numbers)), record.dtype)
    values = chunks_of(record, reader.values)
    return floats(values, record.dtype) if record.dtype in STEP_RANGE else values.view(f"i{values.itemsize}")


@pytest.mark.long
@pytest.mark.filterwarnings(WHOLE)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"policy": "coarse"}, {"policy": Policy("coarse", max_abs_error=1e-3)}, {"policy": Policy("coarse", "lc")},
        {"policy": Policy("coarse", "dynaquant")},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_array_of_every_pack_reads(tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]) -> None:
    store, _ = versions(tmp_path, dtype, **options)
    read: Counter[str] = Counter()
    for array, record in arrays(store):
        values = np.asarray(array[...])
        assert values.shape == (record.count,)
        said = array.attrs["ckstore"]
        is_delta = record.base is not None
        in_context = record.context if isinstance(record, Delta) else isinstance(record, Codebook) and is_delta
        is_added = isinstance(record, Codebook) and record.additive
        assert (in_context and not is_added) == (said.get("order") == "context")
        assert is_delta == said.get("delta", False)
        assert said.get("base") == (array_name(record.base) if record.base else None)
        assert is_delta == ("recipe" in said)
        if is_delta and not is_added:
            if isinstance(record, Linear):
                assert np.array_equal(values, residuals(store, record))
                read["delta"] += 1
            else:
                assert values.dtype.kind == "i"
        else:
            assert values.tobytes() == expected(store, record).tobytes()
            read["base"] += isinstance(record, Linear)
        place = record.count // 2
        assert array[place] == values[place]
        read[record.kind] += 1
        read["added"] += is_added and is_delta
        read["rows"] += isinstance(record, Linear) and not is_delta and record.lattice.rows.size > 0 < record.chunks - 1
    assert read.total() >= 8
    scheme = getattr(options.get("policy"), "scheme", "lattice")
    if options and scheme == "lattice":
        assert read["base"]
        assert read["delta"]
    if dtype in (torch.float32, torch.bfloat16) and scheme != "lattice":
        assert read["codebook"] > 2
        assert (read["added"] > 0) == (scheme == "lc")
    if dtype in (torch.float32, torch.bfloat16) and options and not getattr(options["policy"], "is_bounded", False):
        assert read["rounded"]
    if "fidelity" in options:
        assert read["rows"]


@pytest.mark.long
@pytest.mark.filterwarnings(WHOLE)
@pytest.mark.parametrize("scheme", ["lattice", "lc", "dynaquant"])
def test_small_arrays_of_coarse_versions_open(tmp_path: Path, gpt_run: list[Path], scheme: Any) -> None:
    store = ckstore.init(tmp_path / "store")
    for path in gpt_run[1:4]:
        store.ingest(path, run="r", policy=Policy("coarse", scheme), hot=0)
    small = [(array, record) for array, record in arrays(store) if record.nbytes < pack._SMALL]
    kinds = {f"{record.kind} delta" if record.base else record.kind for _, record in small}
    # The steps of codebooks are so large that positive values of small tensors would become 0: these are rounded.
    linear = {"linear", "linear delta"} if scheme == "lattice" else set()
    assert kinds >= {"rounded", *linear, *(["codebook delta"] if scheme == "lc" else [])}
    assert all(np.isfinite(array[...]).all() for array, _ in small)


def codebook(record: Record) -> tuple[np.ndarray, int]:
    """Return the centroids of a codebook, and the number of its levels."""
    assert isinstance(record, Codebook)
    return record.lattice.centroids, record.lattice.centroids.size + record.lattice.protected


def indices(shown: dict[str, tuple[Any, Record]], name: str) -> np.ndarray:
    """Return the indices of a codebook by plain Zarr, those of protected elements with their bits."""
    array, record = shown[name]
    centroids, levels = codebook(record)
    if record.base is not None:
        said = array.attrs["ckstore"]
        assert said["recipe"] == "(base - this) mod levels"
        last = codebook(shown[said["base"]][1])[1] - 1
        before = np.minimum(indices(shown, said["base"]), last)
        stored = np.empty(record.count, int)
        stored[np.argsort(before >> max(0, last.bit_length() - 6), kind="stable")] = array[:]
        return np.where(stored < levels, (before - stored) % levels, stored - 1)
    plain = array.metadata.to_dict()
    plain |= {"data_type": "int32", "codecs": [one for one in plain["codecs"] if one["name"] != "ckstore.levels"]}
    stored = zarr.Array(zarr.AsyncArray(metadata=plain, store_path=array.store_path))[:]
    return stored + np.argmin(np.abs(centroids))


def test_deltas_of_codebooks_restore_by_their_recipe(tmp_path: Path) -> None:
    store, _ = versions(tmp_path, torch.float32, shape=(300, 256), policy=Policy("coarse", "dynaquant"))
    shown = {array_name(record.id): (array, record) for array, record in arrays(store)}
    wanted = [store[f"r@{step}"]["model/w"][:].reshape(-1) for step in range(3)]
    found = []
    for name, (_, record) in shown.items():
        if isinstance(record, Codebook) and record.base is not None and record.dtype == "float32":
            centroids, numbers = codebook(record)[0], indices(shown, name)
            kept = (np.maximum(numbers - centroids.size, 0).astype("u4") << 16).view("f4")
            values = np.where(numbers < centroids.size, centroids[np.minimum(numbers, centroids.size - 1)], kept)
            found.append(any(np.array_equal(values, weights) for weights in wanted))
    assert sum(found) == 2


def test_a_base_shows_the_weights(tmp_path: Path) -> None:
    store, trees = versions(tmp_path, torch.float32, shape=(256, 300), policy=Policy("coarse", max_abs_error=1e-3))
    weight = trees[0]["model"]["w"].numpy().reshape(-1)
    shown = [array[...] for array, record in arrays(store) if record.count == weight.size and record.base is None]
    assert min(np.abs(values - weight).max() for values in shown) <= 1e-3


def test_an_array_without_a_change_has_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of zeros is not stored, and reads as zeros."""
    monkeypatch.setattr(pack, "_SMALL", 0)
    store = ckstore.init(tmp_path / "store")
    torch.save({"mask": torch.zeros(70_000)}, tmp_path / "file.pt")
    store.ingest(tmp_path / "file.pt", run="r", step=0, hot=0)
    [(array, record)] = arrays(store)
    assert record.nbytes == 0
    assert not array[...].any()
    assert store.verify().problems == []
    assert not store["r@0"]["mask"].numpy().any()


def test_the_recipe_of_a_delta_holds_in_its_last_chunk(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    values = [generator.standard_normal(300_000).astype(np.float32)]
    values.append(values[0] * np.float32(1.001))
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            store.ingest({"w": values[step]}, run="r", step=step, hot=0)
        found = [array for array, record in arrays(store) if record.base is not None and record.count == 300_000]
        (delta,) = found
        assert delta.attrs["ckstore"]["recipe"] == "ord(base) + sign(base) * this"
        assert delta.attrs["ckstore"].get("order") is None
        ordinals = [np.where(bits < 0, bits ^ 0x7FFFFFFF, bits) for bits in (value.view("i4") for value in values)]
        sign = np.where(np.signbit(values[0]), -1, 1)
        assert np.array_equal(ordinals[0] + sign * np.asarray(delta[...]), ordinals[1])


def test_additive_codebooks_restore_by_their_recipe(tmp_path: Path) -> None:
    store, _ = versions(tmp_path, torch.float32, shape=(300, 256), policy=Policy("coarse", "lc"))
    shown = {array_name(record.id): array for array, record in arrays(store) if isinstance(record, Codebook)}

    def values(name: str) -> Any:
        base = shown[name].attrs["ckstore"].get("base")
        return shown[name][:] + (values(base) if base else 0)

    wanted = [store[f"r@{step}"]["model/w"][:].reshape(-1) for step in range(3)]
    found = [values(name) for name in shown]
    assert all(any(np.array_equal(weights, restored) for restored in found) for weights in wanted)
