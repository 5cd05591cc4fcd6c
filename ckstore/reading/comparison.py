"""Compares the tensors of two versions: by ids where these decide, else by their values, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf, isfinite, prod, sqrt
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import NotFoundError, UsageError
from ckstore.formats.paths import match_texts
from ckstore.reading.buffers import read_tensor
from ckstore.reading.real_values import parts_of, to_float64
from ckstore.reading.renames import renames
from ckstore.runtime.threads import batches, in_order, worker_count

if TYPE_CHECKING:
    from ckstore.codecs.lattice import Bits
    from ckstore.formats.layout import Tensor
    from ckstore.reading.stored_version import StoredVersion

#: Bytes of a tensor that are decoded at once if its elements are not adjacent, and bytes of one task of a thread.
_BLOCK, _GROUP = 1 << 24, 2 << 20

#: Elements that are compared at once: their float64 values stay in the processor's cache.
_COMPARED = 1 << 15

Kind = Literal["added", "removed", "shape", "dtype", "values"]

#: Orders of tensors whose values changed.
Sort = Literal["drift", "path", "share", "rms"]


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The dtype, as torch names it, and the shape of a tensor.

    Examples
    --------
    >>> store.diff("gpt@100", "gpt@300").changes[0].after
    TensorForm(dtype='float32', shape=(256, 128))
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that differs between two versions.

    Numbers are of changed values alone, in float64, from the elements that are finite in both versions; a dtype that
    packs several numbers in a byte has only a `share`.

    Attributes
    ----------
    path
        Typed path as text.
    change
        `added`, `removed`, `shape`, `dtype` or `values`.
    before, after
        Its dtype and shape in each version; None in the version that lacks it.
    share
        Fraction of the elements that differ, bit for bit.
    drift
        Norm of the difference, relative to the norm before; infinite if that is 0.
    rms, max_abs
        Root mean square and largest magnitude of the differences.
    cosine
        Cosine of the angle between both; None if a norm is 0.
    nonfinite
        Number of infinities and NaNs in each version.

    Examples
    --------
    >>> [change] = store.diff("gpt@100", "gpt@300").changes
    >>> change.path, change.change, change.share, round(change.drift, 4)
    ('model/weight', 'values', 1.0, 0.002)
    """

    path: str
    change: Kind
    before: TensorForm | None
    after: TensorForm | None
    share: float | None = None
    drift: float | None = None
    rms: float | None = None
    cosine: float | None = None
    max_abs: float | None = None
    nonfinite: tuple[int, int] | None = None

    @property
    def is_scalar(self) -> bool:
        """Whether the tensor has one element, as a counter or a schedule has."""
        return self.after is not None and prod(self.after.shape) == 1


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of a comparison of two versions.

    Attributes
    ----------
    changes
        The tensors that differ: added ones, other shapes and dtypes in the order of the second version, then removed
        ones, then other values, sorted.
    compared
        Number of tensors compared, equal ones included.
    renames
        The paths of renamed tensors in the first version, by those in the second, which `changes` has.

    Examples
    --------
    >>> report = store.diff("gpt@100", "gpt@300")
    >>> report.compared, report.changes[0].path, round(report.changes[0].rms, 3)
    (2, 'model/weight', 0.002)
    """

    changes: tuple[TensorChange, ...]
    compared: int
    renames: Mapping[str, str] = field(default_factory=dict)

    def count(self, change: Kind) -> int:
        """Return the number of changes of one kind."""
        return sum(item.change == change for item in self.changes)


def compare(
    before: StoredVersion, after: StoredVersion, globs: Sequence[str] = (), *, sort: Sort = "drift"
) -> DiffReport:
    """Compare two versions tensor by tensor, bit for bit: 0.0 and -0.0 differ, and a NaN equals itself.

    Parameters
    ----------
    before, after
        The two versions.
    globs
        Globs over the paths of tensors; without any, all tensors are compared.
    sort
        Order of tensors with other values: `path` is that of the second version; others are descending, tensors of one
        element last, since they are mostly counters and schedules.

    Raises
    ------
    NotFoundError
        Neither version has a tensor that a glob matches.
    UsageError
        `sort` is unknown.
    """
    if sort not in get_args(Sort):
        raise UsageError(f"Unknown order {sort!r}; sort by {', '.join(get_args(Sort))}.")
    names = renames(before, after)
    one, other = _Side(before.under(names) if names else before, globs), _Side(after, globs)
    if globs and not one.tensors and not other.tensors:
        raise NotFoundError(
            f"Neither version has a tensor that matches {' or '.join(globs)}; see `ckstore ls {before.row.number}`."
        )
    values = _changed_values(one, other)
    if sort != "path":
        values.sort(key=lambda change: (change.is_scalar, -_magnitude(getattr(change, sort))))
    paths = one.tensors.keys() | other.tensors.keys()
    given = {path: former for former, path in names.items() if path in paths}
    return DiffReport((*_structure(one, other), *values), len(paths), given)


def _magnitude(value: float | None) -> float:
    return -1.0 if value is None or value != value else value


class _Side:
    """One of the two versions, with the tensors that are compared."""

    def __init__(self, stored: StoredVersion, globs: Sequence[str]) -> None:
        self.stored = stored
        texts = list(stored.paths)
        numbers = match_texts(texts, globs)
        self.tensors: dict[str, tuple[int, Tensor]] = {texts[number]: stored.paths[texts[number]] for number in numbers}

    def form(self, path: str) -> TensorForm:
        """Return the dtype and shape of a tensor."""
        tensor = self.tensors[path][1]
        return TensorForm(tensor.dtype, tensor.shape)

    def identity(self, path: str) -> tuple[Any, ...]:
        """Return the identity of a tensor: equal ones have equal bits."""
        return self.stored.contents.identity(*self.tensors[path])

    def stretches(self, path: str) -> Iterator[tuple[int, int]]:
        """Cut an adjacent tensor into ranges of elements that lie in one chunk each."""
        file, tensor = self.tensors[path]
        last = tensor.offset + prod(tensor.shape)
        for first, stop in self.stored.contents.stretches(file, tensor.extent, tensor.offset, last):
            yield first - tensor.offset, stop - tensor.offset

    def read(self, path: str, first: int, last: int) -> Any:
        """Return elements of an adjacent tensor as bytes; chunks stay cached for the versions stored against them."""
        file, tensor = self.tensors[path]
        data = self.stored.read_extent(file, tensor.extent, tensor.offset + first, tensor.offset + last, keep=True)
        return np.frombuffer(data, np.uint8)

    def rows(self, path: str) -> Iterator[Any]:
        """Yield the bytes of whole rows of any tensor."""
        file, tensor = self.tensors[path]
        whole = [range(size) for size in tensor.shape]
        rows = tensor.shape[0] if tensor.shape else 1
        row = max(1, prod(tensor.shape) // max(rows, 1)) * ITEM_SIZES[tensor.dtype]
        step = max(1, _BLOCK // row)
        for start in range(0, rows, step):
            part = [range(start, min(start + step, rows)), *whole[1:]] if tensor.shape else whole
            yield read_tensor(self.stored, file, tensor, part).reshape(-1).view(np.uint8)


def _structure(before: _Side, after: _Side) -> Iterator[TensorChange]:
    for path in after.tensors:
        now = after.form(path)
        then = before.form(path) if path in before.tensors else None
        if then is None:
            yield TensorChange(path, "added", None, now)
        elif then != now:
            yield TensorChange(path, "dtype" if then.shape == now.shape else "shape", then, now)
    for path in before.tensors:
        if path not in after.tensors:
            yield TensorChange(path, "removed", before.form(path), None)


def _changed_values(before: _Side, after: _Side) -> list[TensorChange]:
    """Return the tensors of both versions whose bits differ, in the order of the second."""
    common = [path for path in after.tensors if path in before.tensors and before.form(path) == after.form(path)]
    unequal = [path for path in common if before.identity(path) != after.identity(path)]
    adjacent = [path for path in unequal if before.tensors[path][1].is_adjacent and after.tensors[path][1].is_adjacent]
    if adjacent:
        before.stored.prefetch()
        after.stored.prefetch()
    # The later version may be stored against the earlier one, whose chunk is then decoded once.
    earlier_first = before.stored.row.number <= after.stored.row.number

    def work(stretches: list[tuple[str, int, int, int]]) -> list[tuple[str, _Sums]]:
        found = []
        for path, first, last, _ in stretches:
            sides = (before, after) if earlier_first else (after, before)
            pair = [side.read(path, first, last) for side in sides]
            sums = _Sums(after.form(path).dtype)
            sums.add(*(pair if earlier_first else reversed(pair)))
            found.append((path, sums))
        return found

    sums = {path: _Sums(after.form(path).dtype) for path in unequal}
    stretches = (
        (path, first, last, (last - first) * ITEM_SIZES[after.form(path).dtype])
        for path in adjacent
        for first, last in after.stretches(path)
    )
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        groups = batches(stretches, lambda stretch: stretch[3], _GROUP)
        for parts in in_order(pool, work, groups, 4 * worker_count()):
            for path, part in parts:
                sums[path].join(part)
    for path in set(unequal).difference(adjacent):
        for left, right in zip(before.rows(path), after.rows(path), strict=True):
            sums[path].add(left, right)
    return [sums[path].change(path, after.form(path)) for path in unequal if sums[path].changed]


class _Sums:
    """The sums over pairs of elements from which the distances of a tensor follow."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._parts = parts_of(dtype)
        self.changed = self._finite = 0
        self._nonfinite = [0, 0]
        self._squares = [0.0, 0.0, 0.0]  # of the first, the second and their difference
        self._product = self._largest = 0.0

    def join(self, other: _Sums) -> None:
        """Add the sums over other elements."""
        self.changed += other.changed
        self._finite += other._finite
        self._nonfinite = [mine + its for mine, its in zip(self._nonfinite, other._nonfinite, strict=True)]
        self._squares = [mine + its for mine, its in zip(self._squares, other._squares, strict=True)]
        self._product += other._product
        self._largest = max(self._largest, other._largest)

    def add(self, before: Bits, after: Bits) -> None:
        """Add elements, given as bytes."""
        size = _COMPARED * ITEM_SIZES[self._dtype]
        for start in range(0, before.size, size):
            self._add(before[start : start + size], after[start : start + size])

    def _add(self, before: Bits, after: Bits) -> None:
        size = ITEM_SIZES[self._dtype] // self._parts
        unequal = before.view(f"u{size}") != after.view(f"u{size}")
        if self._parts > 1:
            unequal = unequal.reshape(-1, self._parts).any(axis=1)
        self.changed += int(np.count_nonzero(unequal))
        one, other = to_float64(before, self._dtype), to_float64(after, self._dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            difference = other - one
            squares = [np.einsum("i,i->", values, values) for values in (one, other, difference)]
            if not np.isfinite(squares).all():
                finite = [np.isfinite(values).reshape(-1, self._parts).all(axis=1) for values in (one, other)]
                for side, mask in enumerate(finite):
                    self._nonfinite[side] += int(mask.size - np.count_nonzero(mask))
                both = np.repeat(finite[0] & finite[1], self._parts)
                one, other, difference = one[both], other[both], difference[both]
                squares = [np.einsum("i,i->", values, values) for values in (one, other, difference)]
            self._product += float(np.einsum("i,i->", one, other))
            self._squares = [mine + float(its) for mine, its in zip(self._squares, squares, strict=True)]
            self._finite += difference.size // self._parts
            if self._parts > 1:
                difference = np.hypot(difference[::2], difference[1::2])
            if difference.size:
                self._largest = max(self._largest, float(difference.max()), -float(difference.min()))

    def change(self, path: str, form: TensorForm) -> TensorChange:
        """Return the change of a tensor."""
        share = self.changed / prod(form.shape)
        nonfinite = self._nonfinite[0], self._nonfinite[1]
        if not all(map(isfinite, (*self._squares, self._product))):  # Squares of values near 1e200 are too large.
            return TensorChange(path, "values", form, form, share, max_abs=self._largest, nonfinite=nonfinite)
        before, after, moved = map(sqrt, self._squares)
        return TensorChange(
            path, "values", form, form, share,
            drift=moved / before if before else inf if moved else 0.0,
            rms=sqrt(self._squares[2] / max(self._finite, 1)),
            cosine=max(-1.0, min(1.0, self._product / before / after)) if before and after else None,
            max_abs=self._largest, nonfinite=nonfinite,
        )  # fmt: skip
