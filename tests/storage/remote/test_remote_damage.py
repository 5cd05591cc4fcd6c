"""A damaged or missing pack in a bucket is put again by a mirror that has it; else its objects are stored again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.commit import change as commit_module
from ckstore.errors import ConflictError, IntegrityError
from ckstore.recovery.recover import recover
from ckstore.storage.pack import RAW
from tests.checkpoints import settled
from tests.storage.remote.simulated import SimulatedServer
from tests.storage.remote.test_remote_store import URL, files, same


@pytest.fixture
def paths(server: SimulatedServer, directory: Path) -> list[Path]:
    """Three files; the store that holds them was written from mirror `a`."""
    found = files(directory, 3)
    with ckstore.init(URL, cache=directory / "a") as store:
        for step, path in enumerate(found):
            store.ingest(path, run="gpt", step=step)
        settled(store).encode()  # Two encodings of one version would leave a pack that no version has.
        settled(store).tag("gpt@1", "best")
    return found


def recovered(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[str]:
    monkeypatch.setenv("CKSTORE_CACHE", str(cache))
    return recover(URL).problems


def damage(server: SimulatedServer, pack: str) -> bytes:
    """Flip a bit in the middle of a pack; return the previous bytes."""
    data, when = server.objects[f"packs/{pack}"]
    middle = len(data) // 2
    server.objects[f"packs/{pack}"] = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :], when
    return data


def packs(server: SimulatedServer) -> list[str]:
    """Return the names of the packs with manifests; raw ones are removed in due time."""
    names = [name.removeprefix("packs/") for name in server.objects if name.startswith("packs/")]
    return [name for name in names if not name.endswith(RAW)]


def records(server: SimulatedServer) -> list[str]:
    return [name for name in server.objects if name.startswith("log/")]


@pytest.mark.parametrize("missing", [False, True])
def test_the_writer_of_a_pack_puts_it_again(
    server: SimulatedServer, directory: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    before = len(records(server))
    with ckstore.open(URL, cache=directory / "b") as reader:
        whole = {pack: damage(server, pack) for pack in packs(server)}
        if missing:
            for pack in whole:
                del server.objects[f"packs/{pack}"]
        with pytest.raises(IntegrityError):
            reader["gpt@2"].checkout(directory / "out")
        assert recovered(monkeypatch, directory / "a") == []
        # Encodings have removed the files of the packs that hot versions had.
        mended = {path.name for path in (directory / "a").rglob("*.zip")}
        assert len(mended) == len(paths)
        assert all(server.objects[f"packs/{pack}"][0] == whole[pack] for pack in mended)
        assert len(records(server)) == before, "nothing was lost"
        # Damaged bytes that were read before are not taken for the present ones, once some time has passed.
        monkeypatch.setattr("ckstore.storage.remote.remote_packs._AGAIN", 0.0)
        same(reader, paths, directory / "out")
        assert reader.verify().problems == []


def test_a_reader_of_a_pack_puts_it_again(
    server: SimulatedServer, directory: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.open(URL, cache=directory / "b") as reader:
        assert reader.verify().problems == []
    for pack in [name.removeprefix("packs/") for name in server.objects if name.startswith("packs/")]:
        damage(server, pack)
    assert recovered(monkeypatch, directory / "b") == []
    with ckstore.open(URL, cache=directory / "c") as store:
        same(store, paths, directory / "out")


def rebased_pack(store: ckstore.Store) -> str:
    """Rebase the version at step 1; return the pack of its objects."""
    store.rebase(["gpt@1"])
    store.gc(grace=0.0)
    found = {store._repository.resolver.record(identity).pack for identity in store["gpt@1"]._stored.document.objects}
    [pack] = found - {store["gpt@0"]._stored.row.pack}
    return pack


def test_lost_objects_are_stored_again_and_other_mirrors_follow(
    server: SimulatedServer, directory: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.open(URL, cache=directory / "other") as other:
        pack = rebased_pack(other)
        del server.objects[f"packs/{pack}"]
        problems = recovered(monkeypatch, directory / "fresh")
        assert problems[0].startswith(f"Pack {pack} is damaged or missing")
        assert any(re.match(r"Version 2 \(gpt@1\) lacks \d+ objects", problem) for problem in problems)
        assert "Version 1" not in " ".join(problems)
        before = len(records(server))
        assert recovered(monkeypatch, directory / "fresher") == problems
        assert len(records(server)) == before, "a loss is reported once"
        for step in (1, 2):
            assert other.ingest(paths[step], run="gpt", step=step).is_new
        assert other["best"].step == 1
        same(other, paths, directory / "out")
        assert other.verify().problems == []
    assert recovered(monkeypatch, directory / "fresh") == []
    with ckstore.open(URL, cache=directory / "fresh") as store:
        same(store, paths, directory / "out")


def test_a_lost_manifest_is_replaced_and_a_copy_brings_it_back(
    server: SimulatedServer, directory: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.open(URL, cache=directory / "other") as other:
        pack = other["gpt@1"]._stored.row.pack
    copy = server.objects.pop(f"packs/{pack}")
    assert any("Version 2 (gpt@1) cannot be read" in problem for problem in recovered(monkeypatch, directory / "fresh"))
    server.objects[f"packs/{pack}"] = copy
    assert recovered(monkeypatch, directory / "fresh") == []
    with ckstore.open(URL, cache=directory / "other") as other:
        same(other, paths, directory / "out")
        assert other.verify().problems == []
    del server.objects[f"packs/{pack}"]
    recovered(monkeypatch, directory / "fresher")
    with ckstore.open(URL, cache=directory / "fresher") as store:
        number = store.ingest(paths[1], run="gpt", step=1).version.number
        assert store.ingest(paths[2], run="gpt", step=2).is_new
        assert store["best"].number == number
        same(store, paths, directory / "out")
        assert store.verify().problems == []


@pytest.mark.parametrize("rebased", [False, True])
def test_a_lost_base_comes_back_with_a_copy(
    server: SimulatedServer, directory: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch, rebased: bool
) -> None:
    with ckstore.open(URL, cache=directory / "other") as other:
        pack = other["gpt@0"]._stored.row.pack
        if rebased:  # Its pack has no version.
            pack = rebased_pack(other)
        uses = other._catalog.uses_of(pack)
    whole = server.objects.pop(f"packs/{pack}")
    assert recovered(monkeypatch, directory / "fresh")
    server.objects[f"packs/{pack}"] = whole
    assert recovered(monkeypatch, directory / "fresher") == []
    with ckstore.open(URL, cache=directory / "other") as other:
        found = other._catalog.uses_of(pack)
        assert (found[:3], found.above.keys()) == (uses[:3], uses.above.keys())
        same(other, paths, directory / "out")
        assert other.verify().problems == []


def test_the_second_of_two_repairs_is_refused(
    server: SimulatedServer, directory: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for pack in packs(server):
        del server.objects[f"packs/{pack}"]
    recovered(monkeypatch, directory / "fresh")
    with ckstore.open(URL, cache=directory / "b") as first, ckstore.open(URL, cache=directory / "c") as second:
        first.untag("best")
        finish = commit_module.Change.finish
        numbers: list[int] = []

        def finished(*arguments: Any, **named: Any) -> None:
            monkeypatch.setattr(commit_module.Change, "finish", finish)
            numbers.append(second.ingest(paths[1], run="gpt", step=1).version.number)
            finish(*arguments, **named)

        monkeypatch.setattr(commit_module.Change, "finish", finished)
        with pytest.raises(ConflictError, match=r"Another process stored gpt@1 again as version \d+"):
            first.ingest(paths[1], run="gpt", step=1)
        assert first["gpt@1"].number == numbers[0]
        assert not first.ingest(paths[1], run="gpt", step=1).is_new
