"""Decides the roles of a coarse version's tensors by their values, whatever they are called.

A second moment that becomes 0 makes the first step after a restore explode. So a name only proposes a role: a state of
an unknown kind, and a tensor whose values are those of a second moment, are rounded relative to each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ckstore.codecs.lattice import PARTS, STEP_RANGE, Bits, floats
from ckstore.encoding.estimate import ReadUnit
from ckstore.encoding.positives import LEAST, steady_least
from ckstore.formats.layout import FileLayout, Path
from ckstore.objects.roles import ADAM, State, state_of
from ckstore.objects.units import Unit
from ckstore.runtime.cached import cached_property

#: Elements of a tensor that its partners are searched with.
_SAMPLE = 1 << 10

#: Logarithms of a moment and of its partner are correlated by at least this; partners that are tried in this order.
_CORRELATED = 0.3
_TRIED = 3

#: First moments relative to roots of second ones: the largest one, and bounds of the median.
_LARGEST_RATIO = 32.0
_MEDIAN_RATIO = (2.0**-7, 8.0)

#: Magnitudes above which a maximum of gradients cannot be told from a mean of their squares.
_LARGE = 2.0**-5

#: Last parts of the names of a layer's parameters.
_OF_LAYERS = {"weight", "bias"}

#: Binary logarithm in place of that of 0.
_NONE = -200.0


class Values(Protocol):
    """Units of a version and their values."""

    @property
    def units(self) -> Sequence[Unit]:
        """All objects."""

    @property
    def layouts(self) -> Sequence[FileLayout]:
        """The layouts of the files."""

    @property
    def size(self) -> int:
        """Bytes of the version."""

    def read(self, unit: Unit, first: int, last: int) -> Bits:
        """Return the bits of the elements from `first` to before `last` of a unit."""

    def checked(self, unit: Unit, *, rounded: bool = False) -> ReadUnit:
        """Compare a unit with its hash and return its reader; raise `InputError` if its bytes changed.

        Of values that are `rounded`, a CRC-32 is enough.
        """


class JudgedValues:
    """Units of a version with the roles that their values allow, in place of those of their paths.

    `relative` is the role of a tensor that is rounded relative to each value. A state that weights round is a weight:
    `masters` returns such units with the roles of their roundings.
    """

    def __init__(self, values: Values, masters: Callable[[], Mapping[Unit, str]] = dict) -> None:
        self._values = values
        self._masters = masters

    @property
    def units(self) -> Sequence[Unit]:
        """All objects."""
        return self._judged[0]

    @property
    def layouts(self) -> Sequence[FileLayout]:
        """The layouts of the files."""
        return self._values.layouts

    @property
    def size(self) -> int:
        """Bytes of the version."""
        return self._values.size

    def judged(self, unit: Unit) -> Unit:
        """Return a given unit with its role."""
        changed = self._judged[1]
        return changed.get(unit, unit) if changed else unit

    def read(self, unit: Unit, first: int, last: int) -> Bits:
        """Return the bits of the elements from `first` to before `last` of a unit."""
        return self._values.read(self._given(unit), first, last)

    def checked(self, unit: Unit, *, rounded: bool = False) -> ReadUnit:
        """Compare a unit with its hash and return its reader; raise `InputError` if its bytes changed.

        Of values that are `rounded`, a CRC-32 is enough.
        """
        return self._values.checked(self._given(unit), rounded=rounded)

    def _given(self, unit: Unit) -> Unit:
        given = self._judged[2]
        return given.get(unit, unit) if given else unit

    @cached_property
    def _judged(self) -> tuple[list[Unit], dict[Unit, Unit], dict[Unit, Unit]]:
        """All units, the changed ones by the given ones, and the reverse."""
        roles = _Judgement(self._values).roles
        masters = self._masters()
        for number, unit in enumerate(self._values.units if masters else ()):
            if roles.get(number) == "relative" and unit in masters:
                roles[number] = masters[unit]
        changed = {
            unit: replace(unit, role=roles[number])
            for number, unit in enumerate(self._values.units)
            if roles.get(number, unit.role) != unit.role
        }
        units = [changed.get(unit, unit) for unit in self._values.units] if changed else [*self._values.units]
        return units, changed, {judged: unit for unit, judged in changed.items()}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor, or a part of one, of at least `LEAST` elements.

    Attributes
    ----------
    number, first, count
        Its unit, and its elements there.
    shape
        Tensors with the same one may be moments of one parameter.
    tree, state
        Its file and the first segment above it; the optimiser's state that the path names.
    is_positive
        No value is negative, and some are positive.
    sample
        Values at places that depend on `count` alone.
    name
        `weight` or `bias` of a layer, or the state if the path ends with it; otherwise empty.
    """

    number: int
    first: int
    count: int
    shape: tuple[int, ...]
    tree: tuple[int, Path]
    state: State | None
    is_positive: bool
    sample: npt.NDArray[np.float64]
    name: str


