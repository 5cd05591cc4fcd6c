from __future__ import annotations

import pickle
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest
import torch
import xarray
import zarr
from hypothesis import given
from hypothesis import strategies as st

import ckstore
from ckstore.codecs.lattice import CHUNK
from ckstore.formats.layout import Tensor
from ckstore.objects.units import Unit
from ckstore.version import Version
from ckstore.views.groups import chunk_shape, version_store
from tests.equality import bits_of


@pytest.fixture(scope="module")
def source() -> dict[str, Any]:
    torch.manual_seed(6)
    weight = torch.randn(700, 600)
    return {
        "model": {
            "a.weight": weight,
            "tied": weight,
            "fortran": torch.randn(600, 700).t(),
            "back\\slash/and%": torch.randn(3),
            "zarr.json": torch.arange(4),
            "": torch.arange(5),
            "a.weight_dim0": torch.randn(2),
            "expanded": torch.randn(5, 1).expand(5, 6),
            "bf16": torch.randn(2, 3).bfloat16(),
            "f8": torch.randn(4).to(torch.float8_e4m3fn),
            "c64": torch.randn(3, dtype=torch.complex64),
            "c128": torch.randn(3, dtype=torch.complex128),
            "mask": torch.rand(9) > 0.5,
            "empty": torch.empty(0, 3),
            "c": torch.tensor(3, dtype=torch.int16),
        },
        "state": {0: {"step": torch.tensor(12.0)}, "0": torch.randn(1), 1: [torch.zeros(2), torch.full((2,), -0.0)]},
    }


@pytest.fixture(scope="module", params=[1, 0], ids=["hot", "encoded"])
def version(
    source: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Version]:
    with ckstore.init(tmp_path_factory.mktemp("view") / "store") as store:
        store.ingest(source, run="gpt", step=40, hot=request.param)
        yield store["latest"]


def test_groups_follow_the_paths(version: Version) -> None:
    group = version.arrays
    assert isinstance(group, zarr.Group)
    assert group.read_only
    assert dict(group.attrs) == {"version": 1, "run": "gpt", "step": 40, "id": version.id}
    assert set(group.keys()) == {"model", "state"}
    assert set(group["state"].keys()) == {"[0]", "0", "[1]"}
    assert {"a.weight", "back%5Cslash%2Fand%25", "%7Aarr.json", "%", "c"} <= set(group["model"].keys())
    assert group["state/[1]/[1]"][...].tobytes() == np.full(2, -0.0, np.float32).tobytes()


def test_every_array_holds_the_ingested_values(version: Version, source: dict[str, Any]) -> None:
    for path in version:
        array = version.arrays[path]
        lazy = version[path]
        assert array.shape == lazy.shape
        expected = lazy.torch() if array.attrs.get("dtype") is None else lazy.torch().float()
        assert np.asarray(array[...]).tobytes() == bits_of(expected), path
        assert [codec["name"] for codec in array.metadata.to_dict()["codecs"]] == ["bytes"]
    np.testing.assert_array_equal(version.arrays["model/fortran"][17:20, ::7], source["model"]["fortran"][17:20, ::7])
    np.testing.assert_array_equal(version.arrays["model/expanded"][...], source["model"]["expanded"])


@pytest.mark.parametrize(
    ("name", "dtype", "attribute"),
    [
        ("bf16", "float32", "bfloat16"),
        ("f8", "float32", "float8_e4m3fn"),
        ("c64", "complex64", None),
        ("c128", "complex128", None),
        ("mask", "bool", None),
        ("c", "int16", None),
    ],
)
def test_dtypes_that_zarr_lacks_are_float32_with_an_attribute(
    version: Version, name: str, dtype: str, attribute: str | None
) -> None:
    array = version.arrays[f"model/{name}"]
    assert array.dtype == dtype
    assert array.attrs.get("dtype") == attribute


def test_groups_open_with_and_without_consolidated_metadata(version: Version) -> None:
    store = version.arrays.store
    plain = zarr.open_group(store, mode="r", use_consolidated=False)
    assert plain.metadata.consolidated_metadata is None
    np.testing.assert_array_equal(plain["model/a.weight"][3], version["model/a.weight"][3])
    below = zarr.open_consolidated(store, path="model", mode="r")
    assert set(below.keys()) == set(plain["model"].keys())
    assert below["c"][()] == 3


