"""Statistics of runs: every number against NumPy on the original values, the cache, and bounded memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import ckstore
from ckstore import Store
from ckstore.report import statistics as room
from ckstore.report.measures import BINS, ROW, edges, float_values, histogram, spectrum
from ckstore.report.statistics import RunStatistics, sampled_places, statistics

Array = npt.NDArray[Any]

FLOATS = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"]


def of(store: Store, run: str = "a", **options: Any) -> RunStatistics:
    """Return the statistics of a run."""
    return statistics([version._stored for version in store.versions(run)], **options)


def values_of(found: RunStatistics, path: str) -> dict[str, Array]:
    """Return the values of a tensor over the versions, by measure."""
    [number] = [number for number, tensor in enumerate(found.tensors) if tensor.path == path]
    return {key: values[number] for key, values in found.values.items()}


def wide(array: Array) -> Array:
    """Return an array in double precision."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def expected(arrays: list[Array], steps: list[int]) -> dict[str, list[float]]:
    """Compute the measures of a tensor with NumPy alone."""
    found: dict[str, list[float]] = {
        key: [] for key in ("rms", "change", "distance", "unchanged", "nonfinite", "ratio")
    }
    for place, array in enumerate(arrays):
        now, first = wide(array), wide(arrays[0])
        finite = np.isfinite(now)
        found["rms"].append(float(np.sqrt(np.mean(np.abs(now[finite]) ** 2))))
        found["nonfinite"].append(float(np.mean(~finite)))
        found["distance"].append(relative(now, first))
        if not place:
            for key in ("change", "unchanged", "ratio"):
                found[key].append(np.nan)
            continue
        before = wide(arrays[place - 1])
        found["change"].append(relative(now, before))
        found["ratio"].append(found["change"][-1] / (steps[place] - steps[place - 1]))
        size = array.dtype.itemsize
        bits = [np.frombuffer(one.tobytes(), "u1").reshape(-1, size) for one in (array, arrays[place - 1])]
        found["unchanged"].append(float(np.mean((bits[0] == bits[1]).all(1))))
    return found


def relative(now: Array, before: Array) -> float:
    """Return the relative distance, over elements that are finite in both."""
    both = np.isfinite(now) & np.isfinite(before)
    return float(np.linalg.norm(now[both] - before[both]) / np.linalg.norm(before[both]))


def walk(dtype: str, shape: tuple[int, ...], count: int = 4, seed: int = 0) -> list[Array]:
    """Return versions of an array; about a third of the elements does not move each time."""
    generator = np.random.default_rng(seed)

    def drawn() -> Array:
        values = generator.standard_normal(shape)
        return values + 1j * generator.standard_normal(shape) if dtype.startswith("complex") else values

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    value = drawn()
    found = []
    for _ in range(count):
        found.append(value.astype(kind))
        value = value + 0.05 * drawn() * (generator.random(shape) < 0.7)
    return found


