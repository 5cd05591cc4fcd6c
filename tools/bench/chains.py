"""A series stored by a peer: as pairs, and as chains that restore within a given factor of a full version."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tools.bench import pieces
from tools.bench.peers import Peer
from tools.bench.pieces import Bytes, Piece
from tools.bench.series import Series

Prepare = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class _Stored:
    """One piece of one version: its members' keys and sizes, and its stored forms."""

    dtype: str
    members: tuple[tuple[str, int], ...]
    full: bytes
    delta: bytes | None

    @property
    def smaller(self) -> bytes:
        return self.full if self.delta is None or len(self.delta) >= len(self.full) else self.delta


@dataclass(frozen=True)
class Sizes:
    """The sizes of a series with a peer.

    Attributes
    ----------
    pairs
        Bytes with the previous version available: the first in full, the others as differences.
    later
        The part of `pairs` that is not the first version.
    chains
        Bytes with a full version every `period` versions.
    period
        The largest period that restores the deepest version within the factor; 1 for a peer without deltas.
    """

    pairs: int
    later: int
    chains: int
    period: int


class PeerSeries:
    """Every version of a series encoded by a peer, in full and as a difference to the one before.

    Names and places of tensors, which a real store must keep too, are not counted.

    Parameters
    ----------
    peer, series
        The peer and the series.
    scratch
        A file that restored versions are written to, as in a store's checkout.
    """

    def __init__(self, peer: Peer, series: Series, scratch: Path) -> None:
        self.peer = peer
        self.scratch = scratch
        self.versions: list[list[_Stored]] = []
        self.places: list[dict[str, tuple[int, int, int]]] = []
        split = pieces.whole if peer.whole_files else pieces.tensors
        previous: dict[str, Bytes] = {}
        for index in range(len(series.versions)):
            current = split(series, index)
            self.versions.append([self._encode(piece, previous) for piece in current])
            self.places.append(
                {key: (i, start, stop) for i, piece in enumerate(current) for key, start, stop in _cut(piece.members)}
            )
            previous = {key: piece.data[start:stop] for piece in current for key, start, stop in _cut(piece.members)}
            self._check(current, index)
        self._check(current, 0)

    def _check(self, wanted: list[Piece], first: int) -> None:
        """Raise unless the last version so far is restored, from `first` in full and differences."""
        for piece, data in zip(wanted, self._restored(first), strict=True):
            if not np.array_equal(piece.data, data):
                raise AssertionError(f"{self.peer.name} does not restore version {len(self.versions) - 1}")

    def _restored(self, first: int) -> list[Bytes]:
        last = len(self.versions) - 1
        memo: dict[tuple[int, int], Bytes] = {}
        return [self._piece(last, index, first, memo) for index in range(len(self.versions[last]))]

    def _encode(self, piece: Piece, previous: dict[str, Bytes]) -> _Stored:
        delta = None
        if self.peer.encode_delta is not None and piece.dtype != "opaque":
            base = _gather(piece.members, previous)
            if base is not None:
                delta = self.peer.encode_delta(piece.data, base, piece.dtype)
        return _Stored(piece.dtype, piece.members, self.peer.encode(piece.data, piece.dtype), delta)

    def _piece(self, version: int, index: int, first: int, memo: dict[tuple[int, int], Bytes]) -> Bytes:
        """Decode a piece from `first` in full and the differences of every later version."""
        known = memo.get((version, index))
        if known is not None:
            return known
        stored = self.versions[version][index]
        if version == first or stored.smaller is stored.full:
            data = self.peer.decode(stored.full, stored.dtype)
        else:
            previous = {}
            for key, _ in stored.members:
                place = self.places[version - 1].get(key)
                if place is not None:
                    before, start, stop = place
                    previous[key] = self._piece(version - 1, before, first, memo)[start:stop]
            base = _gather(stored.members, previous)
            assert base is not None
            assert stored.delta is not None
            assert self.peer.decode_delta is not None
            data = self.peer.decode_delta(stored.delta, base, stored.dtype)
        memo[version, index] = data
        return data

    def restore(self, depth: int) -> None:
        """Write the last version to the scratch file, from a full version `depth` versions earlier."""
        with self.scratch.open("wb") as file:
            for data in self._restored(len(self.versions) - 1 - depth):
                file.write(data)

    def sizes(self, limit: float) -> Sizes:
        """Measure and add up, with chains bounded by `limit` times the restore of a full version."""
        full = [sum(len(stored.full) for stored in version) for version in self.versions]
        delta = [sum(len(stored.smaller) for stored in version) for version in self.versions]
        pairs = full[0] + sum(delta[1:])
        if self.peer.encode_delta is None:
            return Sizes(pairs, sum(delta[1:]), sum(full), 1)
        period = 1
        for depth in range(1, len(self.versions)):
            factor = time_ratio(partial(partial, self.restore, depth), partial(partial, self.restore, 0))
            if factor > limit:
                break
            period = depth + 1
        chains = sum(full[i] if i % period == 0 else delta[i] for i in range(len(full)))
        return Sizes(pairs, pairs - full[0], chains, period)


def time_ratio(slow: Prepare, fast: Prepare, *, pairs: int = 7) -> float:
    """Return the time of a slow call over the time of a fast one: the median over interleaved pairs, after a warm-up.

    Both are given by functions that prepare a call, in time that is not counted. Calls of a few milliseconds are
    repeated until they take a twentieth of a second.
    """
    _seconds([slow()])
    repeats = max(1, round(0.05 / max(1e-6, _seconds([fast()]))))
    ratios = []
    for _ in range(pairs):
        above, below = (_seconds([prepare() for _ in range(repeats)]) for prepare in (slow, fast))
        ratios.append(above / below)
    return statistics.median(ratios)


def _seconds(calls: list[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def _cut(members: tuple[tuple[str, int], ...]) -> list[tuple[str, int, int]]:
    """Return key, start and stop of each member in its piece."""
    cuts = []
    position = 0
    for key, size in members:
        cuts.append((key, position, position + size))
        position += size
    return cuts


def _gather(members: tuple[tuple[str, int], ...], previous: dict[str, Bytes]) -> Bytes | None:
    """Return the previous version's bytes of each member, zeros for another size; None without a previous version."""
    parts = []
    for key, size in members:
        data = previous.get(key)
        parts.append(data if data is not None and len(data) == size else None)
    if all(part is None for part in parts):
        return None
    return np.concatenate(
        [np.zeros(size, np.uint8) if part is None else part for part, (_, size) in zip(parts, members, strict=True)]
    )