class _Judgement:
    """The roles of units by number, as far as values change them."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.roles: dict[int, str] = {}
        self._read: dict[int, Bits] = {}
        with np.errstate(all="ignore"):
            tensors = [tensor for number in self._suspects() for tensor in self._tensors(number)]
            self._doubt_first_moments(tensors)
            self._note_pairs([*_pairs(tensors)])
        self._keep_centred()
        for number, unit in enumerate(values.units):
            if unit.role == "state":
                self.roles.setdefault(number, "relative")

    def _suspects(self) -> Iterator[int]:
        for number, unit in enumerate(self._values.units):
            member = unit.members[0]
            dtype = self._values.layouts[member.file].extents[member.extent].dtype
            if unit.role != "other" and unit.dtype in STEP_RANGE and dtype not in PARTS:
                yield number

    def _tensors(self, number: int) -> Iterator[_Tensor]:
        """Yield the tensors of a unit. Those named as torch's second moments keep that role: it is always safe."""
        unit = self._values.units[number]
        counts = unit.member_counts if unit.is_bundle else [unit.count]
        states = [self._state(unit, member) for member in range(len(counts))]
        if unit.role == "second" and all(state is not None and state.name in ADAM for state in states):
            return
        read = self._reader(number)
        first = 0
        for member, (count, state) in enumerate(zip(counts, states, strict=True)):
            if count >= LEAST:
                start = first + (count - min(count, _SAMPLE)) // 2
                sample = read(start, start + min(count, _SAMPLE))
                is_positive = bool(sample.min() >= 0) and _is_positive(read, first, count, unit.chunk)
                place = unit.members[member]
                extent = self._values.layouts[place.file].extents[place.extent]
                shape = extent.shape if unit.is_bundle else (*unit.shape, len(unit.members))
                tree = place.file, extent.path[:-1][:1]
                last = str(extent.path[-1]).rpartition(".")[2]
                name = last if last in _OF_LAYERS or (state is not None and last == state.name) else ""
                yield _Tensor(number, first, count, shape, tree, state, is_positive, sample, name)
            first += count

    def _state(self, unit: Unit, member: int) -> State | None:
        place = unit.members[member]
        return state_of(self._values.layouts[place.file].extents[place.extent].path)

    def _doubt_first_moments(self, tensors: Sequence[_Tensor]) -> None:
        """Doubt a first moment without a negative value, unless it is small and steady or has a second moment."""
        doubted = [
            tensor for tensor in tensors
            if self._values.units[tensor.number].role == "first" and tensor.is_positive and not self._is_steady(tensor)
        ]  # fmt: skip
        if not doubted:
            return
        sound = set()
        for number, unit in enumerate(self._values.units):
            if unit.role == "second":
                read, first = self._reader(number), 0
                for member, count in enumerate(unit.member_counts if unit.is_bundle else [unit.count]):
                    state = self._state(unit, member)
                    if state is not None and read(first, first + min(count, _SAMPLE)).min() >= 0:
                        sound.add(state.parameter)
                    first += count
        for tensor in doubted:
            if tensor.state is None or tensor.state.parameter not in sound:
                self.roles[tensor.number] = "relative"

    def _is_steady(self, tensor: _Tensor) -> bool:
        """Return whether no value of a bundle's tensor becomes 0."""
        if not self._values.units[tensor.number].is_bundle or not steady_least(tensor.sample):
            return False
        return steady_least(self._reader(tensor.number)(tensor.first, tensor.first + tensor.count)) > 0

    def _note_pairs(self, pairs: Sequence[tuple[_Tensor, _Tensor]]) -> None:
        """Note the roles of first and second moments; those of an optimiser whose variances have roots stay exact."""
        bounded: dict[Any, bool] = {}
        for first, second in pairs:
            if bounded.get(second.tree, True):
                bounded[second.tree] = self._is_variance(first, second)
        for first, second in pairs:
            for tensor, role in ((first, "relative"), (second, "second")):
                unit = self._values.units[tensor.number]
                if bounded[second.tree]:
                    self.roles[tensor.number] = "other"
                elif unit.role not in ("first", "second") and self.roles.get(tensor.number) != "other":
                    # The other tensors of a bundle may be weights.
                    self.roles[tensor.number] = "relative" if unit.is_bundle else role

    def _is_variance(self, first: _Tensor, second: _Tensor) -> bool:
        """Return whether the second is never below the square of the first, as if their difference were a variance.

        Its root would be that of a negative number after rounding. A maximum of gradients exceeds their mean, too.
        """
        if (first.sample**2 > second.sample * 1.001).any():
            return False
        pieces = (self._pieces(first), self._pieces(second))
        is_maximum = True
        for mean, squares in zip(*pieces, strict=True):
            if (mean**2 > squares * 1.001).any():
                return False
            is_maximum &= bool((np.abs(mean) <= squares * 1.1).all() and squares.max() < _LARGE)
        return not is_maximum

    def _pieces(self, tensor: _Tensor) -> Iterator[npt.NDArray[np.float64]]:
        read = self._reader(tensor.number)
        for start in range(0, tensor.count, 1 << 20):
            yield read(tensor.first + start, tensor.first + min(start + (1 << 20), tensor.count))

    def _keep_centred(self) -> None:
        """Keep the squares of a centred RMSprop exact, which subtracts the square of `grad_avg` from them."""
        layouts = self._values.layouts
        centred = {
            (file, extent.path[:1]) for file, layout in enumerate(layouts) for extent in layout.extents
            if (state := state_of(extent.path)) is not None and state.name == "grad_avg"
        }  # fmt: skip
        for number, unit in enumerate(self._values.units if centred else ()):
            place = unit.members[0]
            if unit.role == "second" and (place.file, layouts[place.file].extents[place.extent].path[:1]) in centred:
                self.roles[number] = "other"

    def _reader(self, number: int) -> Callable[[int, int], npt.NDArray[np.float64]]:
        """Return a reader of a unit's values; the latest two bundles are kept in memory."""
        unit = self._values.units[number]
        if unit.is_bundle and number not in self._read:
            while len(self._read) > 1:
                del self._read[next(iter(self._read))]
            self._read[number] = self._values.read(unit, 0, unit.count)
        bits = self._read.get(number)

        def read(first: int, last: int) -> npt.NDArray[np.float64]:
            part = self._values.read(unit, first, last) if bits is None else bits[first:last]
            return floats(part, unit.dtype).astype(np.float64)

        return read


