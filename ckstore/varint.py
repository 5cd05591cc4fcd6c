"""Numbers of variable length, seven bits per byte, lowest first; each byte but the last has bit 7 set."""

from __future__ import annotations

#: Bytes of the longest number: 63 bits.
LONGEST = 9

_ONE_BYTE = [bytes([number]) for number in range(128)]


def varint(number: int) -> bytes:
    """Write a number from 0 to 2^63 − 1."""
    if number < 128:
        return _ONE_BYTE[number]
    result = bytearray()
    while number >= 128:
        result.append(number & 127 | 128)
        number >>= 7
    result.append(number)
    return bytes(result)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number; return it and its end.

    Raises
    ------
    ValueError
        The number exceeds `data` or 63 bits.
    """
    number = shift = 0
    for end, byte in enumerate(data[at : at + LONGEST], at + 1):
        number |= (byte & 127) << shift
        if byte < 128:
            return number, end
        shift += 7
    raise ValueError("it holds a number that is cut off or too long")
