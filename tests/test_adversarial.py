"""Values that break codecs come back bit for bit, in any order of versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckstore
from ckstore.recovery.recover import recover
from tests.checkpoints import lose_catalog, scratch, sha256, write_safetensors
from tests.equality import bits_of

Bits = npt.NDArray[Any]

ITEM = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8,
    "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8,
}  # fmt: skip

#: From 2^16 elements on a tensor is an object by itself, and a float weight has a linear lattice; more than
#: 2^18 are several chunks.
SHAPES = [
    (), (0,), (1,), (3, 0, 5), (2, 3), (100,), (65_535,), (65_536,), (256, 257), (300, 7, 40), (1, 70_000),
    (70_000, 1), (262_145,), (900, 300),
]  # fmt: skip

KINDS = ["normal", "zero", "minus zero", "equal", "any bits", "specials", "wide", "subnormal", "sparse", "integers"]

CHANGES = [
    "same", "noise", "tiny noise", "up", "down", "negate", "nans appear", "nans vanish", "shuffle", "one bit up",
    "one element", "all zero", "anything",
]  # fmt: skip

#: Tensors of these names have other lattices than weights.
NAMES = ["model.weight", "exp_avg", "exp_avg_sq"]

_SPECIALS32 = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
     0xFFC00000, 0x7F800001, 0x7FC12345, 0xFFFFFFFF, 0x7149F2CA, 0x0DA24260, 0x3F800000, 0xBF800000, 0x3F800001],
    np.uint32,
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A tensor and how it changes; everything else follows from `seed`."""

    dtype: str
    shape: tuple[int, ...]
    kind: str
    name: str
    seed: int


def first_bits(recipe: Recipe) -> Bits:
    """Return the bits of the first version's elements."""
    generator = np.random.default_rng(recipe.seed)
    count = prod(recipe.shape) * (2 if recipe.dtype == "complex64" else 1)
    if recipe.dtype not in ("float64", "float32", "float16", "bfloat16", "complex64"):
        return small_items(recipe, generator, count)
    values = generator.normal(0, 0.02, count)
    bits = None
    match recipe.kind:
        case "zero":
            values[:] = 0.0
        case "minus zero":
            values[:] = -0.0
        case "equal":
            values[:] = generator.normal()
        case "wide":
            values = np.where(generator.random(count) < 0.5, 1e30, 1e-30) * generator.choice([-1, 1], count)
        case "sparse":
            values *= generator.random(count) < 0.05
        case "integers":
            values = np.rint(values * 200)
        case "subnormal":
            values = values * 1e-37
        case "any bits":
            bits = generator.integers(0, 256, count * ITEM[recipe.dtype], np.uint8)
        case "specials":
            chosen = generator.choice(_SPECIALS32, count)
            bits = np.where(generator.random(count) < 0.5, chosen, values.astype(np.float32).view(np.uint32))
            bits = bits.astype(np.uint32)
    if bits is None:
        return rounded(values, recipe.dtype)
    if bits.dtype == np.uint8:
        width = ITEM[recipe.dtype] // (2 if recipe.dtype == "complex64" else 1)
        return bits[: count * width].view(f"u{width}")
    with np.errstate(all="ignore"):
        return bits if recipe.dtype in ("float32", "complex64") else rounded(bits.view(np.float32), recipe.dtype)


def small_items(recipe: Recipe, generator: np.random.Generator, count: int) -> Bits:
    width = ITEM[recipe.dtype]
    high = 2 if recipe.dtype == "bool" else 256
    if recipe.kind in ("zero", "equal"):
        return np.full(count, int(recipe.kind == "equal"), f"u{width}")
    if recipe.kind == "any bits":
        return generator.integers(0, high, count * width, np.uint8).view(f"u{width}")
    return generator.integers(0, min(high, 100), count).astype(f"u{width}")


