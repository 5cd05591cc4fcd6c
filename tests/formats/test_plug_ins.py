"""Formats of other distributions: found by their entry points, and checked like our own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.errors import CkstoreError, InputError
from ckstore.formats import detect
from ckstore.formats.layout import Checked, Extent, FileLayout, Format, Source, Tensor, TensorRef
from tests.formats.reading import assert_comes_back, in_memory, saved, zipped

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-format.md"


def weights(seed: int = 0) -> bytes:
    """A file of the format of the page."""
    values = np.random.default_rng(seed).standard_normal(300 * 200 + 7).astype("<f4")
    header = json.dumps({"w": [300, 200], "b": [7]}).encode()
    return b"WEIGHTS1" + struct.pack("<I", len(header)) + header + values.tobytes()


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    detect._others.cache_clear()
    yield
    detect._others.cache_clear()


def install(place: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Install a distribution with the page's module, and one entry point."""
    (place / "weights_format.py").write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    info = place / "weights_format-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weights-format\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[ckstore.formats]\nweights = {value}\n")
    monkeypatch.syspath_prepend(place)
    invalidate_caches()


def test_a_distribution_adds_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "weights_format:FORMAT")
    assert assert_comes_back(weights()).kind == "weights"
    (tmp_path / "x").write_bytes(weights())
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "x", run="a", step=1, hot=0, verify=True)
        version = store["a@1"]
        expected = np.frombuffer(weights(), "<f4", 60_000, len(weights()) - 240_028).reshape(300, 200)
        np.testing.assert_array_equal(version["w"][10:20], expected[10:20])
        assert version.state_dict()["w"].shape == (300, 200)
    monkeypatch.setattr(detect, "_others", lambda: ())
    with ckstore.open(tmp_path / "store") as store:  # As where the distribution is not installed.
        version = store["a@1"]
        np.testing.assert_array_equal(version["w"][10:20], expected[10:20])
        version.checkout(tmp_path / "back")
        with pytest.raises(ckstore.CkstoreError, match="no readable tensors"):
            version.state_dict()
    assert (tmp_path / "back").read_bytes() == weights()


def test_distributions_are_searched_only_for_files_that_no_format_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_others", lambda: pytest.fail("searched"))
    assert detect.parse(in_memory(saved({"a": np.ones(3)}))).kind == "torch-zip"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("weights_format:NONE", "cannot be imported"),
        ("no_such_module:FORMAT", "cannot be imported"),
        ("weights_format:parse", "is no `Format`"),
    ],
)
def test_a_broken_distribution_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, why: str
) -> None:
    install(tmp_path, monkeypatch, value)
    with pytest.raises(CkstoreError, match=f"The file format weights .*{why}"):
        detect.parse(in_memory(b"text"))


def layout(extents: list[Extent], tensors: list[Tensor] | None = None, **other: Any) -> FileLayout:
    return FileLayout("x", 100, extents, tensors or [], **other)


EXTENT = Extent(20, "float32", (4,), ("a",))
TENSOR = Tensor(("a",), "float32", (4,), (1,), 0, 0)


def test_files_in_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its parser cannot read stays bytes, like a damaged file of our own formats."""

    def parse(source: Source) -> FileLayout:
        made = FileLayout("x", source.size, tree={})
        made.tree["a"] = made.add(("a",), "uint8", ({b"good": (4,)}[source.pread(1, 4)]), 5)
        return made

    formats = (Format("x", lambda head: head[:1] == b"x", parse),)
    monkeypatch.setattr(detect, "_others", lambda: formats)
    data = zipped({"one.x": b"xgood1234", "two.x": b"xbad.1234"})
    assert [tensor.path for tensor in assert_comes_back(data).tensors] == [("one", "a")]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (layout([EXTENT, Extent(32, "float32", (4,), ("b",))]), "extents"),
        (layout([Extent(88, "float32", (4,), ("a",))]), "extents"),
        (layout([Extent(-4, "float32", (4,), ("a",))]), "extents"),
        (layout([Extent(20, "float32", (-1,), ("a",)), EXTENT]), "extents"),
        (layout([Extent(20, "uint8", (-(1 << 62), 1 << 62), ("a",))]), "extents"),
        (layout([Extent(20, "text", (4,), ("a",))]), "KeyError"),
        (layout([Extent("20", "uint8", (4,), ("a",))]), "TypeError"),  # type: ignore[arg-type]
        (layout([EXTENT], [Tensor(("a",), "float32", (5,), (1,), 0, 0)]), "tensors"),
        (layout([EXTENT], [Tensor(("a",), "float32", (4,), (1,), 0, 1)]), "tensors"),
        (layout([EXTENT], [Tensor(("a",), "float32", (4,), (1,), 0, -1)]), "tensors"),
        (layout([EXTENT], [Tensor(("a",), "float32", (4,), (-1,), 0, 3)]), "tensors"),
        (layout([EXTENT], [Tensor(("a",), "float32", (4,), (1,), 1, 0)]), "tensors"),
        (layout([EXTENT], [Tensor(("a",), "float64", (2,), (1,), 0, 0)]), "tensors"),
        (layout([EXTENT], [Tensor(("a",), "float32", (4,), (), 0, 0)]), "tensors"),
        (layout([], checked=[Checked("a", 0, 101, (4,))]), "checked"),
        (FileLayout("x", 99), "size and kind"),
        (FileLayout("torch-zip", 100), "size and kind"),
        (layout([EXTENT], [TENSOR]), "each tensor once"),
        (layout([EXTENT], [TENSOR], tree=[TensorRef(0), TensorRef(1)]), "each tensor once"),
        (layout([EXTENT], [TENSOR, TENSOR], tree=[TensorRef(0), TensorRef(1)]), "each tensor once"),
        ("no layout", "AttributeError"),
    ],
)
def test_an_unsound_layout_is_refused(monkeypatch: pytest.MonkeyPatch, found: Any, why: str) -> None:
    made = Format("x", lambda head: True, lambda source: found)
    monkeypatch.setattr(detect, "_others", lambda: (made,))
    with pytest.raises(InputError, match=f"f is not a sound x file: its .*{why}.*`force`"):
        detect.parse(in_memory(bytes(100)), "f")
