"""Directories of torch.distributed.checkpoint: whole tensors by name however they are cut, files as they were."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as distributed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils import _pytree as pytree

import ckstore
from ckstore.errors import InputError
from ckstore.formats.dcp import name_tensors, nested, read_metadata
from ckstore.formats.detect import parse
from ckstore.formats.layout import TensorRef
from tests.checkpoints import flip
from tests.distributed import run_ranks
from tests.formats.reading import assert_comes_back, in_memory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state, saved by two ranks and by one."""
    place = tmp_path_factory.mktemp("saved")
    ckstore.init(place / "store").close()
    run_ranks(2, "save", place=str(place))
    run_ranks(1, "save", place=str(place))
    return place


def assert_equal_trees(found: Any, expected: Any) -> None:
    one, form = pytree.tree_flatten(found)
    other, other_form = pytree.tree_flatten({key: expected[key] for key in found})
    assert found.keys() == expected.keys()
    assert form == other_form
    for left, right in zip(one, other, strict=True):
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)
        else:
            assert left == right


def assert_same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert [(one / name).read_bytes() for name in names] == [(other / name).read_bytes() for name in names]


@pytest.mark.long
@pytest.mark.parametrize("name", ["cut-2", "files-2", "cut-1"])
def test_tensors_are_whole(saved: Path, store: ckstore.Store, tmp_path: Path, name: str) -> None:
    """One name, the global shape, and the values that torch itself puts together."""
    dcp_to_torch_save(saved / name, tmp_path / "whole.pt")
    expected = torch.load(tmp_path / "whole.pt", weights_only=False)
    row = store.ingest(saved / name, run="a", hot=0, verify=True).version
    version = store["a@7"]
    assert row.tensors == len(version) == 13
    assert_equal_trees(version.state_dict(), expected)
    for path, whole in (("rows", expected["rows"]), ("columns", expected["columns"]), ("large", expected["large"])):
        assert version[path].shape == whole.shape
        array, lazy = whole.numpy(), version[path]
        np.testing.assert_array_equal(lazy[1:3, 7:290:5], array[1:3, 7:290:5])
        np.testing.assert_array_equal(lazy[::-2, ::-3], array[::-2, ::-3])
        np.testing.assert_array_equal(lazy[[0, 2], 150], array[[0, 2], 150])
        np.testing.assert_array_equal(lazy[...], array)
    np.testing.assert_array_equal(version.arrays["columns"][100:200, 100:200], expected["columns"][100:200, 100:200])
    assert torch.equal(version["half"].torch(slice(34_000, 36_000)), expected["half"][34_000:36_000])
    version.checkout(tmp_path / "back")
    assert_same_files(saved / name, tmp_path / "back")
    assert not store.verify().problems


