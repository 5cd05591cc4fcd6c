"""Stores that a group shares: its members write to them whatever their umask is, others read if the modes let them."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.cli.program import run
from ckstore.errors import CkstoreError, LockedError
from ckstore.gc.collect import gc
from ckstore.policy import Policy, Retention
from ckstore.recovery.recover import recover
from ckstore.storage import durable, reserve
from tests.object_store import ObjectStore, object_store
from tests.users import User, Users, other_users

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be other users"),
]

TEAM = 51000
ALICE, BOB = User(51001, (TEAM,), 0o077), User(51002, (TEAM,))
STRANGER = User(51003, ())


def weight(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(7)
    values = generator.standard_normal(70_000).astype(np.float32)
    return {"weight": values + seed * generator.standard_normal(70_000).astype(np.float32) / 1000}


def create(place: Path, *, shared: bool) -> None:
    ckstore.init(place, shared=shared).close()


def everything(place: Path | str, run: str, **options: Any) -> None:
    """Use all verbs that write, on versions of the run's own and on those of others."""
    with ckstore.open(place, **options) as store:
        for step in range(4):
            store.ingest(weight(step), run=run, step=step)
        store.encode()
        if not isinstance(place, str):
            writing(store)
        store.tag(f"{run}@3", "best")
        store.untag("best")
        store.set_metrics(f"{run}@3", {"loss": 1.0})
        store.thin([f"{run}@1"])
        store.forget([f"{run}@0"])
        store.gc(grace=0)
        store.rebase(f"{run}@2")
        store.set_policy(Policy(retention=Retention(keep_last=2)), run)
        store.retain()
        store.gc(grace=0)
        reserve.keep(store.path)
        assert store.verify().problems == []
        for version in store.versions():
            assert version["weight"][:].shape == (70_000,)


def writing(store: ckstore.Store) -> None:
    """Check the journal of a change, and a lease of it."""
    journal = store.path / "catalog.sqlite-journal"
    catalog = store._repository.catalog
    with catalog.transaction():
        catalog.set_policy("journal", "")
        assert os.access(store.path, os.W_OK)
        assert stat.S_IMODE(journal.stat().st_mode) == stat.S_IMODE(journal.with_name("catalog.sqlite").stat().st_mode)
        catalog.set_policy("journal", None)
    with catalog.lease("test"):
        pass


def forget_others(place: Path, run: str) -> None:
    """Forget another user's versions, and collect them."""
    with ckstore.open(place) as store:
        store.forget(store.versions(run))
        assert store.gc(grace=0).bytes > 0


def rebuild(place: Path) -> list[str]:
    (place / "catalog.sqlite").unlink(missing_ok=True)
    return recover(place).problems


def collects_under_a_lease(place: Path) -> bool:
    """Return whether `gc` runs now, for which it needs garbage."""
    try:
        with ckstore.open(place) as store:
            store.ingest({"w": np.ones(9)}, run="garbage", step=0)
            store.forget("garbage")
            gc(store._repository, patience=0.1)
    except LockedError:
        return False
    return True


def die_in_a_change(place: Path) -> None:
    """End this process with a lease, a reservation and a journal in the store."""
    store = ckstore.open(place)
    catalog = store._repository.catalog
    catalog.lease("killed").__enter__()
    catalog.reserve_number()
    catalog._connection.execute("PRAGMA cache_size = 1")  # Changed pages are written before the commit.
    with catalog.transaction():
        for number in range(500):
            catalog.set_policy(f"journal {number}", "")
        durable.touch(store.path / "packs" / f".tmp-{os.getpid()}-00")
        os._exit(9)


def numbers(place: Path) -> list[int]:
    with ckstore.open(place, "r") as store:
        return [version.number for version in store.versions() if version["weight"][:].size]


def sentence(*arguments: object) -> str:
    """Return the only line that a command writes to stderr when it fails."""
    with redirect_stderr(StringIO()) as said:
        assert run([str(argument) for argument in arguments])
    [line] = said.getvalue().splitlines()
    return line


def prepare() -> None:
    """Use a store once, so that its modules and kernels are loaded."""
    from ckstore.storage.remote import mirror

    assert mirror
    with TemporaryDirectory() as directory:
        create(Path(directory, "store"), shared=True)
        reserve.LITTLE = reserve.PLENTY = 1 << 60
        everything(Path(directory, "store"), "run")
        rebuild(Path(directory, "store"))
        run(["--store", f"{directory}/store", "log", "--json", "-n", "0"])
        run(["--store", f"{directory}/none", "log"])


@pytest.fixture(scope="module")
def users() -> Iterator[Users]:
    with other_users(prepare) as users:
        yield users


@pytest.fixture
def project() -> Iterator[Path]:
    """A directory that everyone may enter and the team may write to."""
    with TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = Path(directory, "project")
        path.mkdir()
        os.chown(path, 0, TEAM)
        path.chmod(0o2775)
        yield path


def closed_to_the_group(store: Path) -> list[str]:
    """Return the files and directories of a store that its group cannot use."""
    found = []
    for path in (store, *store.rglob("*")):
        status = path.lstat()
        wanted = 0o2070 if path.is_dir() else 0o060
        if status.st_gid != TEAM or status.st_mode & wanted != wanted:
            found.append(f"{path.relative_to(store)} {stat.filemode(status.st_mode)} {status.st_gid}")
    return found


