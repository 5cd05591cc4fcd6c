"""The statistics of a run: measures of its tensors over its versions, read in bounded memory and cached."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.errors import UsageError
from ckstore.formats.paths import match_texts, text_to_path
from ckstore.objects.roles import state_of
from ckstore.reading.buffers import read_tensor
from ckstore.reading.deviations import tensor_deviations
from ckstore.reading.gather import Selection
from ckstore.reading.renames import under_last_names
from ckstore.reading.storage_facts import StorageFacts
from ckstore.reading.stored_version import ChangedVersionError, StoredVersion
from ckstore.report.measures import BINS, MEASURES, ROW, Reading, measure, nonfinite, unmoved
from ckstore.report.numbers import Numbers, Row, key_of
from ckstore.repository import Repository
from ckstore.runtime.threads import shared, worker_count
from ckstore.storage.remote.mirror import cache_directory

Values = npt.NDArray[np.float32]
Places = list[Selection]

#: Elements of a tensor that are read at most, in up to four stretches; of chosen matrices, whose spectrum is computed.
SAMPLE = 1 << 20
_STRETCHES = 4
_LARGEST_MATRIX = 1 << 22

#: Number of weights with a spectrum and a histogram: the largest ones.
CHOSEN = 6

#: Part of every key of the cache: raised when a measure has another definition.
_REVISION = 4

_ROLES = {"first": "first moment", "second": "second moment"}

#: Elements that are read at once to count NaN and infinities.
_BLOCK = 1 << 22

#: Last names of buffers of layers, which training moves in other ways than weights, or not at all.
_BUFFERS = {
    "running_mean", "running_var", "inv_freq", "freqs", "freqs_cis", "cos", "sin", "cos_cached", "sin_cached", "pe",
    "mask", "attn_mask", "causal_mask", "bias_mask", "masked_bias", "relative_position_index",
}  # fmt: skip


@dataclass(slots=True)
class TensorHistory:
    """One tensor of a run.

    Attributes
    ----------
    role
        `weight`, `first moment`, `second moment` or `other`.
    dtype, shape
        Of the latest version that has it.
    objects
        A key of its values at each version, by the ids of its objects; None where it is missing.
    first
        The first version that has it.
    most
        About the number of elements to read at most.
    state
        Of a moment: a key that it shares with the other moments of its weight.
    is_chosen, is_matrix
        Whether it has a histogram, and a spectrum.
    """

    path: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    objects: list[bytes | None]
    first: int
    most: int
    state: object = None
    is_chosen: bool = False
    is_matrix: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def sampled(self) -> float | None:
        """Share of the elements that are read; None for all."""
        places = sampled_places(self.shape, self.most)
        return None if places is None else prod(map(len, places)) / self.elements


@dataclass(slots=True)
class RunStatistics:
    """The measures of a run: `values` has an array for each key, tensors x versions, with NaN for no value.

    `histograms` has edges and counts by the index of a tensor.
    """

    versions: list[StoredVersion]
    tensors: list[TensorHistory]
    values: dict[str, Values]
    histograms: dict[int, Values] = field(default_factory=dict)

    def value(self, key: str, tensor: int, version: int) -> float | None:
        """Return the value of a measure, by the indexes of tensor and version; None for no value."""
        value = float(self.values[key][tensor, version])
        return None if np.isnan(value) else value

    def steps(self) -> list[int]:
        """Return the step of each version, or its number where a version has none."""
        steps = [version.row.step for version in self.versions]
        if None in steps:
            return [version.row.number for version in self.versions]
        return [step for step in steps if step is not None]


def statistics(
    versions: Sequence[StoredVersion], globs: Sequence[str] = (), *, sample: int = SAMPLE, values: bool = True
) -> RunStatistics:
    """Return the statistics of the versions of a run, in their order.

    Parameters
    ----------
    globs
        Globs over the paths of tensors.
    sample
        Read at most about this many elements of a tensor.
    values
        Whether to compute the measures that need values; the others decode nothing.
    """
    if sample < 1:
        raise UsageError(f"`sample` must be 1 or more, not {sample}.")
    while True:
        try:
            if versions:  # The store's cache may be large, and each chunk is needed for the next version alone.
                passing = versions[0].repository.reader.in_passing()
                versions = [version.read_by(passing) for version in versions]
            return _statistics(list(versions), globs, sample, values)
        except ChangedVersionError:  # Rows of the cache make the second attempt short.
            versions = [version.present() for version in versions]


def _statistics(versions: list[StoredVersion], globs: Sequence[str], sample: int, values: bool) -> RunStatistics:
    versions = under_last_names(versions)
    tensors = _histories(versions, globs, sample)
    shape = len(tensors), len(versions)
    found = RunStatistics(versions, tensors, {key: np.full(shape, np.nan, np.float32) for key in MEASURES})
    if values and versions:
        _measure_all(found)
        spans = np.diff(np.array(found.steps(), np.float64), prepend=np.nan)
        found.values["ratio"][:] = found.values["change"] / np.where(spans > 0, spans, np.nan)
    for place, version in enumerate(versions):
        _describe_storage(found, place, version)
    return found


def _histories(versions: list[StoredVersion], globs: Sequence[str], sample: int) -> list[TensorHistory]:
    paths = list(dict.fromkeys(path for version in versions for path in version.paths))
    paths = [paths[number] for number in match_texts(paths, globs)]
    moments = {path: moment for path in paths if (moment := _moment(path))}
    states = {state for _, state in moments.values()}
    found = []
    for path in paths:
        objects = [
            key_of(version.contents.identity(*version.paths[path])) if path in version.paths else None
            for version in versions
        ]
        there = [number for number, key in enumerate(objects) if key is not None]
        tensor = versions[there[-1]].paths[path][1]
        is_float = tensor.dtype.startswith(("float", "bfloat", "complex"))
        typed = text_to_path(path)
        is_weight = (
            is_float and _words(path)[-1] not in _BUFFERS and state_of(typed) is None and typed[:-1] not in states
        )
        role, state = moments.get(path, ("weight" if is_weight else "other", None))
        found.append(TensorHistory(path, role, tensor.dtype, tensor.shape, objects, there[0], sample, state))
    _choose(found)
    return found


def _words(path: str) -> list[str]:
    return re.split(r"[/.]", path)


def _moment(path: str) -> tuple[str, object] | None:
    """Return the role of a moment and the key of its state; None for other tensors."""
    state = state_of(text_to_path(path))
    return None if state is None or state.role not in _ROLES else (_ROLES[state.role], state.parameter)


def _choose(tensors: list[TensorHistory]) -> None:
    """Choose the largest weights for histograms, and the largest matrices for spectra."""
    weights = [history for history in tensors if history.role == "weight" and len(history.shape) > 1]
    weights.sort(key=lambda history: -history.elements)
    for history in weights[:CHOSEN]:
        history.is_chosen = True
    matrices = [
        history for history in weights
        if len(history.shape) == 2 and history.elements <= _LARGEST_MATRIX and min(history.shape) > 1
        and not history.dtype.startswith("complex")
    ]  # fmt: skip
    for history in matrices[:CHOSEN]:
        history.is_matrix, history.most = True, max(history.most, _LARGEST_MATRIX)


def sampled_places(shape: tuple[int, ...], most: int) -> Places | None:
    """Return about `most` positions in up to four stretches along one axis, evenly spaced; None for all.

    Examples
    --------
    >>> places = sampled_places((1000, 100), 4000)
    >>> [len(places[0]), places[0][:11].tolist(), places[1]]
    [40, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 330], range(0, 100)]
    """
    if prod(shape) <= most:
        return None
    # The first axis with room for stretches: one index of it is few of the elements.
    axis, outer = 0, 1
    while axis < len(shape) - 1 and outer * prod(shape[axis + 1 :]) * _STRETCHES > most:
        outer *= shape[axis]
        axis += 1
    count = min(shape[axis], max(1, most // (outer * prod(shape[axis + 1 :]))))
    stretches = min(_STRETCHES, count)
    length = count // stretches
    starts = np.linspace(0, shape[axis] - length, stretches).astype(np.int64)
    places: Places = [range(size) for size in shape]
    places[axis] = np.unique((starts[:, None] + np.arange(length)).reshape(-1))
    return places


def _blocks(shape: tuple[int, ...]) -> Iterator[Places]:
    """Yield positions that divide a tensor into blocks of at most about `_BLOCK` elements."""
    axis = 0
    while axis < len(shape) - 1 and prod(shape[axis + 1 :]) > _BLOCK:
        axis += 1
    length = max(1, _BLOCK // prod(shape[axis + 1 :]))
    for outer in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], length):
            stretch = range(start, min(start + length, shape[axis]))
            yield [*(range(index, index + 1) for index in outer), stretch, *map(range, shape[axis + 1 :])]


def _groups(found: RunStatistics) -> Iterator[list[int]]:
    """Group tensors that are decoded together: those of one bundle, and the moments of a weight."""
    parent = list(range(len(found.tensors)))

    def root(number: int) -> int:
        while parent[number] != number:
            number = parent[number]
        return number

    seen: dict[Any, int] = {}
    for number, history in enumerate(found.tensors):
        version = found.versions[history.first]
        file, tensor = version.paths[history.path]
        keys: list[Any] = [
            version.layout.units[unit].key
            for place in tensor.places(file)
            for _, unit, _ in version.contents.parts(*place)[:1]
        ]
        if history.state is not None:
            keys.append(history.state)
        for key in keys:
            parent[root(number)] = root(seen.setdefault(key, number))
    groups: dict[int, list[int]] = {}
    for number in range(len(parent)):
        groups.setdefault(root(number), []).append(number)
    yield from groups.values()


def _measure_all(found: RunStatistics) -> None:
    """Fill in the measures of `ROW` and the histograms, and save new ones in the cache."""
    repository = found.versions[0].repository
    caches = [Numbers(path, width) for path, width in cache_files(repository)]
    work = partial(_measure_group, found, caches)
    for rows in shared(work, _groups(found), worker_count()):
        for number, row in rows.items():
            for place, key in enumerate(ROW):
                found.values[key][number] = row[:, place]
            if found.tensors[number].is_chosen:
                found.histograms[number] = row[:, len(ROW) :]
    for cache in caches:
        cache.save()


def cache_files(repository: Repository) -> list[tuple[Path, int]]:
    """Return the files of a store's cache and the widths of their rows: without and with histograms."""
    address = repository.address
    place = cache_directory(None if address.cache is None else Path(address.cache)) / "statistics"
    name = key_of(address.place, repository.catalog.identity()).hex()
    return [(place / f"{name}-{width}", width) for width in (len(ROW), len(ROW) + BINS)]


