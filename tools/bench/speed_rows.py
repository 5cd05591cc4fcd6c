"""The table of speeds: storing and restoring against other tools, and the read of one row."""

from __future__ import annotations

import filecmp
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import ckstore
from ckstore.policy import FIDELITIES, Fidelity
from tools.bench.keepers import COPY, KEEPERS, LOAD, SAVE, Keeper, Source
from tools.bench.moonclips import Moonclip
from tools.bench.series import load
from tools.bench.speed_figures import COMPARED, Section, Spread, compared
from tools.bench.speed_frame import Bench, Contender, deepest, race

#: Names of ckstore's operations in tables.
HOT, HOT_LIVE, ENCODE = "ingest, hot", "live ingest, hot", "encoding"
INGEST, LIVE, COARSE_INGEST = "ingest", "live ingest", "coarse ingest"
HOT_CHECKOUT, HOT_STATE_DICT = "checkout, hot version", "state_dict, hot version"
CHECKOUT, STATE_DICT = "checkout", "state_dict"
COARSE = "state_dict, coarse version"
MOONCLIP, MOONCLIP_RESUME = "moonclip, live", "moonclip"

#: Names of the processes of ckstore and torch.load.
_OURS, _THEIRS = "ckstore", "torch"

#: Hot versions that are not encoded during the measurement.
_ALL = 1_000_000

#: Rows of the largest tensor between two that are read.
_STRIDE = 173


def storing(bench: Bench) -> Section:
    """Measure ingests against other tools."""
    bench.report("storing")
    paths = bench.series()
    first, size = (path.stat().st_size for path in (paths[0], paths[-1]))  # A first one may have no moments yet.
    source, packed = Source(bench.work / f"source{paths[0].suffix}"), bench.work / "packed"
    kinds = HOT, HOT_LIVE, INGEST, LIVE, COARSE_INGEST
    roots = {name: bench.work / f"in-{number}" for number, name in enumerate(kinds)}
    stores = {name: ckstore.init(root) for name, root in roots.items()}
    sizes: dict[str, int] = {}

    def keep(keeper: Keeper, number: int) -> None:
        keeper.store(source, packed)
        sizes[keeper.stores] = packed.stat().st_size

    def take(number: int) -> None:
        source.take(paths[number])

    def remove(number: int) -> None:
        packed.unlink(missing_ok=True)

    contenders = [
        Contender(HOT, partial(ingest, roots[HOT], source.path, "exact", hot=_ALL), take, _OURS),
        Contender(ENCODE, partial(encode, roots[HOT]), apart=_OURS),
        Contender(INGEST, partial(ingest, roots[INGEST], source.path, "exact"), apart=_OURS),
        Contender(COARSE_INGEST, partial(ingest, roots[COARSE_INGEST], source.path, "coarse"), apart=_OURS),
        Contender(HOT_LIVE, lambda number: stores[HOT_LIVE].ingest(source.state, run="run", step=number, hot=_ALL)),
        Contender(LIVE, lambda number: stores[LIVE].ingest(source.state, run="run", step=number, hot=0)),
        *(Contender(keeper.stores, partial(keep, keeper), remove) for keeper in KEEPERS),
    ]
    moonclip = None
    if Moonclip.takes(load(paths[0])):
        moonclip = Moonclip(bench.work / "moonclip", len(paths))
        contenders.append(Contender(MOONCLIP, partial(_save_by, moonclip, source)))
    # Every round has another version: an ingest of a version that the store already holds takes no time.
    timings = race(contenders, range(len(paths)), warm=False)
    saves = timings[SAVE]
    if moonclip is not None:
        sizes[MOONCLIP] = moonclip.nbytes // len(paths)
        shutil.rmtree(bench.work / "moonclip")
    rows = [COMPARED]
    for name, found in timings.items():
        shrinks = size / sizes[name] if name in sizes else _shrinks(stores[HOT if name == ENCODE else name])
        rows.append(compared(name, found[1:], saves[1:], size, shrinks))
        if name in stores:
            rows.append(compared(f"{name}, first version", found[:1], saves[:1], first))
    for name, store in stores.items():
        store.close()
        shutil.rmtree(roots[name])
    packed.unlink()
    source.path.unlink()
    return Section(
        "Storing",
        "Each round stores the next version of the run. `ingest`: open the store, and store a file. `live ingest`: "
        "`store.ingest(state_dict)` in a process that has ingested the parent. *Hot*: stored unencoded. `encoding` "
        "encodes the hot version before it. *stored*: bytes left, as a part of the original. *ratio*: speed over that "
        "of `torch.save, fsync`.",
        [rows],
    )


def _save_by(moonclip: Moonclip, source: Source, number: int) -> None:
    """Save the version after those before it, and sync the file system."""
    moonclip.save(source.state, number)
    os.sync()


def _shrinks(store: ckstore.Store) -> float:
    """Return original over stored bytes of the versions after the first."""
    rows = store.versions()[1:]
    return sum(row.original_bytes for row in rows) / sum(row.stored_bytes for row in rows)


