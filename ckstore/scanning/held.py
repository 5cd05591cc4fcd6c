"""The bytes of objects that are being read and coded: a few windows of them, in memory that is reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator

import numpy as np
import numpy.typing as npt

from ckstore.dtypes import ITEM_SIZES
from ckstore.scanning.scanned import ScannedVersion

#: Objects are estimated, planned and encoded in windows of about this many bytes.
WINDOW = 32 << 20

#: Windows in memory.
_WINDOWS = 3

#: The window size for data that stays in place, whose writing begins sooner.
_LENT = 8 << 20

#: The alignment of objects in memory: NumPy needs aligned items, and the processor profits from aligned cache lines.
_ALIGNMENT = 64


class Held:
    """The bytes of objects that are being read and coded: some windows, and incomplete bundles.

    Attributes
    ----------
    windows
        The number of windows passed on.
    """

    def __init__(self, version: ScannedVersion) -> None:
        self.windows = 0
        self._version = version
        self._arenas = deque(np.empty(WINDOW, np.uint8) for _ in range(_WINDOWS))
        self._used = 0
        self._window: list[int] = []
        self._filled = 0
        #: Windows that were passed on and may still be used.
        self._before: deque[list[int]] = deque()
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}
        self._waiting = 0
        self._late: dict[int, None] = {}

    def target(self, number: int, position: int) -> Generator[list[int], None, npt.NDArray[np.uint8] | None]:
        """Return the memory for the bytes of a unit from `position` on; None if they are not kept.

        Yields a window if the unit has no room next to the kept ones.
        """
        buffer = self._buffers.get(number)
        if buffer is None and number not in self._late:
            unit = self._version.units[number]
            nbytes = unit.nbytes
            if self._filled and self._filled + nbytes > WINDOW:
                yield from self._close()
            if len(unit.members) > 1:
                if self._waiting + nbytes > WINDOW:
                    self._late[number] = None
                    return None
                self._waiting += nbytes
                buffer = np.empty(nbytes, np.uint8)
            else:
                if self._used + nbytes <= WINDOW:
                    buffer = self._arenas[0][self._used : self._used + nbytes]
                    self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
                else:
                    buffer = np.empty(nbytes, np.uint8)
            self._buffers[number] = buffer
        return None if buffer is None else buffer[position:]

    def lend(self, number: int, data: memoryview) -> Iterator[list[int]]:
        """Record a unit of one member, whose bytes stay in place; yield a window once there are enough of them."""
        unit = self._version.units[number]
        self._version.held[unit.members[0]] = np.frombuffer(data, f"u{ITEM_SIZES[unit.dtype]}")
        self._window.append(number)
        self._filled += unit.nbytes
        if self._filled >= _LENT:
            yield from self._close()

    def arrived(self, number: int) -> None:
        """Record that all bytes of a unit were read."""
        buffer = self._buffers.pop(number, None)
        if buffer is None:
            return
        unit = self._version.units[number]
        if len(unit.members) > 1:
            self._waiting -= unit.nbytes
        buffer.flags.writeable = False
        self._version.held[unit.members[0]] = buffer.view(f"u{ITEM_SIZES[unit.dtype]}")
        self._window.append(number)
        self._filled += unit.nbytes

    def rest(self) -> Iterator[list[int]]:
        """Yield the last window, and windows of units that were not kept."""
        if self._window:
            yield from self._close()
        for number in self._late:
            self._window.append(number)
            self._filled += self._version.units[number].nbytes
            if self._filled >= WINDOW:
                yield from self._close()
        if self._window:
            yield from self._close()

    def _close(self) -> Iterator[list[int]]:
        """Yield the complete units; at the next request the oldest window is coded, and its memory is free again."""
        self.windows += 1
        self._before.append(self._window)
        self._window, self._filled, self._used = [], 0, 0
        self._arenas.rotate()
        yield self._before[-1]
        if len(self._before) == _WINDOWS:
            for number in self._before.popleft():
                self._version.held.pop(self._version.units[number].members[0], None)
