"""Functions of the shared library that are exported for tests, with arrays as parameters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckstore.kernels.native import check, function

LONGEST = 12
OCTAVES = 64

_code_lengths = function("code_lengths", "ppp")
_set_geometry = function("set_geometry", "iiip")
_cell_of = function("cell_of", "ip")
_choose_bins = function("choose_bins", "ppiippppp")
_list_bins = function("list_bins", "ppiiipppppi")
_symbols_of_cells = function("symbols_of_cells", "pppip")


def code_lengths(counts: npt.NDArray[np.int64], symbols: int, lengths: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Return (the only symbol that occurs or -1, sum of count times length)."""
    bits = np.zeros(1, np.int64)
    counts, lengths = counts[:symbols], lengths[:symbols]
    return check(_code_lengths(id(counts), id(lengths), bits.ctypes.data)), int(bits[0])


def set_geometry(top: int, exact: int, fine: int, geometry: npt.NDArray[np.int64]) -> int:
    """Return the number of cells; `geometry` has the shape (6, OCTAVES)."""
    return _set_geometry(top, exact, fine, geometry.ctypes.data)


def cell_of(number: int, geometry: npt.NDArray[np.int64]) -> int:
    return _cell_of(int(number), geometry.ctypes.data)


def choose_bins(cells, geometry, top, deepest, price, split_bits, splits, floors, losses) -> float:
    prices, bits = np.array([price, split_bits], float), np.zeros(1)
    arrays = (array.ctypes.data for array in (prices, splits, floors, losses, bits))
    _choose_bins(cells.ctypes.data, geometry.ctypes.data, top, deepest, *arrays)
    return float(bits[0])


def list_bins(cells, geometry, top, deepest, all_occur, splits, floors, lowers, raws, counts, limit) -> int:
    arrays = (array.ctypes.data for array in (splits, floors, lowers, raws, counts))
    return _list_bins(cells.ctypes.data, geometry.ctypes.data, top, deepest, all_occur, *arrays, limit)


def symbols_of_cells(geometry, lowers, raws, bins, table) -> None:
    arrays = (array.ctypes.data for array in (geometry, lowers, raws))
    _symbols_of_cells(*arrays, bins, table.ctypes.data)


_code_bits = function("code_bits", "pii")
_code_number = function("code_number", "pi")
_code_bins = function("code_bins", "ppiipp")


class Bits:
    """The bits of a directory in a buffer, which are written or read."""

    def __init__(self, buffer: npt.NDArray[np.uint8], writes: bool) -> None:
        self._buffer = buffer
        self._fields = np.array([buffer.ctypes.data, buffer.size, 0, writes], np.int64)

    @property
    def position(self) -> int:
        return int(self._fields[2])

    def code_bits(self, count: int, value: int = 0) -> int:
        return _code_bits(self._fields.ctypes.data, count, value)

    def code_number(self, value: int = 0) -> int:
        return _code_number(self._fields.ctypes.data, value) % (1 << 64)

    def code_bins(
        self, top: int, bins: int, lowers: npt.NDArray[np.int64], raws: npt.NDArray[np.uint8]
    ) -> tuple[int, int]:
        """Return (top, bins)."""
        tops = np.array([top])
        arrays = lowers.ctypes.data, raws.ctypes.data
        found = _code_bins(self._fields.ctypes.data, tops.ctypes.data, bins, lowers.size, *arrays)
        return int(tops[0]), found
