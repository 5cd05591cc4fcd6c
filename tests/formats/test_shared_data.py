"""Every real checkpoint is taken apart, read as torch reads it, and put together again."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from ckstore.errors import InputError
from ckstore.formats.detect import parse
from ckstore.formats.skeleton import stored_crcs
from tests.formats.reading import assert_comes_back, assert_tree_equals, in_memory, split_skeleton

SERIES = ("espcn", "lightning_a", "opt_lora", "trades_sgd", "vdsr", "willmore_pinn")


def _files(root: Path, series: str) -> list[Path]:
    files = sorted(path for path in (root / series).rglob("*") if path.is_file())
    assert files
    return files


@pytest.mark.parametrize("series", SERIES)
def test_comes_back(shared_data: Path, series: str) -> None:
    for path in _files(shared_data, series):
        layout = assert_comes_back(path.read_bytes(), path.name)
        if path.suffix in (".pth", ".pt", ".ckpt", ".tar", ".safetensors"):
            assert layout.kind != "opaque"


@pytest.mark.parametrize(
    ("pattern", "tensors"),
    [
        ("lightning_a/*.ckpt", 247),
        ("opt_lora/*/optimizer.pt", 144),
        ("trades_sgd/*", 14),
        ("willmore_pinn/*.pt", 100),
    ],
)
def test_tensors_are_those_that_torch_loads(shared_data: Path, pattern: str, tensors: int) -> None:
    class Adam:
        """A stand-in for the optimiser class in the hyper-parameters of a Lightning checkpoint."""

    paths = sorted(shared_data.glob(pattern))
    assert paths
    for path in paths:
        data = path.read_bytes()
        layout = parse(in_memory(data), path.name)
        with torch.serialization.safe_globals([(Adam, "torch.optim.adam.Adam")]):
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        assert assert_tree_equals(data, layout, layout.tree, loaded) == tensors == len(layout.tensors)


def test_whole_model_in_a_legacy_stream(shared_data: Path) -> None:
    for path in sorted(shared_data.glob("espcn/*.pth")):
        data = path.read_bytes()
        layout = parse(in_memory(data), path.name)
        shapes = {tensor.path: tensor.shape for tensor in layout.tensors}
        assert shapes[("conv1", "weight")] == (64, 1, 5, 5)
        assert len(shapes) == 8
        for extent in layout.extents:
            count = int.from_bytes(data[extent.start - 8 : extent.start], "little")
            assert count == extent.count
            assert np.isfinite(np.frombuffer(data, "<f4", count, extent.start)).all()
        assert layout.extents[-1].stop == len(data)


def test_steps(shared_data: Path) -> None:
    for path in sorted(shared_data.glob("opt_lora/*/trainer_state.json")):
        assert parse(in_memory(path.read_bytes()), str(path)).facts["step"] == int(path.parent.name.split("-")[1])
    last = parse(in_memory((shared_data / "lightning_a" / "last.ckpt").read_bytes()))
    assert (last.facts["epoch"], last.facts["step"]) == (100, 6100)


def test_one_extent_for_each_tensor_in_any_storage(shared_data: Path) -> None:
    """`last.ckpt` separates tensors that share a storage in the other files; the extents have the same paths."""
    extents = [
        {
            (extent.path, extent.shape)
            for extent in parse(in_memory(path.read_bytes())).extents
            if extent.path[0] in ("state_dict", "optimizer_states")
        }
        for path in sorted(shared_data.glob("lightning_a/*.ckpt"))
    ]
    assert len(extents[0]) == 240
    assert all(one == extents[0] for one in extents)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("derived_truncated_zip.pt", "cut off"),
        ("derived_truncated.safetensors", "ends within"),
        ("derived_truncated_legacy.pth", "ends within storage"),
        ("derived_empty.pt", "is empty"),
        ("lfs_pointer_optimizer.pt", "git lfs pull"),
        ("lfs_pointer_adapter_model.safetensors", "git lfs pull"),
    ],
)
def test_bad_input(shared_data: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse(in_memory((shared_data / "odd" / name).read_bytes()), name, lone=True)
    assert name in str(error.value)


def test_flipped_bit_is_found_by_the_stored_crc(shared_data: Path) -> None:
    data = (shared_data / "odd" / "derived_bitflip_zip.pt").read_bytes()
    source = in_memory(data)
    layout = parse(source)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        bad = archive.testzip()
    computed = [zlib.crc32(data[one.start : one.stop]) for one in layout.checked]
    wrong = [
        one.name
        for one, crc, stored in zip(layout.checked, computed, stored_crcs(source, layout), strict=True)
        if crc != stored
    ]
    assert wrong == [bad]
    assert len(split_skeleton(source, layout)) < 40_000
