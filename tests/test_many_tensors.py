"""Operations on versions of many small tensors make few calls of Python for each tensor."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.cli.program import run
from ckstore.objects.layouts import LayoutDocument

pytestmark = pytest.mark.local

FEW, MANY = 1000, 3000
#: Most calls of functions written in Python for each further tensor.
MOST = {
    "hot ingest": 27,
    "encode": 2,
    "encoded ingest": 27,
    "state dict": 28,
    "slice": 0,
    "names": 0,
    "ls": 0,
    "ls -l": 0,
    "show": 0,
}


#: Python functions that each thread has called.
_counts: dict[int, int] = {}


def _note(_frame: FrameType, event: str, _argument: Any) -> None:
    if event == "call":
        thread = threading.get_ident()
        _counts[thread] = _counts.get(thread, 0) + 1


def _count() -> None:
    """Begin to count, before any thread starts: those of pools stay for later operations."""
    gc.disable()
    threading.setprofile(_note)
    sys.setprofile(_note)


def calls(operation: Callable[[], object]) -> int:
    """Return the number of Python functions that an operation calls, in all threads."""
    before = sum(_counts.values())
    operation()
    return sum(_counts.values()) - before


def state(tensors: int, seed: int) -> dict[str, torch.Tensor]:
    values = torch.randn(tensors, 2, generator=torch.Generator().manual_seed(seed))
    return {f"layer{number // 10}.part{number % 10}.weight": values[number].clone() for number in range(tensors)}


def measured(place: Path, tensors: int) -> dict[str, int]:
    found: dict[str, int] = {}
    with ckstore.init(place) as store:
        store.ingest(state(tensors, 0), run="hot", step=0, hot=9)
        given = state(tensors, 1)
        found["hot ingest"] = calls(lambda: store.ingest(given, run="hot", step=1, hot=9))
        found["encode"] = calls(lambda: store.encode("hot@1"))
        store.ingest(state(tensors, 2), run="encoded", step=0, hot=0)
        given = state(tensors, 3)
        found["encoded ingest"] = calls(lambda: store.ingest(given, run="encoded", step=1, hot=0))
    for name, operation in {
        "state dict": lambda version: version.state_dict(),
        "slice": lambda version: version["layer7.part3.weight"][0],
        "names": list,
    }.items():
        with ckstore.open(place, "r") as store:
            found[name] = calls(lambda: operation(store["encoded@1"]))  # noqa: B023
    for verb in ("ls", "ls -l", "show"):
        found[verb] = calls(lambda: run(["--store", str(place), *verb.split(), "encoded@1"]))  # noqa: B023
    return found


def test_only_wanted_tensors_become_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing takes columns, and a slice its tensor alone."""
    made: list[tuple[str, int]] = []

    def noted(part: str, make: Callable[[Any, int, int], Any]) -> Callable[[Any, int, int], Any]:
        def note(layout: Any, first: int, last: int) -> Any:
            made.append((part, last - first))
            return make(layout, first, last)

        return note

    with ckstore.init(tmp_path / "store") as store:
        store.ingest(state(FEW, 0), run="r", hot=0)
    for part in ("_extents", "_tensors", "_checked"):
        monkeypatch.setattr(LayoutDocument, part, noted(part, getattr(LayoutDocument, part)))
    for verb in ("ls", "ls -l", "show"):
        run(["--store", str(tmp_path / "store"), *verb.split(), "r"])
    assert made == []
    with ckstore.open(tmp_path / "store", "r") as store:
        version = store["r"]
        assert len(list(version)) == len(version) == FEW
        assert version["layer7.part3.weight"][0] == state(FEW, 0)["layer7.part3.weight"][0]
        assert sorted(set(made)) == [("_extents", 1), ("_tensors", 1)]
        np.testing.assert_array_equal(version.arrays["layer7.part4.weight"], state(FEW, 0)["layer7.part4.weight"])


def test_layouts_are_freed_without_the_collector(tmp_path: Path) -> None:
    """It counts no tensors, so that it would come late."""
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(state(FEW, 0), run="r", hot=0)
        data = store["r"]._stored.layout.data
    gc.disable()
    try:
        layout = LayoutDocument.decode(data)
        [file] = layout.files
        for rows in (file.tensors, file.extents, layout.units):
            assert [rows[0], *rows][0] == rows[-len(rows)]
        assert layout.wrong_part(gaps=False) == ""
        columns = weakref.ref(layout.starts)
        del layout, file, rows
        assert columns() is None
    finally:
        gc.enable()


def test_calls_for_each_tensor(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, get_context("spawn"), _count) as pool:
        few, many = [pool.submit(measured, tmp_path / str(tensors), tensors).result(300) for tensors in (FEW, MANY)]
    each = {name: (many[name] - few[name]) / (MANY - FEW) for name in MOST}
    for name, most in MOST.items():
        assert each[name] <= most, (name, each)
