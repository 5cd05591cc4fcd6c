"""Numbers of NumPy in trees, read without NumPy."""

from __future__ import annotations

import struct
from typing import Any

from ckstore.formats.layout import Unknown

#: Modules of NumPy 1 and 2 that define its functions.
NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
#: `struct` formats of NumPy's dtypes.
_NUMBERS = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip


def numpy_number(node: Any) -> bool | int | float | complex | None:
    """Return the number of an unknown object that is a NumPy scalar, little-endian; None for anything else."""
    if not isinstance(node, Unknown) or node.name not in [f"{core}.scalar" for core in NUMPY_CORES]:
        return None
    kind, data = node.args if node.args is not None and len(node.args) == 2 else (None, None)
    if not isinstance(kind, Unknown) or not kind.args or not isinstance(data, bytes):
        return None
    order = kind.state[1] if isinstance(kind.state, tuple) and len(kind.state) > 1 else "<"
    code = _NUMBERS.get(kind.args[0]) if isinstance(kind.args[0], str) else None
    if code is None or order not in ("<", "|", "=") or len(data) != struct.calcsize(f"<{code}"):
        return None
    numbers: tuple[Any, ...] = struct.unpack(f"<{code}", data)
    return complex(*numbers) if len(numbers) == 2 else numbers[0]