def restoring(bench: Bench) -> Section:
    """Measure checkouts and state dicts against other tools."""
    root, coarse, hot = bench.store(), bench.store("coarse"), bench.store(hot=1)
    bench.report("restoring")
    number = deepest(root)
    original = bench.series()[number - 1]
    size = original.stat().st_size
    out = bench.work / "out"
    packed = {keeper.restores: bench.work / f"packed-{index}" for index, keeper in enumerate(KEEPERS)}
    source = Source(bench.work / f"source{original.suffix}")
    source.take(original)
    for keeper in KEEPERS:
        keeper.store(source, packed[keeper.restores])

    def remove(_: int) -> None:
        out.unlink(missing_ok=True)

    def contender(name: str) -> Contender:
        return Contender(name, partial(_kept, name, packed[name], out), remove, _THEIRS if name == LOAD else "")

    check_out(root, number, out, 0)
    if not filecmp.cmp(out, original, shallow=False):
        raise AssertionError(f"version {number} is not restored byte for byte")
    latest = len(bench.series())
    resumed = []
    if Moonclip.takes(source.state):
        moonclip = Moonclip(bench.work / "moonclip", 1)
        moonclip.save(source.state, number)
        parts = source.state["model"], source.state["optimizer"]
        resumed.append(Contender(MOONCLIP_RESUME, lambda _: moonclip.resume(*parts)))
    source.state = None
    contenders = [
        Contender(HOT_CHECKOUT, partial(check_out, hot, latest, out), remove, _OURS),
        Contender(HOT_STATE_DICT, partial(state_dict, hot, latest), apart=_OURS),
        Contender(CHECKOUT, partial(check_out, root, number, out), remove, _OURS),
        Contender(STATE_DICT, partial(state_dict, root, number), apart=_OURS),
        Contender(COARSE, partial(state_dict, coarse, deepest(coarse)), apart=_OURS),
        *map(contender, packed),
        *resumed,
    ]
    timings = race(contenders, range(bench.repeat))
    for path in (out, source.path, *packed.values()):
        path.unlink(missing_ok=True)
    shutil.rmtree(bench.work / "moonclip", ignore_errors=True)
    rows = [COMPARED]
    for name, found in timings.items():
        against = COPY if name in (CHECKOUT, HOT_CHECKOUT) else LOAD
        rows.append(compared(name, found, timings[against], size))
    return Section(
        "Restoring",
        "The version with the longest chain, with the time to open the store: as a synced file (`checkout`), or in "
        "memory (`state_dict`; safetensors only maps the file). *ratio*: speed over that of `torch.load`, of checkouts "
        "over that of `cp`. The hot version is the latest of a run.",
        [rows],
    )


def row(bench: Bench) -> Section:
    """Measure one row of the largest tensor."""
    root, out = bench.store(), bench.work / "out"
    bench.report("row")
    number = deepest(root)
    before = _bytes_read()
    check_out(root, number, out, 0)
    whole = _bytes_read() - before
    out.unlink()
    shares: list[float] = []
    opened: list[ckstore.Store] = []
    tensors: list[Any] = []

    def find(_: int) -> None:
        opened.append(ckstore.open(root, "r"))
        version = opened[-1][number]
        tensors.append(version[max(version, key=lambda path: version[path].size)])

    def read(index: int) -> Any:
        before = _bytes_read()
        values = tensors[-1][index * _STRIDE % len(tensors[-1])]
        shares.append(100 * (_bytes_read() - before) / whole)
        return values

    timings = race([Contender("row", read, find)], range(bench.repeat))["row"]
    for store in opened:
        store.close()
    time, share = Spread.of([1e3 * timing.seconds for timing in timings]), Spread.of(shares)
    return Section(
        "One row of a tensor",
        "One row of the largest tensor of the version with the longest chain, which is open but unread. Bytes read are "
        "a part of those of a checkout.",
        [[["measurement", "figure"], ["time", f"{time} ms"], ["bytes read, of a checkout's", f"{share} %"]]],
    )


def _bytes_read() -> int:
    """Return the bytes that this process has read from files so far, with cached ones."""
    return int(Path("/proc/self/io").read_text().split()[1])


def warm_up(paths: list[Path], directory: Path) -> None:
    """Store and restore a small checkpoint here and in the contenders' processes: no code loads during timing."""
    for apart in ("", _OURS):
        race([Contender("", partial(_warm, paths, directory), apart=apart)], [0], warm=False)
    race([Contender("", partial(_kept, LOAD, paths[0], directory), apart=_THEIRS)], [0], warm=False)


def _warm(paths: list[Path], directory: Path, _: int) -> None:
    root, out = directory / "warm", directory / "warm-out"
    for fidelity in FIDELITIES:
        ckstore.init(root).close()
        for step, path in enumerate(paths):
            ingest(root, path, fidelity, step)
        state_dict(root, len(paths), 0)
        check_out(root, len(paths), out, 0)
        out.unlink()
        shutil.rmtree(root)


def ingest(root: Path, source: Path, fidelity: Fidelity, number: int, *, hot: int = 0) -> None:
    """Store a file, from opening the store on."""
    with ckstore.open(root) as store:
        store.ingest(source, run="run", step=number, hot=hot, policy=fidelity)


def encode(root: Path, _: int) -> None:
    """Encode the hot versions but the latest, from opening the store on."""
    with ckstore.open(root) as store:
        store.encode()


def check_out(root: Path, number: int, target: Path, _: int) -> None:
    """Write a version as a synced file, from opening the store on."""
    with ckstore.open(root, "r") as store:
        store[number].checkout(target)


def state_dict(root: Path, number: int, _: int) -> Any:
    """Return a version as a state dict, from opening the store on."""
    with ckstore.open(root, "r") as store:
        return store[number].state_dict()


def _kept(name: str, packed: Path, target: Path, _: int) -> Any:
    """Return a keeper's result; by its name, so that another process finds it."""
    return next(keeper for keeper in KEEPERS if keeper.restores == name).restore(packed, target)
