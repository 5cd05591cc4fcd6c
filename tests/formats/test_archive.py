"""Zip archives of files: tensors of each stored file are named after it, and its checksums fit whatever comes out."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import InputError
from ckstore.formats.detect import holds_tensors, parse
from ckstore.formats.layout import Checked, are_nested_once
from ckstore.formats.skeleton import Checks
from tests.formats.reading import assert_comes_back, bits, in_memory, saved, zipped
from tests.formats.written import learner_bytes


def states(seed: int = 0, rows: int = 300) -> tuple[dict[str, Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 300, generator=generator)
    policy = {"mlp.0.weight": weight, "mlp.0.bias": torch.randn(300, generator=generator)}
    return policy, {"state": {0: {"step": torch.tensor(4.0), "exp_avg": weight * 0.1}}, "param_groups": [{"lr": 0.1}]}


def test_a_learner() -> None:
    policy, optimizer = states()
    data = learner_bytes(policy, optimizer, 5000)
    layout = assert_comes_back(data)
    assert (layout.kind, layout.facts, layout.bytes_for) == ("zip", {"step": 5000}, {})
    assert holds_tensors(in_memory(data))
    found = {tensor.path: bits(data, layout, tensor).tobytes() for tensor in layout.tensors}
    assert found == {
        ("policy", "mlp.0.weight"): policy["mlp.0.weight"].numpy().tobytes(),
        ("policy", "mlp.0.bias"): policy["mlp.0.bias"].numpy().tobytes(),
        ("policy.optimizer", "state", 0, "step"): optimizer["state"][0]["step"].numpy().tobytes(),
        ("policy.optimizer", "state", 0, "exp_avg"): optimizer["state"][0]["exp_avg"].numpy().tobytes(),
    }
    assert layout.tree["policy.optimizer"]["param_groups"] == [{"lr": 0.1}]
    assert [checked.name for checked in layout.checked] == [
        "policy.pth/archive/data/0", "policy.pth/archive/data/1", "policy.pth",
        "policy.optimizer.pth/archive/data/0", "policy.optimizer.pth/archive/data/1", "policy.optimizer.pth",
    ]  # fmt: skip


def test_files_of_all_kinds_and_names() -> None:
    array, together = io.BytesIO(), io.BytesIO()
    np.save(array, np.ones(3))
    np.savez(together, w=np.ones(2), t=np.array(["a"]))
    zipped_too = zipped({"inner.pth": saved({"a": torch.ones(2)})})
    layout = assert_comes_back(zipped({
        "readme": b"", "sub/model.pth": saved({"a": torch.ones(2)}), "model.pt": saved({"a": torch.ones(2)}),
        "model.npy": array.getvalue(), "more.npz": together.getvalue(), "zip.zip": zipped_too, "large": bytes(70_000),
        "legacy": saved({"a": torch.ones(2)}, _use_new_zipfile_serialization=False),
    }))  # fmt: skip
    assert [tensor.path for tensor in layout.tensors] == [
        ("sub/model", "a"), ("model.pt", "a"), ("model.npy",), ("more", "w"), ("legacy", "a"),
    ]  # fmt: skip
    assert layout.bytes_for == {"more.npz/t.npy": "dtype <U1"}
    assert ("__entry__", "large") in {extent.path for extent in layout.extents}


def test_compressed_and_broken_entries_stay_bytes() -> None:
    policy, optimizer = states()
    data = learner_bytes(policy, optimizer, compression=zipfile.ZIP_DEFLATED)
    assert assert_comes_back(data).kind == "opaque"
    assert not holds_tensors(in_memory(data))
    broken = saved(policy)[:-100]
    layout = assert_comes_back(zipped({"a.pth": broken, "b.pth": saved({"x": torch.ones(3)})}))
    assert [tensor.path for tensor in layout.tensors] == [("b", "x")]
    for data in (zipped({"metadata.json": b"{}", "x": bytes(900)}), learner_bytes(policy, optimizer)):
        with pytest.raises(InputError, match="not a sound zip file: the archive has no directory"):
            parse(in_memory(data[:-100]))


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    policy, optimizer = states()
    data = learner_bytes(policy, optimizer)
    place = data.index(policy["mlp.0.weight"].numpy().tobytes()) + 1000
    (tmp_path / "x.zip").write_bytes(data[:place] + b"!" + data[place + 1 :])
    with ckstore.init(tmp_path / "store") as store, pytest.raises(InputError, match="does not match its CRC-32"):
        store.ingest(tmp_path / "x.zip", run="a")
    place = data.index(b"0.99")
    with pytest.raises(InputError, match="not a sound zip file: the CRC of data is wrong"):
        parse(in_memory(data[:place] + b"1" + data[place + 1 :]))


def test_coarse_values_come_in_a_sound_archive(tmp_path: Path) -> None:
    policy, optimizer = states()
    (tmp_path / "in.zip").write_bytes(learner_bytes(policy, optimizer))
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "in.zip", run="a", policy="coarse")
        version = store["latest"]
        version.checkout(tmp_path / "out.zip")
        assert list(version.state_dict()) == ["policy", "policy.optimizer"]
    assert (tmp_path / "out.zip").read_bytes() != (tmp_path / "in.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "out.zip") as outer:
        assert outer.testzip() is None
        assert json.loads(outer.read("data"))["num_timesteps"] == 3
        for name in ("policy.pth", "policy.optimizer.pth"):
            with zipfile.ZipFile(io.BytesIO(outer.read(name))) as inner:
                assert inner.testzip() is None
        found = torch.load(io.BytesIO(outer.read("policy.pth")), weights_only=True)
    assert 0 < (found["mlp.0.weight"] - policy["mlp.0.weight"]).abs().max() < 1


def test_checks_of_stretches_in_stretches() -> None:
    import zlib

    from ckstore.formats.layout import FileLayout

    data = np.random.default_rng(0).bytes(1000)
    stretches = [(10, 20), (30, 300), (5, 400), (400, 400), (500, 900)]
    layout = FileLayout("zip", 1000, checked=[Checked("", start, stop, ()) for start, stop in stretches])
    for size in (1, 7, 100, 1000):
        checks = Checks(layout)
        for start in range(0, 1000, size):
            checks.update(start, data[start : start + size])
        assert checks.results == [zlib.crc32(data[start:stop]) for start, stop in stretches]


@pytest.mark.parametrize(
    ("stretches", "sound"),
    [
        ([(0, 5), (5, 5), (6, 9)], True),
        ([(1, 2), (3, 5), (0, 6), (7, 10)], True),
        ([(2, 3), (1, 4), (0, 6)], False),
        ([(0, 6), (1, 2)], False),
        ([(0, 6), (5, 8)], False),
        ([(1, 7), (0, 6)], False),
        ([(0, 11)], False),
        ([(3, 2)], False),
        ([(0, 9)] * 3, False),
    ],
)
def test_checked_stretches_of_a_layout_document_must_nest(stretches: list[tuple[int, int]], sound: bool) -> None:
    assert are_nested_once(stretches, 10) is sound
