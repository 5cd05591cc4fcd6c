"""Killed processes, full disks and files that change while they are read leave the store unchanged."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.commit.change import Change
from ckstore.errors import CkstoreError, ConflictError, InputError
from ckstore.recovery.recover import recover
from ckstore.scanning import hashing
from ckstore.storage import durable
from ckstore.storage.catalog import Catalog
from ckstore.storage.pack import PackWriter
from ckstore.storage.root import find_temporaries
from ckstore.writing import ingest
from tests.checkpoints import draw, listing, settled, sha256

REPOSITORY = Path(__file__).resolve().parents[1]
KILLED = -signal.SIGKILL

INGEST = """
import os, signal, sys
store, path, step = sys.argv[1:4]
import ckstore
from ckstore.storage import durable
def stop(name):
    if name == step:
        os.kill(os.getpid(), signal.SIGKILL)
def begin(name):
    # The reservation and the lease are transactions of their own; the version's comes after its packs.
    if name.startswith("pack-"):
        durable.checkpoint = stop
    stop(name) if not name.endswith("-commit") else None
durable.checkpoint = begin
with ckstore.open(store) as opened:
    opened.ingest(path, run="a")
"""

TRANSACTIONS = """
import os, signal, sys
store, path, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
import ckstore
from ckstore.storage import durable
seen = 0
def stop(name):
    global seen
    seen += 1
    if seen == wanted:
        os.kill(os.getpid(), signal.SIGKILL)
durable.checkpoint = stop
with ckstore.open(store) as opened:
    opened.ingest(path, run="a")