def _pairs(tensors: Sequence[_Tensor]) -> Iterator[tuple[_Tensor, _Tensor]]:
    """Yield first and second moments: two tensors of one shape whose values are 0, small and large together."""
    groups: dict[tuple[int, ...], tuple[list[_Tensor], list[_Tensor]]] = {}
    for tensor in tensors:
        if tensor.state is None or tensor.state.name not in ADAM:
            groups.setdefault(tensor.shape, ([], []))[tensor.is_positive].append(tensor)
    for firsts, seconds in groups.values():
        if firsts and seconds:
            related = _correlations([tensor.sample for tensor in seconds], [tensor.sample for tensor in firsts])
            for second, row in zip(seconds, related, strict=True):
                for place in np.argsort(-row)[:_TRIED].tolist():
                    first = firsts[place]
                    if {second.name, first.name} == _OF_LAYERS:
                        continue  # The gain of a norm and a bias: moments of one parameter are called alike.
                    if first.name not in ("", *_OF_LAYERS) and second.name in (first.name, *_OF_LAYERS):
                        continue  # A state of two parameters, or a state and the gain of a norm.
                    if row[place] > _CORRELATED and _may_be_moments(first.sample, second.sample):
                        yield first, second
                        break


def _is_positive(read: Callable[[int, int], npt.NDArray[Any]], first: int, count: int, chunk: int) -> bool:
    """Return whether no value is negative, and some are positive."""
    largest = 0.0
    for start in range(first, first + count, chunk):
        values = read(start, min(start + chunk, first + count))
        if not values.min() >= 0:
            return False
        largest = max(largest, float(values.max()))
    return largest > 0


def _correlations(
    seconds: Sequence[npt.NDArray[np.float64]], firsts: Sequence[npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    """Return the correlations of logarithms, for each second moment with each first one."""
    # Not a product of matrices, which would wake the threads of BLAS.
    result: npt.NDArray[np.float64] = np.einsum("ik,jk->ij", _standardised(seconds), _standardised(firsts))
    return result


def _standardised(samples: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    logarithms = np.maximum(np.log2(np.abs(np.stack(samples))), _NONE)
    logarithms -= logarithms.mean(axis=1, keepdims=True)
    scale = np.sqrt(np.square(logarithms).sum(axis=1, keepdims=True))
    result: npt.NDArray[np.float64] = np.nan_to_num(logarithms / np.where(scale > 0, scale, 1.0))
    return result


def _may_be_moments(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> bool:
    """Return whether samples may be those of a first and a second moment: no step is far larger than the rate."""
    moving = first != 0
    if not moving.any() or (second[moving] > 0).mean() < 0.99:
        return False
    moving &= second > 0
    ratios = np.abs(first[moving]) / np.sqrt(second[moving])
    low, high = _MEDIAN_RATIO
    return bool(ratios.max() <= _LARGEST_RATIO and low <= np.median(ratios) <= high)
