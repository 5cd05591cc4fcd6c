"""Invalid checkpoints are refused in one sentence, and the store stays unchanged."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError, ConflictError, InputError, NotFoundError, UsageError
from tests.checkpoints import described, listing, settled, sha256, write_safetensors

FIRST = torch.arange(80_000, dtype=torch.float32).reshape(400, 200)


@pytest.fixture
def store(directory: Path) -> Iterator[ckstore.Store]:
    """A store with one version, which must not change."""
    with ckstore.init(directory / "store") as opened:
        torch.save({"w": FIRST, "step": 0}, directory / "good.pt")
        opened.ingest(directory / "good.pt", run="a")
        yield opened


def truncated_zip(path: Path) -> None:
    torch.save({"w": FIRST}, path)
    os.truncate(path, path.stat().st_size * 3 // 5)


def truncated_legacy(path: Path) -> None:
    torch.save({"w": FIRST}, path, _use_new_zipfile_serialization=False)
    os.truncate(path, path.stat().st_size * 3 // 5)


def flipped_zip(path: Path) -> None:
    torch.save({"w": FIRST}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not torch.equal(torch.load(path)["w"], FIRST), "torch takes the damaged file without a word"


def truncated_safetensors(path: Path) -> None:
    write_safetensors(path, {"w": ("float32", (400, 200), FIRST.numpy())})
    os.truncate(path, path.stat().st_size * 3 // 5)


def lying_offsets(path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    header["v"] = {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))


def long_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 100_000) + b'{"w":' + bytes(100))


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def bomb(path: Path) -> None:
    """Write a pickle of a few bytes that expands to 2^80 lists."""
    pickled = io.BytesIO()
    pickled.write(b"\x80\x02]q\x00")
    for number in range(80):
        pickled.write(b"](" + b"h" + bytes([number]) + b"h" + bytes([number]) + b"e" + b"q" + bytes([number + 1]))
    pickled.write(b".")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/version", "3\n")


DAMAGED = [
    truncated_zip, truncated_legacy, flipped_zip, truncated_safetensors, lying_offsets, long_header,
]  # fmt: skip


def refused(store: ckstore.Store, call: Callable[[], Any], kind: type[CkstoreError] = InputError) -> str:
    """Return the error's sentence; versions, packs and log are unchanged."""
    rows, files = settled(store)._catalog.versions(), listing(store.place)
    with pytest.raises(kind) as raised:
        call()
    message = str(raised.value)
    assert message
    assert "\n" not in message
    assert len(message) < 600
    assert store._catalog.versions() == rows
    assert listing(store.place) == files
    assert store._catalog.reservations() == []
    return message


@pytest.mark.parametrize("make", DAMAGED, ids=lambda make: make.__name__)
def test_damaged_files(store: ckstore.Store, directory: Path, make: Callable[[Path], None]) -> None:
    path = directory / "bad.pt"
    make(path)
    message = refused(store, lambda: store.ingest(path, run="a", step=1))
    assert "bad.pt" in message
    assert "`force`" in message
    assert ("data/0" in message) == (make is flipped_zip), "the entry with the wrong checksum is named"
    row = store.ingest(path, run="a", step=1, force=True).version
    store[row.number].checkout(directory / "out")
    assert sha256(directory / "out") == sha256(path)
    assert len(store[row.number]) == 0, "stored as bytes, not as tensors"
    assert store.verify().problems == []


@pytest.mark.parametrize("make", [pointer, empty], ids=lambda make: make.__name__)
def test_files_that_are_no_checkpoint(store: ckstore.Store, directory: Path, make: Callable[[Path], None]) -> None:
    path = directory / "bad.pt"
    make(path)
    message = refused(store, lambda: store.ingest(path, run="a", step=1))
    assert "bad.pt" in message
    assert ("git lfs pull" in message) == (make is pointer)


def test_a_path_that_is_not_there(store: ckstore.Store, directory: Path) -> None:
    assert "missing.pt" in refused(store, lambda: store.ingest(directory / "missing.pt"))


def test_only_regular_files_are_ingested(store: ckstore.Store, directory: Path) -> None:
    os.mkfifo(directory / "fifo")
    refused(store, lambda: store.ingest(directory / "fifo"))
    refused(store, lambda: store.ingest("/dev/null"))
    tree = directory / "tree"
    tree.mkdir()
    shutil.copy(directory / "good.pt", tree)
    os.mkfifo(tree / "fifo")
    assert "fifo" in refused(store, lambda: store.ingest(tree))


def test_directories_without_a_checkpoint(store: ckstore.Store, directory: Path) -> None:
    tree = directory / "tree"
    tree.mkdir()
    assert "tree" in refused(store, lambda: store.ingest(tree))
    (tree / "notes.txt").write_text("nothing here")
    assert "tree" in refused(store, lambda: store.ingest(tree))
    pointer(tree / "model.safetensors")
    assert "git lfs pull" in refused(store, lambda: store.ingest(tree))


