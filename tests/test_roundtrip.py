"""Whatever goes in comes out byte for byte: at every depth, after a rebase, after a recovery, in another process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckstore
from ckstore.formats.layout import FileLayout
from ckstore.objects import reader
from ckstore.objects.layouts import encode_layout
from ckstore.recovery.recover import recover
from ckstore.repository import Repository
from tests.checkpoints import described, restored_elsewhere, settled, sha256

REPOSITORY = Path(__file__).resolve().parents[1]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1100), nn.LayerNorm(1100), nn.GELU(), nn.Linear(1100, 64))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(32, 64)
        (module(inputs) - inputs.roll(1, 1)).square().mean().backward()
        optimizer.step()


def adamw_run(directory: Path, count: int) -> list[Path]:
    """Train with AdamW; return its checkpoints: weights above and below 2^16 elements, moments, counters, RNG state."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    paths = []
    for step in range(count):
        train(module, optimizer, 2)
        path = directory / f"step{step}.pt"
        torch.save(
            {
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "step": step,
            },
            path,
        )
        paths.append(path)
    return paths


def with_subnormals(directory: Path, count: int) -> list[Path]:
    """Write tensors on linear and on ordinal lattices, a third of them subnormal, that all shrink by one factor."""
    generator = np.random.default_rng(1)
    single = generator.normal(0, 1e-37, (300, 300)).astype(np.float32)
    double = generator.normal(0, 3e-308, (300, 300))
    paths = []
    for step in range(count):
        tiny = np.finfo(np.float32).tiny, np.finfo(np.float64).tiny
        for values, limit in zip((single, double), tiny, strict=True):
            assert np.count_nonzero((values != 0) & (np.abs(values) < limit)) > 1000
        state = {
            "w": torch.from_numpy(single.copy()),
            "v": torch.from_numpy(double.copy()),
            "half": torch.from_numpy(single.copy()).to(torch.bfloat16),
            "exp_avg": torch.from_numpy(single[0].copy()),
        }
        paths.append(directory / f"step{step}.pt")
        torch.save(state | {"step": step}, paths[-1])
        single = (single * np.float32(0.9) + generator.normal(0, 1e-41, single.shape)).astype(np.float32)
        double = double * 0.9 + generator.normal(0, 1e-312, double.shape)
    return paths


def ingest_all(store: ckstore.Store, paths: list[Path], **options: Any) -> dict[int, str]:
    """Ingest the files; return their SHA-256 by version number."""
    return {store.ingest(path, **options).version.number: sha256(path) for path in paths}


def check_all(store: ckstore.Store, expected: dict[int, str], directory: Path) -> None:
    for number, digest in expected.items():
        out = directory / f"out{number}"
        store[number].checkout(out, force=True)
        assert sha256(out) == digest, f"version {number} at depth {store[number].depth}"
        out.unlink()


def test_every_depth_after_a_rebase_and_after_a_recovery(store: ckstore.Store, directory: Path) -> None:
    paths = adamw_run(directory, 12)
    expected = ingest_all(store, paths, run="a")
    settled(store)  # An encoding at the time of a rebase may keep the depth of before.
    rows = store._catalog.versions("a")
    assert [row.step for row in rows] == list(range(12))
    assert max(row.depth for row in rows) >= 3, "the run must have chains for this test to mean anything"
    assert store.verify().problems == []
    check_all(store, expected, directory)
    report = store.rebase(run="a", max_restore_cost=1.0)
    assert report.objects > 0
    assert store["a@11"].depth <= rows[11].depth
    check_all(store, expected, directory)
    store.rebase([6])
    assert store[6].depth == 0
    assert store[6]._stored.row.base
    check_all(store, expected, directory)
    assert store.verify().problems == []
    store.close()
    with ckstore.open(store.place, "r") as closed:
        before = [(row.number, row.step, row.uid, row.parent, row.depth) for row in closed._catalog.versions()]
    (store.path / "catalog.sqlite").unlink()
    assert recover(store.place).problems == []
    with ckstore.open(store.place, "r") as again:
        assert [(r.number, r.step, r.uid, r.parent, r.depth) for r in again._catalog.versions()] == before
        assert again.verify().problems == []
        check_all(again, expected, directory)


