"""Encode elements in coded order as a payload: `encode.c`, with `survey.c`, `plan.c` and `write.c` for its steps.

`directory` and `encoder` are addresses of a directory and of an encoder's arrays, as in `encoder.h`.
"""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_plan_payload = function("plan_payload", "piipp")
_write_payload = function("write_payload", "piippp")
_narrow = function("narrow", "pp")

CELLS = 1 << 16
"""The maximal number of cells of a histogram."""

PLANE_BYTES, STREAM_BYTES = 4, 16
"""Bytes of an element's planes, and of its part of the streams, at most."""

STREAM_SPARE, DIRECTORY_BYTES = 1 << 16, 7 << 20
"""Bytes of the streams in addition, and of the directory, at most."""

FACTS = 7
"""The number of facts about a payload; the first is the bytes of the narrowest type of all elements, the second is 0 if
all are 0."""


def plan_payload(coded: Array, grouped: bool, number: int, directory: int, encoder: int) -> int:
    """Plan the payload of signed elements in the first `number` groups; return its bytes.

    Write its parts into the encoder's arrays, and its facts behind them.
    """
    return check(_plan_payload(id(coded), grouped, number, directory, encoder))


def write_payload(
    coded: Array, grouped: bool, classes_check: int, directory: int, encoder: int, payload: Array
) -> None:
    """Write the planned payload of these elements into `payload` (uint8), with 0 in place of its checksum."""
    check(_write_payload(id(coded), grouped, classes_check, directory, encoder, id(payload)))


def narrow(wide: Array, narrowed: Array) -> None:
    """Convert signed integers to a narrower dtype, which holds them."""
    check(_narrow(id(wide), id(narrowed)))
