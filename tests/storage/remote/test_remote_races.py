"""Changes of a version by other mirrors between a read of it and the commit of the result."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.errors import ConflictError, DiskFullError, FormatVersionError, IntegrityError, UnreachableError
from ckstore.recovery.recover import recover
from ckstore.storage.durable import full_error
from ckstore.storage.pack_reader import MissingPackError, OpenFile
from ckstore.storage.remote import block_cache as cache_module
from ckstore.storage.remote import mirror as mirror_module
from ckstore.storage.remote import remote_catalog as catalog_module
from ckstore.storage.remote import remote_log as log_module
from ckstore.storage.remote import remote_packs as packs_module
from ckstore.storage.remote import retries as retries_module
from ckstore.writing.drop import drop
from tests.catalog_edits import sign, without_triggers
from tests.checkpoints import draw
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer

pytestmark = pytest.mark.local

URL = "s3://models/team-a"


def state(step: int) -> dict[str, Any]:
    weight = draw(300, 256)
    for number in range(1, step + 1):
        weight = weight + draw(300, 256, seed=number, scale=1e-3)
    return {"weight": weight, "frozen": draw(64, 64, seed=9), "moment": draw(300, 256, seed=500 + step)}


def same(found: dict[str, Any], step: int, names: Sequence[str] = ("weight", "frozen", "moment")) -> bool:
    return all(bool((found[name] == tensor).all()) for name, tensor in state(step).items() if name in names)


def once_published(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, task: Callable[[], None]) -> None:
    """Do something when the packs of the store's next change are put, and before it is committed."""
    publish = store._repository.packs.publish
    tasks = iter([task])

    def published(names: Sequence[str]) -> None:
        publish(names)
        next(tasks, lambda: None)()

    monkeypatch.setattr(store._repository.packs, "publish", published)


