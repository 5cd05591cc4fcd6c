"""Mutates stores and checkpoint files by their structure, signs them again, and calls everything on them.

    python -m tests.fuzzing --seconds 600 [--first SEED] [--kind KIND]...

or, to see the outcomes and to continue after a case that ends the process or does not end:

    tools/fuzz [SECONDS] [FIRST SEED] [KIND...]

Each case follows from its kind and seed alone. A line of JSON announces it before it begins, and another one gives its
outcome: `refused`, `served`, or a fault. The reader of the lines ends the process if a case takes too long.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from threading import Timer
from typing import Any
from unittest import mock

import numpy as np
import torch

import ckstore
from ckstore.errors import CkstoreError
from ckstore.objects import units
from ckstore.policy import Policy
from tests.checkpoints import scratch, sha256
from tests.crafted import CraftedStore, everything, limits
from tests.formats.written import flax_bytes, gguf_bytes, hdf5_bytes, keras_bytes, learner_bytes, tar_bytes

#: Values to put in the place of others; longer ones are made when they are drawn.
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 255, 1 << 17, 1 << 31, 1 << 47, 1 << 48, 1 << 62, 1 << 63, 1 << 64, 10**400,
    -(1 << 62), 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "a", "\0", "\udc80", "../x", "/etc/passwd",
    "a" * 40, "0" * 40, "2026-07-01T12:00:00.000000Z", "9999-99-99T99:99:99.999999Z", "float32", "uint8", "complex64",
    "exact", "x" * 100_000, [], {}, [[]], [0], [0, 0], {"name": "layout"}, {"": 0},
]  # fmt: skip


def make_store(directory: Path) -> Path:
    """Make a store with all kinds of layers, a coarse version, a directory, tags, metrics, a policy, a rebase."""
    torch.manual_seed(1)
    weight, slow = torch.randn(12, 20), torch.randn(150)
    with mock.patch.object(units, "SMALL", 128), ckstore.init(directory / "store") as store:
        for step in range(4):
            state = {
                "w": weight,
                "slow": slow,
                "exp_avg": weight * 0.1,
                "b": slow[:9].bfloat16(),
                "z": torch.zeros(300),
            }
            torch.save({"model": state, "step": step}, directory / "x")
            coarse = {1: "factors", 2: "lattice", 3: "lc"}.get(step)
            store.ingest(
                directory / "x",
                run="a",
                metrics={"loss": step / 7, "of": ["x", {"y": None}]},
                policy=None if coarse is None else Policy("coarse", scheme=coarse),
            )
            weight, slow = weight + 0.001 * torch.randn(12, 20), slow + 1e-7 * torch.randn(150)
        (directory / "tree").mkdir()
        (directory / "x").rename(directory / "tree" / "m.pt")
        (directory / "tree" / "link").symlink_to("m.pt")
        store.ingest(directory / "tree", run="b", parent=3)
        store.tag(1, "first")
        store.set_policy(Policy("coarse", quality=2.0), "b")
        store.rebase([2])
        store.thin([3])
        rows = torch.randn(40, 20)
        for count in (40, 30):  # The second one is a part of the first one.
            store.ingest({"w": rows[:count].clone()}, run="c", config={"rows": count}, hot=0)
            rows = rows + 0.001 * torch.randn(40, 20)
    return directory / "store"


def mutated(value: Any, random: random.Random) -> Any:
    """Return a JSON value with one change."""
    places: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        inner = []
        for node in level:
            found = list(node.items() if isinstance(node, dict) else enumerate(node))
            places += [(node, key) for key, _ in found]
            inner += [child for _, child in found if isinstance(child, dict | list)]
        level = inner
    if not places:
        return random.choice(JUNK)
    # Lists of one kind have many places; each depth and each field shall have its turn.
    node, key = random.choice(places)
    if random.random() < 0.5:
        names = sorted({key for _, key in places if isinstance(key, str)})
        if names:
            name = random.choice(names)
            node, key = random.choice([place for place in places if place[1] == name])
    match random.randrange(7):
        case 0:
            del node[key]
        case 1:
            other, there = random.choice(places)
            try:
                node[key] = copy.deepcopy(other[there])
            except (KeyError, IndexError, RecursionError):
                del node[key]
        case 2 if isinstance(node[key], int):
            node[key] += random.choice([-1, 1, 1 << random.randrange(70), -(1 << random.randrange(70))])
        case 3 if isinstance(node[key], str) and node[key]:
            at = random.randrange(len(node[key]))
            node[key] = node[key][:at] + chr(random.randrange(256)) + node[key][at + random.randrange(2) :]
        case 4 if isinstance(node, list):
            node[key:key] = [copy.deepcopy(node[key])] * random.choice([1, 2, 1000])
        case 5:
            deep: Any = 0
            for _ in range(random.choice([1, 10, 100])):
                deep = [deep]
            node[key] = deep
        case _:
            node[key] = copy.deepcopy(random.choice(JUNK))
    return value


def flipped(data: bytes, random: random.Random) -> bytes:
    """Return the bytes with a few stretches changed."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 8])):
        if not changed:
            break
        at = random.randrange(len(changed))
        length = random.choice([1, 1, 2, 4, 8, 64])
        match random.randrange(6):
            case 0:
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                changed[at : at + length] = random.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length] * random.choice([1, 2, 100])
            case 4:
                other = random.randrange(len(changed))
                changed[at : at + length] = changed[other : other + length]
            case _:
                number = random.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1, random.getrandbits(32)])
                changed[at : at + 8] = number.to_bytes(8, "little")[: random.choice([1, 2, 4, 8])]
    return bytes(changed)


