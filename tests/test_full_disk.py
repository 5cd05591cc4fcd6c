"""A disk without a free byte: verbs that free space work, and free it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import ckstore
from ckstore.gc import collect
from ckstore.storage import durable, reserve

pytestmark = pytest.mark.local

#: Runs a script with a small file system of its own, mounted at its first argument.
MOUNTED = 'mount -t tmpfs -o size=6m tmpfs "$1" && shift && exec "$@"'

PRELUDE = """
    import os, sys
    from pathlib import Path
    import numpy as np
    import ckstore
    from ckstore.errors import CkstoreError
    from ckstore.recovery.recover import recover

    place = sys.argv[1]

    def weights(step):
        return {"w": np.random.default_rng(step).standard_normal((300, 300), np.float32)}

    def fill():
        with open(os.path.join(place, "filling"), "ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    pass
        status = os.statvfs(place)
        assert status.f_bavail == 0, status

    store = ckstore.init(place + "/store")
    for step in range(4):
        store.ingest(weights(step), run="a", step=step, hot=0)
    fill()
    try:
        store.ingest(weights(9), run="a", step=9)
        raise SystemExit("there was room")
    except CkstoreError as error:
        assert "No space" in str(error), error
        assert isinstance(error, ckstore.DiskFullError), error
        assert (error.kind, error.exit_code) == ("disk-full", 16)
"""


def on_a_small_disk(tmp_path: Path, script: str) -> None:
    """Run a script whose store is on a file system of six megabytes without a free byte."""
    try:
        alone = ["unshare", "-rm", "sh", "-ec", MOUNTED, "sh", str(tmp_path)]
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    command = [*alone, sys.executable, "-c", dedent(PRELUDE) + dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("opened", ["before", "again"])
def test_versions_are_forgotten_and_their_space_freed(tmp_path: Path, opened: str) -> None:
    on_a_small_disk(
        tmp_path,
        f"""
        if {opened!r} == "again":
            store.close()
            store = ckstore.open(place + "/store")
        store.forget(["a@0", "a@1"])
        assert [row.step for row in store._catalog.versions()] == [2, 3]
        report = store.gc(grace=0)
        assert report.bytes > 500_000, report
        assert os.statvfs(place).f_bavail * 4096 > 500_000
        assert store.verify().problems == []
        store.ingest(weights(5), run="a", step=5, hot=0)
        assert (store["a@3"]["w"].numpy() == weights(3)["w"]).all()
        """,
    )


def test_the_catalog_is_built_again(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        """
        store.close()
        with open(place + "/store/catalog.sqlite", "r+b") as file:
            file.seek(3000)
            file.write(b"damage" * 100)
        assert recover(Path(place, "store")).problems == []
        store = ckstore.open(place + "/store")
        assert [row.step for row in store._catalog.versions()] == [0, 1, 2, 3]
        assert store.verify().problems == []
        store.forget(["a@0", "a@1"])
        store.gc(grace=0)
        store.ingest(weights(5), run="a", step=5, hot=0)
        """,
    )


def test_files_that_are_written_elsewhere(tmp_path: Path) -> None:
    """The error names the file, and nothing is left of it."""
    on_a_small_disk(
        tmp_path,
        """
        version, out = store["a@0"], Path(place, "out")
        out.mkdir()
        os.truncate(place + "/filling", os.path.getsize(place + "/filling") - 50_000)
        for target, write in {
            "x.pt": lambda path: version.checkout(path),
            "x.npz": lambda path: version.checkout(path),
            "run": lambda path: store.run("a").checkout(path),
            "soup.pt": lambda path: store.average(["a@0", "a@1"], path),
            "patch": lambda path: store["a@1"].write_patch("a@0", path),
            "page.html": lambda path: store.report().save(path),
            "served": lambda path: list(store.follow("a", path, once=True)),
        }.items():
            try:
                write(out / target)
                raise SystemExit(f"there was room for {target}")
            except ckstore.DiskFullError as error:
                assert f"No space for {out / target}" in str(error), error
            left = [path for path in out.rglob("*") if path.is_file() and path.stat().st_size]
            assert target == "served" or left == [], left
        """,
    )


def test_the_error_of_the_store_ends_an_ingest_of_several(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        """
        from ckstore.cli.program import run

        os.truncate(place + "/filling", 0)
        names = [f"{place}/{step}.npy" for step in range(10, 16)]
        for step, name in enumerate(names):
            np.save(name, weights(step)["w"] * 2)
        fill()
        os.truncate(place + "/filling", os.path.getsize(place + "/filling") - 700_000)
        assert run(["--store", place + "/store", "ingest", *names, "--run", "b"]) == 16
        stored = len(store._catalog.versions("b"))
        assert 0 < stored < len(names), stored
        """,
    )


def test_one_change_after_the_other_on_a_disk_that_stays_full(tmp_path: Path) -> None:
    """The rest of one change's reserve serves the next change, where no other process takes it."""
    on_a_small_disk(
        tmp_path,
        """
        for step in range(3):
            store.forget([f"a@{step}"])
            assert os.path.getsize(place + "/store/reserve") > 100_000
        assert recover(Path(place, "store")).problems == []
        assert store.gc(grace=0).bytes > 500_000
        """,
    )


def test_a_quota_is_named(tmp_path: Path) -> None:
    full = pytest.raises(ckstore.DiskFullError, match=r"The quota for .* is used up")
    with full, durable.write_explained(tmp_path, 7):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.encoded
def test_packs_that_cannot_be_rewritten_stay(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs that hold only garbage go first; others are left alone where there is no room for their copies."""
    for step in range(3):
        values = np.random.default_rng(step).standard_normal((2, 300, 300), np.float32)
        store.ingest({"same": np.full((300, 300), step // 2, np.float32), "w": values}, run="a", step=step)
    store.forget(["a@0", "a@1"])
    before = {row.name for row in store._catalog.packs()}
    temporary = store.path / "packs" / ".tmp-999999999-00"
    temporary.write_bytes(b"half")
    copy = collect.repack
    refused = []

    def full(*arguments: object) -> object:
        refused.append(temporary.exists())
        raise durable.full_error(store.path, 1)

    monkeypatch.setattr(collect, "repack", full)
    report = store.gc(grace=0)
    assert report.removed
    assert not report.rewritten
    assert refused == [True, False], "files of killed processes go before the copies are tried again"
    assert {row.name for row in store._catalog.packs()} < before
    assert store.verify().problems == []
    monkeypatch.setattr(collect, "repack", copy)
    assert store.gc(grace=0).rewritten
    assert store.verify().problems == []


def test_the_reserve_exists_where_room_is_little(
    store: ckstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sized(free: int) -> int:
        status = os.statvfs(tmp_path)
        fields = list(status)
        fields[4] = free // status.f_frsize
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
        reserve.keep(store.path)
        monkeypatch.undo()
        path = store.path / reserve.NAME
        return path.stat().st_size if path.exists() else 0

    assert sized(reserve.PLENTY + 4096) == 0
    assert sized(reserve.LITTLE + 4096) == 0
    size = sized(reserve.LITTLE)
    assert size == reserve.SIZE + (store.path / "catalog.sqlite").stat().st_size
    assert sized(reserve.LITTLE + 4096) == size
    assert sized(reserve.PLENTY + 4096) == 0