def test_another_mirror_frees_the_base_of_an_encoding(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        store.ingest(state(1), run="r", step=1, hot=1)
        with ckstore.open(URL, cache=directory / "b") as other:

            def free() -> None:
                other.forget(["r@0"])
                other.gc(grace=0)

            once_published(store, monkeypatch, free)
            store.encode()
            assert not store["r@1"].hot
            store.gc(grace=0)
        assert store.verify().problems == []
    with ckstore.open(URL, cache=directory / "c") as store:
        assert same(store["r@1"].state_dict(), 1)
        assert store.verify().problems == []


def test_a_concurrently_thinned_version_does_not_become_exact_again(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(2):
            store.ingest(state(step), run="r", step=step, hot=0)
        with ckstore.open(URL, cache=directory / "b") as other:

            def thin() -> None:
                other.thin(["r@0"])
                other.gc()

            once_published(store, monkeypatch, thin)
            with pytest.raises(ConflictError, match="Version 1 was changed by another process; try again"):
                drop(store._repository, [store["r@0"]._stored.row], ["moment"])
            assert store["r@0"].fidelity == "coarse"
            assert store["r@0"].dropped == ()
            drop(store._repository, [store["r@0"]._stored.row], ["moment"])
    with ckstore.open(URL, cache=directory / "c") as store:
        store.gc(grace=0)
        assert store.verify().problems == []
        assert set(store["r@0"].state_dict()) == {"weight", "frozen"}
        assert same(store["r@1"].state_dict(), 1)


def test_a_thinning_writes_coarse_objects_again_that_another_mirror_frees(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects are those of a thinning that was undone."""
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        store.thin("r@0")
        store.undo()
        with ckstore.open(URL, cache=directory / "b") as other:
            once_published(store, monkeypatch, lambda: other.gc(grace=0))
            assert [thinned.version.step for thinned in store.thin("r@0").versions] == [0]
    with ckstore.open(URL, cache=directory / "c") as store:
        assert store["r@0"].fidelity == "coarse"
        assert store.verify().problems == []


def test_a_missing_pack_is_noticed_inside_of_a_transaction_too(server: SimulatedServer, directory: Path) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
    with ckstore.open(URL, cache=directory / "b") as store:
        name = store["r@0"]._stored.row.pack
        del server.objects[f"packs/{name}"]
        raised: list[BaseException] = []

        def read() -> None:
            try:
                with store._catalog.transaction():
                    store._repository.packs.pread(name, 0, 1)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(30)
        assert [type(error) for error in raised] == [MissingPackError]


def test_a_commit_without_its_snapshot_is_a_commit(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "EVERY", 2)

    def fails(*arguments: object) -> None:
        raise UnreachableError("The network is gone.")

    monkeypatch.setattr(catalog_module, "put_snapshot", fails)
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(2):
            assert store.ingest(state(step), run="r", step=step, hot=0).is_new
        assert len(store._catalog.versions()) == 2


def test_a_mirror_of_an_empty_store_does_not_outlive_it(server: SimulatedServer, directory: Path) -> None:
    ckstore.init(URL, cache=directory / "a").close()
    server.objects.clear()
    with ckstore.init(URL, cache=directory / "b") as store:
        row = store.ingest(state(0), run="r", step=0, hot=0).version
    with ckstore.open(URL, cache=directory / "a") as store:
        assert store._catalog.versions() == [row]


def test_recovery_follows_the_log_and_not_a_false_snapshot(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKSTORE_CACHE", str(directory / "cache"))
    with ckstore.init(URL, cache=directory / "a", options={"region": "us-east-1"}) as store:
        for step in range(2):
            store.ingest(state(step), run="r", step=step, hot=0)
        with ckstore.open(URL, cache=directory / "liar") as liar:
            with without_triggers(liar.path / "catalog.sqlite") as database:
                database.execute("UPDATE versions SET fidelity = 'coarse'")
                database.execute("UPDATE meta SET value = ? WHERE key = 'mirror:head'", [f"2 {'0' * 40}"])
                sign(database)
            mirror_module.put_snapshot(liar._catalog._mirror, 2)
        store.tag("r@0", "t")
        rows = store._catalog.versions()
    with pytest.raises(IntegrityError, match=r"does not follow the known record 2; run `ckstore recover`"):
        ckstore.open(URL, options={"region": "us-east-1"})
    assert recover(URL).versions == 2
    with ckstore.open(URL) as store:
        assert store._catalog.versions() == rows
        assert store._repository.address.options == (("region", "us-east-1"),)


def test_a_snapshot_is_not_put_over_another_store(server: SimulatedServer, directory: Path) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        server.objects.clear()
        ckstore.init(URL, cache=directory / "b").close()
        there = dict(server.objects)
        mirror_module.put_snapshot(store._catalog._mirror, 1)
    assert server.objects == there


def test_a_later_format_of_the_root_is_refused_and_stays(server: SimulatedServer, directory: Path) -> None:
    """An unknown field stays, too: a later version may have put it, and reads the store."""
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        said = json.loads(server.objects[mirror_module.ROOT][0])
        server.objects[mirror_module.ROOT] = json.dumps({**said, "later": [1]}).encode(), server.now()
        mirror_module.put_snapshot(store._catalog._mirror, 1)
        found = json.loads(server.objects[mirror_module.ROOT][0])
        assert found == {**said, "later": [1], "snapshot": found["snapshot"]}
        later = b'{"format":2,"stores":[]}'
        server.objects[mirror_module.ROOT] = later, server.now()
        there = dict(server.objects)
        with pytest.raises(FormatVersionError):
            mirror_module.put_snapshot(store._catalog._mirror, 1)
    with pytest.raises(FormatVersionError, match=r"s3://models/team-a has format 2.*; install a later ckstore"):
        ckstore.open(URL, cache=directory / "b")
    with pytest.raises(FormatVersionError):
        ckstore.recover(URL)
    assert server.objects == there


def test_readers_follow_a_later_format_of_writers(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record has it before root and snapshot do: a writer that is open is refused before its next record."""
    said = "has format 2, this ckstore only reads it and writes up to 1; install a later ckstore"
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, "r", cache=directory / "b") as reader:
        store.ingest(state(0), run="r", step=0, hot=0)
        packed = log_module._packed
        with ckstore.open(URL, cache=directory / "c") as later, monkeypatch.context() as patched:
            patched.setattr(log_module, "_packed", lambda data: packed(data[:-1] + b',"writers":2}'))
            later.tag("r@0", "later")
        there = dict(server.objects)
        with pytest.raises(FormatVersionError, match=said):
            store.tag("r@0", "mine")
        with pytest.raises(FormatVersionError, match=said):
            store.ingest(state(1), run="r", step=1)
        reader._catalog.refresh()
        assert [*reader.tags()] == ["later"]
        assert same(reader["later"].state_dict(), 0)
        assert server.objects.keys() == there.keys()
        mirror_module.put_snapshot(reader._catalog._mirror, 1)
        root = json.loads(server.objects[mirror_module.ROOT][0])
        for content in (root, {**root, "writers": 2}):
            server.objects[mirror_module.ROOT] = json.dumps(content).encode(), server.now()
            there = dict(server.objects)
            for opened in (lambda: ckstore.open(URL, cache=directory / "d"), lambda: recover(URL)):
                with pytest.raises(FormatVersionError, match=said):
                    opened()
            with ckstore.open(URL, "r", cache=directory / "e") as fresh:
                assert same(fresh["later"].state_dict(), 0)
                assert fresh.verify().problems == []
            assert server.objects == there
        with pytest.raises(FormatVersionError, match=said):
            mirror_module.put_snapshot(reader._catalog._mirror, 1)
        assert server.objects == there


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_fetches_for_itself(server: SimulatedServer, directory: Path) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
    with ckstore.open(URL, cache=directory / "b") as store:
        version = store["r@0"]
        assert version["weight"][0, 0] == state(0)["weight"][0, 0]
        for block in store.path.glob("blocks/*/*"):
            block.unlink()
        name, size = version._stored.row.pack, store._repository.packs.size(version._stored.row.pack)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if len(store._repository.packs.pread(name, 0, size)) == size else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_the_writer_of_a_pack_verifies_the_bytes_in_the_bucket(server: SimulatedServer, directory: Path) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        assert store.verify().problems == []
        name = f"packs/{store['r@0']._stored.row.pack}"
        data, modified = server.objects[name]
        server.objects[name] = data[:100] + bytes([data[100] ^ 1]) + data[101:], modified
        assert any("does not match its name" in problem for problem in store.verify().problems)


@pytest.mark.parametrize("way", ["out", "in", "across"])
def test_versions_go_into_a_remote_store_and_out_of_it(server: SimulatedServer, directory: Path, way: str) -> None:
    servers = {URL: SimulatedServer(), f"{URL}-b": SimulatedServer()}
    server.client = lambda url: SimulatedBucket(servers[url])
    ckstore.init(URL, cache=directory / "a").close()
    ckstore.init(f"{URL}-b", cache=directory / "a").close()
    ckstore.init(directory / "local").close()
    places = {"out": (URL, "local"), "in": ("local", URL), "across": (URL, f"{URL}-b")}

    def opened(place: str) -> ckstore.Store:
        return ckstore.open(directory / place) if place == "local" else ckstore.open(place, cache=directory / "a")

    before, after = places[way]
    with opened(before) as source, opened(after) as target:
        for step in range(4):
            source.ingest(state(step), run="r", step=step, hot=2)
        source.tag("r@1", "best")
        assert len(source.push(target, ["r@0", "r@1"]).versions) == 2
        report = target.pull(source)
        assert (len(report.versions), len(report.there), report.failed) == (2, 2, [])
        assert source.push(target).versions == []
        assert [row.uid for row in target._catalog.versions()] == [row.uid for row in source._catalog.versions()]
        assert target._catalog.tags() == {"best": target["r@1"].number}
        with pytest.raises(ConflictError, match="r@0 holds other content"):
            target.ingest(state(9), run="r", step=0)
    with opened(after) as store:
        for step in range(4):
            assert same(store[f"r@{step}"].state_dict(), step)
        assert store.verify().problems == []
        store.untag("best")
        store.forget(["r@1", "r@2"])
    # Another mirror, which did not exist then, learns it from the log.
    with opened(before) as source:
        kept = opened(after) if after == "local" else ckstore.open(places[way][1], cache=directory / "b")
        with kept as target:
            assert [row.step for row in source.push(target).forgotten] == [1, 2]
            assert [version.step for version in target.versions()] == [0, 3]
            assert [item.version.step for item in source.push(target, restore=True).versions] == [1, 2]
            assert target.verify().problems == []


def test_packs_that_were_written_here_long_ago_take_no_place(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs_module, "_LIST", 0.0)
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        written = list((store.path / "packs").iterdir())
        killed = [store.path / "packs" / name for name in (f"{'0' * 40}.zip", f"{'1' * 40}.zip")]
        for path in killed:
            path.touch()
        for path in [*written, killed[0]]:
            os.utime(path, (0, 0))
        store.ingest(state(1), run="r", step=1, hot=0)
        assert written
        assert not any(path.exists() for path in [*written, killed[0]])
        assert killed[1].exists()  # Its writer may be about to commit it.
        for step in range(2):
            assert same(store[f"r@{step}"].state_dict(), step)
        assert store.verify().problems == []


def test_files_of_packs_are_listed_after_an_hour_or_many_bytes(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        monkeypatch.setattr(packs_module.secrets, "randbelow", lambda limit: limit - 1)
        killed = store.path / "packs" / f"{'0' * 40}.zip"
        killed.touch()
        os.utime(killed, (0, 0))
        store.ingest(state(0), run="r", step=0, hot=0)
        assert killed.exists()
        os.utime(store.path / "listed", (time.time() - 3600,) * 2)
        store.ingest(state(1), run="r", step=1, hot=0)
        assert not killed.exists()
        killed.touch()
        os.utime(killed, (0, 0))
        store.ingest(state(2), run="r", step=2, hot=0)
        assert killed.exists()
        monkeypatch.setattr(cache_module, "LIMIT", 1 << 16)
        store.ingest(state(3), run="r", step=3, hot=0)
        assert not killed.exists()


def raw_packs(store: ckstore.Store) -> list[str]:
    return [pack.name for pack in store._catalog.packs() if pack.kind == "raw"]


def pack_files(store: ckstore.Store) -> set[str]:
    return set(os.listdir(store.path / "packs"))


def test_files_of_packs_take_no_more_than_the_limit(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "LIMIT", 0)
    with ckstore.init(URL, cache=directory / "a") as store:
        under_way = f"{'0' * 40}.zip"
        (store.path / "packs" / under_way).touch()  # Of a process that is about to commit it.
        os.utime(store.path / "packs" / under_way, (time.time() - 3600,) * 2)
        known: set[str] = set()
        for step in range(3):
            store.ingest(state(step), run="r", step=step, hot=0)
            assert same(store[f"r@{step}"].state_dict(), step)  # Its files are open now.
            committed = {pack.name for pack in store._catalog.packs()}
            assert pack_files(store) == {under_way, *committed - known}
            known = committed
        opened = [store._repository.packs._open.get(name) for name in store._repository.packs._open]
        assert all(os.fstat(file.descriptor).st_nlink for file in opened if isinstance(file, OpenFile))
        for step in range(3):
            assert same(store[f"r@{step}"].state_dict(), step)
    with ckstore.open(URL, cache=directory / "a", mode="r") as store:
        assert len(pack_files(store)) == 2
        assert under_way in pack_files(store)
        for step in range(3):
            assert same(store[f"r@{step}"].state_dict(), step)
        assert store.verify().problems == []


def test_a_file_of_a_pack_that_is_not_committed_stays(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "LIMIT", 0)
    seen: list[set[str]] = []

    def look() -> None:
        for path in (store.path / "packs").iterdir():
            if path.name not in before:
                os.utime(path, (time.time() - 3600,) * 2)
        with ckstore.open(URL, cache=directory / "a") as other:
            seen.append(pack_files(other) - before)

    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        before = pack_files(store)
        once_published(store, monkeypatch, look)
        store.ingest(state(1), run="r", step=1, hot=0)
        [found] = seen
        assert found == {pack.name for pack in store._catalog.packs()} - before
        assert found


def test_mapped_packs_beyond_the_limit_go_and_can_still_be_read(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "LIMIT", 0)
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(2):
            store.ingest(state(step), run="r", step=step, hot=2)
        with ckstore.open(URL, cache=directory / "b") as reader:
            first, last = raw_packs(reader)
            mapped = [reader._repository.packs.mapped(name) for name in (first, last)]
            assert pack_files(reader) == {last}
            assert [bytes(view) for view in mapped] == [server.objects[f"packs/{name}"][0] for name in (first, last)]
            asked = server.requests["read_range"]
            assert bytes(reader._repository.packs.mapped(last)) == bytes(mapped[1])
            assert server.requests["read_range"] == asked
            os.utime(reader.path / "packs" / last, (time.time() - 60,) * 2)
            monkeypatch.setattr(cache_module, "LIMIT", 1 << 30)
            reader._repository.packs.mapped(first)
            assert pack_files(reader) == {first, last}
        monkeypatch.setattr(cache_module, "LIMIT", 0)
        monkeypatch.setattr(packs_module, "_LIST", 0.0)
        store.encode(["r@0", "r@1"])
    with ckstore.open(URL, cache=directory / "b") as reader:
        assert not raw_packs(reader)
        assert pack_files(reader) == {first}


def test_a_full_disk_below_a_mirror(server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=1)
    with ckstore.open(URL, cache=directory / "b") as store:
        [name] = raw_packs(store)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match=r"free some, or set \$CKSTORE_CACHE to a directory on another disk"):
            store._repository.packs.mapped(name)
        assert not pack_files(store)
    assert "$CKSTORE_CACHE" in str(full_error(store.path, 1))
    assert "$CKSTORE_CACHE" not in str(full_error(directory, 1))


def test_a_pack_that_is_mapped_is_whole_before_it_has_its_name(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=1)
    synced: list[int] = []
    with ckstore.open(URL, cache=directory / "b") as store:
        name = raw_packs(store)[0]
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
        mapped = store._repository.packs.mapped(name)
        assert synced == [len(mapped)]


def test_a_writer_waits_for_a_slow_put_of_another_process(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries_module, "PATIENCE", 5.0)
    monkeypatch.setattr(catalog_module, "BUSY_TIMEOUT", 0.0)
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "a") as other:
        store.ingest(state(0), run="r", step=0, hot=0)
        begun, append = threading.Event(), store._catalog._log.append

        def slow(*arguments: Any, **named: Any) -> Any:
            begun.set()
            time.sleep(0.3)
            return append(*arguments, **named)

        monkeypatch.setattr(store._catalog._log, "append", slow)
        thread = threading.Thread(target=lambda: store.tag("r@0", "slow"))
        thread.start()
        assert begun.wait(30)
        other.tag("r@0", "fast")
        thread.join()
        assert store._catalog.tags() == {"slow": 1, "fast": 1}
