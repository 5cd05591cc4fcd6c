"""Reads every file of a version once, in order: hashes each byte, and holds objects in memory to be coded.

An exact ingest codes objects while their bytes are in memory. Other objects are read a second time: all of a coarse
version, which is planned as a whole, and bundles of distant members. Their bytes are compared with the digests of the
first pass, or with its CRC-32 if they are rounded, so that a file that changes in between is refused and never stored
as a mixture. Memory stays bounded for any order and number of tensors in a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import opaque
from ckstore.formats.skeleton import Checks, fill_crcs, stored_crcs
from ckstore.formats.sources import CompositeSource
from ckstore.formats.torch.live_state import StateDictSource
from ckstore.objects.continuation import Cut
from ckstore.objects.identity import content_id
from ckstore.objects.units import plan_units
from ckstore.runtime.blocks import aligned, empty
from ckstore.runtime.checksum import crc32
from ckstore.scanning.content_cuts import plan_cuts
from ckstore.scanning.scanned import ScannedFile, ScannedVersion

#: Bytes that are read at once.
BLOCK = 1 << 20

#: Stretches of at least this size are read to their final memory; others are copied there from a block of many.
_LARGE = 1 << 18

#: Stretches below this many bytes on average are hashed together, and how many of them a block must have.
_SMALL = 1 << 9
_MANY = 16

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
        self._missing = [len(unit.members) for unit in version.units]

    def windows(self) -> Iterator[list[int]]:
        """Yield the held units whose last byte was read, in windows."""
        for file, cuts in zip(self._version.files, _cuts_of(self._version), strict=True):
            yield from self._read_file(file, cuts)
        if self._held is not None:
            yield from self._held.rest()
        self._version.is_hashed = True

    def _read_file(self, file: ScannedFile, cuts: _Cuts) -> Iterator[list[int]]:
        held, stops, size = self._held, cuts.stops, file.layout.size
        blocks = _Blocks(file, self._progress)
        skeleton = bytearray()
        lent = self._lent(cuts) if blocks.is_still else set()
        begins = {*([] if held is None else cuts.large()), *(cuts.begins[at] for at in lent)}
        large = [size, *sorted(begins, reverse=True)]
        hasher, checksum, at, start = blake3(), 0, 0, 0
        while start < size:
            while large[-1] <= start:
                large.pop()
            if at in lent:
                yield from self._lend(file, cuts, at, blocks)
                at, start = at + 1, stops[at]
                continue
            if start == cuts.begins[at]:
                target = None if held is None else (yield from held.target(cuts.units[at], cuts.positions[at]))
            place = target[: stops[at] - start] if target is not None and stops[at] - start >= _LARGE else None
            view = blocks.read(start, large[-1], place)
            while view:
                many = cuts.small(at, start, len(view))
                part = view[: (stops[many - 1] if many else stops[at]) - start]
                if many:
                    self._take(file, cuts, slice(at, many), bytes(part), skeleton)
                elif cuts.units[at] < 0:
                    skeleton += part
                else:
                    hasher.update(part)
                    checksum = crc32(part, checksum) if held is None else 0
                    if target is not None:
                        if place is None:
                            target[: len(part)] = part
                        target = target[len(part) :]
                view = view[len(part) :]
                start += len(part)
                if not many and start < stops[at]:
                    continue
                if not many and cuts.units[at] >= 0:
                    self._arrived(file, cuts, at, hasher.digest(), checksum)
                    hasher, checksum = blake3(), 0
                at = many or at + 1
                if view:
                    target = None if held is None else (yield from held.target(cuts.units[at], cuts.positions[at]))
        blocks.check()
        if isinstance(file.source, StateDictSource):  # Its checksums are zeros already.
            file.skeleton = file.source.skeleton
        else:
            file.skeleton = fill_crcs(bytes(skeleton), file.layout, [0] * len(file.crcs))
        file.source.check_unchanged()

    def _lent(self, cuts: _Cuts) -> set[int]:
        """Return the stretches that are units by themselves, whose bytes stay in place if they do not change."""
        units = self._version.units
        return {at for at, unit in enumerate(cuts.units) if unit >= 0 and len(units[unit].members) == 1}

    def _lend(self, file: ScannedFile, cuts: _Cuts, at: int, blocks: _Blocks) -> Iterator[list[int]]:
        start, stop, hasher, checksum = cuts.begins[at], cuts.stops[at], blake3(), 0
        source = cast("StateDictSource | CompositeSource", file.source)
        for place in range(start, stop, BLOCK):
            view = blocks.noted(place, source.view(place, min(BLOCK, stop - place)))
            hasher.update(view)
            checksum = crc32(view, checksum) if self._held is None else 0
        self._arrived(file, cuts, at, hasher.digest(), checksum)
        if self._held is not None:
            yield from self._held.lend(cuts.units[at], source.view(start, stop - start))

    def _take(self, file: ScannedFile, cuts: _Cuts, some: slice, data: bytes, skeleton: bytearray) -> None:
        """Hash and keep the bytes of many small stretches, none of them the first or last one of its unit."""
        start, cut = cuts.begins[some.start], zip(cuts.begins[some], cuts.stops[some], strict=True)
        parts = [data[begin - start : stop - start] for begin, stop in cut]
        skeleton += b"".join([part for part, unit in zip(parts, cuts.units[some], strict=True) if unit < 0])
        columns = cuts.units[some], cuts.extents[some], cuts.firsts[some], cuts.positions[some], parts
        taken = [row for row in zip(*columns, strict=True) if row[0] >= 0]
        units, extents, firsts, positions, contents = zip(*taken, strict=True)
        keys = [*zip(extents, firsts, strict=True)]
        file.digests.update(zip(keys, [blake3(content).digest() for content in contents], strict=True))
        if self._held is None:
            file.checksums.update(zip(keys, map(crc32, contents), strict=True))
        else:
            self._held.fill(units, positions, contents)
        for unit in units:
            self._missing[unit] -= 1

    def _arrived(self, file: ScannedFile, cuts: _Cuts, at: int, digest: bytes, checksum: int) -> None:
        """Record the digest of a member, and the content id of its unit if that is complete now."""
        version, number, key = self._version, cuts.units[at], (cuts.extents[at], cuts.firsts[at])
        file.digests[key] = digest
        if self._held is None:
            file.checksums[key] = checksum
        self._missing[number] -= 1
        if not self._missing[number]:
            unit = version.units[number]
            digests = [version.files[one.file].digests[one.extent, one.first] for one in unit.members]
            version.contents[number] = content_id(unit.dtype, unit.chunk, digests)
            if self._held is not None:
                self._held.arrived(number)


class _Cuts(NamedTuple):
    """A file cut into stretches, in order: columns of their first byte, end and unit (-1: of the skeleton).

    Further of the extent, the first element there and the first byte in the unit; and at last the numbers of the
    stretches that are the first or last ones of their unit in the file.
    """

    begins: list[int]
    stops: list[int]
    units: list[int]
    extents: list[int]
    firsts: list[int]
    positions: list[int]
    ends_of_units: list[int]

    def small(self, at: int, start: int, nbytes: int) -> int:
        """Return the end of many small stretches from one on, which begins at `start`, that lie in `nbytes`; else 0."""
        if start != self.begins[at]:
            return 0
        event = bisect_left(self.ends_of_units, at)
        last = self.ends_of_units[event] if event < len(self.ends_of_units) else at
        last = bisect_right(self.stops, start + nbytes, at, last)
        return last if last - at >= _MANY and self.stops[last - 1] - start < _SMALL * (last - at) else 0

    def large(self) -> list[int]:
        """Return the beginnings of large stretches of members, the last one first."""
        columns = zip(self.begins, self.stops, self.units, strict=True)
        return [begin for begin, stop, unit in columns if unit >= 0 and stop - begin >= _LARGE][::-1]


def _cuts_of(version: ScannedVersion) -> Iterator[_Cuts]:
    """Yield each file cut into the members of units and the skeleton."""
    members = [*chain.from_iterable([unit.members for unit in version.units])]
    files, extents, firsts, counts = (
        np.array(list(map(attrgetter(name), members)), np.int64) for name in ("file", "extent", "first", "count")
    )
    lengths = np.array([len(unit.members) for unit in version.units], np.int64)
    units = np.arange(lengths.size).repeat(lengths)
    nbytes = np.array([unit.nbytes for unit in version.units], np.int64)
    bounds = np.append(0, lengths.cumsum())
    widths = (nbytes // np.diff(np.append(0, counts.cumsum())[bounds]))[units]
    sizes = counts * widths
    positions = sizes.cumsum() - sizes - (nbytes.cumsum() - nbytes)[units]
    order = np.lexsort((firsts, extents, files))
    bounds = files[order].searchsorted(np.arange(len(version.files) + 1))
    for number, layout in enumerate(version.layouts):
        rows = order[bounds[number] : bounds[number + 1]]
        begins = np.array([extent.start for extent in layout.extents], np.int64)[extents[rows]]
        begins += firsts[rows] * widths[rows]
        stops = begins + sizes[rows]
        # Gaps belong to the skeleton.
        before, after = np.append(0, stops), np.append(begins, layout.size)
        gaps = (after > before).nonzero()[0]
        owners = units[rows]
        lasts = owners.size - 1 - np.unique(owners[::-1], return_index=True)[1]
        ends = np.union1d(np.unique(owners, return_index=True)[1], lasts)
        columns: list[tuple[Any, Any]] = [(begins, before[gaps]), (stops, after[gaps]), (owners, -1)]
        columns += [(column[rows], -1) for column in (extents, firsts, positions)]
        lists = [np.insert(column, gaps, values).tolist() for column, values in columns]
        yield _Cuts._make([*lists, (ends + gaps.searchsorted(ends, "right")).tolist()])


class _Blocks:
    """Reads a file block by block, and hashes and checks every byte."""

    def __init__(self, file: ScannedFile, progress: Progress | None) -> None:
        self._file = file
        self._block = np.empty(min(BLOCK, file.layout.size), np.uint8).data
        self.is_still = isinstance(file.source, StateDictSource | CompositeSource) and file.source.is_still
        # The file of a state dict in memory has valid checksums by construction.
        self._checks = None if self.is_still or isinstance(file.source, StateDictSource) else Checks(file.layout)
        self._whole = blake3()
        self._progress = progress

    def read(self, start: int, stop: int, place: memoryview | None) -> memoryview:
        """Return bytes from `start` on: some before `stop`, in a reused block, or as many as fit into `place`."""
        view = self._block[: stop - start] if place is None else place[:BLOCK]
        self._file.source.read_into(start, view)
        return self.noted(start, view)

    def noted(self, start: int, view: memoryview) -> memoryview:
        """Return the next bytes of the file, which are hashed and checked with it."""
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
        """Return the memory for the bytes of a unit from `position` on; None if they are not kept, or of no unit (-1).

        Yields a window if the unit has no room next to the kept ones.
        """
        buffer = self._buffers.get(number)
        if buffer is None and number >= 0 and number not in self._late:
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

    def fill(self, units: Sequence[int], positions: Sequence[int], contents: Sequence[bytes]) -> None:
        """Copy the bytes of some members to their places in units, as far as these are kept."""
        for number, position, content in zip(units, positions, contents, strict=True):
            buffer = self._buffers.get(number)
            if buffer is not None:
                buffer.data[position : position + len(content)] = content

    def lend(self, number: int, data: memoryview) -> Iterator[list[int]]:
        """Record a unit of one member, whose bytes stay in place; yield a window once there are enough of them."""
        unit = self._version.units[number]
        self._version.held[unit.members[0]] = aligned(np.frombuffer(data, f"u{ITEM_SIZES[unit.dtype]}"))
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
