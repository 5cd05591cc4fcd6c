"""Exponents of rows and columns as text, for records and for the metadata of arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import NO_EXPONENTS

#: One character for each exponent from -45 to 45: the compression of a manifest codes characters best.
_LETTERS = "".join(chr(code) for code in range(35, 127) if chr(code) != "\\")
_CODES = np.frombuffer(_LETTERS.encode("ascii"), np.uint8)
_MIDDLE = len(_LETTERS) // 2

#: The exponent by the code of its character; an out-of-range value for other characters.
_EXPONENTS = np.array([_LETTERS.find(chr(code)) - _MIDDLE for code in range(256)], np.int16)


def exponents_to_text(exponents: npt.NDArray[np.int16]) -> str | list[int]:
    """Return one character per exponent; beyond 45 octaves, the exponents themselves."""
    if np.abs(exponents.astype(np.int32)).max(initial=0) > _MIDDLE:
        return [int(exponent) for exponent in exponents]
    return _CODES[exponents + _MIDDLE].tobytes().decode("ascii")


def exponents_from_text(text: str | list[int] | None) -> npt.NDArray[np.int16]:
    """Invert `exponents_to_text`, empty for None; raise `ValueError` for invalid text."""
    if text is None:
        return NO_EXPONENTS
    if isinstance(text, str):
        return _exponents_of(text)
    if not all(type(exponent) is int and -(1 << 15) <= exponent < 1 << 15 for exponent in text):
        raise ValueError("Exponents are integers of 16 bits.")
    return np.array(text, np.int16)


@lru_cache(256)
def _exponents_of(text: str) -> npt.NDArray[np.int16]:
    """Return the exponents of a text, read-only and cached: versions of one tensor mostly have the same exponents."""
    codes = np.frombuffer(text.encode("ascii"), np.uint8)
    exponents = _EXPONENTS[codes]
    if codes.size and exponents.min() < -_MIDDLE:
        raise ValueError("Invalid exponents: the text has a character outside the alphabet.")
    exponents.flags.writeable = False
    return exponents