@pytest.mark.long
@pytest.mark.parametrize("flush", [True, False])
def test_another_process_reads_the_same_bytes(store: ckstore.Store, directory: Path, flush: bool) -> None:
    expected = ingest_all(store, with_subnormals(directory, 3), run="tiny")
    expected |= ingest_all(store, adamw_run(directory, 2), run="a")
    store.close()
    (directory / "out").mkdir()
    found = restored_elsewhere(store.place, directory / "out", flush=flush)
    assert found == {str(number): digest for number, digest in expected.items()}


@pytest.mark.long
def test_a_process_that_flushes_subnormals_ingests_the_bytes_of_the_file(directory: Path) -> None:
    paths = with_subnormals(directory, 3)
    script = (
        "import sys, torch; assert torch.set_flush_denormal(True); import ckstore\n"
        "with ckstore.open(sys.argv[1]) as store:\n"
        "    for path in sys.argv[2:]: store.ingest(path, run='tiny', hot=0)\n"
    )
    with ckstore.init(directory / "store") as store:
        command = [sys.executable, "-c", script, str(store.place), *map(str, paths)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with ckstore.open(directory / "store") as store:
        assert store.verify().problems == []
        check_all(store, {number + 1: sha256(path) for number, path in enumerate(paths)}, directory)
        # The content is deduplicated, no matter how the process treats subnormals.
        again = store.ingest(paths[1], run="tiny")
        assert not again.is_new


def tied() -> Any:
    weight = torch.randn(300, 300)
    return {"embedding": weight, "head": weight, "transposed": weight.t(), "part": weight[10:20, ::3]}


def strided() -> Any:
    base = torch.arange(200_000, dtype=torch.float32)
    return {"fortran": base[:90_000].view(300, 300).t(), "every": base[::7], "expanded": torch.ones(1).expand(5, 5)}


def small_view_of_a_large_storage() -> Any:
    return {"view": torch.randn(100_000)[5_000:5_010], "other": [torch.randn(3), (torch.tensor(1.5), None, "x")]}


def all_dtypes() -> Any:
    names = [
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
        "uint8", "bool", "complex64", "complex128",
    ]  # fmt: skip
    values = torch.arange(70_000) % 251 - 100
    return {name: values.to(getattr(torch, name)) for name in names}


def odd_shapes() -> Any:
    shapes = [(), (0,), (1,), (3, 0, 5), (1, 1, 1), (2, 3, 4, 5), (65_536,), (65_535,), (262_145,), (1, 262_144)]
    return {f"t{number}": torch.randn(shape) for number, shape in enumerate(shapes)} | {
        "zeros": torch.zeros(80_000),
        "ones": torch.ones(400, 400),
    }


def whole_module() -> Any:
    return model()


def ordered() -> Any:
    return OrderedDict([("a.b", torch.ones(2)), ("a", {"b": torch.zeros(2)}), (3, torch.randn(4)), (True, 1 << 80)])


STATES: list[Callable[[], Any]] = [
    tied, strided, small_view_of_a_large_storage, all_dtypes, odd_shapes, whole_module, ordered,
]  # fmt: skip


@pytest.mark.parametrize("make", STATES)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_torch_files(store: ckstore.Store, directory: Path, make: Callable[[], Any], legacy: bool) -> None:
    torch.manual_seed(2)
    state = make()
    paths = []
    for step in range(3):
        path = directory / f"step{step}.pt"
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)
        paths.append(path)
        with torch.no_grad():
            for tensor in _leaves(state):
                if tensor.is_floating_point() and tensor.numel() > 100 and tensor.element_size() >= 4:
                    flat = tensor.untyped_storage()
                    values = torch.empty(0, dtype=tensor.dtype).set_(flat)
                    values += 1e-3 * torch.randn_like(values)
    expected = ingest_all(store, paths)
    assert store.verify().problems == []
    check_all(store, expected, directory)


