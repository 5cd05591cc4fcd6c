"""Several processes use one store at once: nothing is lost, nothing is done twice, everything comes back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch

import ckstore
from ckstore.recovery.recover import recover
from tests.checkpoints import lose_catalog, sha256

REPOSITORY = Path(__file__).resolve().parents[1]

INGEST = """
import sys, ckstore
store, run, *paths = sys.argv[1:]
with ckstore.open(store) as opened:
    print("ready", flush=True)
    sys.stdin.readline()
    for path in paths:
        opened.ingest(path, run=run)
"""


def run_files(directory: Path, name: str, seed: int, shared: torch.Tensor) -> list[Path]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(300, 300, generator=generator)
    paths = []
    for step in range(6):
        paths.append(directory / f"{name}-{step}.pt")
        torch.save({"w": weight, "shared": shared, "step": step}, paths[-1])
        weight = weight + 1e-3 * torch.randn(300, 300, generator=generator)
    return paths


def start(store: Path, run: str, paths: list[Path]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", INGEST, str(store), run, *map(str, paths)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def together(processes: list[subprocess.Popen[bytes]]) -> list[str]:
    """Start processes at the same time; return the errors of those in which it failed."""
    said = []
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        _, error = process.communicate(timeout=120)
        if process.returncode:
            said.append(error.decode())
    return said


def check(store: Path, expected: dict[str, list[Path]], out: Path) -> None:
    with ckstore.open(store, "r") as opened:
        assert opened.verify().problems == []
        assert len({row.number for row in opened._catalog.versions()}) == sum(map(len, expected.values()))
        assert opened._catalog.reservations() == []
        for run, paths in expected.items():
            for step, path in enumerate(paths):
                opened[f"{run}@{step}"].checkout(out, force=True)
                assert sha256(out) == sha256(path)


def test_two_runs_at_once(directory: Path) -> None:
    """Tensors in both are stored by the first writer; nobody waits for the other's coding."""
    ckstore.init(directory / "store").close()
    shared = torch.randn(300, 300)
    expected = {name: run_files(directory, name, seed, shared) for seed, name in enumerate("ab")}
    assert together([start(directory / "store", name, paths) for name, paths in expected.items()]) == []
    check(directory / "store", expected, directory / "out")
    assert recover(directory / "store").problems == []
    check(directory / "store", expected, directory / "out")


@pytest.mark.long
def test_the_same_files_by_two_processes(directory: Path) -> None:
    """The same content under two runs: both versions are whole, whichever process stored the shared objects."""
    ckstore.init(directory / "store").close()
    paths = run_files(directory, "a", 3, torch.randn(70_000))
    assert together([start(directory / "store", name, paths) for name in "ab"]) == []
    check(directory / "store", {"a": paths, "b": paths}, directory / "out")
    lose_catalog(directory / "store")
    assert recover(directory / "store").problems == []
    check(directory / "store", {"a": paths, "b": paths}, directory / "out")


@pytest.mark.long
def test_one_run_by_two_processes(directory: Path) -> None:
    """Each step is taken once; the other process's version of it is a rerun or a conflict, and leaves nothing."""
    ckstore.init(directory / "store").close()
    paths = run_files(directory, "a", 3, torch.randn(70_000))
    said = together([start(directory / "store", "a", paths) for _ in range(2)])
    assert all("ckstore.errors.ConflictError" in error for error in said), "\n".join(said)
    with ckstore.open(directory / "store") as store:
        for path in paths:
            store.ingest(path, run="a")
        assert [row.step for row in store._catalog.versions()] == list(range(6))
    check(directory / "store", {"a": paths}, directory / "out")
    assert recover(directory / "store").versions == 6
    check(directory / "store", {"a": paths}, directory / "out")


def test_readers_while_another_process_ingests_and_rebases(directory: Path) -> None:
    store = ckstore.init(directory / "store")
    paths = run_files(directory, "a", 3, torch.randn(300, 300))
    store.ingest(paths[0], run="a")
    failures: list[BaseException] = []
    stop = False

    def read() -> None:
        out = directory / "read"
        try:
            with ckstore.open(directory / "store", "r") as opened:
                while not stop:
                    for row in opened._catalog.versions():
                        opened[row.number].checkout(out, force=True)
                        assert sha256(out) == sha256(paths[row.number - 1])
        except BaseException as error:
            failures.append(error)

    reader = Thread(target=read)
    reader.start()
    try:
        with ckstore.open(directory / "store") as writer:
            for path in paths[1:]:
                writer.ingest(path, run="a")
                writer.rebase(run="a")
    finally:
        stop = True
        reader.join()
    assert failures == []
    assert store.verify().problems == []


@pytest.mark.parametrize(
    "does",
    [
        lambda store, other: store.thin("a@2", dry_run=True),
        lambda store, other: store.thin("a@2"),
        lambda store, other: store.push(other, "a@2", dry_run=True),
        lambda store, other: store.push(other, "a@2"),
    ],
)
def test_a_version_that_another_process_has_encoded(
    directory: Path, monkeypatch: pytest.MonkeyPatch, does: Callable[[ckstore.Store, ckstore.Store], object]
) -> None:
    """Its raw packs, which the process knows, are gone."""
    monkeypatch.chdir(directory)
    weight = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    with ckstore.init("stale") as store, ckstore.init("copy") as copy:
        store.ingest({"w": weight}, run="a", step=1, hot=0)
        store.ingest({"w": weight + 1e-3}, run="a", step=2, hot=9)
        with ckstore.open("stale") as other:
            other.encode()
            other.gc(grace=0)
        report = does(store, copy)
        assert not getattr(report, "failed", None)
        assert store.verify().problems == []
