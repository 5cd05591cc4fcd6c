"""Averages of versions: the file of the last one, or an export, with the mean of all in place of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckstore.codecs.lattice import PARTS, STEP_RANGE
from ckstore.errors import ConflictError, UsageError
from ckstore.formats.layout import Tensor
from ckstore.formats.paths import path_to_text
from ckstore.reading.checkout import checkout
from ckstore.reading.export import export
from ckstore.reading.real_values import Reals, from_float64, to_float64
from ckstore.reading.renames import under_last_names
from ckstore.reading.stored_version import StoredVersion
from ckstore.reading.subtree import format_for

#: Float tensors without axes of these names count steps.
_COUNTERS = ("step",)


@dataclass(frozen=True, slots=True)
class AverageReport:
    """Result of an average.

    Attributes
    ----------
    versions
        Numbers of the versions, in order.
    averaged
        Paths of the averaged tensors.
    kept
        Paths of the other tensors: integers, booleans, floats of 8 bits and less, and counters of steps.

    Examples
    --------
    >>> report = store.average("gpt@100..gpt@300", "soup.pt")
    >>> report.versions, report.averaged, report.kept
    ([1, 2, 3], ['model/weight', 'model/bias'], [])
    """

    versions: list[int]
    averaged: list[str]
    kept: list[str]


def average(
    versions: Sequence[StoredVersion],
    target: Path,
    *,
    ema: float | None = None,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> AverageReport:
    """Write the average of versions to `target`, in memory for a few chunks of each; see `Store.average`."""
    if len(versions) < 2:
        raise UsageError(f"An average needs two or more versions, not {len(versions)}.")
    if ema is not None and not 0 < ema < 1:
        raise UsageError(f"`ema` must lie between 0 and 1, not {ema:g}.")
    weights = [1.0] * len(versions)
    if ema is not None:
        weights = [ema ** (len(versions) - 1), *((1 - ema) * ema**age for age in range(len(versions) - 2, -1, -1))]
    format = format_for(versions[-1], target)
    made = _Average(versions, weights)
    try:
        if format == "original":
            checkout(made, target, force=force, progress=progress)
        else:
            export(made, target, format, force=force, progress=progress)
    finally:
        made.chunks.clear()
    averaged = [path for path, (file, tensor) in made.paths.items() if made.averages(file, tensor)]
    kept = [path for path in made.paths if path not in set(averaged)]
    return AverageReport([version.row.number for version in versions], averaged, kept)


class _Average(StoredVersion):
    """The last of several versions, with weighted means in place of its values.

    Raise `ConflictError` if the tensors of another version differ from those of the last.
    """

    is_computed = True

    def __init__(self, versions: Sequence[StoredVersion], weights: Sequence[float]) -> None:
        super().__init__(versions[-1].repository, versions[-1].row)
        # The store's cache may be large, and each chunk is needed for the next version alone.
        passing = self.repository.reader.in_passing()
        versions = under_last_names(versions)
        self._versions = [version.read_by(passing) for version in versions]
        self.chunks = passing.cache
        self._weights = weights
        for version in versions[:-1]:
            self._require_same(version)
        self._kept: set[tuple[int, int]] = set()
        named: set[tuple[int, int]] = set()
        for file, tensor in self.paths.values():
            places = tensor.places(file)
            named.update(places)
            if not _is_averaged(tensor) or any(self._dtype(*place) != tensor.dtype for place in places):
                self._kept.update(places)
        self._means = named - self._kept

    def _dtype(self, file: int, extent: int) -> str:
        return self.layout.files[file].extents[extent].dtype

    def averages(self, file: int, tensor: Tensor) -> bool:
        """Return whether the values of a tensor are means."""
        return not self._kept.intersection(tensor.places(file)) and _is_averaged(tensor)

    def is_changed(self, file: int) -> bool:
        """Return True: the file has other values than the ingested one."""
        return True

    def prefetch(self, places: object = None) -> None:
        """Prefetch everything of all versions."""
        for version in self._versions:
            version.prefetch()

    def read_extent(self, file: int, extent: int, first: int, last: int, *, keep: bool = False) -> memoryview:
        """Return the bytes of the mean of elements; each version is decoded from the cached chunk of the one before."""
        if (file, extent) not in self._means:
            return super().read_extent(file, extent, first, last, keep=keep)
        dtype = self._dtype(file, extent)
        total: Reals | None = None
        with np.errstate(over="ignore", invalid="ignore"):
            for version, weight in zip(self._versions, self._weights, strict=True):
                data = version.read_extent(file, extent, first, last, keep=True)
                values = to_float64(np.frombuffer(data, np.uint8), dtype)
                values *= weight
                total = values if total is None else np.add(total, values, out=total)
            assert total is not None
            total /= sum(self._weights)
        return from_float64(total, dtype).data.cast("B")

    def _require_same(self, version: StoredVersion) -> None:
        mine, its = self.forms(), version.forms()
        names = f"version {version.row.number} and version {self.row.number}"
        for path in {**mine, **its}:
            if path not in mine or path not in its:
                raise ConflictError(f"Only one of {names} has {path}; average versions of one structure.")
            if mine[path] != its[path]:
                raise ConflictError(f"{path} has another shape or dtype in {names}; average versions of one structure.")
        if _arrangement(self) != _arrangement(version):
            raise ConflictError(
                f"The files of {names} arrange the same tensors in other ways; export both in one format, ingest these "
                "files, and average them."
            )


def _is_averaged(tensor: Tensor) -> bool:
    is_counter = not tensor.shape and tensor.path[-1:] and tensor.path[-1] in _COUNTERS
    return not is_counter and (tensor.dtype in STEP_RANGE or tensor.dtype in PARTS)


def _arrangement(version: StoredVersion) -> object:
    """Return the values' places in the extents of a version's files, by the names of files in a directory."""
    directory = version.document.is_directory
    names = dict(zip(version.contents.numbers, version.numbers, strict=True))
    return [
        (
            entry.path if directory else "",
            [(extent.dtype, extent.count) for extent in layout.extents],
            [
                (_name(version, number, tensor, names), tensor.strides, tensor.extent, tensor.offset, tensor.lazy)
                for tensor in layout.tensors
            ],
        )
        for number, (entry, layout) in enumerate(zip(version.document.files, version.layout.files, strict=True))
    ]


def _name(version: StoredVersion, file: int, tensor: Tensor, names: Mapping[str, str]) -> object:
    """Return the path that a tensor of a file has in a version."""
    path = path_to_text((*version.contents.prefix(file), *tensor.path))
    return names.get(path, tensor.path)