print("done")
"""


@pytest.fixture
def store(directory: Path, paths: list[Path]) -> Iterator[ckstore.Store]:
    """A store that holds the first checkpoint."""
    with ckstore.init(directory / "store") as opened:
        opened.ingest(paths[0], run="a")
        yield opened


def check(store: ckstore.Store, paths: list[Path]) -> None:
    """Check that the store holds these checkpoints, and that all of them come back."""
    assert store.verify().problems == []
    assert [row.step for row in store._catalog.versions("a")] == list(range(len(paths)))
    out = store.path.parent / "out"
    for path, row in zip(paths, store._catalog.versions("a"), strict=True):
        store[row.number].checkout(out, force=True)
        assert sha256(out) == sha256(path)


def killed(script: str, store: ckstore.Store, path: Path, step: str) -> int:
    command = [sys.executable, "-c", script, str(store.place), str(path), step]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode in (KILLED, 0), done.stderr
    store._catalog.refresh()
    return done.returncode


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "committed"),
    [
        ("pack-written", False),
        ("pack-synced", False),
        ("pack-renamed", False),
        ("before-commit", False),
        ("after-commit", True),
    ],
)
def test_an_ingest_that_is_killed(store: ckstore.Store, paths: list[Path], step: str, committed: bool) -> None:
    assert killed(INGEST, store, paths[1], step) == KILLED
    # The record of a remote store is its commit; then the mirror's catalog has it.
    committed |= isinstance(store.place, str) and step == "before-commit"
    check(store, paths[: 1 + committed])
    assert store.ingest(paths[1], run="a").is_new != committed
    store.ingest(paths[2], run="a")
    check(store, paths[:3])
    # All remaining files are in order, no matter which process was killed.
    for path in find_temporaries(store.path, grace=-1):
        durable.remove(path)
    assert recover(store.place).problems == []
    with ckstore.open(store.place) as again:
        check(again, paths[:3])


@pytest.mark.long
def test_an_ingest_that_is_killed_at_any_checkpoint(store: ckstore.Store, paths: list[Path]) -> None:
    """The steps of the reservation, the lease and the clean-up are among them."""
    done, wanted = KILLED, 0
    while done == KILLED:
        wanted += 1
        assert wanted < 40
        done = killed(TRANSACTIONS, store, paths[1], str(wanted))
        committed = len(store._catalog.versions("a")) == 2
        check(store, paths[: 1 + committed])
        if committed:
            break
    assert wanted >= 7
    assert store.ingest(paths[2], run="a").is_new
    check(store, paths[:3])


@pytest.mark.long
def test_an_ingest_that_is_killed_at_random_times(store: ckstore.Store, paths: list[Path]) -> None:
    """From a process that ingests in a loop, so that the time of the imports does not count."""
    script = (
        "import sys, ckstore\n"
        "with ckstore.open(sys.argv[1]) as store:\n"
        "    store.ingest(sys.argv[2], run='warm')\n"
        "    print('go', flush=True)\n"
        "    for number in range(10_000): store.ingest(sys.argv[2 + number % 2], run=f'r{number}')\n"
    )
    draw = random.Random(0)
    for _ in range(4):
        command = [sys.executable, "-c", script, str(store.place), str(paths[1]), str(paths[2])]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            time.sleep(draw.random() * 0.3)
            process.kill()
        assert store.verify().problems == []
        for row in store._catalog.versions():
            assert set(store[row.number].sha256().values()) <= {sha256(path) for path in paths}
    assert store.ingest(paths[3], run="a").is_new
    settled(store)  # Background encoding of this process holds a lease too.
    assert store._catalog.leases() == [], "leases of processes that are gone do not count"
    assert recover(store.place).problems == []


def unchanged(store: ckstore.Store) -> Callable[[], bool]:
    """Return a check that versions and files are unchanged since now."""
    rows, files = store._catalog.versions(), listing(store.place)
    return lambda: store._catalog.versions() == rows and listing(store.place) == files


def test_a_file_size_limit(store: ckstore.Store, paths: list[Path]) -> None:
    """A write fails in the middle of a pack, as under a quota."""
    same = unchanged(store)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (150_000, 5_000, 100):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(CkstoreError) as raised:
                store.ingest(paths[1], run="a")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert raised.value.kind == "error"
        if limit == 150_000:  # SQLite does not name the others.
            assert "`ulimit -f`" in str(raised.value)
        assert "\n" not in str(raised.value)
        assert "free" not in str(raised.value)
        assert same()
    store.ingest(paths[1], run="a")
    check(store, paths[:2])


@pytest.mark.encoded
@pytest.mark.parametrize("part", range(4))
def test_a_full_disk(store: ckstore.Store, paths: list[Path], part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th write of a pack finds no space."""
    same = unchanged(store)
    calls = 0
    places = [PackWriter._add, PackWriter.seal]

    def failing(original: Any) -> Any:
        def call(self: PackWriter, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1 + part:
                raise durable.full_error(store.path, 1)
            return original(self, *arguments, **named)

        return call

    for place in places:
        monkeypatch.setattr(PackWriter, place.__name__, failing(place))
    with pytest.raises(CkstoreError, match="No space"):
        store.ingest(paths[1], run="a")
    monkeypatch.undo()
    assert same()
    assert store._catalog.reservations() == []
    store.ingest(paths[1], run="a")
    check(store, paths[:2])


def test_an_fsync_that_fails(store: ckstore.Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    same = unchanged(store)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CkstoreError, match="No space"):
        store.ingest(paths[1], run="a")
    monkeypatch.undo()
    assert same()
    check(store, paths[:1])


@pytest.mark.local
def test_a_commit_that_is_refused_leaves_no_packs(
    store: ckstore.Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took the same step in between: `recover` must not bring the loser back in its place."""
    catalog = store._catalog
    monkeypatch.setattr(catalog, "at_step", lambda run, step: None)
    same = unchanged(store)

    def commit(*arguments: Any, **options: Any) -> None:
        raise ConflictError("a@1 is already version 9; choose another step or run, or replace it.")

    monkeypatch.setattr(catalog, "commit_version", commit)
    with pytest.raises(ConflictError):
        store.ingest(paths[1], run="a")
    monkeypatch.undo()
    assert same()
    assert recover(store.place).versions == 1


def test_an_ingest_after_one_whose_packs_could_not_be_removed(
    store: ckstore.Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is known any more, however its removal failed."""

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Change, "commit_version", interrupted)
    monkeypatch.setattr("ckstore.commit.change.remove_uncommitted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.ingest(paths[1], run="a")
    monkeypatch.undo()
    store.gc(grace=0)
    assert store.ingest(paths[1], run="a").is_new
    check(store, paths[:2])


def test_leftovers_of_a_killed_ingest_are_removed_by_the_next(store: ckstore.Store, paths: list[Path]) -> None:
    assert killed(INGEST, store, paths[1], "pack-written") == KILLED
    left = list((store.path / "packs").glob(".tmp-*"))
    assert left
    store.ingest(paths[1], run="a")
    assert all(path.exists() for path in left), "their writers may run on another host"
    for path in left:
        os.utime(path, (time.time() - 7200,) * 2)
    with ckstore.open(store.place) as again:  # The first ingest of a program looks for them.
        again.ingest(paths[2], run="a")
    assert not any(path.exists() for path in left)
    store._catalog.refresh()
    check(store, paths[:3])


@pytest.mark.encoded
@pytest.mark.parametrize("known", [True, False], ids=["known", "parent"])
def test_objects_that_go_before_the_commit(
    store: ckstore.Store, paths: list[Path], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that refers to them, or has objects stored against them, is not committed."""
    commit = Change.commit_version

    def interposed(self: Change, *arguments: Any, **options: Any) -> int:
        with Catalog(store.path, "a") as other:
            for pack in other.packs():
                other.remove_objects([place for place, _ in other.objects_in(pack.name)])
        return commit(self, *arguments, **options)

    monkeypatch.setattr(Change, "commit_version", interposed)
    with pytest.raises(ConflictError, match="ingest it again"):
        store.ingest(paths[0] if known else paths[1], run="b" if known else "a")
    assert len(store._catalog.versions()) == 1


def overwrite(path: Path) -> None:
    """Write other values of the same size, and put the time of the last change back."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


CHANGES = [overwrite, cut_off, append, replace, Path.unlink]


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("moment", ["parsed", "read", "hashed"])
@pytest.mark.parametrize("tree", [False, True], ids=["file", "directory"])
def test_a_file_that_changes_while_it_is_read(
    store: ckstore.Store,
    paths: list[Path],
    change: Callable[[Path], None],
    moment: str,
    tree: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if change is overwrite and moment != "hashed":
        pytest.skip("only hashed values count: values that were never read are not missed")
    path = source = paths[1]
    if tree:
        source = path.parent / "tree"
        source.mkdir()
        path = path.rename(source / "model.pt")
    store.encode()  # Coarse versions would be stored against it.
    same = unchanged(store)
    begin, hash_version, add = hashing._Reading.__init__, hashing.hash_version, PackWriter.add_values
    changed: list[Path] = []

    def begun(*arguments: Any, **options: Any) -> None:
        begin(*arguments, **options)
        change(path)

    def added(self: Any, *arguments: Any, **options: Any) -> Any:
        if path not in changed:
            changed.append(path)
            change(path)
        return add(self, *arguments, **options)

    def hashed(version: Any, **options: Any) -> None:
        hash_version(version, **options)
        change(path)

    # Exact versions are read once; coarse ones are hashed before they are read again.
    fidelity: Any = "exact"
    if moment == "parsed":
        monkeypatch.setattr(hashing._Reading, "__init__", begun)
    elif moment == "read":
        monkeypatch.setattr(PackWriter, "add_values", added)
    else:
        fidelity = "coarse"
        monkeypatch.setattr(ingest, "hash_version", hashed)
    with pytest.raises(InputError) as raised:
        store.ingest(source, run="a", policy=fidelity)
    assert path.name in str(raised.value)
    monkeypatch.undo()
    assert same()
    assert store._catalog.reservations() == []
    check(store, paths[:1])


def test_a_file_that_is_written_all_the_time(store: ckstore.Store, directory: Path) -> None:
    """Whatever is stored was in the file at one time as a whole; mostly the ingest is refused."""
    path = directory / "live.safetensors"
    script = (
        "import sys, numpy as np\n"
        "from safetensors.numpy import save_file\n"
        "from pathlib import Path\n"
        "n = 0\n"
        "while True:\n"
        "    save_file({'w': np.full(1_000_000, n, np.float32)}, sys.argv[1])\n"
        "    n += 1\n"
        "    if n == 1: print('go', flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    refused = 0
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for step in range(6):
            try:
                number = store.ingest(path, run="live", step=step).version.number
            except InputError:
                refused += 1
            else:
                values = store[number]["w"].numpy()
                assert np.unique(values).size == 1
        process.kill()
    assert store.verify().problems == []
    assert refused + len([row for row in store._catalog.versions() if row.run == "live"]) == 6


@pytest.mark.local
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_packs_that_were_named_but_not_synced_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """`recover` would take them for a version's."""
    from ckstore.storage import durable

    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest({"w": draw(300, 300)}, step=0)
        before = set((path / "packs").iterdir())
        sync = durable.sync_directory

        def failing(_: Path) -> None:
            assert len(set((path / "packs").iterdir()) - before) == 2
            raise error

        monkeypatch.setattr(durable, "sync_directory", failing)
        with pytest.raises(error):
            store.ingest({"w": draw(300, 300, seed=1)}, step=1)
        assert set((path / "packs").iterdir()) == before
        monkeypatch.setattr(durable, "sync_directory", sync)
    assert recover(path).problems == []
    with ckstore.open(path) as store:
        assert len(store._catalog.versions()) == 1
        store.ingest({"w": draw(300, 300, seed=1)}, step=1)