def rounded(values: npt.NDArray[Any], dtype: str) -> Bits:
    with np.errstate(all="ignore"):
        if dtype == "float64":
            return values.astype(np.float64).view(np.uint64)
        if dtype == "float16":
            return values.astype(np.float16).view(np.uint16)
        single = values.astype(np.float32).view(np.uint32)
        return (single >> np.uint32(16)).astype(np.uint16) if dtype == "bfloat16" else single


def valued(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    if dtype == "float64":
        return bits.view(np.float64)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view(np.float32).astype(np.float64)


def changed(bits: Bits, recipe: Recipe, change: str, seed: int) -> Bits:
    """Return the bits of the version after the one of `bits`."""
    generator = np.random.default_rng(seed)
    if change == "same" or not bits.size:
        return bits
    if change == "anything":
        other = Recipe(recipe.dtype, recipe.shape, KINDS[seed % len(KINDS)], recipe.name, seed)
        return first_bits(other)
    if change == "shuffle":
        return generator.permutation(bits)
    if change == "all zero":
        return np.zeros_like(bits)
    if recipe.dtype == "bool":
        return bits ^ (generator.random(bits.size) < 0.1)
    if change in ("one bit up", "one element") or ITEM[recipe.dtype] == 1 or "int" in recipe.dtype:
        out = bits.copy()
        if change == "one element":
            out[generator.integers(bits.size)] ^= 1
            return out
        return out + bits.dtype.type(1)
    with np.errstate(all="ignore"):
        values = valued(bits, recipe.dtype)
        finite = values[np.isfinite(values)]
        size = np.abs(finite).mean() if finite.size else 1.0
        match change:
            case "noise":
                values = values + generator.normal(0, 0.01, values.size) * size
            case "tiny noise":
                values = values + (generator.random(values.size) < 0.1) * generator.normal(0, 1e-6, values.size) * size
            case "up":
                values = values * 2.0**20
            case "down":
                values = values * 2.0**-30
            case "negate":
                values = -values
            case "nans appear":
                values = np.where(generator.random(values.size) < 0.01, np.nan, values)
            case "nans vanish":
                values = np.nan_to_num(values, nan=1e-3, posinf=1.0, neginf=-1.0)
        return rounded(values, recipe.dtype)


recipes = st.builds(
    Recipe,
    st.sampled_from([*ITEM, "float32", "float32", "float64", "bfloat16"]),
    st.sampled_from(SHAPES),
    st.sampled_from(KINDS),
    st.sampled_from(NAMES),
    st.integers(0, 2**32 - 1),
)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with scratch() as path:
        yield path


def tensor_of(bits: Bits, recipe: Recipe) -> torch.Tensor:
    if not bits.size:
        return torch.empty(recipe.shape, dtype=getattr(torch, recipe.dtype))
    flat = torch.from_numpy(bits.copy().view(f"i{bits.itemsize}")).view(getattr(torch, recipe.dtype))
    return flat.reshape(recipe.shape)


def write(path: Path, recipes: list[Recipe], version: list[Bits], carrier: str) -> None:
    names = [f"{number}.{recipe.name}" for number, recipe in enumerate(recipes)]
    if carrier == "safetensors":
        parts = {name: (r.dtype, r.shape, bits) for name, r, bits in zip(names, recipes, version, strict=True)}
        write_safetensors(path, parts)
        return
    tree: dict[str, Any] = {}
    for number, (recipe, bits) in enumerate(zip(recipes, version, strict=True)):
        tensor = tensor_of(bits, recipe)
        if carrier == "strided" and tensor.dim():
            # Fortran order, and every second element of a storage: neither lies as its shape reads.
            doubled = torch.stack([tensor.reshape(-1), tensor.reshape(-1)], 1)
            tree[f"{number}"] = {recipe.name: tensor.t() if tensor.dim() == 2 else tensor, "every": doubled[:, 0]}
        else:
            tree[f"{number}"] = {recipe.name: tensor}
    torch.save(tree, path)


@settings(max_examples=40)
@given(
    st.lists(recipes, min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 2**32 - 1)), max_size=3),
    st.sampled_from(["safetensors", "torch", "strided"]),
)
@example([Recipe("float32", (262_145,), "specials", "w", 1)], [("up", 2), ("down", 3), ("nans vanish", 4)], "torch")
@example([Recipe("float64", (256, 257), "any bits", "w", 1)], [("noise", 2), ("anything", 3), ("same", 4)], "torch")
@example([Recipe("float32", (65_536,), "subnormal", "w", 5)], [("tiny noise", 6), ("up", 7)], "safetensors")
@example([Recipe("float32", (900, 300), "wide", "w", 1)], [("negate", 2), ("nans appear", 3)], "strided")
@example([Recipe("float32", (900, 300), "zero", "w", 1)], [("noise", 2), ("all zero", 3), ("anything", 8)], "torch")
@example([Recipe("complex64", (256, 257), "specials", "w", 1)], [("noise", 2), ("shuffle", 3)], "safetensors")
def test_everything_comes_back(
    directory: Path, recipes: list[Recipe], changes: list[tuple[str, int]], carrier: str
) -> None:
    with scratch() as place, ckstore.init(place / "store") as store:
        version = [first_bits(recipe) for recipe in recipes]
        versions = [version]
        for change, seed in changes:
            version = [
                changed(bits, recipe, change, seed + number)
                for number, (bits, recipe) in enumerate(zip(version, recipes, strict=True))
            ]
            versions.append(version)
        digests = {}
        for number, version in enumerate(versions):
            path = place / f"step{number}"
            write(path, recipes, version, carrier)
            digests[store.ingest(path).version.number] = sha256(path)
            path.unlink()
        assert store.verify().problems == []
        for number, digest in digests.items():
            store[number].checkout(place / "out", force=True)
            assert sha256(place / "out") == digest
        check_tensors(store, list(digests), recipes, versions, carrier)
        store.encode()
        check_tensors(store, list(digests), recipes, versions, carrier)
        store.rebase([max(digests)])
        store[max(digests)].checkout(place / "out", force=True)
        assert sha256(place / "out") == digests[max(digests)]
        assert store.verify().problems == []


