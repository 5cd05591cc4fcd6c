"""Opaque bytes are cut by content: files that share bytes share objects, wherever these lie."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.scanning import content_cuts as module
from ckstore.scanning.content_cuts import LEAST, MOST, content_cuts
from tests.formats.reading import in_memory
from tests.formats.test_tar import nemo
from tests.formats.written import tar_bytes

MB = 1 << 20


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def reference(data: bytes) -> list[int]:
    """Return the cuts byte by byte."""
    cuts = [0]
    while len(data) - cuts[-1] > module.MOST:
        length = module.LEAST
        while length < module.MOST:
            word = int.from_bytes(data[cuts[-1] + length : cuts[-1] + length + 4], "little")
            if cuts[-1] + length + 4 <= len(data) and word * 0x9E3779B1 % (1 << 32) < (1 << 32) // module._SHARE:
                break
            length += 1
        cuts.append(cuts[-1] + length)
    return cuts


@pytest.mark.parametrize("seed", range(5))
def test_the_cuts_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for name, value in {"LEAST": 64, "MOST": 256, "_SHARE": 64, "_BLOCK": 32, "_BELOW": np.uint32(1 << 26)}.items():
        monkeypatch.setattr(module, name, value)
    data = noise(8000 + seed, seed)
    cuts = content_cuts(in_memory(b"skipped" + data), 7, len(data))
    assert cuts == reference(data)
    assert len(set(np.diff(cuts))) > 10


@pytest.mark.parametrize("data", [noise(8 * MB), bytes(8 * MB), b"\xb1\x79\x37\x9e" * (2 * MB), b"a" * (MOST + 1)])
def test_parts_have_bounded_sizes(data: bytes) -> None:
    cuts = content_cuts(in_memory(data), 0, len(data))
    sizes = [stop - start for start, stop in pairwise([*cuts, len(data)])]
    assert sum(sizes) == len(data)
    assert all(LEAST <= size <= MOST for size in sizes[:-1])
    assert 0 < sizes[-1] <= MOST


def test_cuts_move_with_the_bytes() -> None:
    data = noise(20 * MB)
    moved = data[: 5 * MB] + b"inserted" + data[5 * MB : 12 * MB] + data[12 * MB + 100_001 :]
    before = {data[start:stop] for start, stop in pairwise(content_cuts(in_memory(data), 0, len(data)))}
    after = {moved[start:stop] for start, stop in pairwise(content_cuts(in_memory(moved), 0, len(moved)))}
    assert len(after - before) <= 6
    assert len(after & before) > 20


def stored(place: Path, files: list[bytes], **options: int) -> list[int]:
    """Store files as versions of one run; return their sizes in the store."""
    with ckstore.init(place / "store") as store:
        for step, data in enumerate(files):
            (place / f"{step}.bin").write_bytes(data)
            store.ingest(place / f"{step}.bin", run="run", step=step, force=True, **options)  # type: ignore[arg-type]
        store.encode()
        for step, data in enumerate(files):
            out = io.BytesIO()
            store[f"run@{step}"].write(out)
            assert out.getvalue() == data
        assert store.verify().problems == []
        return [version.stored_bytes for version in store.versions()]


@pytest.mark.parametrize("options", [{"hot": 0}, {}], ids=["encoded", "hot"])
def test_an_insertion_costs_little(tmp_path: Path, options: dict[str, int]) -> None:
    data = noise(20 * MB)
    first, second = stored(tmp_path, [data, data[: 10 * MB] + b"inserted" + data[10 * MB :]], **options)
    assert first > 20 * MB
    assert second < 2 * MB


def test_files_of_two_runs_share_bytes(tmp_path: Path) -> None:
    data = noise(16 * MB)
    with ckstore.init(tmp_path / "store") as store:
        for name, content in (("a", data), ("b", noise(3 * MB, 1) + data + noise(3 * MB, 2))):
            (tmp_path / name).write_bytes(content)
            store.ingest(tmp_path / name, run=name, step=0, hot=0, force=True)
        assert store["b"].stored_bytes < 10 * MB


def floats(change: Callable[[np.ndarray], None] | None = None) -> bytes:
    values = np.random.default_rng(0).standard_normal(2 * MB).astype("f4")
    if change is not None:
        change(values)
    return b"head" + values.tobytes()


def test_values_that_all_change_a_little_are_stored_as_differences(tmp_path: Path) -> None:
    def change(values: np.ndarray) -> None:
        values *= 1 + np.float32(1e-4) * np.random.default_rng(1).standard_normal(len(values)).astype("f4")

    first, second, third = stored(tmp_path, [floats(), floats(change), floats()], hot=0)
    assert second < 0.6 * first
    assert third < 0.01 * first


def test_bytes_that_change_in_place_are_stored_as_differences(tmp_path: Path) -> None:
    def change(values: np.ndarray) -> None:
        values[[5, 70_000, 900_000]] += 1

    first, second = stored(tmp_path, [floats(), floats(change)], hot=0)
    assert second < 0.001 * first


def test_opaque_files_in_archives_of_checkpoints_are_cut(tmp_path: Path) -> None:
    data = noise(6 * MB)
    archives = [tar_bytes(nemo(0) | {"a": data}), tar_bytes(nemo(0) | {"a": noise(100, 1) + data})]
    first, second = stored(tmp_path, archives, hot=0)
    assert first > 6 * MB
    assert second < 1.5 * MB
    with ckstore.open(tmp_path / "store") as store:
        assert list(store[2].state_dict()) == ["model_weights"]


def test_huge_files_stay_in_large_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 5 * MB)
    (tmp_path / "a.bin").write_bytes(noise(6 * MB))
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "a.bin", hot=0, force=True)
        assert len(store[1]._stored.layout.units) == 2
