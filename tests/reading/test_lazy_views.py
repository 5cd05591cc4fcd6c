"""Tensors that are conjugates or negatives of the stored values: they are read as torch shows them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

import ckstore
from ckstore.errors import InputError, IntegrityError
from ckstore.formats.detect import parse
from ckstore.formats.layout import MARKS, Unknown
from ckstore.objects.layouts import LayoutDocument, encode_layout
from tests.checkpoints import sha256
from tests.coarse_checks import stored
from tests.equality import assert_same, bits_of, storage_of
from tests.formats.reading import in_memory, saved
from tests.layout_columns import columns, packed, rows

#: dtypes that torch can negate.
NEGATED = [
    "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def views() -> dict[str, torch.Tensor]:
    """Return conj and neg views: small and large, dense, strided, tied, both at once, without elements, 0-d."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(40, 50, dtype=torch.complex64, generator=generator)
    large = torch.randn(700, 600, dtype=torch.complex64, generator=generator)
    return {
        "z": torch.tensor([1 + 2j]).conj(),
        "n": torch._neg_view(torch.ones(2)),
        "both": torch._neg_view(z.clone().conj()),
        "tied": z,
        "tied_conj": z.conj(),
        "tied_part": z.conj().t()[::3, 5:],
        "imag": torch.randn(30, 7, dtype=torch.complex128, generator=generator).conj().imag,
        "large": large.conj(),
        "large_strided": large.t()[100:, ::2].conj(),
        "expanded": torch.tensor([[1 + 1j], [2 - 3j]]).conj().expand(2, 5),
        "scalar": torch.tensor(3 - 4j, dtype=torch.complex128).conj(),
        "empty": torch._neg_view(torch.empty(0, 3)),
        "integers": torch._neg_view(torch.tensor([0, 1, -5, 2**62])),
        "plain": torch.arange(5),
        "bools": torch.tensor([True, False]),
        "zero": torch._neg_view(torch.tensor([0.0, -0.0, float("inf"), 1e-40])),
    }


