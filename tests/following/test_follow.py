"""Followed directories: equal to a checkout of the newest version, whatever happened before, with few bytes read."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import ckstore
from ckstore.following import follow as following
from ckstore.following import update as updating
from ckstore.following import written_files
from ckstore.following.marker import LOCK, MARKER, read_marker
from ckstore.gc import plan
from ckstore.objects.records import Patches
from ckstore.objects.resolver import Manifest
from ckstore.storage import durable
from tests.checkpoints import write_safetensors

pytestmark = pytest.mark.encoded

Model = dict[str, Any]


def weights(step: int, rows: int = 300) -> np.ndarray[Any, Any]:
    """Return bf16 weights; a hundredth of them changes with each step."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((rows, 1000), np.float32).view("u4") >> 16).astype("u2").reshape(-1)
    for _ in range(step):
        changed = rng.choice(values.size, values.size // 100, replace=False)
        values[changed] ^= rng.integers(1, 4, changed.size, "u2")
    return values


def write_model(directory: Path, step: int, **others: bytes) -> Path:
    """Write a directory of two shards, a configuration and other files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    values = weights(step)
    half = values.size // 2
    for number, part in enumerate((values[:half], values[half:]), 1):
        tensors = {
            f"layer.{number}": ("bfloat16", (part.size // 1000, 1000), part),
            f"norm.{number}": ("bfloat16", (7,), part[:7]),
        }
        write_safetensors(directory / f"model-{number:05}-of-00002.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps({"layers": 2}))
    for name, data in others.items():
        (directory / name).write_bytes(data)
    return directory


#: The followed directory, a checkout to compare it with, and the directory to ingest.
LOCAL, CHECKOUT, MODEL = Path("local"), Path("checkout"), Path("model")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ckstore.Store]:
    monkeypatch.chdir(tmp_path)
    with ckstore.open(tmp_path / "store", create=True) as made:
        yield made


def publish(store: ckstore.Store, step: int, run: str = "policy", **others: bytes) -> None:
    store.ingest(write_model(MODEL, step, **others), run=run, step=step, replace=True)


def followed(store: ckstore.Store, name: str = "policy") -> ckstore.Followed:
    """Update the directory; return the outcome."""
    (found,) = ckstore.follow(store.place, name, LOCAL, once=True)
    return found


def tree(directory: Path) -> dict[str, bytes | str]:
    """Return files and links of a directory by path, without those of followers, also of killed ones."""
    entries = {entry.relative_to(directory).as_posix(): entry for entry in directory.rglob("*")}
    return {
        path: os.readlink(entry) if entry.is_symlink() else entry.read_bytes()
        for path, entry in entries.items()
        if path not in (MARKER, LOCK) and path[:5] != ".tmp-" and (entry.is_file() or entry.is_symlink())
    }


def check(store: ckstore.Store, name: str = "policy") -> None:
    """Assert that the directory is marked as a complete version, and that its files are those of a checkout."""
    marker = json.loads((LOCAL / MARKER).read_text())
    assert (marker["state"], marker["id"]) == ("complete", store[name].id)
    store[name].checkout(CHECKOUT, force=True)
    assert tree(LOCAL) == tree(CHECKOUT)
    assert {path: held[2] for path, held in marker["files"].items()} == {
        entry.path: entry.blake3 for entry in store[name]._stored.document.files
    }


def test_updates_write_in_place_and_read_the_changes_alone(store: ckstore.Store) -> None:
    publish(store, 0)
    first = followed(store)
    check(store)
    assert first.bytes_read > 300_000
    inodes = {path: (LOCAL / path).stat().st_ino for path in tree(LOCAL)}
    for step in (1, 2, 3):
        publish(store, step)
        found = followed(store)
        check(store)
        assert (found.name, found.is_mended, found.was_applied) == (f"policy@{step}", False, False)
        # A patch of 3,000 elements takes below 10 bits each, with places.
        assert found.bytes_read < 3000 * 14 / 8
        assert found.bytes_written < 610_000
    assert inodes == {path: (LOCAL / path).stat().st_ino for path in tree(LOCAL)}


def test_the_end_of_a_chain_costs_followers_nothing(store: ckstore.Store) -> None:
    shortcuts = []
    for step in range(12):
        store.ingest(write_model(MODEL, step), run="policy", step=step, hot=0, max_restore_cost=1.3)
        if step == 2:
            followed(store)
            shutil.copytree(LOCAL, "behind")
        if step > 2:
            assert followed(store).bytes_read < 3000 * 14 / 8
            check(store)
        shortcuts += store._repository.resolver.manifest(store["policy"]._stored.row.pack).document.shortcuts
    assert shortcuts
    shutil.rmtree(LOCAL)
    Path("behind").rename(LOCAL)
    # Nine versions behind, and some of those between are gone.
    shutil.copytree(LOCAL, "behind")
    assert followed(store).bytes_read < 9 * 3000 * 14 / 8
    check(store)
    shutil.rmtree(LOCAL)
    Path("behind").rename(LOCAL)
    store.forget([f"policy@{step}" for step in range(2, 9)])
    store.gc(grace=0)
    followed(store)
    check(store)


@pytest.fixture
def shortened(store: ckstore.Store) -> list[Patches]:
    """Publish versions until one has shortcuts, with a follower one version behind; return these."""
    for step in range(12):
        store.ingest(write_model(MODEL, step), run="policy", step=step, hot=0, max_restore_cost=1.3)
        found = store._repository.resolver.manifest(store["policy"]._stored.row.pack).document.shortcuts
        if found:
            return found
        followed(store)
    raise AssertionError


def test_shortcuts_are_recovered_and_a_rewritten_pack_needs_none(
    store: ckstore.Store, shortened: list[Patches], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shortened
    assert store.verify().problems == []
    behind = Path(shutil.copytree(LOCAL, "behind"))
    store.close()
    ckstore.recover(store.path)
    with ckstore.open(store.path) as again:
        assert followed(again).bytes_read < 3000 * 14 / 8
        check(again)
        monkeypatch.setattr(plan, "GARBAGE_BYTES", 0)
        before = again["policy"]._stored.row.pack
        again.gc(grace=0)
        assert again["policy"]._stored.row.pack != before
        shutil.rmtree(LOCAL)
        behind.rename(LOCAL)
        assert not followed(again).is_mended
        check(again)
        assert again.verify().problems == []


def test_shortcuts_of_hostile_packs_cost_reads_alone(
    store: ckstore.Store, shortened: list[Patches], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patches outside the pack, across its end, of other bytes and without changes."""
    size = store._repository.packs.size(store["policy"]._stored.row.pack)
    shutil.copytree(LOCAL, "behind")
    for start, is_empty in ((1 << 40, False), (size - 5, False), (100, False), (0, True)):
        made = {}
        for one in shortened:
            sizes = (0,) * len(one.sizes) if is_empty else one.sizes
            made[one.id] = replace(one, at=(start, sum(sizes)), sizes=sizes)
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "shortcut", lambda pack, identity, made=made: made[identity].placed(pack.pack))
            shutil.rmtree(LOCAL)
            shutil.copytree("behind", LOCAL)
            assert followed(store).is_mended == is_empty
            check(store)


