"""A staged state is read in place: the stored bytes do not depend on that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ckstore.formats.torch.live_state import LiveState, describe_state_dict
from ckstore.objects import units
from ckstore.saving.staging import Area, Packed, StagedStates
from ckstore.scanning.hashing import hash_version, held_windows
from ckstore.scanning.inputs import scan_state_dict
from ckstore.scanning.scanned import ScannedVersion


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "PART", 1 << 17)


def state() -> dict[str, Any]:
    """Return tied, strided, complex, 8-bit, empty and many small tensors, one of several parts, an array."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(1100, 300, generator=generator)
    return {
        "large": large,
        "tied": large[3:7],
        "strided": torch.randn(300, 512, generator=generator)[:, ::2],
        "complex": torch.randn(300, 256, dtype=torch.complex64, generator=generator),
        "bytes": torch.arange(100_003, dtype=torch.int64).to(torch.uint8),
        "empty": torch.zeros(0, 3),
        "small": {str(number): torch.randn(number, generator=generator) for number in range(50)},
        "array": np.arange(7, dtype=">f8"),
        "step": 7,
    }


@pytest.fixture(params=["new", "mapped"])
def staged(request: pytest.FixtureRequest) -> Iterator[LiveState]:
    packed = Packed(describe_state_dict(state()))
    area = Area()
    area.reserve(packed.stop)
    if request.param == "mapped":
        area.populate()
    area.stage(packed)
    yield StagedStates(area.descriptor).read(packed.start, packed.stop)
    area.close()


def read(scanned: ScannedVersion, *, hold: bool) -> dict[str, bytes]:
    """Return the bytes of every object, by content id."""
    found = {}
    windows = held_windows(scanned) if hold else iter([])
    if not hold:
        hash_version(scanned, force=False)
        windows = iter([list(range(len(scanned.units)))])  # type: ignore[assignment]
    for numbers in windows:
        for number in numbers:
            unit = scanned.units[number]
            bits = scanned.read(unit, 0, unit.count)
            scanned.check(unit, bits)
            found[scanned.contents[number]] = bits.tobytes()
    assert set(found) == set(scanned.contents)
    return found


def test_only_a_first_state_is_written_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are not mapped yet are written at half the price; later ones are copied at less than half of that."""
    written = []

    def pwrite(descriptor: int, view: memoryview, offset: int, write: Callable[..., int] = os.pwrite) -> int:
        written.append(view.nbytes)
        return write(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    described = describe_state_dict(state())
    packed = Packed(described)
    area = Area()
    area.reserve(packed.stop)
    for _ in range(2):
        area.stage(packed)
        area.populate()
        assert sum(written) == sum(extent.nbytes for extent in described.extents)
    larger = Packed(described, 2 * packed.stop)
    area.reserve(larger.stop)
    area.stage(larger)
    assert sum(written) == 2 * sum(extent.nbytes for extent in described.extents)
    area.close()


@pytest.mark.parametrize("hold", [False, True])
def test_a_staged_state_equals_its_copy(staged: LiveState, hold: bool) -> None:
    assert staged.is_still
    still, copied = scan_state_dict(staged), scan_state_dict(replace(staged, is_still=False))
    assert read(still, hold=hold) == read(copied, hold=hold) == read(scan_state_dict(state()), hold=hold)
    for one, other in zip(still.files, copied.files, strict=True):
        assert (one.blake3, one.skeleton, one.crcs, one.digests) == (
            other.blake3, other.skeleton, other.crcs, other.digests
        )  # fmt: skip
    assert still.units == copied.units


def test_nothing_is_copied_but_bundles(staged: LiveState) -> None:
    scanned = scan_state_dict(staged)
    lent = 0
    for numbers in held_windows(scanned):
        for number in numbers:
            unit = scanned.units[number]
            bits = scanned.held[unit.members[0]]
            assert not bits.flags.writeable
            lent += bits.base is not None and len(unit.members) == 1
    assert lent == sum(len(unit.members) == 1 for unit in scanned.units) > 4