def resolved(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().resolve_conj().resolve_neg().numpy()


@pytest.fixture(params=["zip", "legacy", "live"])
def version(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    state = views()
    source: Any = state
    if request.param != "live":
        source = tmp_path / "views.pt"
        torch.save(state, source, _use_new_zipfile_serialization=request.param == "zip")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(source)
        found = store["latest"]
        found.checkout(tmp_path / "out.pt")
        if source is not state:
            assert sha256(tmp_path / "out.pt") == sha256(source)
        assert_same(torch.load(tmp_path / "out.pt", weights_only=True), state, strides=False)
        yield found


def test_state_dicts_equal_those_of_torch(version: ckstore.Version) -> None:
    found = version.state_dict()
    assert_same(found, views(), strides=False)
    assert storage_of(found["tied"]) == storage_of(found["tied_conj"]) == storage_of(found["tied_part"])


def of_the_run(version: ckstore.Version, path: str) -> Any:
    with ckstore.open(version._stored.repository.place) as store:
        return store.run("main").arrays[path][0]


READERS: list[Callable[[ckstore.Version, str], Any]] = [
    lambda version, path: version[path].numpy(),
    lambda version, path: version[path][...],
    lambda version, path: np.asarray(version[path]),
    lambda version, path: version[path].torch().numpy(),
    lambda version, path: version.arrays[path][...],
    of_the_run,
]


@pytest.mark.long
@pytest.mark.parametrize("reader", range(len(READERS)))
def test_values_equal_those_of_torch(version: ckstore.Version, reader: int) -> None:
    for path, tensor in views().items():
        found = np.asarray(READERS[reader](version, path))
        assert found.dtype == resolved(tensor).dtype
        assert found.shape == tuple(tensor.shape)
        assert found.tobytes() == resolved(tensor).tobytes(), path


def test_slices(version: ckstore.Version) -> None:
    wanted = views()
    for path in ("tied_conj", "tied_part", "large", "large_strided", "imag", "both"):
        values, lazy = resolved(wanted[path]), version[path]
        for key in [3, slice(2, 9, 3), (slice(None), 4), (..., slice(None, None, -2)), [5, 1, 1], (2, 6)]:
            assert np.array_equal(lazy[key], values[key]), (path, key)
            assert np.array_equal(lazy.torch(key).numpy(), values[key]), (path, key)


def test_exports(version: ckstore.Version, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    wanted = views()
    version.checkout(tmp_path / "all.pt", format="pt")
    exported = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_same(exported, wanted, strides=False)
    assert storage_of(exported["tied"]) == storage_of(exported["tied_conj"])
    version.checkout(tmp_path / "all.npz", format="npz")
    version.checkout(tmp_path / "most.safetensors", format="safetensors", exclude=["scalar"])
    for found in (dict(np.load(tmp_path / "all.npz")), load_file(tmp_path / "most.safetensors")):
        assert found.keys() | {"scalar"} == wanted.keys()
        for path, array in found.items():
            assert array.tobytes() == resolved(wanted[path]).tobytes(), path


def test_a_conjugate_takes_no_space_of_its_own(tmp_path: Path) -> None:
    z = torch.randn(300, 300, dtype=torch.complex64)
    with ckstore.init(tmp_path / "store") as store:
        version = store.ingest({"z": z, "conj": z.conj(), "again": z.conj()}).version
        assert version.elements == 2 * z.numel()  # Real and imaginary parts.


@pytest.mark.parametrize(
    ("dtype", "marks"),
    [
        *((dtype, "neg") for dtype in NEGATED),
        *((dtype, marks) for dtype in ("complex64", "complex128") for marks in ("conj", "both")),
    ],
)
def test_every_dtype(tmp_path: Path, dtype: str, marks: str) -> None:
    bits = torch.randint(0, 256, (70_000 * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    plain = bits.view(getattr(torch, dtype))
    if plain.is_floating_point() or plain.is_complex():
        parts = torch.view_as_real(plain) if plain.is_complex() else plain
        parts.nan_to_num_(1.5)  # torch's effect on the bits of a NaN depends on the processor.
    tensor = plain.conj() if marks != "neg" else plain
    tensor = torch._neg_view(tensor) if marks != "conj" else tensor
    with ckstore.init(tmp_path / "store") as store:
        torch.save({"t": tensor, "few": tensor[3:8]}, tmp_path / "t.pt")
        store.ingest(tmp_path / "t.pt")
        lazy = store["latest"]["t"]
        assert np.ascontiguousarray(lazy.numpy()).tobytes() == bits_of(tensor)
        assert np.ascontiguousarray(store["latest"]["few"].numpy()).tobytes() == bits_of(tensor[3:8])


def test_versions_of_a_run_differ_in_marks_alone(tmp_path: Path) -> None:
    z = torch.tensor([[1 + 2j, 3 - 1j]])
    with ckstore.init(tmp_path / "store") as store:
        for step, tensor in enumerate([z, z.conj(), torch._neg_view(z), z.conj().resolve_conj()]):
            torch.save({"z": tensor}, tmp_path / "z.pt")
            store.ingest(tmp_path / "z.pt", run="r", step=step)
        expected = np.stack([z.numpy(), z.numpy().conj(), -z.numpy(), z.numpy().conj()])
        assert np.array_equal(store.run("r").arrays["z"][...], expected)

        def changes(one: int, other: int) -> list[Any]:
            report = store.diff(one, other)
            return [(item.path, item.change, item.max_abs) for item in report.changes]

        assert changes(1, 2) == [("z", "values", 4.0)]
        assert changes(1, 3) == [("z", "values", pytest.approx(2 * 10**0.5))]
        assert changes(2, 4) == []


@pytest.mark.parametrize("live", [False, True])
def test_negatives_of_coarse_weights_are_coarse_negatives(tmp_path: Path, live: bool) -> None:
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(5)) * 0.02
    with ckstore.init(tmp_path / "plain") as plain, ckstore.init(tmp_path / "store") as store:
        expected = stored(plain, {"w": weight})["w"].numpy()
        state = {"w": torch._neg_view(weight)}
        torch.save(state, tmp_path / "w.pt")
        version = stored(store, state if live else tmp_path / "w.pt")
        assert version.fidelity == "coarse"
        assert np.array_equal(version["w"].numpy(), -expected)
        assert np.array_equal(version.arrays["w"][...], -expected)
        assert np.array_equal(resolved(version.state_dict()["w"]), -expected)
        difference = np.abs(version["w"].numpy() + weight.numpy()).max()
        assert 0 < difference <= version.deviations()["w"].max_abs
        version.checkout(tmp_path / "out.pt")
        assert np.array_equal(resolved(torch.load(tmp_path / "out.pt", weights_only=True)["w"]), -expected)


# Tensors that torch would not write.


def with_metadata(dtype: torch.dtype, put: bytes) -> bytes:
    """Return a torch file whose pickle holds `put` in place of the metadata of a neg view."""
    data = saved({"t": torch._neg_view(torch.ones(4).to(dtype)), "other": torch.ones(3)})
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as read, zipfile.ZipFile(out, "w") as written:
        for name in read.namelist():
            content = read.read(name)
            if name.endswith("data.pkl"):
                key = content.index(b"neg")
                start, stop = content.rindex(b"}", 0, key), content.index(b"s", key)
                content = content[:start] + put + content[stop + 1 :]
            written.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("put", "dtype"),
    [
        (b"}X\x04\x00\x00\x00conj\x88s", torch.float32),
        (b"}X\x03\x00\x00\x00neg\x88s", torch.bool),
        (b"}X\x03\x00\x00\x00neg\x88s", torch.float8_e4m3fnuz),
        (b"}X\x03\x00\x00\x00negX\x03\x00\x00\x00yess", torch.float32),
        (b"]", torch.float32),
    ],
)
def test_a_view_that_torch_cannot_show_is_no_tensor(tmp_path: Path, put: bytes, dtype: torch.dtype) -> None:
    data = with_metadata(dtype, put)
    (tmp_path / "x.pt").write_bytes(data)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "x.pt")
        version = store["latest"]
        assert list(version) == ["other"]
        assert isinstance(version.state_dict()["t"], Unknown)
        version.checkout(tmp_path / "out.pt")
        assert (tmp_path / "out.pt").read_bytes() == data


def test_metadata_of_other_devices_is_ignored_as_torch_does(tmp_path: Path) -> None:
    data = with_metadata(torch.float32, b"}X\x05\x00\x00\x00other\x88s")
    layout = parse(in_memory(data), "x.pt")
    assert layout.tensors[0].marks == ()
    assert_same(torch.load(io.BytesIO(data), weights_only=True)["t"], torch.ones(4))


def test_an_unknown_mark_is_refused(tmp_path: Path) -> None:
    torch.save({"z": torch.tensor([1 + 2j]).conj()}, tmp_path / "z.pt")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "z.pt")
        document = store["latest"]._stored.layout
    encoded = rows(document.data)
    assert encoded["files"][0]["tensors"] == [["z", "complex64", [1], [1], 0, 0, ["conj"]]]
    assert encode_layout(document.files, document.units) == document.data
    stored = columns(document.data)
    assert stored[19] == [1]
    stored[19] = [1 << len(MARKS)]
    with pytest.raises(IntegrityError, match="an integer is too large"):
        LayoutDocument.decode(packed(stored))
    strange = [structs.replace(tensor, marks=("halved",)) for tensor in document.files[0].tensors]
    document.files[0] = replace(document.files[0], tensors=strange)
    with pytest.raises(InputError, match="halved"):
        encode_layout(document.files, document.units)
