"""Denied access: one sentence with the owner and the remedy, exit code 1, and the rest of a batch is stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckstore
from tests.checkpoints import listing, write_safetensors
from tests.denied import call, deny, run

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX"),
]

Close = Callable[[Path], Path]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "store"
    with ckstore.init(path) as store:
        for step in (1, 2, 3):
            weights = np.random.default_rng(step).standard_normal((300, 300), np.float32)
            store.ingest({"w": weights}, run="a", step=step, hot=0)
        store.tag("a@3", "best")
        store.ingest({"w": weights + 1}, run="b", hot=0)
        store.forget(["b"], prune=False)
    return path


@pytest.fixture
def place(tmp_path: Path, filled: Path) -> Path:
    shutil.copytree(filled, tmp_path / "store")
    save(tmp_path / "step9.safetensors", 9)
    return tmp_path


def save(path: Path, seed: int) -> Path:
    array = np.random.default_rng(seed).standard_normal((300,), np.float32)
    write_safetensors(path, {"w": ("float32", array.shape, array)})
    return path


def opened(place: Path) -> None:
    """Give back every permission."""
    for path in [place, *place.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def packs(store: Path) -> Path:
    deny(*(store / "packs").iterdir())
    return store / "packs"


def packs_directory(store: Path) -> Path:
    deny(store / "packs")
    return store / "packs"


def log_records(store: Path) -> Path:
    deny(*(store / "log").iterdir())
    return store / "log"


def log_directory(store: Path) -> Path:
    deny(store / "log")
    return store / "log"


def catalog(store: Path) -> Path:
    deny(store / "catalog.sqlite")
    return store / "catalog.sqlite"


def whole_store(store: Path) -> Path:
    deny(store)
    return store


#: Verbs that read, for each part of a store that may be closed.
READERS = {
    packs: ["verify", "checkout a@1 -o out", "gc", "recover", "diff a@1 a@2", "thin a@1", "rebase a@2"],
    packs_directory: ["verify", "checkout a@1 -o out", "gc", "recover", "ingest step9.safetensors"],
    log_records: ["verify", "gc", "recover"],
    log_directory: ["verify", "gc", "recover", "tag a@2 x", "forget a@2"],
    catalog: ["verify", "checkout a@1 -o out", "log", "gc", "recover", "ingest step9.safetensors"],
    whole_store: ["verify", "log", "recover", "ingest step9.safetensors"],
}


@pytest.mark.parametrize("close", READERS, ids=lambda close: close.__name__)
def test_a_closed_part_is_never_called_damage(place: Path, close: Close) -> None:
    before = listing(place / "store")
    closed = close(place / "store")
    for verb in READERS[close]:
        done = run(place, ["--store", "store", *verb.split()])
        assert done.code == ckstore.AccessError.exit_code == 1, (verb, done)
        assert str(closed) in done.sentence, verb
        assert "with mode 0000; work as nobody" in done.sentence or "has mode 0000; allow it" in done.sentence
        assert "`chmod`" in done.sentence
        for word in ("damage", "recover`", "copy", "lost"):
            assert word not in done.err, (verb, done.err)
    opened(place)
    assert listing(place / "store") == before
    with ckstore.open(place / "store") as store:
        assert store.verify().problems == []
        assert len(store) == 3


def read_only_store(store: Path) -> Path:
    deny(store, mode=0o555)
    return store


def read_only_packs(store: Path) -> Path:
    deny(store / "packs", mode=0o555)
    return store / "packs"


def read_only_log(store: Path) -> Path:
    deny(store / "log", mode=0o555)
    return store / "log"


def read_only_catalog(store: Path) -> Path:
    deny(store / "catalog.sqlite", mode=0o444)
    return store / "catalog.sqlite"


WRITERS = {
    read_only_store: ["ingest step9.safetensors", "tag a@2 x", "forget a@2", "gc", "recover"],
    read_only_packs: ["ingest step9.safetensors"],
    read_only_log: ["tag a@2 x", "forget a@2"],
    read_only_catalog: ["ingest step9.safetensors", "tag a@2 x", "forget a@2", "gc"],
}


@pytest.mark.parametrize("close", WRITERS, ids=lambda close: close.__name__)
def test_a_part_that_may_not_be_written_is_named(place: Path, close: Close) -> None:
    """Readers go on."""
    closed = close(place / "store")
    for verb in WRITERS[close]:
        done = run(place, ["--store", "store", *verb.split()])
        assert done.code == 1, (verb, done)
        assert "cannot be written by" in done.sentence, verb
        assert str(closed) in done.sentence, verb
        assert "readonly database" not in done.err
    for verb in ("verify", "log", "checkout a@1 -o out --force"):
        assert run(place, ["--store", "store", *verb.split()]).code == 0, verb
    opened(place)
    with ckstore.open(place / "store") as store:
        assert store.verify().problems == []
        assert len(store) == 3


#: Runs verbs, each in a process forked from one that has imported the program, and prints their exit codes.
EACH_VERB = """
import os, sys
import ckstore.gc.collect, ckstore.intake.intake, ckstore.recovery.recover, ckstore.store
from ckstore.cli.program import run
for verb in sys.argv[1:]:
    if not os.fork():
        sys.exit(run(["--store", "store", *verb.split()]))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.long