class _Rows:
    """The rows of one tensor: known ones from the cache, others measured; holds values that the next row needs."""

    def __init__(self, found: RunStatistics, number: int, caches: list[Numbers], pair: _Rows | None) -> None:
        self.history = found.tensors[number]
        self._cache = caches[self.history.is_chosen]
        self._pair = pair
        self._versions = found.versions
        self._held: dict[bytes, Reading] = {}
        self.rows: list[Row] = []

    def add(self, place: int) -> None:
        """Add the row of the next version."""
        objects = self.history.objects
        keep = {objects[number] for number in (place, max(place - 1, 0), self.history.first)}
        self._held = {key: reading for key, reading in self._held.items() if key in keep}
        if objects[place] is None or not self.history.elements:
            self.rows.append(np.full(self._cache.width, np.nan, np.float32))
            return
        key = self._key(place)
        row = self._cache.get(key)
        if row is None:
            row = unmoved(self.rows[-1]) if self._is_unmoved(place) else self._measured(place)
            self._cache.put(key, row)
        self.rows.append(row)

    def _key(self, place: int) -> bytes:
        history, objects = self.history, self.history.objects
        before = objects[place - 1] if place else None
        moments = None if self._pair is None else self._pair.history.objects[place]
        options = history.most, history.is_matrix, history.role
        return key_of(_REVISION, objects[place], before, objects[history.first], moments, *options)

    def _is_unmoved(self, place: int) -> bool:
        pair = [] if self._pair is None else [self._pair.history]
        return place > 0 and all(one.objects[place] == one.objects[place - 1] for one in (self.history, *pair))

    def _measured(self, place: int) -> Row:
        history = self.history
        now = self.reading(place)
        assert now is not None
        return measure(
            now,
            self.reading(place - 1, now) if place else None,
            self.reading(history.first, now),
            is_matrix=history.is_matrix,
            is_second_moment=history.role == "second moment",
            first_moments=None if self._pair is None else self._pair.reading(place, now),
            has_histogram=history.is_chosen,
            start=float(self.rows[history.first][ROW.index("rms")]) if place > history.first else None,
            nonfinite=None if history.sampled is None else self._nonfinite(place),
        )

    def _nonfinite(self, place: int) -> float:
        """Return the share of all elements that are not finite; a sample would miss a few rows."""
        version = self._versions[place]
        file, tensor = version.paths[self.history.path]
        blocks = (read_tensor(version, file, tensor, places) for places in _blocks(tensor.shape))
        return sum(nonfinite(bits, tensor.dtype) * bits.size for bits in blocks) / prod(tensor.shape)

    def reading(self, place: int, like: Reading | None = None) -> Reading | None:
        """Return the values of a version, if their shape is that of `like`; None where it has none."""
        key = self.history.objects[place]
        if key is None:
            return None
        found = self._held[key] = self._held.get(key) or self._read(place)
        return found if like is None or found.bits.shape == like.bits.shape else None

    def _read(self, place: int) -> Reading:
        version = self._versions[place]
        file, tensor = version.paths[self.history.path]
        places = sampled_places(tensor.shape, self.history.most) or [range(size) for size in tensor.shape]
        return Reading(tensor.dtype, read_tensor(version, file, tensor, places))


