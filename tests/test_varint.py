"""Numbers of variable length: back as they were, and never read beyond the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.varint import LONGEST, read_varints, varint, varints


@given(st.lists(st.integers(0, 2**63 - 1)), st.binary(max_size=3))
def test_numbers_round_trip(numbers: list[int], before: bytes) -> None:
    data, at = before + b"".join(map(varint, numbers)), len(before)
    assert data == varints(before, *numbers)
    for number in numbers:
        [found], at = read_varints(data, at)
        assert found == number
    assert at == len(data)
    assert not numbers or read_varints(data, len(before), len(numbers)) == (numbers, at)


@pytest.mark.parametrize(("number", "data"), [(0, "00"), (127, "7f"), (128, "8001"), (2**63 - 1, "ff" * 8 + "7f")])
def test_bytes(number: int, data: str) -> None:
    assert varint(number).hex() == data


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * LONGEST, b"\xff" * LONGEST + b"\1"])
def test_truncated_or_overlong_numbers_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="cut off or too long"):
        read_varints(data, 0)
    with pytest.raises(ValueError, match="cut off or too long"):
        read_varints(b"\1" + data, 0, 2)
