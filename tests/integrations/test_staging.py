"""Versions that are on the disk before the bucket has them, on one rank."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckstore
from ckstore.errors import CkstoreError, ConflictError, IntegrityError
from ckstore.intake import unsent
from ckstore.intake.unsent import Unsent
from ckstore.integrations import dcp as integration
from ckstore.integrations.dcp import Staging, StoreReader, StoreWriter
from ckstore.storage import durable
from ckstore.storage.remote.remote_catalog import RemoteCatalog
from ckstore.storage.remote.remote_packs import RemotePacks
from tests.object_store import object_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def server() -> Iterator[object]:
    with object_store() as found:
        yield found


@pytest.fixture
def store(
    server: object, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ckstore.Store]:
    """A store in a bucket; packs and versions are sent only by `sent`."""
    for name, value in server.anywhere.items():  # type: ignore[attr-defined]
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Unsent, "start", lambda self: None)
    with ckstore.init(f"{server.url}/{abs(hash(request.node.name))}") as found:  # type: ignore[attr-defined]
        yield found


def state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"w": torch.randn(200, 300)}


def save(store: ckstore.Store, staging: Staging, run: str, step: int, seed: int, **options: object) -> StoreWriter:
    writer = StoreWriter(store, run, step, staging=staging, **options)
    dcp.save(state(seed), storage_writer=writer)
    return writer


def sent(staging: Staging) -> None:
    staging._unsent.send()
    staging._unsent.commit()


def shown(store: ckstore.Store) -> dict[str, str | None]:
    """Return the versions by name, each with that of its parent."""
    rows = {row.number: row for row in store._catalog.versions()}
    return {row.name: None if row.parent is None else rows[row.parent].name for row in rows.values()}


def test_a_run_may_fork_from_another(store: ckstore.Store) -> None:
    store.ingest(state(1), run="base", step=1)
    with Staging(store) as staging:
        save(store, staging, "tuned", 1, 2, parent="base@1")
        save(store, staging, "tuned", 2, 3)
        sent(staging)
        assert shown(store) == {"base@1": None, "tuned@1": "base@1", "tuned@2": "tuned@1"}


def test_a_version_outlives_its_parent(store: ckstore.Store) -> None:
    """If that was forgotten, or left out since its step was taken."""
    store.ingest(state(1), run="a", step=1)
    store.ingest(state(1), run="b", step=1)
    with Staging(store) as staging:
        save(store, staging, "a", 2, 2)
        left_out = save(store, staging, "b", 2, 2).pushed
        store.forget("a@1")
        store.ingest(state(4), run="b", step=2)
        last = save(store, staging, "b", 3, 2).pushed  # With the content of the one that is left out.
        assert left_out is not None
        assert last is not None
        sent(staging)
        assert isinstance(left_out.exception(0), ConflictError)
        assert last.result(0).step == 3
        assert shown(store) == {"a@2": None, "b@1": None, "b@2": "b@1", "b@3": None}
        assert store.verify().problems == []


def test_a_clock_that_is_behind_loses_nothing(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.ingest(state(1), run="a", step=1)
    monkeypatch.setattr(durable, "timestamp", lambda: "2020-01-01T00:00:00.000000Z")
    monkeypatch.setattr(integration, "timestamp", lambda: "2020-01-01T00:00:00.000000Z")
    with Staging(store) as staging:
        save(store, staging, "a", 2, 2)
        save(store, staging, "a", 3, 3)
        sent(staging)
        assert shown(store) == {"a@1": None, "a@2": "a@1", "a@3": "a@2"}


def test_a_pack_that_was_freed_before_the_commit_keeps_no_one_waiting(
    store: ckstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The versions after it are committed."""
    with Staging(store) as staging:
        freed = save(store, staging, "a", 1, 1).pushed
        staging._unsent.send()
        store.gc(grace=0)
        after = save(store, staging, "a", 2, 2).pushed
        assert freed is not None
        assert after is not None
        sent(staging)
        assert "`gc` has freed" in str(freed.exception(0))
        assert after.result(0).step == 2
        assert shown(store) == {"a@2": None}
        assert torch.equal(store["a@2"].state_dict()["w"], state(2)["w"])


