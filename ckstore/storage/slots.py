"""Sets of slots of a pack, as short texts: `0-3,7`, or `*` for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

ALL = "*"
#: Largest number of ranges in a text; sets with more are widened to all slots.
_MOST = 500
_RANGE = "[0-9]{1,15}(?:-[0-9]{1,15})?"
Slots = Annotated[str, Meta(pattern=rf"\A(?:\*|{_RANGE}(?:,{_RANGE})*)\Z", max_length=32 * _MOST)]


def to_text(slots: Iterable[int]) -> str:
    """Return the text of some slots; empty if there are none."""
    ranges: list[list[int]] = []
    for slot in sorted(slots):
        if ranges and slot <= ranges[-1][1] + 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    if len(ranges) > _MOST:
        return ALL
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def among(text: str, slots: Iterable[int]) -> set[int]:
    """Return the slots that are in the set of a text; none if it is empty."""
    if text == ALL:
        return set(slots)
    parts = [part.partition("-") for part in text.split(",")] if text else []
    ranges = [(int(first), int(last or first)) for first, _, last in parts]
    return {slot for slot in slots if any(first <= slot <= last for first, last in ranges)}