def test_members_of_a_group_write_to_a_shared_store(users: Users, project: Path) -> None:
    store = project / "store"
    users.call(ALICE, create, store, shared=True)
    assert closed_to_the_group(store) == []
    for member, name in [(ALICE, "alice"), (BOB, "bob"), (ALICE, "alice2")]:
        users.call(member, everything, store, name)
        assert closed_to_the_group(store) == []
    assert (store / "reserve").exists()
    users.call(BOB, forget_others, store, "alice")
    users.call(ALICE, forget_others, store, "bob")
    for member in (BOB, ALICE):
        assert users.call(member, rebuild, store) == []
        assert closed_to_the_group(store) == []
        users.call(member, everything, store, f"after-{member.uid}")
        users.call(BOB if member is ALICE else ALICE, numbers, store)
    assert closed_to_the_group(store) == []


def test_a_store_without_the_option_follows_the_umask(users: Users, project: Path) -> None:
    store = project / "store"
    users.call(ALICE._replace(umask=0o002), create, store, shared=False)
    assert stat.S_IMODE((store / "catalog.sqlite").stat().st_mode) == 0o664
    users.call(BOB._replace(umask=0o002), everything, store, "bob")
    assert closed_to_the_group(store) == []
    # Without the set-group-id bit, nothing says that a group shares it.
    private = project.parent / "private"
    private.mkdir()
    os.chown(private, ALICE.uid, ALICE.uid)
    users.call(ALICE, create, private / "store", shared=False)
    users.call(ALICE, everything, private / "store", "alice")
    assert all(not path.stat().st_mode & 0o077 for path in (private / "store").rglob("*"))


def test_members_wait_for_one_another_and_clean_up(users: Users, project: Path) -> None:
    store = project / "store"
    users.call(ALICE._replace(umask=0o022), create, store, shared=True)
    users.call(ALICE, everything, store, "alice")
    with ckstore.open(store) as opened, opened._repository.catalog.lease("test"):
        assert not users.call(BOB, collects_under_a_lease, store)
    for killed, other in [(ALICE, BOB), (BOB, ALICE)]:
        with pytest.raises(ChildProcessError):
            users.call(killed, die_in_a_change, store)
        assert closed_to_the_group(store) == []
        said = users.call(STRANGER, sentence, "--store", store, "log")
        assert "in the middle of a change, and repairing it takes permission to write" in said
        assert users.call(other, numbers, store)
        assert users.call(other, collects_under_a_lease, store)
        users.call(other, everything, store, f"after-{killed.uid}")
        assert list(store.rglob(".tmp-*")) == []


def test_others_read_where_the_modes_allow_it(users: Users, project: Path) -> None:
    store = project / "store"
    users.call(ALICE._replace(umask=0o022), create, store, shared=True)
    users.call(ALICE._replace(umask=0o022), everything, store, "alice")
    assert users.call(STRANGER, numbers, store) == users.call(ALICE, numbers, store)
    for verb in (["tag", "alice@3", "best"], ["rebase", "alice@3"], ["forget", "alice@3"], ["gc"]):
        said = users.call(STRANGER, sentence, "--store", store, *verb)
        assert "cannot be written by user" in said, said
    for closed in (store / "packs", store / "catalog.sqlite", store):
        mode = closed.stat().st_mode
        closed.chmod(stat.S_IMODE(mode) & ~0o007)
        verb = ["ls", "alice@3"] if closed.name == "packs" else ["log"]
        said = users.call(STRANGER, sentence, "--store", store, *verb)
        assert re.search("cannot be re(ad|ached) by user|not readable", said), said
        assert str(closed) in said
        closed.chmod(mode)


def test_only_a_directory_of_the_own_group_is_shared(users: Users, project: Path) -> None:
    foreign = project / "foreign"
    foreign.mkdir()
    with pytest.raises(CkstoreError, match="cannot be shared: it belongs to another user or group"):
        users.call(ALICE, create, foreign, shared=True)
    with pytest.raises(CkstoreError, match="rights to s3://bucket/store are those of the bucket"):
        ckstore.init("s3://bucket/store", shared=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


def remote(environment: dict[str, str], cache: Path, call: Callable[..., None], *arguments: Any, **named: Any) -> None:
    os.environ.update(environment)
    call(*arguments, cache=cache, **named)


def create_remote(url: str, cache: Path, options: dict[str, str]) -> None:
    ckstore.init(url, options=options, cache=cache).close()


def test_members_share_a_mirror(users: Users, project: Path, server: ObjectStore) -> None:
    cache, url = project / "cache", f"{server.url}/shared"
    for member, name in [(ALICE, "alice"), (BOB, "bob"), (ALICE, "alice2")]:
        if member is ALICE and name == "alice":
            options = dict(server.options)
            users.call(member, remote, dict(server.credentials), cache, create_remote, url, options=options)
        users.call(member, remote, dict(server.credentials), cache, everything, url, name)
        assert closed_to_the_group(cache) == []
    assert not any(path.stat().st_mode & 0o007 for path in cache.rglob("*") if path.is_dir())


@pytest.mark.long
@pytest.mark.parametrize("place", ["", "*-*", "*-*/packs", "*-*/log", "*-*/blocks", "urls"])
def test_a_cache_that_everyone_may_write_to_is_refused(
    project: Path, server: ObjectStore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name, value in server.credentials.items():
        monkeypatch.setenv(name, value)
    cache, url = project / "cache", f"{server.url}/open{len(place)}{place.strip('*-/')}"
    with ckstore.init(url, options=dict(server.options), cache=cache) as store:
        store.ingest(weight(0), run="a", step=0)
    with ckstore.open(url, "r", cache=cache) as store:
        shutil.rmtree(store.path / "packs")
        (store.path / "packs").mkdir()
        store["a@0"].state_dict()
    [refused] = list(cache.glob(place or ".")) if place else [cache]
    refused.chmod(0o777)
    with pytest.raises(CkstoreError, match=f"Everyone may write to the cache {refused}; run `chmod o-w"):
        ckstore.open(url, cache=cache)
    refused.chmod(0o755)
    ckstore.open(url, cache=cache).close()
