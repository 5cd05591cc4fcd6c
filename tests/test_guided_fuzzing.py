"""Guided fuzzing: its initial inputs are accepted, truncated ones are refused, and faults come through."""

from __future__ import annotations

import pytest

from tests.guided_fuzzing import TARGETS, reader, seeds, taken


@pytest.mark.parametrize("target", TARGETS)
def test_seeds(target: str) -> None:
    read = reader(target)
    assert any(taken(read, data) for data in seeds(target))
    assert not taken(read, seeds(target)[0][:-1])


def test_a_fault_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        taken(lambda data: 1 / len(data), b"")
