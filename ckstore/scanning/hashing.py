"""Reads every file of a version once, in order: hashes each byte, and holds objects in memory to be coded.

An exact ingest codes objects while their bytes are in memory. Other objects are read a second time: all of a coarse
version, which is planned as a whole, and bundles of distant members. Their bytes are compared with the digests of the
first pass, or with its CRC-32 if they are rounded, so that a file that changes in between is refused and never stored
as a mixture. Memory stays bounded for any order and number of tensors in a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from operator import attrgetter
from typing import cast

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import FileLayout, opaque
from ckstore.formats.skeleton import Checks, fill_crcs, pieces, stored_crcs
from ckstore.formats.sources import CompositeSource
from ckstore.formats.torch.live_state import StateDictSource
from ckstore.objects.continuation import Cut
from ckstore.objects.identity import content_id
from ckstore.objects.units import Member, plan_units
from ckstore.runtime.blocks import empty
from ckstore.runtime.checksum import crc32
from ckstore.scanning.content_cuts import plan_cuts
from ckstore.scanning.scanned import ScannedFile, ScannedVersion

#: Bytes that are read at once.
BLOCK = 1 << 20

#: Stretches of at least this size are read to their final memory; others are copied there from a block of many.
_LARGE = 1 << 18

#: Objects are estimated, planned and encoded in windows of about this many bytes.
WINDOW = 32 << 20

#: Windows in memory.
_WINDOWS = 3

#: The size of short windows, and of windows of data that stay in place.
_SHORT = 8 << 20

Progress = Callable[[int], None]


def hash_version(version: ScannedVersion, *, force: bool, progress: Progress | None = None) -> None:
    """Read every byte once: fill in digests, skeletons, CRCs, units and content ids.

    Raises `InputError` if a CRC in a file does not agree with its bytes, unless `force`, which makes that file opaque
    bytes.
    """
    while True:
        try:
            for _ in _Reading(version, progress, window=0).windows():
                pass
        except _CrcMismatch as mismatch:
            if not force:
                raise mismatch.refusal() from None
            mismatch.file.layout = opaque(mismatch.file.source)
            mismatch.file.digests.clear()
            mismatch.file.checksums.clear()
            progress = None
            continue
        return


def held_windows(
    version: ScannedVersion, progress: Progress | None = None, *, short: bool = False
) -> Generator[list[int], None, None]:
    """Plan the units at once, then read every byte once, and yield objects while their bytes are in memory.

    A window has the numbers of units whose content ids are known. `version.read` takes them from memory until the third
    next window is requested (one is being read, one estimated, one coded). Units in too many pieces are not held; it
    reads them again. Windows are `short` for units that are only written, since that begins sooner then. Raises
    `InputError` if a CRC in a file does not agree with its bytes.
    """
    reading = _Reading(version, progress, window=_SHORT if short else WINDOW)

    def windows() -> Generator[list[int], None, None]:
        try:
            yield from reading.windows()
        except _CrcMismatch as mismatch:
            raise mismatch.refusal() from None

    return windows()


class _CrcMismatch(Exception):  # noqa: N818 - a signal between functions of this module, not an error of its own
    def __init__(self, file: ScannedFile, name: str) -> None:
        super().__init__(name)
        self.file = file
        self.name = name

    def refusal(self) -> InputError:
        return InputError(
            f"{self.file.path} is damaged: entry {self.name} does not match its CRC-32; get the file again, "
            "or store it as opaque bytes with `force`."
        )


class _Reading:
    """One pass over the files of a version, in order; fills in its units, content ids and the facts of its files."""

    def __init__(self, version: ScannedVersion, progress: Progress | None, *, window: int) -> None:
        self._version = version
        self._progress = progress
        files = [(version.prefix(file), file.layout) for file in version.files]
        cuts = plan_cuts(version)
        version.units = plan_units(files, cuts)
        if version.continued is not None:
            version.alone = version.units
            version.units = version.continued(Cut(files, version.units), cuts)
        self._held = _Held(version, window) if window else None
        version.contents = [""] * len(version.units)
        #: Unit, and first byte in it, of each stretch of an extent.
        self._places: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._stretches: dict[tuple[int, int], list[Member]] = {}
        self._missing = [len(unit.members) for unit in version.units]
        for number, unit in enumerate(version.units):
            position = 0
            for member, nbytes in zip(unit.members, unit.member_bytes, strict=True):
                self._places[member.file, member.extent, member.first] = number, position
                self._stretches.setdefault((member.file, member.extent), []).append(member)
                position += nbytes
        for members in self._stretches.values():
            if len(members) > 1:
                members.sort(key=attrgetter("first"))

    def windows(self) -> Iterator[list[int]]:
        """Yield the held units whose last byte was read, in windows."""
        for number, file in enumerate(self._version.files):
            is_still = isinstance(file.source, StateDictSource | CompositeSource) and file.source.is_still
            yield from self._read_still(number) if is_still else self._read_file(number)
        if self._held is not None:
            yield from self._held.rest()
        self._version.is_hashed = True

    def _read_file(self, number: int) -> Iterator[list[int]]:
        held, file = self._held, self._version.files[number]
        layout = file.layout
        blocks = _Blocks(file, self._progress)
        skeleton = bytearray()
        cuts = list(_cuts(layout, number, self._stretches))
        large = [layout.size, *([] if held is None else _large(cuts))]
        following = iter(cuts)
        extent, member, stop = next(following, (-1, None, layout.size))
        hasher, checksum = blake3(), 0
        target = None if member is None else (yield from self._target(number, extent, member))
        start = 0
        while start < layout.size:
            while large[-1] <= start:
                large.pop()
            in_place = target is not None and stop - start >= _LARGE
            place = target[: stop - start] if target is not None and in_place else None
            view = blocks.read(start, large[-1], place)
            while view:
                part = view[: stop - start]
                if member is None:
                    skeleton += part
                else:
                    hasher.update(part)
                    if held is None:
                        checksum = crc32(part, checksum)
                if target is not None:
                    if not in_place:
                        target[: len(part)] = part
                    target = target[len(part) :]
                view = view[len(part) :]
                start += len(part)
                if start == stop:
                    if member is not None:
                        file.digests[extent, member.first] = hasher.digest()
                        if held is None:
                            file.checksums[extent, member.first] = checksum
                        hasher, checksum = blake3(), 0
                        arrived = self._arrived(number, member)
                        if held is not None and arrived is not None:
                            held.arrived(arrived)
                    extent, member, stop = next(following, (-1, None, layout.size))
                    target = None if member is None else (yield from self._target(number, extent, member))
        blocks.check()
        file.skeleton = fill_crcs(bytes(skeleton), layout, [0] * len(file.crcs))
        file.source.check_unchanged()

    def _read_still(self, number: int) -> Iterator[list[int]]:
        """Read a state dict that does not change while it is read: only bundles are copied."""
        held, file = self._held, self._version.files[number]
        source = cast("StateDictSource | CompositeSource", file.source)
        skeleton = bytearray()
        position = 0
        whole = blake3()
        for extent, member, stop in _cuts(file.layout, number, self._stretches):
            if member is None:
                part = source.pread(position, stop - position)
                whole.update(part)
                skeleton += part
            else:
                unit, first = self._places[number, extent, member.first]
                is_alone = len(self._version.units[unit].members) == 1
                target = None if held is None or is_alone else (yield from held.target(unit, first))
                hasher = blake3()
                for start in range(position, stop, BLOCK):
                    view = source.view(start, min(BLOCK, stop - start))
                    whole.update(view)
                    hasher.update(view)
                    if target is not None:
                        target[: len(view)] = view
                        target = target[len(view) :]
                file.digests[extent, member.first] = hasher.digest()
                arrived = self._arrived(number, member)
                if held is not None and is_alone:
                    yield from held.lend(unit, source.view(position, stop - position))
                elif held is not None and arrived is not None:
                    held.arrived(arrived)
            if self._progress is not None:
                self._progress(stop - position)
            position = stop
        file.blake3 = whole.hexdigest()
        file.crcs = source.crcs() if isinstance(source, StateDictSource) else stored_crcs(source, file.layout)
        file.skeleton = fill_crcs(bytes(skeleton), file.layout, [0] * len(file.crcs))

    def _target(self, file: int, extent: int, member: Member) -> Generator[list[int], None, memoryview | None]:
        """Return the memory for the bytes of a stretch, if they are held; see `_Held.target`."""
        if self._held is None:
            return None
        return (yield from self._held.target(*self._places[file, extent, member.first]))

    def _arrived(self, file: int, member: Member) -> int | None:
        """Record that a stretch was hashed; return the number of its unit if that is complete now."""
        version = self._version
        number, _ = self._places[file, member.extent, member.first]
        self._missing[number] -= 1
        if self._missing[number]:
            return None
        unit = version.units[number]
        digests = [version.files[one.file].digests[one.extent, one.first] for one in unit.members]
        version.contents[number] = content_id(unit.dtype, unit.chunk, digests)
        return number


class _Blocks:
    """Reads a file block by block, and hashes and checks every byte."""

    def __init__(self, file: ScannedFile, progress: Progress | None) -> None:
        self._file = file
        self._block = np.empty(min(BLOCK, file.layout.size), np.uint8).data
        # The file of a state dict in memory has valid checksums by construction.
        self._checks = None if isinstance(file.source, StateDictSource) else Checks(file.layout)
        self._whole = blake3()
        self._progress = progress

    def read(self, start: int, stop: int, place: memoryview | None) -> memoryview:
        """Return bytes from `start` on: some before `stop`, in a reused block, or as many as fit into `place`."""
        view = self._block[: stop - start] if place is None else place[:BLOCK]
        self._file.source.read_into(start, view)
        self._whole.update(view)
        if self._checks is not None:
            self._checks.update(start, view)
        if self._progress is not None:
            self._progress(len(view))
        return view

    def check(self) -> None:
        """Set the digest and the stored CRCs of the file, which was read; raise `_CrcMismatch` unless they match."""
        file = self._file
        file.blake3 = self._whole.hexdigest()
        source = file.source
        file.crcs = source.crcs() if isinstance(source, StateDictSource) else stored_crcs(source, file.layout)
        if self._checks is not None:
            for checked, expected, found in zip(file.layout.checked, file.crcs, self._checks.results, strict=True):
                if expected != found:
                    raise _CrcMismatch(file, checked.name)


class _Held:
    """The bytes of objects that are being read and coded: windows in reused memory, and incomplete bundles."""

    def __init__(self, version: ScannedVersion, window: int) -> None:
        self._version = version
        self._size = window
        self._window: list[int] = []
        self._filled = 0
        #: Windows that were passed on and may still be used.
        self._before: deque[list[int]] = deque()
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}
        self._waiting = 0
        self._late: dict[int, None] = {}

    def target(self, number: int, position: int) -> Generator[list[int], None, memoryview | None]:
        """Return the memory for the bytes of a unit from `position` on; None if they are not kept.

        Yields a window if the unit has no room next to the kept ones.
        """
        buffer = self._buffers.get(number)
        if buffer is None and number not in self._late:
            unit = self._version.units[number]
            nbytes = unit.nbytes
            if self._filled and self._filled + nbytes > self._size:
                yield from self._close()
            if len(unit.members) > 1:
                if self._waiting + nbytes > WINDOW:
                    self._late[number] = None
                    return None
                self._waiting += nbytes
            buffer = self._buffers[number] = empty(nbytes, np.uint8)
        return None if buffer is None else memoryview(buffer)[position:]

    def lend(self, number: int, data: memoryview) -> Iterator[list[int]]:
        """Record a unit of one member, whose bytes stay in place; yield a window once there are enough of them."""
        unit = self._version.units[number]
        self._version.held[unit.members[0]] = np.frombuffer(data, f"u{ITEM_SIZES[unit.dtype]}")
        self._window.append(number)
        self._filled += unit.nbytes
        if self._filled >= _SHORT:
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
            if self._filled >= self._size:
                yield from self._close()
        if self._window:
            yield from self._close()

    def _close(self) -> Iterator[list[int]]:
        """Yield the complete units; at the next request the oldest window is coded, and its memory is free again."""
        self._before.append(self._window)
        self._window, self._filled = [], 0
        yield self._before[-1]
        if len(self._before) == _WINDOWS:
            for number in self._before.popleft():
                self._version.held.pop(self._version.units[number].members[0], None)


def _cuts(
    layout: FileLayout, file: int, stretches: dict[tuple[int, int], list[Member]]
) -> Iterator[tuple[int, Member | None, int]]:
    """Yield the file cut into (extent, stretch of it, end) and (-1, None, end) for the skeleton, in order."""
    for piece in pieces(layout):
        if piece.extent < 0:
            yield -1, None, piece.stop
            continue
        size = ITEM_SIZES[layout.extents[piece.extent].dtype]
        for member in stretches.get((file, piece.extent), []):
            yield piece.extent, member, piece.start + (member.first + member.count) * size


def _large(cuts: Sequence[tuple[int, Member | None, int]]) -> list[int]:
    """Return the beginnings of large stretches, the last one first."""
    begins = []
    start = 0
    for _, member, stop in cuts:
        if member is not None and stop - start >= _LARGE:
            begins.append(start)
        start = stop
    return begins[::-1]