def test_writing_is_refused(version: Version) -> None:
    with pytest.raises(ValueError, match="read-only"):
        version.arrays["model/a.weight"][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        version.arrays.create_array("other", shape=(1,), dtype="f4")


def test_xarray_and_dask_read_the_same(version: Version, source: dict[str, Any]) -> None:
    dataset = xarray.open_zarr(version.arrays.store, group="model", consolidated=True)
    assert set(dataset.data_vars) == set(version.arrays["model"].keys())
    assert dataset["a.weight"].dims == ("a.weight_dim0_", "a.weight_dim1")
    assert not dataset.coords
    weight = source["model"]["a.weight"].numpy()
    np.testing.assert_array_equal(dataset["a.weight"][::-3, 5].compute(), weight[::-3, 5])
    array = dask.array.from_zarr(version.arrays["model/a.weight"])
    assert array.chunks == ((436, 264), (600,))
    np.testing.assert_array_equal((array + array).compute(scheduler="threads"), weight + weight)


def test_a_view_survives_pickling(version: Version) -> None:
    array = pickle.loads(pickle.dumps(version.arrays["model/a.weight"]))
    assert array.store == version.arrays.store
    np.testing.assert_array_equal(array[5:7], version["model/a.weight"][5:7])


@pytest.mark.encoded
def test_a_slice_decodes_only_its_chunks(store: ckstore.Store) -> None:
    store.ingest({"w": torch.randn(4096, 512)})
    store._repository.reader.cache.clear()  # an ingest leaves its chunks there for the version that follows
    array = store["latest"].arrays["w"]
    assert array.chunks == (512, 512)
    counts = []
    for key in (slice(0, 1), slice(1, 512), slice(1000, 1100), slice(None)):
        before = store._repository.reader.decoded_chunks
        array[key]
        counts.append(store._repository.reader.decoded_chunks - before)
    one = counts[0]
    assert one in (1, 2)
    assert counts == [one, 0, 2 * one, 5 * one]


def test_a_tensor_above_others_is_a_member_of_its_group(version: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    """No parser gives such paths today; if one does, nothing may be lost."""
    paths = dict(version._stored.paths)
    paths["model/c/deeper"] = paths["model/mask"]
    monkeypatch.setitem(version._stored.__dict__, "paths", paths)
    store = version_store(version._stored)
    group = zarr.open_group(store, mode="r")
    assert set(group["model/c"].keys()) == {"__tensor__", "deeper"}
    assert group["model/c/__tensor__"][()] == 3
    assert group["model/c/deeper"].shape == (9,)


@given(shape=st.lists(st.integers(0, 3000), max_size=4).map(tuple))
def test_chunks_of_contiguous_tensors_equal_those_of_objects(shape: tuple[int, ...]) -> None:
    strides = tuple(prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    chunk = chunk_shape(shape, strides)
    assert all(1 <= length <= max(size, 1) for length, size in zip(chunk, shape, strict=True))
    assert prod(chunk) <= CHUNK
    if len(shape) == 2 and 0 not in shape:
        assert prod(chunk) == min(prod(shape), Unit("", "", "uint8", shape, "", ()).chunk)


def test_every_tensor_of_real_files_is_its_bytes_in_the_file(shared_data: Path, store: ckstore.Store) -> None:
    """Whole pickled models cannot be unpickled here, so arrays are compared with the files' own bytes."""
    names = [
        "espcn/model_epoch_14.pth", "espcn/model_epoch_15.pth", "lightning_a/epoch=70-step=4331.ckpt",
        "lightning_a/last.ckpt", "willmore_pinn/checkpoint_epoch_5.pt", "trades_sgd/opt-nn-checkpoint_epoch5.tar",
    ]  # fmt: skip
    for name in names:
        store.ingest(shared_data / name, run=name.partition("/")[0])
        version = store["latest"]
        data = (shared_data / name).read_bytes()
        group = version.arrays
        assert len(version) > 0
        for path, (_, tensor) in version._stored.paths.items():
            array = np.asarray(group[path][...])
            assert array.tobytes() == raw_bytes(data, version._stored.layout.files[0].extents[tensor.extent], tensor), (
                path
            )


def raw_bytes(data: bytes, extent: Any, tensor: Tensor) -> bytes:
    """Return a tensor's elements in C order, from the bytes of its file."""
    item = extent.nbytes // extent.count
    flat = np.frombuffer(data, f"V{item}", extent.count, extent.start)
    return bytes(
        np.lib.stride_tricks.as_strided(
            flat[tensor.offset :], tensor.shape, [item * stride for stride in tensor.strides]
        ).tobytes()
    )
