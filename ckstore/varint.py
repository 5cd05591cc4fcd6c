"""Numbers of variable length, seven bits per byte, lowest first; each byte but the last has bit 7 set."""

from __future__ import annotations

#: Bytes of the longest number: 63 bits.
LONGEST = 9

_ONE_BYTE = [bytes([number]) for number in range(128)]


def varint(number: int) -> bytes:
    """Write a number from 0 to 2^63 − 1."""
    result = bytearray()
    while number >= 128:
        result.append(number & 127 | 128)
        number >>= 7
    result.append(number)
    return bytes(result)


def varints(*parts: int | bytes) -> bytes:
    """Write numbers, and bytes between them."""
    return b"".join([(_ONE_BYTE[one] if one < 128 else varint(one)) if isinstance(one, int) else one for one in parts])


def read_varints(data: bytes, at: int, count: int = 1) -> tuple[list[int], int]:
    """Read numbers, at least one; return them and their end.

    Raises
    ------
    ValueError
        A number exceeds `data` or 63 bits.
    """
    numbers = []
    number = shift = 0
    for end, byte in enumerate(data[at : at + count * LONGEST], at + 1):
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            if len(numbers) == count:
                return numbers, end
            number = shift = 0
        elif shift == 7 * LONGEST:
            break
    raise ValueError("it holds a number that is cut off or too long")