def test_a_store_that_is_mounted_read_only(place: Path) -> None:
    """By a mount of its own; one sentence, and readers go on."""
    verbs = ["ingest step9.safetensors", "tag a@2 x", "forget a@2", "gc", "encode", "recover"]
    script = (
        'mount --bind store store && mount -o remount,ro,bind store || { echo "no mount" >&2; exit 99; }\n'
        'exec "$0" -c "$@"'
    )
    if shutil.which("unshare") is None:
        pytest.skip("a mount of its own takes unshare")
    command = ["unshare", "-rm", "sh", "-c", script, sys.executable, EACH_VERB, *verbs, "verify", "log"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    codes = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert codes == ["1"] * 4 + ["0", "1", "0", "0"], (done.stdout, done.stderr)  # There is nothing to encode.
    said = [line for line in done.stderr.splitlines() if "of the store belong to no version" not in line]
    assert len(said) == 5
    for line in said:
        assert line.endswith("is on a file system that is mounted read-only; mount it for writing, or write elsewhere.")


@pytest.mark.parametrize("is_directory", [False, True])
def test_an_unreadable_input_does_not_stop_the_others(place: Path, is_directory: bool) -> None:
    """Reported like a missing one; `--dry-run` and `--recursive` too."""
    for step in (11, 12, 13):
        (place / "in" / f"step{step}").mkdir(parents=True)
        save(place / "in" / f"step{step}" / "model.safetensors", step)
        (place / "in" / f"step{step}" / "config.json").write_text("{}")
    closed = place / "in" / "step12" if is_directory else place / "in" / "step12" / "model.safetensors"
    deny(closed)
    names = [f"in/step{step}" for step in (11, 12, 13)]
    if not is_directory:
        names = [f"{name}/model.safetensors" for name in names]
    assert run(place, ["--store", "store", "ingest", *names, "--run", "b", "--dry-run"]).code == 3
    done = run(place, ["--store", "store", "ingest", *names, "in/absent", "--run", "b", "--step-from", "order"])
    assert done.code == 3
    assert "2 of 4 inputs could not be stored" in done.sentence
    [why] = [line for line in done.err.splitlines() if "step12" in line]
    assert str(closed) in why
    assert "chmod" in why
    done = run(place, ["--store", "store", "ingest", "in", "--recursive"])
    assert done.code == 3
    assert "in/step12" in done.err
    alone = run(place, ["--store", "store", "ingest", names[1], "--run", "b"])
    assert alone.code == 1
    assert alone.sentence == why.removeprefix("ckstore: ")
    rows = json.loads(run(place, ["--store", "store", "log", "b", "--json"]).out)
    assert len(rows) == 2


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
@pytest.mark.parametrize(
    "verb",
    ["checkout a@1 -o shut/out", "checkout a@1 -o shut/out.safetensors", "average a@1 a@2 -o shut/mean.pt",
     "report -o shut/page.html", "init shut/new"],
)  # fmt: skip
def test_a_target_that_may_not_be_written(place: Path, verb: str) -> None:
    (place / "shut").mkdir()
    (place / "in").mkdir()
    save(place / "in" / "step1.safetensors", 1)
    deny(place / "shut", mode=0o555)
    done = run(place, ["--store", "store", *verb.split()])
    assert done.code == 1, done
    assert "cannot be written by" in done.sentence
    assert f"{place / 'shut'}" in done.sentence
    assert os.listdir(place / "shut") == []


def verify_in_python() -> int:
    """Return a code for the error's kind."""
    try:
        ckstore.open("store").verify()
    except PermissionError as error:
        return 5 if getattr(error, "kind", "") == "access" else 6
    return 0


def test_in_python_it_is_a_permission_error(place: Path) -> None:
    deny(*(place / "store" / "packs").iterdir())
    assert call(place, verify_in_python).code == 5
