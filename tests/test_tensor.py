from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ckstore
from ckstore.dtypes import numpy_dtype
from ckstore.errors import NotFoundError
from ckstore.tensor import LazyTensor
from ckstore.version import Version
from tests.equality import assert_same, bits_of

SHAPE = (40, 30, 20)


def fresh_cache(version: Version) -> None:
    """Forget every decoded chunk."""
    version._stored.repository.reader.cache = type(version._stored.repository.reader.cache)(
        version._stored.repository.reader.cache.limit
    )


@pytest.fixture(scope="module")
def source() -> dict[str, Any]:
    torch.manual_seed(5)
    cube = torch.randn(SHAPE)
    return {
        "cube": cube,
        "transposed": torch.randn(SHAPE[::-1]).permute(2, 1, 0),
        "strided": torch.randn(80, 60, 40)[::2, 30:, ::2],
        "large": torch.randn(4096, 512),
        "bf16": torch.randn(7, 5).bfloat16(),
        "f8": torch.randn(9).to(torch.float8_e5m2),
        "c128": torch.randn(3, 2, dtype=torch.complex128),
        "scalar": torch.tensor(7),
        "mask": torch.rand(11) > 0.5,
        "empty": torch.empty(0, 3),
    }


@pytest.fixture(scope="module", params=[1, 0], ids=["hot", "encoded"])
def version(
    source: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Version]:
    with ckstore.init(tmp_path_factory.mktemp("tensor") / "store") as store:
        store.ingest(source, hot=request.param)
        yield store["latest"]


def test_properties_of_a_tensor(version: Version) -> None:
    tensor = version["cube"]
    assert (tensor.shape, tensor.ndim, tensor.size, tensor.nbytes) == (SHAPE, 3, 24_000, 96_000)
    assert (tensor.dtype, tensor.dtype_name, len(tensor)) == (np.dtype("float32"), "float32", 40)
    assert tensor.chunks == SHAPE
    assert version["large"].chunks == (512, 512)
    assert repr(tensor) == "<ckstore.LazyTensor cube float32 [40, 30, 20] of version 1>"
    assert version["bf16"].dtype == ml_dtypes.bfloat16
    assert version["f8"].dtype == ml_dtypes.float8_e5m2
    with pytest.raises(TypeError):
        len(version["scalar"])


def test_an_unknown_path_names_near_ones(version: Version) -> None:
    with pytest.raises(NotFoundError, match="did you mean cube"):
        version["cubes"]


def test_whole_tensors_equal_the_ingested_ones(version: Version, source: dict[str, Any]) -> None:
    for path, tensor in source.items():
        lazy = version[path]
        assert_same(lazy.torch(), tensor.contiguous(), path)
        array = np.asarray(lazy)
        assert array.shape == tuple(tensor.shape)
        assert array.dtype == lazy.dtype
        assert array.tobytes() == bits_of(tensor), path
        assert lazy.numpy().flags.writeable


basic = hnp.basic_indices(SHAPE, allow_newaxis=True, max_dims=5)
arrays = hnp.integer_array_indices(SHAPE[:2], result_shape=hnp.array_shapes(max_dims=2, max_side=4), dtype=np.int64)
masks = hnp.arrays(np.bool, SHAPE[0])
mixed = st.one_of(
    st.tuples(hnp.integer_array_indices(SHAPE[:1], dtype=np.int32).map(lambda index: index[0]), st.slices(30)),
    st.tuples(st.slices(40), st.just(np.array([[3, -1], [0, 0]])), st.integers(-20, 19)),
    st.tuples(st.integers(-40, 39), st.just(...), st.lists(st.integers(-20, 19), max_size=4)),
    st.tuples(masks, st.slices(30), st.just(None)),
    st.tuples(st.integers(-40, 39), st.just(...), st.lists(st.integers(-20, 19), max_size=4), st.slices(20)),
)


@pytest.mark.parametrize("path", ["cube", "transposed", "strided"])
@given(key=st.one_of(basic, arrays, masks, mixed))
def test_indexing_is_numpys(version: Version, source: dict[str, Any], path: str, key: Any) -> None:
    array = source[path].numpy()
    found = version[path][key]
    np.testing.assert_array_equal(found, array[key], strict=True)


@pytest.mark.parametrize(
    "key", [40, -41, (0, 0, 0, 0), (..., ...), [40], np.zeros(39, bool), 1.5, "a", True, (slice(None), [[30]])]
)
def test_keys_that_numpy_refuses_are_refused(version: Version, source: dict[str, Any], key: Any) -> None:
    with pytest.raises(IndexError):
        version["cube"][key]