def _measure_group(found: RunStatistics, caches: list[Numbers], group: list[int]) -> dict[int, npt.NDArray[Any]]:
    """Return the rows of tensors that are decoded together, versions x width, by the index of the tensor."""
    rows: dict[int, _Rows] = {}
    firsts: dict[object, _Rows] = {}
    for number in sorted(group, key=lambda number: found.tensors[number].role == "second moment"):
        history = found.tensors[number]
        pair = firsts.get(history.state) if history.role == "second moment" else None
        rows[number] = _Rows(found, number, caches, pair)
        if history.role == "first moment":
            firsts[history.state] = rows[number]
    for place in range(len(found.versions)):
        for item in rows.values():
            item.add(place)
    return {number: np.array(item.rows) for number, item in rows.items()}


def _describe_storage(found: RunStatistics, place: int, version: StoredVersion) -> None:
    """Fill in the measures of a version that its records and its document have."""
    facts, deviations = StorageFacts(version), tensor_deviations(version)
    for number, history in enumerate(found.tensors):
        if history.objects[place] is None:
            continue
        bits = facts.of_tensor(*version.paths[history.path]).bits
        found.values["bits"][number, place] = np.nan if bits is None else bits
        if version.row.fidelity == "coarse":
            off = deviations.get(history.path)
            found.values["deviation"][number, place] = 0.0 if off is None else off.relative