@pytest.mark.parametrize("make", DAMAGED, ids=lambda make: make.__name__)
def test_a_directory_with_a_damaged_file(store: ckstore.Store, directory: Path, make: Callable[[Path], None]) -> None:
    tree = directory / "tree"
    tree.mkdir()
    shutil.copy(directory / "good.pt", tree)
    make(tree / "bad.bin")
    assert "bad.bin" in refused(store, lambda: store.ingest(tree))
    row = store.ingest(tree, force=True).version
    store[row.number].checkout(directory / "out")
    assert described(directory / "out") == described(tree)
    assert "good.pt/w" in store[row.number], "the other file is still tensors"


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside.pt", "deep/../../outside.pt"])
def test_links_out_of_the_tree(store: ckstore.Store, directory: Path, target: str) -> None:
    tree = directory / "tree"
    (tree / "deep").mkdir(parents=True)
    shutil.copy(directory / "good.pt", directory / "outside.pt")
    shutil.copy(directory / "good.pt", tree)
    (tree / "link.pt").symlink_to(target)
    assert "link.pt" in refused(store, lambda: store.ingest(tree))
    refused(store, lambda: store.ingest(tree, force=True))


class Runs:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_code_in_a_pickle_is_not_run(store: ckstore.Store, directory: Path, legacy: bool) -> None:
    witness = directory / "witness"
    path = directory / "evil.pt"
    torch.save({"w": FIRST, "evil": Runs(str(witness))}, path, _use_new_zipfile_serialization=not legacy)
    (directory / "evil.pkl").write_bytes(pickle.dumps(Runs(str(witness))))
    for name in ("evil.pt", "evil.pkl"):
        try:
            row = store.ingest(directory / name, run=name).version
        except InputError:
            assert name == "evil.pkl"
            continue
        version = store[row.number]
        version.checkout(directory / "out", force=True)
        assert sha256(directory / "out") == sha256(directory / name)
        if name == "evil.pt":
            assert version["w"][0, 1] == 1.0
            version.state_dict()
    assert store.verify().problems == []
    assert not witness.exists()


def test_a_pickle_bomb(store: ckstore.Store, directory: Path) -> None:
    """The file is refused, or stored as a file; its meaning is never unfolded."""
    path = directory / "bomb.pt"
    bomb(path)
    try:
        row = store.ingest(path, run="bomb").version
    except InputError:
        assert "bomb.pt" in refused(store, lambda: store.ingest(path, run="bomb"))
        return
    store[row.number].checkout(directory / "out")
    assert sha256(directory / "out") == sha256(path)


def test_steps_that_are_taken(store: ckstore.Store, directory: Path) -> None:
    torch.save({"w": FIRST + 1, "step": 0}, directory / "other.pt")
    assert "a@0" in refused(store, lambda: store.ingest(directory / "other.pt", run="a"), ConflictError)
    store.tag("a@0", "kept")
    message = refused(store, lambda: store.ingest(directory / "other.pt", run="a", replace=True), ConflictError)
    assert "kept" in message
    store.untag("kept")
    row = store.ingest(directory / "other.pt", run="a", replace=True).version
    assert [other.number for other in store._catalog.versions("a")] == [row.number]


def test_names_that_are_not_there(store: ckstore.Store, directory: Path) -> None:
    refused(store, lambda: store.ingest(directory / "good.pt", run="b", parent="nobody"), NotFoundError)
    refused(store, lambda: store["a@7"], NotFoundError)
    refused(store, lambda: store.tag("a@7", "x"), NotFoundError)
    refused(store, lambda: store.tag("a@0", "latest"), UsageError)
    refused(store, lambda: store.untag("x"), NotFoundError)
    refused(store, lambda: store.run("b"), NotFoundError)


@pytest.mark.parametrize("name", ["a@1", " a", "a\nb", "\udcff", "\x00"])
def test_runs_that_could_not_be_named(store: ckstore.Store, directory: Path, name: str) -> None:
    refused(store, lambda: store.ingest(directory / "good.pt", run=name), UsageError)


@pytest.mark.parametrize(
    "step", [1 << 63, -(1 << 63) - 1, True, 1.5, "x", np.float64(1.5), np.True_, np.uint64(1 << 63)]
)
def test_steps_that_are_no_numbers(store: ckstore.Store, directory: Path, step: int) -> None:
    refused(store, lambda: store.ingest(directory / "good.pt", run="b", step=step), UsageError)