@pytest.mark.parametrize("verify", [False, True])
def test_a_pushed_version_has_its_shortcuts(store: ckstore.Store, tmp_path: Path, verify: bool) -> None:
    with ckstore.open(tmp_path / "copy", create=True) as copy:
        for step in range(12):
            store.ingest(write_model(MODEL, step), run="policy", step=step, hot=0, max_restore_cost=1.3)
            pushed = store.push(copy, "policy", verify=verify)
            manifest = store._repository.resolver.manifest(store["policy"]._stored.row.pack).document
            found = followed(copy)
            check(copy)
            if manifest.shortcuts:
                assert found.bytes_read < 3000 * 14 / 8
                assert sum(one.nbytes for one in manifest.shortcuts) < pushed.bytes
                break
        assert manifest.shortcuts


def test_updates_where_a_tenth_changes_read_less_than_a_bit_an_element(store: ckstore.Store) -> None:
    rng = np.random.default_rng(0)
    values = weights(0)
    file = Path("model.safetensors")
    for step in range(5):
        write_safetensors(file, {"layer": ("bfloat16", (values.size // 1000, 1000), values)})
        store.ingest(file, run="policy", step=step, hot=0)
        assert followed(store).bytes_read < (values.size / 8 if step else 2 * values.size)
        assert (LOCAL / file).read_bytes() == file.read_bytes()
        chosen = rng.choice(values.size, values.size // 10, replace=False)
        values[chosen] += rng.choice(np.array([1, 65535], np.uint16), chosen.size)


def test_a_version_that_is_there_is_not_written_again(store: ckstore.Store) -> None:
    publish(store, 0)
    followed(store)
    again = followed(store)
    assert (again.bytes_read, again.bytes_written, again.was_applied) == (0, 0, True)


def test_files_that_come_and_go_and_links(store: ckstore.Store) -> None:
    publish(store, 0, **{"old.txt": b"old"})
    followed(store)
    model = write_model(MODEL, 1, **{"new.txt": b"new"})
    (model / "sub" / "deep").mkdir(parents=True)
    np.save(model / "sub" / "deep" / "extra.npy", np.arange(5))
    (model / "link.txt").symlink_to("new.txt")
    store.ingest(model, run="policy", step=1)
    followed(store)
    check(store)
    model = write_model(model, 2, **{"link.txt": b"no link any more", "sub": b"no directory any more"})
    store.ingest(model, run="policy", step=2)
    followed(store)
    check(store)


def test_directories_keep_other_files_and_become_files_and_links(store: ckstore.Store) -> None:
    model = write_model(MODEL, 0)
    (model / "sub").mkdir()
    (model / "sub" / "one.txt").write_text("one")
    (model / "sub" / "two.txt").write_text("two")
    for name in ("empty/deep", "link"):
        (model / name).mkdir(parents=True)
    store.ingest(model, run="policy", step=0)
    followed(store)
    check(store)
    (model / "sub" / "one.txt").unlink()
    shutil.rmtree(model / "empty")
    (model / "empty").write_text("no directory any more")
    (model / "link").rmdir()
    (model / "link").symlink_to("empty")
    store.ingest(model, run="policy", step=1)
    followed(store)
    check(store)


def test_a_directory_with_files_of_others_is_not_removed(store: ckstore.Store) -> None:
    publish(store, 0)
    followed(store)
    (LOCAL / "new.txt").mkdir()
    (LOCAL / "new.txt" / "mine").write_text("mine")
    publish(store, 1, **{"new.txt": b"new"})
    with pytest.raises(OSError, match="not empty"):
        followed(store)
    assert (LOCAL / "new.txt" / "mine").read_text() == "mine"


def test_versions_in_between_are_left_out(store: ckstore.Store) -> None:
    publish(store, 0)
    followed(store)
    for step in range(1, 6):
        publish(store, step)
    found = followed(store)
    check(store)
    assert found.version.step == 5
    assert found.bytes_read < 5 * 3000 * 14 / 8


def test_patches_are_undone_on_the_way_to_an_older_version_or_a_fork(store: ckstore.Store) -> None:
    for step in range(4):
        publish(store, step)
    store.ingest(write_model(MODEL, 2), run="fork", step=9, parent="policy@1")
    values = weights(1)
    values[::300] ^= 1
    with (MODEL / "model-00001-of-00002.safetensors").open("r+b") as file:
        file.seek(-2 * 7 - values.size, os.SEEK_END)
        file.write(values[: values.size // 2].tobytes())
    store.ingest(MODEL, run="fork", step=10, parent="policy@1")
    followed(store, "policy@3")
    for name in ("policy@1", "fork@10", "policy@3"):
        found = followed(store, name)
        check(store, name)
        assert not found.is_mended
        assert found.bytes_read < 3 * 3000 * 14 / 8


def test_a_version_is_used_though_newer_ones_come_faster(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, 0)
    update, steps = following.update, iter(range(1, 6))

    def updated(*given: Any, **named: Any) -> Any:
        found = update(*given, **named)
        publish(store, next(steps))
        return found

    monkeypatch.setattr(following, "update", updated)
    with closing(ckstore.follow(store.place, "policy", LOCAL, poll=0.001)) as versions:
        assert [item.version.step for item, _ in zip(versions, range(3), strict=False)] == [0, 1, 2]


def test_a_changed_file_is_mended(store: ckstore.Store) -> None:
    publish(store, 0)
    followed(store)
    shard = LOCAL / "model-00001-of-00002.safetensors"
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"changed by hand")
    found = followed(store)
    check(store)
    assert found.bytes_written < 400_000
    (LOCAL / "config.json").unlink()
    followed(store)
    check(store)


def test_all_directories_are_durable(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(MODEL, 0)
    (model / "sub" / "deep").mkdir(parents=True)
    (model / "sub" / "deep" / "one.txt").write_text("one")
    (model / "empty" / "one").mkdir(parents=True)
    store.ingest(model, run="policy", step=0)
    synced = set()
    monkeypatch.setattr(durable, "sync_directory", lambda path: synced.add(Path(path)))
    followed(store)
    assert {LOCAL, LOCAL / "sub", LOCAL / "sub" / "deep", LOCAL / "empty"} <= synced


def test_a_missing_link_is_mended(store: ckstore.Store) -> None:
    model = write_model(MODEL, 0)
    (model / "link").symlink_to("config.json")
    store.ingest(model, run="policy", step=0)
    followed(store)
    (LOCAL / "link").unlink()
    followed(store)
    check(store)


def test_a_changed_file_with_its_former_time_is_mended_by_digest(store: ckstore.Store) -> None:
    publish(store, 0)
    followed(store)
    shard = LOCAL / "model-00001-of-00002.safetensors"
    status = shard.stat()
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"changed by hand")
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    publish(store, 1)
    assert followed(store).is_mended
    check(store)


def test_other_names_of_a_file_keep_its_content(store: ckstore.Store) -> None:
    publish(store, 0)
    followed(store)
    shard, kept = LOCAL / "model-00001-of-00002.safetensors", Path("kept")
    kept.hardlink_to(shard)
    before = kept.read_bytes()
    publish(store, 1)
    assert not followed(store).is_mended
    check(store)
    assert kept.read_bytes() == before


class Killed(BaseException):
    """The death of the process."""


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Kill a follower at the given one of its steps: writes to files, and checkpoints."""
    left = after

    def step(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    write, write_file = written_files.write_at, durable.write_file

    def written(descriptor: int, data: memoryview, position: int) -> None:
        write(descriptor, data[: len(data) // 2], position)
        step()
        write(descriptor, data[len(data) // 2 :], position + len(data) // 2)

    def file_written(*given: Any, **named: Any) -> bool:
        step()
        return write_file(*given, **named)

    monkeypatch.setattr(written_files, "write_at", written)
    monkeypatch.setattr(durable, "write_file", file_written)


@pytest.mark.parametrize("newer", [False, True], ids=["the same version", "a newer version"])
def test_a_killed_update_is_finished_and_never_marked_complete(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    publish(store, 0, **{"old.txt": b"old"})
    followed(store)
    former = shutil.copytree(LOCAL, "former")
    publish(store, 1)
    publish(store, 2)
    for after in range(100):
        shutil.rmtree(LOCAL)
        shutil.copytree(former, LOCAL)
        with monkeypatch.context() as patch:
            dying(patch, after)
            try:
                followed(store, "policy@1")
            except Killed:
                marker = json.loads((LOCAL / MARKER).read_text())
            else:
                break
        assert (marker["state"], marker["step"]) in {("complete", 0), ("updating", 1), ("complete", 1)}
        if marker["state"] == "complete":
            check(store, f"policy@{marker['step']}")
        name = "policy@2" if newer else "policy@1"
        followed(store, name)
        check(store, name)
    assert 5 < after < 50


def test_the_former_version_may_be_forgotten(store: ckstore.Store) -> None:
    publish(store, 0)
    followed(store)
    publish(store, 1)
    publish(store, 2)
    store.forget(["policy@0", "policy@1"])
    store.gc(grace=0)
    found = followed(store)
    check(store)
    # Its objects may still be bases: then files are compared by digests, and changes read.
    assert found.bytes_read < 700_000


def test_another_store_gives_a_full_update(store: ckstore.Store, tmp_path: Path) -> None:
    publish(store, 0)
    followed(store)
    store.close()
    shutil.rmtree(store.path)
    with ckstore.open(tmp_path / "store", create=True) as again:
        publish(again, 3)
        followed(again)
        check(again)


def test_a_run_that_goes_back_is_followed(store: ckstore.Store) -> None:
    for step in (0, 1, 2):
        publish(store, step)
    followed(store)
    store.ingest(write_model(MODEL, 7), run="policy", step=1, parent="policy@0")
    assert followed(store).version.step == 1
    check(store)


def test_coarse_versions_are_written_as_checkouts(store: ckstore.Store) -> None:
    for step in (0, 1):
        model = write_model(MODEL, step)
        store.ingest(model, run="policy", step=step, policy=ckstore.Policy(fidelity="coarse"))
        followed(store)
        store["policy"].checkout(CHECKOUT, force=True)
        assert tree(LOCAL) == tree(CHECKOUT)
    assert followed(store).bytes_written == 0


def test_single_files_are_followed(store: ckstore.Store) -> None:
    for step in (1, 2):
        store.ingest({"w": np.full(5, step, np.float32)}, run="policy", step=step)
        followed(store)
        store["policy"].checkout(Path("file.pt"), force=True)
        assert (LOCAL / "state_dict.pt").read_bytes() == (Path("file.pt")).read_bytes()


def test_a_directory_with_other_files_is_refused(store: ckstore.Store) -> None:
    publish(store, 0)
    LOCAL.mkdir()
    (LOCAL / "mine.txt").write_text("mine")
    with pytest.raises(ckstore.ConflictError, match="no follower wrote"):
        followed(store)
    assert tree(LOCAL) == {"mine.txt": b"mine"}


def test_a_version_of_a_followed_directory_is_refused(store: ckstore.Store) -> None:
    publish(store, 0)
    followed(store)
    store.ingest(LOCAL, run="policy", step=1)
    with pytest.raises(ckstore.ConflictError, match="a followed directory was ingested"):
        followed(store)
    (model := write_model(MODEL, 2)).joinpath(MARKER).mkdir()
    store.ingest(model, run="policy", step=2)
    with pytest.raises(ckstore.ConflictError, match="a followed directory was ingested"):
        followed(store)
    check(store, "policy@0")


def test_a_version_counts_as_applied_when_the_next_is_asked_for(store: ckstore.Store) -> None:
    publish(store, 0)
    versions = ckstore.follow(store.place, "policy", LOCAL, once=True)
    assert next(versions).name == "policy@0"
    assert json.loads((LOCAL / MARKER).read_text())["applied"] is None
    versions.close()  # type: ignore[attr-defined]
    assert not followed(store).was_applied
    assert followed(store).was_applied


def test_some_files_are_followed(store: ckstore.Store) -> None:
    def kept(*include: str) -> set[str]:
        for _ in ckstore.follow(store.place, "policy", LOCAL, once=True, include=include):
            store["policy"].checkout(CHECKOUT, force=True)
        files = tree(LOCAL)
        assert files.items() <= tree(CHECKOUT).items()
        return set(files)

    for step in (0, 1):
        model = write_model(MODEL, step, **{"other.txt": b"x" * step})
        (model / "link").symlink_to("config.json")
        store.ingest(model, run="policy", step=step)
        assert kept("*-00001-*") == {"model-00001-of-00002.safetensors"}
    assert kept("*-00001-*", "link") == {"model-00001-of-00002.safetensors", "link", "config.json"}
    assert kept() == set(tree(MODEL))
    assert kept("other.txt") == {"other.txt"}
    with pytest.raises(ckstore.NotFoundError, match="is chosen"):
        kept("none")
    assert tree(LOCAL).keys() == {"other.txt"}


def test_some_steps_are_followed(store: ckstore.Store) -> None:
    versions = ckstore.follow(store.place, "policy", LOCAL, every=3, poll=0.001)
    publish(store, 0)
    for step in range(8):
        publish(store, step)
        if step % 3 == 0:
            assert next(versions).name == f"policy@{step}"
    (last,) = ckstore.follow(store.place, "policy", LOCAL, once=True, every=3)
    assert (last.name, last.bytes_written) == ("policy@6", 0)
    versions.close()  # type: ignore[attr-defined]
    # Multiples may be missing: the one before them stays the newest.
    (last,) = ckstore.follow(store.place, "policy", LOCAL, once=True, every=4)
    assert last.name == "policy@4"
    for step in (9, 10, 14):
        publish(store, step)
    (last,) = ckstore.follow(store.place, "policy", LOCAL, once=True, every=4)
    assert last.name == "policy@4"
    publish(store, 3, run="other")
    store.ingest(MODEL, run="unnumbered", hot=0)
    for run in ("other", "unnumbered"):
        with pytest.raises(ckstore.NotFoundError, match="multiple of 2"):
            next(ckstore.follow(store.place, run, LOCAL, once=True, every=2))
    with pytest.raises(ckstore.UsageError, match="1 or more"):
        next(ckstore.follow(store.place, "policy", LOCAL, every=0))


def test_a_missing_name_is_waited_for_or_refused(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ckstore.NotFoundError):
        followed(store)
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", lambda _: publish(store, 0))
    versions = ckstore.follow(store.place, "policy", LOCAL, stop=stop)
    assert next(versions).name == "policy@0"


def test_followers_of_one_directory_share_an_update(store: ckstore.Store) -> None:
    publish(store, 0)
    found: list[ckstore.Followed] = []
    threads = [threading.Thread(target=lambda: found.append(followed(store))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(item.bytes_written > 0 for item in found) == [False, False, False, True]
    check(store)


def test_no_update_begins_while_a_version_is_used(store: ckstore.Store) -> None:
    publish(store, 0)
    versions = ckstore.follow(store.place, "policy", LOCAL)
    next(versions)
    publish(store, 1)
    stop = threading.Event()
    other = threading.Thread(target=lambda: list(ckstore.follow(store.place, "policy", LOCAL, stop=stop)))
    other.start()
    tried = [flocked(LOCAL / LOCK) for _ in range(3)]
    assert tried == [False] * 3
    check(store, "policy@0")
    assert next(versions).name == "policy@1"
    stop.set()
    versions.close()  # type: ignore[attr-defined]
    other.join()
    check(store)


def flocked(path: Path) -> bool:
    """Return whether the lock is free to write."""
    import fcntl

    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_link_changes_between_two_directories(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    former, before = LOCAL, dict[str, bytes | str]()
    for step in range(4):
        publish(store, step)
        (item,) = ckstore.follow(store.place, "policy", LOCAL, once=True, swap=True)
        check(store)
        seen.append((os.readlink(LOCAL), item.bytes_read < 3 * 3000 * 14 / 8))
        if step:
            # Readers that have the former directory open keep its files.
            assert tree(former) == before
        former, before = LOCAL.resolve(), tree(LOCAL)
    assert [name for name, _ in seen] == ["local.a", "local.b", "local.a", "local.b"]
    assert [is_few for _, is_few in seen] == [False, False, True, True]
    (again,) = ckstore.follow(store.place, "policy", LOCAL, once=True, swap=True)
    assert (again.bytes_written, again.was_applied) == (0, True)
    publish(store, 4)
    for after in range(0, 40, 4):
        with monkeypatch.context() as patch:
            dying(patch, after)
            try:
                list(ckstore.follow(store.place, "policy", LOCAL, once=True, swap=True))
            except Killed:
                # The link leads to a complete version at any time.
                check(store, f"policy@{json.loads((LOCAL / MARKER).read_text())['step']}")
            else:
                break
    list(ckstore.follow(store.place, "policy", LOCAL, once=True, swap=True))
    check(store, "policy@4")
    with pytest.raises(ckstore.ConflictError, match="not a link"):
        next(ckstore.follow(store.place, "policy", MODEL, swap=True))


@pytest.mark.parametrize("links", [(("x", "../../outside"),), (("x", "/etc"),), (("config.json", "x"), ("x", ".."))])
def test_hostile_links_are_never_complete(store: ckstore.Store, links: tuple[tuple[str, str], ...]) -> None:
    publish(store, 0)
    followed(store)
    publish(store, 1)
    version = store["policy"]._stored
    vars(version)["document"] = replace(version.document, links=links)
    with pytest.raises((ckstore.CkstoreError, OSError)):
        updating.update(version, LOCAL, read_marker(LOCAL))
    assert json.loads((LOCAL / MARKER).read_text())["state"] == "updating"
    assert not (LOCAL / "x").is_symlink()
    followed(store)
    check(store)


@pytest.mark.parametrize("mode", [0, 0o4777, 0o440])
def test_the_owner_may_update_files_of_any_mode(store: ckstore.Store, mode: int) -> None:
    publish(store, 0)
    version = store["policy"]._stored
    files = tuple(replace(entry, mode=mode) for entry in version.document.files)
    vars(version)["document"] = replace(version.document, files=files)
    LOCAL.mkdir()
    updating.update(version, LOCAL, None)
    assert {(LOCAL / path).stat().st_mode & 0o7777 for path in tree(LOCAL)} == {mode & 0o777 | 0o600}


def test_files_behind_a_link_are_not_written(store: ckstore.Store, tmp_path: Path) -> None:
    publish(store, 0)
    followed(store)
    outside = tmp_path / "outside"
    shutil.copy(LOCAL / "config.json", outside)
    (LOCAL / "config.json").unlink()
    (LOCAL / "config.json").symlink_to(outside)
    store.ingest(write_model(MODEL, 1, **{"config.json": b"{}"}), run="policy", step=1)
    followed(store)
    check(store)
    assert json.loads(outside.read_text()) == {"layers": 2}