def _leaves(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, nn.Module):
        return list(state.parameters())
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in _leaves(value)]
    if isinstance(state, list | tuple):
        return [leaf for value in state for leaf in _leaves(value)]
    return []


def test_the_same_values_in_another_shape(store: ckstore.Store, directory: Path) -> None:
    """An object with another cut into chunks is not read by the cut of its equal."""
    values = torch.randn(1000, 300)
    torch.save({"w": values}, directory / "a.pt")
    torch.save({"w": values.reshape(-1).clone(), "v": values.clone()}, directory / "b.pt")
    torch.save({"w": values.reshape(-1) + 1e-3, "v": values.reshape(300, 1000) + 1e-3}, directory / "c.pt")
    expected = ingest_all(store, [directory / name for name in ("a.pt", "b.pt", "c.pt")])
    check_all(store, expected, directory)
    assert store.verify().problems == []


def test_values_that_move_by_less_than_a_step(store: ckstore.Store, directory: Path) -> None:
    """Integers that do not change at all are an object that is stored already, and no delta to itself."""
    values = torch.randn(400, 400)
    paths = []
    for step in range(5):
        paths.append(directory / f"step{step}.pt")
        torch.save({"w": values.clone()}, paths[-1])
        values.view(torch.int32)[0, step] += 1
    expected = ingest_all(store, paths)
    check_all(store, expected, directory)
    store.encode()
    check_all(store, expected, directory)
    sizes = [row.stored_bytes for row in store._catalog.versions()]
    assert sizes[-1] < 0.02 * sizes[0]
    assert store.verify().problems == []


