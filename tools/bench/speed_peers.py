"""Other ways to store a checkpoint and to get it back, run as their users would on the same file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file

from tools.bench import peers
from tools.bench.speed_bench import Bench, Place, deepest, load, sync
from tools.bench.speed_clock import Contender, race
from tools.bench.speed_contenders import (
    CHECKOUT,
    INGEST,
    LOAD,
    SAVE,
    STATE_DICT,
    Source,
    by_checkout,
    by_load,
    by_state_dict,
    copy_durably,
    store_in_turn,
)
from tools.bench.speed_figures import Line, Section

#: Threads that zstd is given.
_THREADS = 2


@dataclass(frozen=True)
class Keeper:
    """A way to store a checkpoint.

    Attributes
    ----------
    name
        What tables call it.
    store
        Writes a version to a path, durably.
    restore
        Gets it back from the first path: as a durable file at the second, or as tensors that it returns.
    """

    name: str
    store: Callable[[Source, Path], Any]
    restore: Callable[[Path, Path], Any]


def _save_safetensors(source: Source, target: Path) -> None:
    save_file(dict(_flat(source.state)), target)
    sync(target)


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dictionaries by their joined keys: safetensors files hold nothing else."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))


def _zstd(source: Source, target: Path) -> None:
    compressor = zstandard.ZstdCompressor(level=3, threads=_THREADS)
    with source.path.open("rb") as plain, target.open("wb") as packed:
        compressor.copy_stream(plain, packed, size=source.path.stat().st_size)
    sync(target)


def _unzstd(packed: Path, target: Path) -> None:
    with packed.open("rb") as compressed, target.open("wb") as plain:
        zstandard.ZstdDecompressor().copy_stream(compressed, plain)
    sync(target)


def _coder(name: str, encode: peers.Encode, decode: peers.Decode) -> Keeper:
    """A coder of arrays, given the whole file as float32: its tensors begin at multiples of 64 bytes."""

    def pack(source: Source, target: Path) -> None:
        _write(encode(_read(source.path), _dtype(source.path)), target)

    def unpack(packed: Path, target: Path) -> None:
        _write(decode(packed.read_bytes(), "float32"), target)

    return Keeper(name, pack, unpack)


def _dtype(path: Path) -> str:
    """What a file is taken for: single bytes where it is no whole number of floats."""
    return "opaque" if path.stat().st_size % 4 else "float32"


def _read(path: Path) -> peers.Bytes:
    return np.fromfile(path, np.uint8)


def _write(data: bytes | peers.Bytes, target: Path) -> None:
    with target.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


KEEPERS = (
    Keeper(
        "safetensors",
        _save_safetensors,
        lambda packed, target: load_file(packed),
    ),
    Keeper("cp", lambda source, target: copy_durably(source.path, target), copy_durably),
    Keeper(f"zstd -3 -T{_THREADS}", _zstd, _unzstd),
    _coder("ZipNN", peers.zipnn_encode, peers.zipnn_decode),
    _coder("blosc2", peers.blosc_encode, peers.blosc_decode),
)


def storing(bench: Bench) -> Section:
    """Ingest beside peers."""
    section = Section(
        "store_peers",
        "Storing, beside others",
        "The same checkpoints to the medium, `fsync` included; ZipNN and blosc2 with their defaults. The figure is the "
        "speed over that of `torch.save`; stored is what is left of the bytes, without the run's first version.",
        notes=bench.notes,
    )
    for place in bench.places:
        bench.report(f"storing beside others on {place.name}")
        section.lines.extend(_stored(bench, place))
    return section


def _stored(bench: Bench, place: Place) -> Iterator[Line]:
    paths = bench.series()
    packed = place.directory / "packed"
    sizes: dict[str, int] = {}

    def others(source: Source) -> list[Contender]:
        def contender(keeper: Keeper) -> Contender:
            def work(_: int) -> None:
                keeper.store(source, packed)
                sizes[keeper.name] = packed.stat().st_size

            return Contender(keeper.name, work, lambda _: packed.unlink(missing_ok=True))

        return [contender(keeper) for keeper in KEEPERS]

    stored = store_in_turn(paths, place.directory, others=others)
    packed.unlink()
    size = paths[0].stat().st_size
    timings = {name: found[1:] for name, found in stored.timings.items()}
    for name, found in timings.items():
        shrinks = stored.shrinks if name == INGEST else size / sizes.get(name, size)
        what = "ckstore ingest" if name == INGEST else name
        yield Line.compared(what, found, SAVE, timings[SAVE], size, place=place.name, shrinks=shrinks)


def restoring(bench: Bench) -> Section:
    """Checkouts and state dicts beside peers."""
    section = Section(
        "restore_peers",
        "Restoring, beside others",
        "The version with the longest chain back: as a synced file, or as tensors in memory (`state_dict`, "
        "`torch.load`, safetensors, which maps the file and reads nothing yet). The figure is the speed over that of "
        "`torch.load`.",
        notes=bench.notes,
    )
    for place in bench.places:
        bench.report(f"restoring beside others on {place.name}")
        section.lines.extend(_restored(bench, place))
    return section


def _restored(bench: Bench, place: Place) -> Iterator[Line]:
    root, coarse = bench.store(place), bench.store(place, "coarse")
    number = deepest(root)
    out = place.directory / "out.pt"
    packed = {keeper.name: place.directory / f"packed-{index}" for index, keeper in enumerate(KEEPERS)}

    def contender(keeper: Keeper) -> Contender:
        return Contender(
            keeper.name,
            lambda _: keeper.restore(packed[keeper.name], out),
            lambda _: out.unlink(missing_ok=True),
        )

    with bench.copied(bench.series()[number - 1], place) as original:
        source = Source(original, load(original))
        for keeper in KEEPERS:
            keeper.store(source, packed[keeper.name])
        source.state = None
        contenders = [
            replace(by_checkout(root, number, out), name=f"ckstore {CHECKOUT}"),
            replace(by_state_dict(root, number), name=f"ckstore {STATE_DICT}"),
            replace(by_state_dict(coarse, number), name=f"ckstore {STATE_DICT}, coarse version"),
            by_load(original),
            *map(contender, KEEPERS),
        ]
        timings = race(contenders, range(bench.settings.repeat))
        size = original.stat().st_size
    for path in (out, *packed.values()):
        path.unlink(missing_ok=True)
    for name, found in timings.items():
        yield Line.compared(name, found, LOAD, timings[LOAD], size, place=place.name)