def check_tensors(
    store: ckstore.Store, numbers: list[int], recipes: list[Recipe], versions: list[list[Bits]], carrier: str
) -> None:
    """Check every tensor by itself, bit for bit, and one stretch out of the middle of it."""
    for number, version in zip(numbers, versions, strict=True):
        for index, (recipe, bits) in enumerate(zip(recipes, version, strict=True)):
            path = f"{index}.{recipe.name}" if carrier == "safetensors" else f"{index}/{recipe.name}"
            tensor = store[number][path]
            expected = tensor_of(bits, recipe)
            if carrier == "strided" and expected.dim() == 2:
                expected = expected.t()
            assert tensor.shape == tuple(expected.shape)
            assert raw(np.asarray(tensor.numpy())) == bits_of(expected)
            if expected.dim():
                middle = expected.shape[0] // 2
                assert raw(np.asarray(tensor[middle : middle + 2])) == bits_of(expected[middle : middle + 2])


def raw(array: npt.NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("first", KINDS)
def test_every_kind_after_every_other_on_the_linear_lattice(directory: Path, dtype: str, first: str) -> None:
    """One run through all kinds of values, each stored against the one before, then recovered."""
    shape = (256, 257)
    kinds = [first, *(kind for kind in KINDS if kind != first)]
    with scratch() as place:
        digests = {}
        with ckstore.init(place / "store") as store:
            for step, kind in enumerate(kinds):
                bits = first_bits(Recipe(dtype, shape, kind, "w", step))
                write_safetensors(place / "file", {"w": (dtype, shape, bits)})
                digests[store.ingest(place / "file", step=step).version.number] = sha256(place / "file")
            store.encode()
        lose_catalog(place / "store")
        assert recover(place / "store").problems == []
        with ckstore.open(place / "store", "r") as store:
            for number, digest in digests.items():
                store[number].checkout(place / "out", force=True)
                assert sha256(place / "out") == digest
