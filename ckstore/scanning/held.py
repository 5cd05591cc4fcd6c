"""The bytes of objects that are read and coded at once: some windows of them, in memory that is used again."""

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

#: Windows of what stays where it is begin to be written sooner.
_LENT = 8 << 20

#: Where objects begin in memory: NumPy wants its items aligned, and the processor its cache lines.
_ALIGNMENT = 64


class Held:
    """The bytes of objects that are being read and coded: some windows, and bundles that are not complete yet.

    Attributes
    ----------
    windows
        How many were handed out.
    """

    def __init__(self, version: ScannedVersion) -> None:
        self.windows = 0
        self._version = version
        self._arenas = deque(np.empty(WINDOW, np.uint8) for _ in range(_WINDOWS))
        self._used = 0
        self._window: list[int] = []
        self._filled = 0
        #: Windows that were handed out and may still be used.
        self._before: deque[list[int]] = deque()
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}
        self._waiting = 0
        self._late: dict[int, None] = {}

    def target(self, number: int, position: int) -> Generator[list[int], None, npt.NDArray[np.uint8] | None]:
        """Where the bytes of a unit from `position` on go; None where they are not kept.

        Yields a window where the unit has no room beside what is held.
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
        """Take note of a unit of one member, all of whose bytes are here to stay; yields a window of enough of them."""
        unit = self._version.units[number]
        self._version.held[unit.members[0]] = np.frombuffer(data, f"u{ITEM_SIZES[unit.dtype]}")
        self._window.append(number)
        self._filled += unit.nbytes
        if self._filled >= _LENT:
            yield from self._close()

    def arrived(self, number: int) -> None:
        """Take note that all bytes of a unit were read."""
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
        """The last window, and windows of what was not kept."""
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
        """Yield the units that have come; whoever asks for more has coded the oldest, whose memory is free again."""
        self.windows += 1
        self._before.append(self._window)
        self._window, self._filled, self._used = [], 0, 0
        self._arenas.rotate()
        yield self._before[-1]
        if len(self._before) == _WINDOWS:
            for number in self._before.popleft():
                self._version.held.pop(self._version.units[number].members[0], None)