def tensor(array: Array) -> torch.Tensor:
    """Return a torch tensor of an array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.asarray(array.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)


def ingest(store: Store, states: list[dict[str, Any]], run: str = "a", **options: Any) -> None:
    """Store states as the versions of a run at steps 10, 20, …."""
    for number, state in enumerate(states, start=1):
        store.ingest(state, run=run, step=10 * number, **options)


@pytest.mark.long
@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_are_those_of_numpy(store: Store, dtype: str, hot: bool) -> None:
    arrays = {"w": walk(dtype, (300, 250)), "small": walk(dtype, (7, 5), seed=1), "scalar": walk(dtype, (), seed=2)}
    for each in arrays.values():
        for number in (1, 2):
            if each[0].ndim:
                each[number].reshape(-1)[:3] = [np.nan, np.inf, -0.0]
    ingest(store, [{"model": {name: tensor(each[k]) for name, each in arrays.items()}} for k in range(4)])
    if not hot:
        store.encode()
    found = of(store)
    for name, each in arrays.items():
        got = values_of(found, f"model/{name}")
        for key, values in expected(each, [10, 20, 30, 40]).items():
            np.testing.assert_allclose(got[key], values, rtol=2e-6, atol=1e-9, err_msg=f"{name} {key}")


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_all_floats_of_eight_bits_have_the_values_of_ml_dtypes(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(float_values(codes, dtype), codes.view(getattr(ml_dtypes, dtype)).astype(np.float32))


def test_a_matrix_of_float4_has_the_measures_of_its_numbers(store: Store) -> None:
    packed = torch.randint(0, 256, (90, 70), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ingest(store, [{"w": packed.view(torch.float4_e2m1fn_x2)}])
    numbers = np.asarray(store["latest"]["w"]).astype(np.float64)
    got = values_of(of(store), "w")
    np.testing.assert_allclose(got["rms"], np.sqrt((numbers**2).mean()), rtol=1e-6)
    np.testing.assert_allclose(got["spectral"], np.linalg.svd(numbers, compute_uv=False)[0], rtol=1e-5)
    assert got["nonfinite"] == [0]


def test_integers_booleans_and_empty_tensors_are_only_compared(store: Store) -> None:
    states = [
        {"n": torch.full((100,), k), "b": torch.arange(100) > 10 * k, "e": torch.zeros(0, 3), "c": torch.tensor(k)}
        for k in range(3)
    ]
    ingest(store, states)
    found = of(store)
    assert {tensor.role for tensor in found.tensors if tensor.path != "e"} == {"other"}
    for path, unchanged in (("n", [np.nan, 0, 0]), ("b", [np.nan, 0.9, 0.9]), ("e", [np.nan] * 3)):
        got = values_of(found, path)
        np.testing.assert_allclose(got["unchanged"], unchanged, rtol=1e-6)
        assert all(np.isnan(got[key]).all() for key in (*ROW, "ratio") if key != "unchanged")


def test_conjugate_and_transposed_views_are_resolved(store: Store) -> None:
    first, second = (torch.randn(40, 30, dtype=torch.complex64, generator=torch.Generator().manual_seed(k))
                     for k in range(2))  # fmt: skip
    ingest(store, [{"w": first.conj().T, "v": first}, {"w": second.T, "v": second.conj()}])
    got = values_of(of(store), "w")
    np.testing.assert_allclose(got["change"][1], relative(wide(second.T.numpy()), wide(first.numpy().conj().T)), 2e-6)


def adam(k: int) -> dict[str, Any]:
    """Return a state of a weight and its moments."""
    generator = torch.Generator().manual_seed(k)
    m, v = torch.randn(200, 300, generator=generator), torch.rand(200, 300, generator=generator) ** 2 * 1e-6
    v[0, :3] = 0
    bias = {"exp_avg": m[0].clone(), "exp_avg_sq": v[1].clone(), "step": torch.tensor(float(k))}
    return {
        "model": {"w": torch.randn(200, 300, generator=generator), "b": m[1].clone()},
        "optimizer": {"state": {0: {"exp_avg": m, "exp_avg_sq": v, "step": torch.tensor(float(k))}, 1: bias}},
    }


def test_moments_have_roles_percentiles_and_ratios(store: Store) -> None:
    states = [adam(k) for k in range(3)]
    ingest(store, states)
    found = of(store)
    roles = {tensor.path: tensor.role for tensor in found.tensors}
    assert roles["model/w"] == roles["model/b"] == "weight"
    assert roles["optimizer/state/[0]/exp_avg"] == "first moment"
    assert roles["optimizer/state/[1]/exp_avg_sq"] == "second moment"
    assert roles["optimizer/state/[1]/step"] == "other"
    for number in (0, 1):
        got = values_of(found, f"optimizer/state/[{number}]/exp_avg_sq")
        for place, state in enumerate(states):
            m, v = (wide(state["optimizer"]["state"][number][name].numpy()) for name in ("exp_avg", "exp_avg_sq"))
            low, high = np.quantile(v, [0.01, 0.99])
            some = v > 0
            ratio = np.median(np.abs(m[some]) / np.sqrt(v[some]))
            np.testing.assert_allclose(
                [got[key][place] for key in ("v_low", "v_high", "m_over_sqrt_v")], [low, high, ratio], rtol=2e-6
            )


def test_moments_of_optax_have_roles_too(store: Store) -> None:
    generator = np.random.default_rng(0)
    m, v = (generator.random((30, 20), np.float32).astype(kind) for kind in (ml_dtypes.bfloat16, np.float32))
    layers = {"mu": m, "w": {"kernel": m + m}}  # A layer may be called like a moment.
    adam = {"count": np.array(3, np.int32), "mu": layers, "nu": {"mu": v, "w": {"kernel": v + v}}}
    factored = {"v_row": {"w": {"kernel": v[0]}}}
    ingest(store, [{"params": {"mu": v, "w": {"kernel": v}}, "opt_state": [{"inner_state": adam}, factored]}])
    found = of(store)
    below = "opt_state/[0]/inner_state"
    assert {tensor.path: tensor.role for tensor in found.tensors} == {
        "params/mu": "weight", "params/w/kernel": "weight", f"{below}/count": "other",
        f"{below}/mu/mu": "first moment", f"{below}/mu/w/kernel": "first moment",
        f"{below}/nu/mu": "second moment", f"{below}/nu/w/kernel": "second moment",
        "opt_state/[1]/v_row/w/kernel": "other",
    }  # fmt: skip
    for path, first, second in (("mu", m, v), ("w/kernel", m + m, v + v)):
        got = values_of(found, f"{below}/nu/{path}")["m_over_sqrt_v"]
        np.testing.assert_allclose(got, [np.median(np.abs(wide(first)) / np.sqrt(wide(second)))], rtol=1e-6)


def test_buffers_are_no_weights(store: Store) -> None:
    ingest(store, [{"model": {"0.pe": torch.ones(3), "w": torch.ones(3)}}])
    assert [tensor.path for tensor in of(store).tensors if tensor.role == "weight"] == ["model/w"]


def test_spectra_are_those_of_an_svd(store: Store) -> None:
    arrays = walk("float32", (220, 300), 2)
    ingest(store, [{"w": torch.from_numpy(array)} for array in arrays])
    got = values_of(of(store), "w")
    for place, array in enumerate(arrays):
        singular = np.linalg.svd(wide(array), compute_uv=False)
        shares = singular / singular.sum()
        np.testing.assert_allclose(got["spectral"][place], singular[0], rtol=2e-6)
        np.testing.assert_allclose(got["rank"][place], np.exp(-(shares * np.log(shares)).sum()), rtol=2e-6)


def test_a_randomised_svd_finds_the_largest_singular_value_and_a_low_rank() -> None:
    generator = np.random.default_rng(0)
    left, right = generator.standard_normal((400, 20)), generator.standard_normal((20, 500))
    matrix = (left @ right + 1e-4 * generator.standard_normal((400, 500))).astype(np.float32)
    singular = np.linalg.svd(wide(matrix), compute_uv=False)
    shares = singular / singular.sum()
    rank, norm = spectrum(matrix)
    assert norm == pytest.approx(singular[0], rel=1e-5)
    assert rank == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=0.02)
    assert spectrum(np.zeros((300, 300), np.float32))[1] == 0


@pytest.mark.parametrize("sides", [(30, 40), (300, 320)])
@pytest.mark.parametrize(("dtype", "exponent"), [("f2", 15), ("f4", 127), ("f8", 1023), ("f8", 400), ("f8", -1060)])
def test_spectra_of_huge_and_tiny_values(sides: tuple[int, int], dtype: str, exponent: int) -> None:
    signs = np.sign(np.random.default_rng(0).standard_normal(sides)).astype(dtype)
    rank, norm = spectrum(signs)
    scaled = spectrum(np.ldexp(signs, exponent))
    with np.errstate(over="ignore"):
        assert scaled == (rank, float(np.ldexp(norm, exponent)))


def test_histograms_count_values_with_the_edges_of_the_first_version(store: Store) -> None:
    arrays = walk("float32", (200, 250), 3)
    ingest(store, [{"w": torch.from_numpy(array * (1 + k))} for k, array in enumerate(arrays)])
    found = of(store)
    bins = edges(float(found.values["rms"][0, 0]))
    for place, array in enumerate(arrays):
        clipped = np.clip(array * (1 + place), bins[0], bins[-1])
        assert found.histograms[0][place].tolist() == np.histogram(clipped, bins)[0].tolist()
    assert histogram(np.float32([0, np.nan, np.inf]), 0.0).sum() == 1
    assert found.histograms[0].shape[1] == BINS


def test_histograms_of_another_dtype_or_shape_have_the_same_edges(store: Store) -> None:
    weight = torch.randn(60, 50, generator=torch.Generator().manual_seed(0))
    states = [weight, (5 * weight).bfloat16(), 5 * weight[:40]]
    ingest(store, [{"w": values} for values in states])
    found = of(store)
    bins = edges(float(found.values["rms"][0, 0]))
    for place, values in enumerate(states):
        clipped = np.clip(values.float().numpy(), bins[0], bins[-1])
        assert found.histograms[0][place].tolist() == np.histogram(clipped, bins)[0].tolist()


def test_a_large_tensor_is_sampled(store: Store) -> None:
    arrays = walk("float32", (1000, 500), 2)
    ingest(store, [{"a": {"w": torch.from_numpy(array), "v": torch.ones(3)}} for array in arrays])
    with mock.patch.object(room, "_LARGEST_MATRIX", 0):
        found = of(store, sample=40_000)
    places = sampled_places((1000, 500), 40_000)
    assert places is not None
    assert [tensor.sampled for tensor in found.tensors] == [0.08, None]
    some = [array[np.ix_(places[0], places[1])] for array in arrays]
    got = values_of(found, "a/w")
    for key, values in expected(some, [10, 20]).items():
        np.testing.assert_allclose(got[key], values, rtol=2e-6)
    assert got["rms"][0] == pytest.approx(np.sqrt(np.mean(wide(arrays[0]) ** 2)), rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(10_000_000,), (1, 10_000_000), (3, 1000, 1000), (2000, 3000), (2, 3, 4_000_000)])
def test_samples_have_about_the_number_of_elements_asked_for(shape: tuple[int, ...]) -> None:
    places = sampled_places(shape, 1 << 20)
    assert places is not None
    count = np.prod([len(each) for each in places])
    assert (1 << 18) < count <= 1 << 20
    assert all(len(each) and each[0] == 0 and each[-1] == size - 1 for each, size in zip(places, shape, strict=True))


def reads(call: Callable[[], Any]) -> tuple[Any, list[tuple[int, int]]]:
    """Return the result of a call, and the (version, extent) that it read."""
    seen = []
    read = room.read_tensor

    def counted(version: Any, file: int, tensor: Any, wanted: Any) -> Any:
        seen.append((version.row.number, tensor.extent))
        return read(version, file, tensor, wanted)

    with mock.patch.object(room, "read_tensor", counted):
        return call(), seen


def test_every_tensor_is_decoded_once_and_unchanged_objects_not_again(store: Store) -> None:
    arrays = walk("float32", (300, 300), 4)
    still = torch.randn(300, 300)
    ingest(store, [{"w": torch.from_numpy(array), "still": still} for array in arrays])
    found, seen = reads(lambda: of(store))
    assert len(seen) == len(set(seen)) == 5
    got = values_of(found, "still")
    assert got["unchanged"][1:].tolist() == [1, 1, 1]
    assert got["change"][1:].tolist() == [0, 0, 0]
    assert len(set(got["spectral"].tolist())) == 1


def test_a_second_report_decodes_nothing_and_a_longer_run_only_new_versions(store: Store) -> None:
    states = [adam(k) for k in range(4)]
    ingest(store, states[:3])
    first = of(store)
    second, seen = reads(lambda: of(store))
    assert not seen
    for key in ROW:
        np.testing.assert_array_equal(first.values[key], second.values[key])
    np.testing.assert_array_equal(first.histograms[0], second.histograms[0])
    store.ingest(states[3], run="a", step=40)
    _, seen = reads(lambda: of(store))
    assert {version for version, _ in seen} == {1, 3, 4}
    store.encode()
    assert not reads(lambda: of(store))[1]


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "directory", "foreign"])
def test_a_damaged_cache_is_computed_again(store: Store, damage: str) -> None:
    ingest(store, [adam(k) for k in range(2)])
    first = of(store)
    for path, _ in room.cache_files(store._repository):
        data = path.read_bytes()
        path.unlink()
        match damage:
            case "flipped":
                path.write_bytes(data[:-3] + bytes([data[-3] ^ 64]) + data[-2:])
            case "cut":
                path.write_bytes(data[: len(data) // 2])
            case "empty":
                path.touch()
            case "directory":
                path.mkdir()
            case "foreign":
                path.write_bytes(b"\x80\x04cos\nsystem\n" * 100)
    second, seen = reads(lambda: of(store))
    assert seen
    for key in ROW:
        np.testing.assert_array_equal(first.values[key], second.values[key])


def test_a_cache_that_cannot_be_written_is_left_out(store: Store, cache: Path) -> None:
    (cache / "statistics").write_text("a file")
    ingest(store, [adam(0)])
    assert np.isfinite(of(store).values["rms"]).any()


def test_versions_without_a_tensor_or_with_another_shape_have_no_values(store: Store) -> None:
    arrays = walk("float32", (100, 20), 4)
    states: list[dict[str, Any]] = [{"w": torch.from_numpy(array), "v": torch.ones(4)} for array in arrays]
    del states[1]["w"]
    states[3]["w"] = torch.ones(100, 21)
    ingest(store, states)
    got = values_of(of(store), "w")
    assert np.isfinite(got["rms"]).tolist() == [True, False, True, True]
    assert not np.isfinite(got["change"]).any()
    assert np.isfinite(got["distance"]).tolist() == [True, False, True, False]


def test_dropped_tensors_and_coarse_values_are_those_of_the_versions(store: Store) -> None:
    states = [adam(k) for k in range(3)]
    ingest(store, states)
    store.encode()
    store.thin("a@10")
    store.set_policy(ckstore.Policy(retention=ckstore.Retention(keep_last=1)), run="b")
    found = of(store)
    version = store["a@10"]
    got = values_of(found, "model/w")
    coarse = version["model/w"].numpy()
    np.testing.assert_allclose(got["rms"][0], np.sqrt(np.mean(wide(coarse) ** 2)), rtol=2e-6)
    np.testing.assert_allclose(got["deviation"][0], version.deviations()["model/w"].relative, rtol=1e-6)
    assert np.isnan(got["deviation"][1:]).all()
    np.testing.assert_allclose(got["change"][1], relative(wide(states[1]["model"]["w"].numpy()), wide(coarse)), 2e-6)
    np.testing.assert_allclose(got["bits"], [v.storage("model/w")["bits"] for v in store.versions("a")], rtol=1e-6)


def test_run_statistics_are_a_table(store: Store) -> None:
    ingest(store, [adam(k) for k in range(3)])
    table = store.run("a").statistics(["change", "rms"], ["model/*"])
    assert len(table) == 6
    assert table[0]["change"] is None
    frame = table.to_pandas()
    assert frame.pivot(index="step", columns="path", values="rms").shape == (3, 2)
    storage, seen = reads(lambda: store.run("a").statistics(["bits"]))
    assert not seen
    assert storage[0]["bits"] is not None
    with pytest.raises(ckstore.UsageError, match="no measure 'loss'"):
        store.run("a").statistics(["loss"])


_PEAK = """
import resource, sys
import ckstore
from ckstore.report.statistics import statistics
with ckstore.open(sys.argv[1], "r") as store:
    versions = [version._stored for version in store.versions("a")]
    statistics(versions[:1], ["none"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = statistics(versions, sample=1 << 18)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.long
@pytest.mark.local
def test_memory_does_not_grow_with_the_versions(store: Store, directory: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(8):
        state = {f"w{k}": torch.from_numpy(generator.standard_normal((1024, 4096), np.float32)) for k in range(3)}
        store.ingest(state, run="a", step=number + 1)
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(directory / "store")], capture_output=True, text=True, check=True
    )
    whole = 8 * 3 * (16 << 20)
    assert int(done.stdout) < whole / 2
