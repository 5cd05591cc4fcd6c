"""npy and npz files in a store: sliced, as state dicts, exported; `test_other_files` compares their sizes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckstore
from ckstore.cli.program import run
from tests.checkpoints import sha256


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    return {
        "w": generator.standard_normal((900, 700), dtype=np.float32),
        "f": np.asfortranarray(generator.standard_normal((600, 500))),
        "step": np.array(7),
        "names": np.array(["a", "b"]),
        "big": np.arange(30_000, dtype=">f8"),
    }


def test_a_slice_decodes_only_its_chunks(
    arrays: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "w.npz", **arrays)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "w.npz", run="a", step=1)
        version = store["latest"]
        assert {path: (version[path].dtype.name, version[path].shape) for path in version} == {
            "w": ("float32", (900, 700)), "f": ("float64", (600, 500)), "step": ("int64", ()),
        }  # fmt: skip
        decoded = []
        chunk = type(version._stored)._chunk

        def counting(self: Any, number: int, place: int, **options: Any) -> Any:
            decoded.append((number, place))
            return chunk(self, number, place, **options)

        monkeypatch.setattr(type(version._stored), "_chunk", counting)
        np.testing.assert_array_equal(version["w"][3:5, 10:20], arrays["w"][3:5, 10:20], strict=True)
        assert len(set(decoded)) == 1
        np.testing.assert_array_equal(version["f"][::50, 7:9], arrays["f"][::50, 7:9], strict=True)
        np.testing.assert_array_equal(version["f"][...], arrays["f"], strict=True)
        np.testing.assert_array_equal(version.arrays["f"][10:20], arrays["f"][10:20])
        assert version["step"][...] == 7


def test_a_state_dict_has_the_tensors(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **arrays)
    np.save(tmp_path / "w.npy", arrays["f"])
    np.savez_compressed(tmp_path / "z.npz", w=arrays["w"])
    with ckstore.init(tmp_path / "store") as store:
        for step, name in enumerate(("w.npz", "w.npy", "z.npz")):
            store.ingest(tmp_path / name, run="a", step=step, allow_empty=True)
        found = store["a@0"].state_dict()
        assert list(found) == ["w", "f", "step"]
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor.numpy(), arrays[name], strict=True)
        np.testing.assert_array_equal(store["a@1"].state_dict().numpy(), arrays["f"], strict=True)
        with pytest.raises(ckstore.errors.UsageError, match="has no readable tensors"):
            store["a@2"].state_dict()
        store["a@2"].checkout(tmp_path / "back.npz")
        assert sha256(tmp_path / "back.npz") == sha256(tmp_path / "z.npz")
        store["a@0"].checkout(tmp_path / "w.safetensors", include=["*"], strip=True)
        store["a@0"].checkout(tmp_path / "w.pt", include=["w", "f"])
        store["a@1"].checkout(tmp_path / "a.pt", include=["*"])
    assert set(load_file(tmp_path / "w.safetensors")) == {"w", "f", "step"}
    assert set(torch.load(tmp_path / "w.pt", weights_only=True)) == {"w", "f"}
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True), torch.from_numpy(arrays["f"]))


def test_coarse_values_come_in_a_sound_archive(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **arrays)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "w.npz", run="a", step=1, policy="coarse")
        store["latest"].checkout(tmp_path / "out.npz")
    assert sha256(tmp_path / "out.npz") != sha256(tmp_path / "w.npz")
    with np.load(tmp_path / "out.npz") as found:  # which compares the CRCs
        for name, array in arrays.items():
            if name != "w" and name != "f":
                np.testing.assert_array_equal(found[name], array, strict=True)
        assert 0 < np.abs(found["w"] - arrays["w"]).max() < 1
        assert found["f"].flags.f_contiguous


def test_a_damaged_array_is_refused_when_it_is_read(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **arrays)
    data = bytearray((tmp_path / "w.npz").read_bytes())
    data[1_000_000] ^= 1
    (tmp_path / "w.npz").write_bytes(data)
    with ckstore.init(tmp_path / "store") as store:
        with pytest.raises(ckstore.errors.InputError, match=r"entry w\.npy does not match its CRC-32"):
            store.ingest(tmp_path / "w.npz", run="a", step=1)
        store.ingest(tmp_path / "w.npz", run="a", step=1, force=True)
        store["latest"].checkout(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


def test_ls_names_files_without_tensors(
    arrays: dict[str, np.ndarray], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    np.savez(folder / "w.npz", **arrays)
    np.savez_compressed(folder / "z.npz", a=arrays["w"])
    np.save(folder / "o.npy", np.array([{}], dtype=object))
    assert run(["init"]) == 0
    assert run(["ingest", str(folder), "--run", "a"]) == 0
    capfd.readouterr()
    assert run(["ls", "a@7"]) == 0
    out, err = capfd.readouterr()
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["w.npz/w", "w.npz/f", "w.npz/step"]
    assert err.splitlines() == [
        "ckstore: w.npz has bytes that are not tensors: names.npy (dtype <U1), big.npy (dtype >f8).",
        "ckstore: z.npz has bytes that are not tensors: a.npy (compressed).",
        "ckstore: o.npy is bytes: dtype |O.",
    ]
    shutil.rmtree(folder)
    assert run(["checkout", "a@7", "-o", "out"]) == 0
    with np.load(tmp_path / "out" / "w.npz") as found:
        np.testing.assert_array_equal(found["big"], arrays["big"], strict=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: np.save(path / "words.npy", np.array(["a", "bc"])),
        lambda path: np.savez_compressed(path / "z.npz", w=np.arange(3.0)),
    ],
    ids=["text", "compressed"],
)
def test_the_state_dict_of_a_directory_leaves_out_arrays_that_are_bytes(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    place = tmp_path / "model"
    place.mkdir()
    torch.save({"w": torch.arange(3.0)}, place / "model.pt")
    torch.save({"lr": 0.5}, place / "plain.pt")
    write(place)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(place, run="a")
        assert list(store["a"].state_dict()) == ["model.pt", "plain.pt"]