def npy(shape: tuple[int, ...], order: bool = False) -> bytes:
    """Return an npy file of an array without elements."""
    header = f"{{'descr': '<f4', 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def safetensors(shape: tuple[int, ...]) -> bytes:
    """Return a safetensors file of a tensor without elements and one of two."""
    header = json.dumps(
        {
            "a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        }
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


def torch_bytes(state: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        npy((0, 10**17)),
        npy((10**17, 0), True),
        npy((0, 10**17, 10**17)),
        safetensors((0, 1 << 50)),
        torch_bytes({"w": torch.empty((0, 1 << 50))}),
        torch_bytes({"w": torch.arange(3.0).as_strided((1,), (1 << 60,))}),
    ],
    ids=["npy", "npy, turned", "npy, no strides", "safetensors", "torch", "torch, one element"],
)
def test_sizes_and_strides_that_place_nothing(store: ckstore.Store, directory: Path, data: bytes) -> None:
    path = directory / "file"
    path.write_bytes(data)
    check_all(store, ingest_all(store, [path], allow_empty=True), directory)


def test_a_shape_whose_strides_no_integer_holds(store: ckstore.Store, directory: Path) -> None:
    path = directory / "file.safetensors"
    path.write_bytes(safetensors((0, 1 << 40, 1 << 40)))
    with pytest.raises(ckstore.InputError, match="implausible shape"):
        store.ingest(path)
    number = store.ingest(path, force=True).version.number
    check_all(store, {number: sha256(path)}, directory)


@pytest.mark.parametrize("character", [b"\xff", b"\0"])
def test_archives_with_names_that_are_no_text(store: ckstore.Store, directory: Path, character: bytes) -> None:
    paths = [directory / "model.pt", directory / "a.npz"]
    torch.save({"w": torch.arange(10.0)}, paths[0])
    np.savez(paths[1], aaaa=np.arange(10.0))
    for path, name in zip(paths, (b"model/", b"aaaa.npy"), strict=True):
        path.write_bytes(path.read_bytes().replace(name, character + name[1:]))
    check_all(store, ingest_all(store, paths), directory)


def test_a_file_of_the_far_future(store: ckstore.Store, directory: Path) -> None:
    path = directory / "a.pt"
    torch.save({"w": torch.arange(10.0)}, path)
    os.utime(path, (10**10 + 1, 10**10 + 1))  # The year 2286: 64 bits of nanoseconds end in 2262.
    check_all(store, ingest_all(store, [path]), directory)
    store["main"].checkout(directory / "out")
    assert (directory / "out").stat().st_mtime_ns == path.stat().st_mtime_ns


def test_unreadable_layouts_are_not_stored() -> None:
    with pytest.raises(ckstore.InputError, match="tar archive"):
        encode_layout([FileLayout("opaque", 1 << 48)], [])


def test_directories(store: ckstore.Store, directory: Path) -> None:
    """Files, links, empty directories, permissions and times of files, across versions that differ in all of them."""
    expected = {}
    for step in range(3):
        tree = directory / f"checkpoint-{step}"
        (tree / "deep" / "empty").mkdir(parents=True)
        save_file({"w": torch.randn(300, 300)}, tree / "model.safetensors")
        torch.save({"state": {0: {"exp_avg": torch.randn(70_000), "step": torch.tensor(float(step))}}}, tree / "o.pt")
        (tree / "config.json").write_text(json.dumps({"step": step}))
        (tree / "deep" / "run me.sh").write_text("#!/bin/sh\n")
        (tree / "deep" / "run me.sh").chmod(0o755)
        (tree / "config.json").chmod(0o600)
        (tree / "tokens.bin").write_bytes(os.urandom(100_000) if step == 1 else b"\0" * 90_000)
        (tree / "none").write_bytes(b"")
        (tree / "umlaut-ä").write_text("x" * step)
        (tree / "latest").symlink_to("model.safetensors")
        (tree / "deep" / "up").symlink_to("../config.json")
        (tree / "deep" / "dangling").symlink_to("nowhere")
        os.utime(tree / "o.pt", ns=(1, 1_600_000_000_123_456_789 + step))
        (tree / "deep" / "empty").chmod(0o700)
        number = store.ingest(tree, run="d").version.number
        expected[number] = described(tree)
    assert store.verify().problems == []
    for number, entries in expected.items():
        out = directory / f"out{number}"
        store[number].checkout(out)
        assert described(out) == entries


def test_many_files_in_a_directory(store: ckstore.Store, directory: Path) -> None:
    """More files than a process may have open by default."""
    import resource

    tree = directory / "tree"
    tree.mkdir()
    torch.save({"w": torch.ones(3)}, tree / "model.pt")
    for number in range(300):
        (tree / f"{number}.json").write_text(str(number))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        number = store.ingest(tree).version.number
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    store[number].checkout(directory / "out")
    assert described(directory / "out") == described(tree)


@pytest.mark.encoded
def test_a_verified_ingest_that_does_not_come_back(
    store: ckstore.Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the coder is found before the version is visible, and leaves nothing behind."""
    paths = adamw_run(directory, 2)
    store.ingest(paths[0], run="a", verify=True)
    before = sorted(os.listdir(store.path / "packs"))
    right = reader.ordinal_correct

    def wrong(predicted: Any, bits: Any, dtype: str, **options: Any) -> None:
        right(predicted, bits, dtype, **options)
        bits ^= bits.dtype.type(store.mode == "broken")

    # Only the reading back can tell.
    monkeypatch.setattr(reader, "ordinal_correct", wrong)
    original = Repository.__init__

    def opened(self: Repository, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        store._repository.mode = "broken"  # type: ignore[assignment]

    monkeypatch.setattr(Repository, "__init__", opened)
    with pytest.raises(ckstore.errors.IntegrityError):
        store.ingest(paths[1], run="a", verify=True)
    monkeypatch.undo()
    store._repository.mode = "a"
    assert [row.step for row in store._catalog.versions()] == [0]
    assert sorted(os.listdir(store.path / "packs")) == before
    assert store._catalog.reservations() == []
    assert not store.ingest(paths[0], run="a").is_new
    check_all(store, ingest_all(store, paths[1:], run="a", verify=True), directory)
    assert recover(store.place).versions == 2