def test_an_ellipsis_of_no_axes_separates_index_arrays(version: Version, source: dict[str, Any]) -> None:
    for key in ((slice(None), 20, ..., [1, 2]), (0, 1, 2, ...), (..., [1, 2], [3, 4], [5, 6])):
        expected = source["cube"].numpy()[key]
        np.testing.assert_array_equal(version["cube"][key], expected, strict=True)
        assert version["cube"].torch(key).shape == expected.shape


def test_slices_of_torch_tensors_keep_their_dtype(version: Version, source: dict[str, Any]) -> None:
    assert_same(version["bf16"].torch((slice(2, 4), 1)), source["bf16"][2:4, 1].contiguous())
    backwards = source["f8"].view(torch.uint8).flip(0)[::2].contiguous().view(torch.float8_e5m2)
    assert_same(version["f8"].torch(slice(None, None, -2)), backwards)
    assert_same(version["cube"].torch((3, 4, 5)), source["cube"][3, 4, 5])


def test_float4_becomes_numbers_as_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32).reshape(2, 8)
    codes = numbers.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": packed, "none": packed[:, :0], "one": packed[0, 1]})
        version = store["latest"]
        found = np.asarray(version["w"])
        assert found.dtype == ml_dtypes.float4_e2m1fn
        np.testing.assert_array_equal(found.astype(np.float32), numbers)
        assert version["none"].numpy().shape == (2, 0)
        assert version["one"].numpy().tolist() == [1, 1.5]
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        np.testing.assert_array_equal(np.asarray(version["w"]), numbers, strict=True)


@pytest.mark.parametrize("version", [0], indirect=True, ids=["encoded"])
def test_a_slice_decodes_the_chunks_it_touches_and_no_others(version: Version) -> None:
    """The version is stored in full."""
    large = version["large"]
    reader = version._stored.repository.reader
    fresh_cache(version)
    before = reader.decoded_chunks
    large[1000]
    one = reader.decoded_chunks - before
    assert one == 1
    before = reader.decoded_chunks
    large[1001]
    assert reader.decoded_chunks == before
    fresh_cache(version)
    before = reader.decoded_chunks
    large[[0, 4095]]
    assert reader.decoded_chunks - before == 2 * one
    fresh_cache(version)
    before = reader.decoded_chunks
    large.numpy()
    assert reader.decoded_chunks - before == 8 * one


def test_threads_may_read_at_once(version: Version, source: dict[str, Any]) -> None:
    array = source["large"].numpy()
    large = version["large"]

    def read(seed: int) -> bool:
        low, high = sorted(np.random.default_rng(seed).integers(0, 4096, 2))
        return bool(np.array_equal(large[low:high, ::3], array[low:high, ::3]))

    fresh_cache(version)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(64)))


def test_an_array_is_a_copy(version: Version) -> None:
    assert isinstance(version["cube"], LazyTensor)
    assert np.asarray(version["cube"], dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.array(version["cube"], copy=False)


def test_every_tensor_of_a_real_file_is_torchs(shared_data: Path, store: ckstore.Store) -> None:
    path = shared_data / "willmore_pinn" / "checkpoint_epoch_10.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)
    store.ingest(shared_data / "willmore_pinn" / "checkpoint_epoch_5.pt")
    store.ingest(path)
    version = store["latest"]
    for name, tensor in state["model_state_dict"].items():
        assert_same(version[f"model_state_dict/{name}"].torch(), tensor, name)
    for number, entry in state["optimizer_state_dict"]["state"].items():
        for name, tensor in entry.items():
            assert_same(version[f"optimizer_state_dict/state/[{number}]/{name}"].torch(), tensor, name)


def test_slices_without_ml_dtypes_show_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    source = {"bfloat16": words.view(torch.bfloat16), "complex32": words.view(torch.complex32).reshape(2, -1)}
    source |= {name: codes.view(getattr(torch, name)) for name in dir(torch) if name.startswith("float8_")}
    numpy_dtype.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    try:
        with ckstore.open(tmp_path / "store", create=True) as store:
            version = store[store.ingest(source, run="a", step=1).version]
            for path, tensor in source.items():
                wide = torch.complex64 if path == "complex32" else torch.float32
                assert version[path].dtype == str(wide).removeprefix("torch.")
                expected = np.asarray(tensor.to(wide))
                for found in (version[path], version.arrays[path]):
                    np.testing.assert_array_equal(np.asarray(found[...]), expected, strict=True)
                np.testing.assert_array_equal(version[path][..., 7], expected[..., 7])
    finally:
        numpy_dtype.cache_clear()