def test_damage_gives_up_no_version(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, which may be whole once the mirror is mended."""
    staging = Staging(store)
    kept = save(store, staging, "a", 1, 1).pushed
    assert kept is not None
    staging._unsent.send()
    with monkeypatch.context() as patched:
        patched.setattr(RemoteCatalog, "latest", damaged)
        with pytest.raises(IntegrityError, match=r"unsent/.*json"):
            staging._unsent.commit()
    staging._unsent.close()
    [file] = (store._repository.path / "unsent").glob("*.json")
    said = file.read_bytes()
    for wrong in (b"{", b'{"packs":[]}', b'{"packs":[["../a",1]]}', b'{"packs":[["a",0]]}'):
        file.write_bytes(wrong)
        with pytest.raises(CkstoreError, match=r"unsent/.*json"):
            Staging(store)
    file.write_bytes(said)
    Staging(store).close()
    assert shown(store) == {"a@1": None}


def damaged(*given: object) -> None:
    raise IntegrityError("The catalog is damaged; run `ckstore recover` to rebuild it.")


def test_the_thread_goes_on_after_any_error(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after a caller has cancelled its future."""
    monkeypatch.setattr(unsent, "_AGAIN", 0.01)
    with Staging(store) as staging:
        first, last = (save(store, staging, "a", step, step).pushed for step in (1, 2))
        assert first is not None
        assert last is not None
        first.cancel()
        send, errors = Unsent.send, [RuntimeError("can't start new thread")]

        def failing(self: Unsent, *, waits: bool = True) -> None:
            if errors:
                raise errors.pop()
            send(self, waits=waits)

        monkeypatch.setattr(Unsent, "send", failing)
        staging._unsent._thread.start()
        assert last.result(60).step == 2
    assert [*shown(store)] == ["a@1", "a@2"]


def test_a_full_disk_sends_no_version_that_was_not_saved(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = store._repository.path / "unsent"
    with Staging(store) as staging:
        with monkeypatch.context() as patched:
            patched.setattr(durable, "write_file", full)
            with pytest.raises(CheckpointException, match="No space"):
                save(store, staging, "a", 1, 1)
        assert {"".join(path.suffixes) for path in directory.iterdir()} == {".lock", ".raw.zip"}
        save(store, staging, "a", 1, 1)
    assert shown(store) == {"a@1": None}


def full(*given: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_packs_are_sent_once(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a rank's pack is in the bucket before the coordinator has the others."""
    puts: list[str] = []
    publish, keep = RemotePacks.publish, Unsent.keep

    def counted(self: RemotePacks, names: Sequence[str]) -> None:
        puts.extend(names)
        publish(self, names)

    def keep_and_send(self: Unsent, packs: Sequence[str]) -> None:
        keep(self, packs)
        self.send()

    monkeypatch.setattr(RemotePacks, "publish", counted)
    monkeypatch.setattr(Unsent, "keep", keep_and_send)
    with Staging(store) as staging:
        save(store, staging, "a", 1, 1)
    assert len(puts) == len({*puts}) == 2


def test_a_lock_that_another_process_takes_is_made_again(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts at the same moment, and finishes the versions of dead processes."""
    touch, calls = durable.touch, []

    def slow(path: Path) -> None:
        touch(path)
        calls.append(path)
        if len(calls) == 1:
            path.unlink()

    monkeypatch.setattr(durable, "touch", slow)
    staging = Staging(store)
    save(store, staging, "a", 1, 1)
    staging._unsent.close()
    Staging(store).close()
    assert shown(store) == {"a@1": None}


def test_a_save_that_replaces_is_refused(store: ckstore.Store) -> None:
    with Staging(store) as staging, pytest.raises(CheckpointException, match="nor replaces"):
        save(store, staging, "a", 1, 1, replace=True)


def test_a_save_finds_a_parent_by_likeness_without_the_packs_of_other_machines(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of objects there are not compared."""
    torch.manual_seed(0)
    before = {name: torch.randn(300, 300) for name in "abc"}
    store.ingest(before, run="base", step=1)
    tuned = {name: value + 0.005 * torch.randn(300, 300) for name, value in before.items()}
    keep = Unsent.keep

    def keep_elsewhere(self: Unsent, packs: Sequence[str]) -> None:
        keep(self, packs)
        for name in packs:
            if ".raw" in name:
                (store._repository.path / "packs" / name).unlink()

    monkeypatch.setattr(Unsent, "keep", keep_elsewhere)
    with Staging(store) as staging:
        writer = StoreWriter(store, "tuned", 1, staging=staging)
        dcp.save(dict(tuned), storage_writer=writer)
        sent(staging)
        assert shown(store) == {"base@1": None, "tuned@1": None}
    assert all(torch.equal(store["tuned@1"].state_dict()[name], value) for name, value in tuned.items())


def test_a_training_that_goes_back_saves_its_steps_again(store: ckstore.Store) -> None:
    for step in (1, 2, 3):
        store.ingest(state(step), run="a", step=step)
    with Staging(store) as staging:
        dcp.load(state(0), storage_reader=StoreReader(store, "a@1"))
        for step in (2, 3, 4):
            save(store, staging, "a", step, 10 * step)
        sent(staging)
    rows = {row.number: row for row in store._catalog.versions("a")}
    found = [(row.step, row.superseded, row.parent and rows[row.parent].step) for row in rows.values()]
    assert found == [(1, False, None), (2, True, 1), (3, True, 2), (2, False, 1), (3, False, 2), (4, False, 3)]
    assert store.verify().problems == []


def test_a_kill_after_the_commit_commits_nothing_again(store: ckstore.Store) -> None:
    staging = Staging(store)
    save(store, staging, "a", 1, 1, metrics={"loss": 0.5})
    [file] = (store._repository.path / "unsent").glob("*.json")
    said = file.read_bytes()
    sent(staging)
    file.write_bytes(said)
    staging._unsent.close()
    Staging(store).close()
    assert shown(store) == {"a@1": None}
    assert store["a@1"].metrics["loss"] == 0.5
    assert [*file.parent.iterdir()] == []