@pytest.mark.parametrize("step", [3.0, "3", np.float64(3), np.array(3), torch.tensor(3)])
def test_steps_in_other_notations(store: ckstore.Store, directory: Path, step: int) -> None:
    assert store.ingest(directory / "good.pt", run="b", step=step).version.step == 3


def test_steps_in_files_that_are_out_of_bounds(store: ckstore.Store, directory: Path) -> None:
    for number, step in enumerate([1 << 70, -1, True, 1.5, "seven", None]):
        torch.save({"w": FIRST, "step": step}, directory / "odd.pt")
        assert store.ingest(directory / "odd.pt", run=f"r{number}").version.step is None


def test_metrics_that_cannot_be_kept(store: ckstore.Store, directory: Path) -> None:
    for value in (object(), np.ones(3), 1j, np.complex64(1j), {np.int64(1): 2}):
        refused(store, lambda v=value: store.ingest(directory / "good.pt", run="b", metrics={"loss": v}), UsageError)


def test_integers_and_metrics_from_numpy(store: ckstore.Store, directory: Path) -> None:
    metrics = {"loss": np.float32(0.5), "tokens": np.int64(7), "best": np.True_, "list": [np.float64(1.5), (2, 3)]}
    row = store.ingest(directory / "good.pt", run="b", step=np.int64(3), metrics=metrics).version
    assert (row.step, type(row.step)) == (3, int)
    assert row.metrics == {"loss": 0.5, "tokens": 7, "best": True, "list": [1.5, [2, 3]]}
    assert store["b@3"].number == row.number
    assert not store.ingest(directory / "good.pt", run="b", step=3).is_new


def test_names_that_are_not_utf8(store: ckstore.Store, directory: Path) -> None:
    odd = os.fsdecode(os.fsencode(directory) + b"/\xff")
    shutil.copy(directory / "good.pt", odd)
    refused(store, lambda: store.ingest(odd, run="b"))
    os.rename(odd, directory / "f.pt")
    os.mkdir(odd)
    shutil.move(directory / "f.pt", odd)
    row = store.ingest(Path(odd) / "f.pt", run="b").version
    assert row.source is not None
    assert row.source.endswith("\\udcff/f.pt")


@pytest.mark.local
def test_the_store_is_not_put_into_itself(store: ckstore.Store, directory: Path) -> None:
    assert "store itself" in refused(store, lambda: store.ingest(directory))
    assert "store itself" in refused(store, lambda: store.ingest(store.path, force=True))


def test_a_store_that_is_open_for_reading(store: ckstore.Store, directory: Path) -> None:
    with ckstore.open(store.place, "r") as reader:
        refused(store, lambda: reader.ingest(directory / "good.pt", run="b"), UsageError)
        refused(store, lambda: reader.tag("a@0", "x"), UsageError)
        refused(store, lambda: reader.rebase(), UsageError)


def test_objects_that_no_file_can_hold(store: ckstore.Store) -> None:
    refused(store, lambda: store.ingest({"w": object()}, run="b"), UsageError)


def test_real_files_that_are_damaged(store: ckstore.Store, shared_data: Path, directory: Path) -> None:
    names = sorted(path.name for path in (shared_data / "odd").iterdir())
    assert names
    for name in names:
        path = shared_data / "odd" / name
        message = refused(store, lambda path=path: store.ingest(path, run="odd"))
        assert name in message
        if path.stat().st_size:
            row = store.ingest(path, run="odd", force=True).version
            store[row.number].checkout(directory / "out", force=True)
            assert sha256(directory / "out") == sha256(path)
    assert store.verify().problems == []


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"policy": 5}, "policy takes a ckstore.Policy, `exact` or `coarse`, not 5"),
        ({"search": 5}, "search takes a ckstore.Search, not 5"),
        ({"max_restore_cost": "much"}, "must be a finite number, 1 or more, not 'much'"),
        ({"max_restore_cost": float("inf")}, "must be a finite number, 1 or more, not inf"),
        ({"max_restore_cost": 10**400}, "must be a finite number, 1 or more, not 10"),
        ({"hot": 1.5}, "`hot` takes a whole number, not 1.5"),
        ({"hot": 10**30}, "`hot` is too large: 10"),
    ],
)
def test_options_of_another_type(store: ckstore.Store, option: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        store.ingest({"w": FIRST}, **option)


def test_options_may_be_numpys(tmp_path: Path) -> None:
    policy = ckstore.Policy("coarse", quality=np.float32(2), hot=np.int64(1))
    with ckstore.init(tmp_path / "store") as store:
        store.set_policy(policy, run="a")
        for step, budget in enumerate((np.int64(3), np.float32(2.5))):
            store.ingest({"w": FIRST + step}, run="a", step=np.int64(step), max_restore_cost=budget, hot=np.int8(1))
        assert len(store) == 2