def test_exports_hold_whole_tensors(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    store.ingest(saved / "cut-2", run="a")
    version = store["a@7"]
    expected = version.state_dict()
    version.checkout(tmp_path / "all.pt", format="pt")
    assert_equal_trees(torch.load(tmp_path / "all.pt"), expected)
    version.checkout(tmp_path / "some.pt", format="pt", include=["plain/turned", "columns"])
    found = torch.load(tmp_path / "some.pt")
    assert torch.equal(found["columns"], expected["columns"])
    assert found["plain"].keys() == {"turned"}
    version.checkout(tmp_path / "plain.pt", format="pt", include=["plain"], strip=True)
    assert_equal_trees(torch.load(tmp_path / "plain.pt"), expected["plain"])
    version.checkout(tmp_path / "all.npz", format="npz", include=["rows", "columns"])
    with np.load(tmp_path / "all.npz") as arrays:
        np.testing.assert_array_equal(arrays["columns"], expected["columns"])


def test_a_part_of_a_directory(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    """Names begin with the checkpoint's directory; other files keep their own."""
    shutil.copytree(saved / "cut-2", tmp_path / "run-5" / "weights")
    torch.save({"lr": 0.5, "scale": torch.ones(2)}, tmp_path / "run-5" / "extra.pt")
    store.ingest(tmp_path / "run-5", run="a", step=1)
    version = store["a@1"]
    assert "weights/rows" in version
    assert "extra.pt/scale" in version
    state = version.state_dict()
    assert state.keys() == {"weights", "extra.pt"}
    assert torch.equal(state["weights"]["rows"], torch.from_numpy(version["weights/rows"].numpy()))
    version.checkout(tmp_path / "rows.pt", format="pt", include=["weights/rows", "extra.pt"])
    assert torch.load(tmp_path / "rows.pt").keys() == {"weights", "extra.pt"}


def test_deltas_when_the_number_of_ranks_changes(saved: Path, store: ckstore.Store) -> None:
    """Tensors cut along their first axis are one object each, whatever the cut; others are new."""
    first = store.ingest(saved / "cut-2", run="a", step=1, hot=0).version
    second = store.ingest(saved / "cut-1", run="a", step=2, hot=0).version
    units = {name: {unit.key: unit for unit in store[name]._stored.layout.units} for name in ("a@1", "a@2")}
    for key in ("rows", "half", "large#0", "large#1"):
        assert units["a@1"][key].signature == units["a@2"][key].signature
    assert len(units["a@1"]["rows"].members) == 2
    assert len(units["a@2"]["rows"].members) == 1
    assert second.depth == 1
    assert second.stored_bytes < 0.2 * first.stored_bytes


def test_without_metadata_tensors_have_numbers(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    shutil.copytree(saved / "cut-2", tmp_path / "step-9")
    (tmp_path / "step-9" / ".metadata").unlink()
    with pytest.raises(InputError, match=r"\.metadata is missing, which is written last"):
        store.ingest(tmp_path / "step-9", run="a")
    store.ingest(tmp_path / "step-9", run="a", force=True)
    version = store["a@9"]
    state = version.state_dict()
    assert state.keys() == {"__0_0.distcp", "__1_0.distcp"}
    number = next(index for index, value in enumerate(state["__1_0.distcp"]) if isinstance(value, torch.Tensor))
    shard = state["__1_0.distcp"][number]
    np.testing.assert_array_equal(version[f"%5F_1_0.distcp/[{number}]"], shard.numpy())
    version.checkout(tmp_path / "back")
    assert_same_files(tmp_path / "step-9", tmp_path / "back")
    layout = assert_comes_back((saved / "cut-2" / "__0_0.distcp").read_bytes())
    assert layout.kind == "dcp"
    assert layout.tree[0] == TensorRef(0)


def test_compressed_items_stay_bytes(store: ckstore.Store, tmp_path: Path) -> None:
    """A file that an extension of torch has compressed is no archive, but still a checkpoint."""
    folder = tmp_path / "step-3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.save({"w": torch.ones(300)}, checkpoint_id=folder)
    for path in folder.glob("*.distcp"):
        path.write_bytes(b"\x28\xb5\x2f\xfd" + path.read_bytes())
    store.ingest(folder, run="a")
    assert len(store["a@3"]) == 0
    store["a@3"].checkout(tmp_path / "back")
    assert_same_files(folder, tmp_path / "back")


def test_coarse_versions(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    """Deviations are those of whole tensors, and torch reads the checkout."""
    store.ingest(saved / "cut-2", run="a", policy="coarse")
    version = store["a@7"]
    off = version.deviations()
    assert {"rows", "columns", "large", "half"} <= off.keys()
    version.checkout(tmp_path / "coarse")
    found, exact = {}, {}
    for place, tensors in ((tmp_path / "coarse", found), (saved / "cut-2", exact)):
        dcp_to_torch_save(place, tmp_path / "whole.pt")
        tensors |= torch.load(tmp_path / "whole.pt", weights_only=False)
    for path in ("rows", "columns", "large"):
        assert torch.equal(found[path], version[path].torch())
        assert 0 < (found[path] - exact[path]).abs().max() <= off[path].max_abs


def test_whole_tensors_are_salvaged(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    """If a file's bytes are lost, tensors with shards in it are written whole, except for the lost tensors."""
    store.ingest(saved / "cut-2", run="a", hot=0)
    version = store["a@7"]._stored
    exact = store["a@7"]["columns"].torch()
    [number] = [number for number in range(len(version.layout.units)) if "rows" in version.contents.names(number)]
    record = version.repository.resolver.record(version.document.objects[number])
    store.close()
    flip(store.place, record.pack, lambda _: record.offset + record.nbytes // 2)
    with ckstore.open(store.place) as opened:
        report = opened["a@7"].salvage(tmp_path / "out")
    assert report.lost_tensors.keys() == {"rows"}
    assert report.tensors["__0_0.distcp"][:2] == ["columns", "few"]
    found = torch.load(tmp_path / "out" / "__0_0.distcp.salvaged.pt")
    assert found["large"].shape == (3, 1 << 21)
    assert torch.equal(found["columns"], exact)


def test_a_missing_file_is_reported(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    shutil.copytree(saved / "cut-2", tmp_path / "step-9")
    (tmp_path / "step-9" / "__1_0.distcp").unlink()
    with pytest.raises(InputError, match=r"\.metadata does not describe a whole checkpoint: it names __1_0\.distcp"):
        store.ingest(tmp_path / "step-9", run="a")
    store.ingest(tmp_path / "step-9", run="a", force=True)
    assert all(path.startswith("%5F_0_0.distcp/") for path in store["a@9"])


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_shard_that_is_cut_off_is_reported(saved: Path, store: ckstore.Store, tmp_path: Path, is_empty: bool) -> None:
    """Between two archives too, where the rest of the file is sound."""
    shutil.copytree(saved / "cut-2", tmp_path / "step-9")
    data = (saved / "cut-2" / "__1_0.distcp").read_bytes()
    end = 0 if is_empty else data.index(b"PK\5\6") + 22
    (tmp_path / "step-9" / "__1_0.distcp").write_bytes(data[:end])
    with pytest.raises(InputError, match=r"it names __1_0\.distcp, which is cut off"):
        store.ingest(tmp_path / "step-9", run="a")


def test_a_file_of_an_earlier_save(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    """Of more ranks than the last one had: it is no part of the checkpoint, and keeps a name of its own."""
    shutil.copytree(saved / "cut-1", tmp_path / "step-9")
    shutil.copy(saved / "cut-2" / "__1_0.distcp", tmp_path / "step-9")
    store.ingest(tmp_path / "step-9", run="a", step=9)
    state = store["a@9"].state_dict()
    assert state["rows"].shape == (257, 300)
    assert isinstance(state["__1_0.distcp"], list)
    store["a@9"].checkout(tmp_path / "all.pt", format="pt")
    assert torch.load(tmp_path / "all.pt").keys() == state.keys()


def test_metadata_of_nothing(store: ckstore.Store, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.save({}, checkpoint_id=tmp_path / "step-9")
    store.ingest(tmp_path / "step-9", run="a")
    assert len(store["a@9"]) == 0


def test_invalid_metadata_is_reported(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    shutil.copytree(saved / "cut-2", tmp_path / "step-9")
    data = (saved / "cut-2" / ".metadata").read_bytes()
    for damaged in (data[:900], data.replace(b"relative_path", b"relative_pith")):
        (tmp_path / "step-9" / ".metadata").write_bytes(damaged)
        with pytest.raises(InputError, match="does not describe a whole checkpoint"):
            store.ingest(tmp_path / "step-9", run="a")


class _Trap:
    def __reduce__(self) -> Any:
        return print, ("imported",)


def test_metadata_is_read_inertly(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    items = read_metadata((saved / "cut-2" / ".metadata").read_bytes())
    assert sum(item.path == ("rows",) for item in items) == 2
    metadata = pickle.loads((saved / "cut-2" / ".metadata").read_bytes())
    metadata.planner_data["trap"] = _Trap()
    assert read_metadata(pickle.dumps(metadata)) == items
    assert capfd.readouterr().out == ""


def test_metadata_with_any_byte_changed(saved: Path) -> None:
    """It is refused, or says something else; nothing else is raised, and no file is read beyond its end."""
    data = (saved / "cut-2" / ".metadata").read_bytes()
    files = {path.name: path.read_bytes() for path in (saved / "cut-2").glob("*.distcp")}
    sources = {name: in_memory(content) for name, content in files.items()}
    layouts = {name: parse(source) for name, source in sources.items()}
    refused = 0
    for place in range(0, len(data), 7):
        changed = data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]
        try:
            name_tensors(dict(layouts), read_metadata(changed), sources)
        except InputError:
            refused += 1
    assert refused > 100


def test_overlapping_shards_are_reported(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    shutil.copytree(saved / "cut-2", tmp_path / "step-9")
    metadata = pickle.loads((saved / "cut-2" / ".metadata").read_bytes())
    metadata.state_dict_metadata["rows"].size = torch.Size([300, 300])
    (tmp_path / "step-9" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match="the shards of rows do not make up the tensor"):
        store.ingest(tmp_path / "step-9", run="a")


def test_nested() -> None:
    assert nested([(("a", "b"), 1), (("c", 1, "d"), 2), (("c", 0, "d"), 3)]) == {
        "a": {"b": 1},
        "c": [{"d": 3}, {"d": 2}],
    }
    assert nested([(("a", 1 << 60), 1)]) == {"a": {1 << 60: 1}}
    for leaves in ([(("a",), 1), (("a", "b"), 2)], [(("a",), {}), (("a", "b"), 2)], [(("a",), 1), (("a",), 2)]):
        with pytest.raises(InputError):
            nested(leaves)


def test_sharded_safetensors(saved: Path, store: ckstore.Store, tmp_path: Path) -> None:
    """Write the files of `HuggingFaceStorageWriter`: one per rank, each with its shards."""
    store.ingest(saved / "hf-2", run="a", step=1, hot=0)
    names = sorted(path.name for path in (saved / "hf-2").glob("*.safetensors"))
    assert len(names) == 2
    shards = [store["a@1"][f"{name}/rows"] for name in names]
    assert [shard.shape for shard in shards] == [(129, 300), (128, 300)]
    store["a@1"].checkout(tmp_path / "back")
    assert_same_files(saved / "hf-2", tmp_path / "back")


def test_dtensors_in_a_file_are_the_ranks_parts(saved: Path) -> None:
    data = (saved / "local-2.pt").read_bytes()
    layout = parse(in_memory(data))
    shapes = {tensor.path: tensor.shape for tensor in layout.tensors}
    assert shapes["rows",] == (129, 300)
    assert shapes["columns",] == (257, 150)
    assert isinstance(layout.tree["same"], TensorRef)
    assert_comes_back(data)


def test_live_dtensors(saved: Path, tmp_path: Path) -> None:
    ckstore.init(tmp_path / "store").close()
    run_ranks(2, "reject", place=str(tmp_path))
    run_ranks(1, "keep", place=str(tmp_path))
    with ckstore.open(tmp_path / "store") as opened:
        assert [row.run for row in opened._catalog.versions()] == ["live"]
        assert torch.equal(opened["live@latest"].state_dict()["rows"], torch.ones(4, 4))