def manifests(crafted: CraftedStore, random: random.Random) -> None:
    """Make one or two changes of a manifest's JSON."""
    pack = random.choice(crafted.packs())
    document, blobs = crafted.read(pack)
    for _ in range(random.choice([1, 1, 2])):
        document = mutated(document, random)
    crafted.write(pack, document, blobs)


def layouts(crafted: CraftedStore, random: random.Random) -> None:
    """Make one to three changes of a layout's columns."""
    # Packs that are not packed against another one.
    packs = [pack for pack in crafted.packs() if not crafted.read(pack)[1].get("layout", b"\2" * 9)[8] & 2]

    def change(columns: list[list[Any]]) -> None:
        for _ in range(random.choice([1, 1, 2, 3])):
            mutated(columns, random)

    crafted.change_columns(random.choice(packs), change)


def catalogs(crafted: CraftedStore, random: random.Random) -> None:
    """Change types and values of cells, rows and their places, tables, or bytes of the file."""
    file = crafted.path / "catalog.sqlite"
    if random.random() < 0.3:
        file.write_bytes(flipped(file.read_bytes(), random))
        return
    tables = [row[0] for row in crafted.sql("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for _ in range(random.choice([1, 1, 2])):
        table = random.choice(tables)
        columns = [row[1] for row in crafted.sql(f"PRAGMA table_info({table})")]
        if not columns:
            continue  # It was dropped before.
        column, other = random.choice(columns), random.choice(columns)
        value = random.choice([
            "NULL", "-1", "0", "1", "7", "1 << 47", "1 << 62", "1.5", "9e999", "''", "'x'", "char(0)", "x'ff'",
            "zeroblob(1000)", "'\udcff'", other, f"{column} + 1", f"{column} || 'x'", f"substr({column}, 2)",
            "'" + "[" * 3000 + "'",
        ])  # fmt: skip
        where = random.choice(["", f" WHERE {other} = (SELECT MAX({other}) FROM {table})"])
        statement = random.choice([
            f"UPDATE {table} SET {column} = {value}{where}", f"UPDATE {table} SET {column} = {value}{where}",
            f"UPDATE {table} SET {column} = {value}{where}", f"DELETE FROM {table}{where}",
            f"DROP TABLE {table}", f"ALTER TABLE {table} RENAME COLUMN {column} TO other",
            f"CREATE TRIGGER t AFTER UPDATE ON {table} BEGIN DELETE FROM versions; END",
            f"PRAGMA user_version = {random.choice([-1, 0, 2, 99])}",
        ])  # fmt: skip
        try:
            crafted.sql(statement)
        except (sqlite3.Error, UnicodeEncodeError):
            continue


def logs(crafted: CraftedStore, random: random.Random) -> None:
    """Change a record, or add one like it."""
    path = random.choice(sorted((crafted.path / "log").iterdir()))
    record = json.loads(path.read_bytes())
    for name in ("sequence", "digest", "format", "created"):
        if random.random() < 0.9:
            record.pop(name)
    record = mutated(record, random)
    if random.random() < 0.5:
        path.unlink()
    crafted.log(record if isinstance(record, dict) else {}, random.choice([1, 2, 3, 9, 10**12 - 1]))


_CHECKSUMS = (
    "codecs.integers.crc32",
    "objects.stored_chunks.crc32",
    "storage.pack_reader.crc32c",
    "objects.blobs._digest",
)


class _Agrees(int):
    """A checksum that equals every value, so that code behind the check is reached."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__

    def to_bytes(self, *_: Any, **__: Any) -> Any:
        return self


@contextmanager
def unchecked() -> Iterator[None]:
    """Checksums of payloads, indexes and blobs agree, whatever they are taken over."""
    with ExitStack() as stack:
        for place in _CHECKSUMS:
            stack.enter_context(mock.patch(f"ckstore.{place}", return_value=_Agrees()))
        yield


def payloads(crafted: CraftedStore, random: random.Random) -> None:
    """Change bytes of layers, shard indexes and blobs, in packs of the same size."""
    pack = random.choice(crafted.packs())
    document, blobs = crafted.read(pack)
    if blobs and random.random() < 0.3:
        name = random.choice(sorted(blobs))
        crafted.write(pack, document, blobs | {name: flipped(blobs[name], random)})
        return
    data = (crafted.path / "packs" / pack).read_bytes()
    changed = bytearray(data)
    for record in random.sample(document["records"], min(2, len(document["records"]))):
        at, size = record["at"] if isinstance(record["at"], list) else (record["at"], sum(record["lengths"]))
        # Headers and directories are at the beginning, the index of a shard at the end.
        first = at + min(random.choice([0, 4, 30, size]), max(size - 24, 0))
        part = flipped(bytes(changed[first : at + size]), random)
        changed[first : at + size] = part[: at + size - first].ljust(at + size - first, b"\0")
    crafted.write_bytes(pack, bytes(changed), document.get("version"))


STORES: dict[str, Callable[[CraftedStore, random.Random], None]] = {
    "manifests": manifests, "layouts": layouts, "catalogs": catalogs, "logs": logs, "payloads": payloads,
}  # fmt: skip


def make_files(directory: Path) -> dict[str, bytes]:
    """Return small checkpoint files of each format."""
    model = {"w": torch.randn(7, 5), "z": torch.tensor([1 + 2j]).conj()}
    state = {"model": model, "n": [1, "a", (2.5, None)], "step": 3, "tied": model["w"]}
    torch.save(state, directory / "zip")
    torch.save(state, directory / "legacy", _use_new_zipfile_serialization=False)
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
              "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
              "__metadata__": {"step": "7"}}  # fmt: skip
    text = json.dumps(header).encode()
    (directory / "safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    with (directory / "npy").open("wb") as array, (directory / "npz").open("wb") as arrays:  # NumPy adds no endings
        np.save(array, np.arange(12.0).reshape(3, 4).T)
        np.savez(arrays, w=np.arange(6, dtype="f4"), s=np.int64(3), t=np.array(["a", "b"]))
    state = {"params": {"w": np.arange(6, dtype="f4").reshape(2, 3)}, "n": [1, 2.5, "a", b"b", None], "step": 3}
    (directory / "flax").write_bytes(flax_bytes(state))
    (directory / "learner").write_bytes(learner_bytes(model, {"state": {0: model["w"]}}))
    (directory / "tar").write_bytes(
        tar_bytes({"a.npy": (directory / "npy").read_bytes(), "m": (directory / "zip").read_bytes()})
    )
    if find_spec("h5py"):
        weights = {"layers": {"dense": {"vars": {"0": np.ones((3, 4), "f4"), "1": np.arange(3, dtype="i2")}}}}
        (directory / "hdf5").write_bytes(hdf5_bytes(weights))
        (directory / "late hdf5").write_bytes(hdf5_bytes(weights, libver="latest"))
        (directory / "keras").write_bytes(keras_bytes(weights))
    (directory / "gguf").write_bytes(gguf_bytes([("a", (2, 3), 0, 24), ("q", (64, 32), 2, 1152), ("h", (5,), 30, 10)]))
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def mutated_file(name: str, data: bytes, random: random.Random) -> bytes:
    """Return a checkpoint file with its pickle, directory or header changed."""
    if name == "safetensors" and random.random() < 0.7:
        size = int.from_bytes(data[:8], "little")
        try:
            text = json.dumps(mutated(json.loads(data[8 : 8 + size]), random)).encode()
        except RecursionError:
            text = b"[" * 10_000
        return len(text).to_bytes(8, "little") + text + data[8 + size :]
    if name == "zip" and random.random() < 0.5:
        # The pickle keeps its length, the directory its places.
        at = data.index(b"\x80\x02}")
        end = data.index(b"PK\3\4", at)
        changed = flipped(data[at:end], random)[: end - at].ljust(end - at, b".")
        return _with_crc(data[:at] + changed + data[end:], at)
    if name in ("npz", "learner", "keras") and random.random() < 0.5:
        # Headers of arrays, with checksums that fit.
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as archive:
            for member in old.namelist():
                archive.writestr(member, flipped(old.read(member), random))
        return out.getvalue()
    if name in ("zip", "npz", "learner", "keras") and random.random() < 0.5:
        at = data.index(b"PK\1\2")
        return data[:at] + flipped(data[at:], random)
    return flipped(data, random)


def _with_crc(data: bytes, at: int) -> bytes:
    """Return the zip with the correct checksum of the member at `at`, in every place that holds it."""
    import zlib

    end = data.index(b"PK\7\10", at) if b"PK\7\10" in data[at:] else len(data)
    before = data[end + 4 : end + 8]
    size = int.from_bytes(data[end + 8 : end + 12], "little")
    return data.replace(before, zlib.crc32(data[at : at + size]).to_bytes(4, "little")) if before.strip(b"\0") else data


def run_store(kind: str, seed: int, whole: Path, directory: Path, digests: set[str]) -> str:
    """Run one case of a store: `refused` if a verb raised or complained, else `served`; raise for a fault."""
    shutil.copytree(whole, directory / "store", symlinks=True)
    STORES[kind](CraftedStore(directory / "store"), random.Random(f"{kind} {seed}"))
    refused = False
    out = directory / "out"
    for name, ask in everything(directory / "store", out):
        try:
            if kind == "payloads" and name not in ("verify", "pull"):  # Encoded payloads have checksums of their own.
                with unchecked(), limits():
                    ask()
            else:
                with limits():
                    refused |= bool(getattr(ask(), "problems", ()))
        except CkstoreError as error:
            refused = True
            str(error).encode()  # It can be printed.
        if kind in ("catalogs", "logs") and out.is_dir():
            assert files_of(out) <= digests, f"{name} gave content that was never stored"
        shutil.rmtree(out, ignore_errors=True)
    return "refused" if refused else "served"


def run_file(seed: int, files: dict[str, bytes], directory: Path) -> str:
    """Run one case of a checkpoint file: it is refused, or comes back byte for byte."""
    drawn = random.Random(f"files {seed}")
    name = drawn.choice(sorted(files))
    (directory / "file").write_bytes(mutated_file(name, files[name], drawn))
    with ckstore.init(directory / "store") as store:
        try:
            with limits():
                row = store.ingest(directory / "file").version
        except CkstoreError as error:
            str(error).encode()
            return "refused"
        with limits():
            store[row.number].checkout(directory / "out")
            try:
                version = store[row.number]
                version.state_dict()
                [version[path].numpy() for path in version]
            except CkstoreError:
                pass
    assert sha256(directory / "out") == sha256(directory / "file"), "it came back otherwise"
    return "served"


def files_of(directory: Path) -> set[str]:
    """Return the digests of all files in a directory."""
    return {sha256(path) for path in directory.rglob("*") if path.is_file()}


def cases(kinds: list[str], first: int) -> Iterator[tuple[str, int]]:
    """Yield each kind in turn, with one seed after the other."""
    return ((kind, seed) for seed in count(first) for kind in kinds)


class Fuzzer:
    """The common starting state of all cases."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._whole = make_store(directory)
        self._files = make_files(directory)
        # Compile and import first.
        shutil.copytree(self._whole, directory / "warm", symlinks=True)
        for _, ask in everything(directory / "warm", directory / "out"):
            ask()
        self._digests = files_of(directory / "out")
        for name in self._files:
            run_file_warm(directory / name, directory / f"store.{name}")

    def run(self, kind: str, seed: int) -> str:
        """Return the outcome of a case; raise for a fault."""
        with scratch() as directory:
            if kind == "files":
                return run_file(seed, self._files, directory)
            return run_store(kind, seed, self._whole, directory, self._digests)


def run_file_warm(path: Path, store: Path) -> None:
    """Ingest and read a good file once."""
    with ckstore.init(store) as opened:
        row = opened.ingest(path).version
        opened[row.number].state_dict()


KINDS = [*STORES, "files"]


class Watched:
    """Outcomes of cases in another process, which is restarted if it ends or takes too long.

    Attributes
    ----------
    outcomes
        Numbers of cases, by (kind, outcome).
    faults
        Kind, seed and trace of each case that must not be.
    """

    #: Seconds without a word after which a process hangs; others may share the machine.
    PATIENCE = 60.0

    def __init__(self, seconds: float, first: int = 0, kinds: Sequence[str] = ()) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: list[dict[str, Any]] = []
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            first = self._watch(left, first, kinds)

    def _watch(self, seconds: float, first: int, kinds: Sequence[str]) -> int:
        """Watch one process; return the seed to go on with."""
        command = [sys.executable, "-m", "tests.fuzzing", "--seconds", str(seconds), "--first", str(first)]
        command += [word for kind in kinds for word in ("--kind", kind)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            return self._read(process, first)

    def _read(self, process: subprocess.Popen[str], first: int) -> int:
        assert process.stdout is not None
        timer = Timer(self.PATIENCE, process.kill)
        timer.start()
        under_way: dict[str, Any] | None = None
        said: list[str] = []
        for line in process.stdout:
            timer.cancel()
            timer = Timer(self.PATIENCE, process.kill)
            timer.start()
            try:
                found = json.loads(line)
            except ValueError:
                said.append(line)
                continue
            if "outcome" not in found:
                under_way = found
                continue
            under_way = None
            self.outcomes[found["kind"], found["outcome"]] += 1
            first = found["seed"]
            if found["outcome"] == "fault":
                self.faults.append(found)
        timer.cancel()
        if process.wait() or under_way is not None:
            case = under_way or {"kind": "", "seed": first}
            self.outcomes[case["kind"], "the process ended"] += 1
            self.faults.append({**case, "outcome": f"ended with {process.returncode}", "trace": "".join(said[-20:])})
        return first + 1

    def __str__(self) -> str:
        lines = [f"{kind:<10} {outcome:<18} {number:>8}" for (kind, outcome), number in sorted(self.outcomes.items())]
        lines += [f"\n{found['kind']} {found['seed']}: {found['outcome']}\n{found['trace']}" for found in self.faults]
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parsed = parser.parse_args()
    with scratch() as directory:
        fuzzer = Fuzzer(directory)
        end = time.monotonic() + parsed.seconds
        for kind, seed in cases(parsed.kind or KINDS, parsed.first):
            if time.monotonic() > end:
                return
            print(json.dumps({"kind": kind, "seed": seed}), flush=True)
            try:
                came = {"outcome": fuzzer.run(kind, seed)}
            except Exception:
                came = {"outcome": "fault", "trace": traceback.format_exc(limit=-8)}
            print(json.dumps({"kind": kind, "seed": seed, **came}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
