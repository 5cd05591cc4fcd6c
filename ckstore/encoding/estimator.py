"""Decides for each object of a version whether it is exact or coarse, and passes it to the encoder of that kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import isfinite, nan, prod
from threading import Lock
from typing import Protocol

import numpy as np

from ckstore.codecs.codebook import CODEBOOK_DTYPES, Floats, as_float32
from ckstore.codecs.lattice import PARTS, STEP_RANGE, floats, statistics_of
from ckstore.codecs.scheme import Layer, MatrixScheme, Scheme, Statistics
from ckstore.codecs.schemes import LATTICE, scheme_of
from ckstore.codecs.schemes.dynaquant import moment_sensitivity
from ckstore.encoding.casts import Casts
from ckstore.encoding.coarse import CoarseEncoder, Steps
from ckstore.encoding.codebooks import CAREFUL, CodebookEncoder
from ckstore.encoding.common_step import CommonStep, common_step
from ckstore.encoding.estimate import SPREAD, Encoded, Estimate, Master, Parent, Source
from ckstore.encoding.exact import ObjectEncoder
from ckstore.encoding.factors import FactorEncoder
from ckstore.encoding.sensitivity import Sensitivity, sensitivities
from ckstore.encoding.value_roles import JudgedValues, Values
from ckstore.errors import IntegrityError, UsageError
from ckstore.formats.layout import FileLayout, Path
from ckstore.formats.paths import path_to_text
from ckstore.lineage.cost import Work, layer
from ckstore.lineage.planner import Choice
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import exact_work
from ckstore.objects.units import Unit
from ckstore.policy import Policy
from ckstore.runtime.cached import cached_property
from ckstore.runtime.threads import worker_count

_EMBEDDING = re.compile(r"embed|emb\b|\bw[tp]e\b")
_ATTENTION = re.compile(r"attn|attention|qkv")


def layer_type(path: Path, axes: int) -> str:
    """Return the type of the layer of a weight: `convolution`, `embedding`, `attention` or `linear`.

    Four axes mean a convolution under any name, such as the one that embeds patches.
    """
    name = "/".join(segment for segment in path if isinstance(segment, str)).lower()
    if axes > 3:
        return "convolution"
    if _EMBEDDING.search(name):
        return "embedding"
    if _ATTENTION.search(name):
        return "attention"
    return "convolution" if axes == 3 else "linear"


#: If all small weights together take less than this part of the version, they are quantised more finely ...
SMALL_SHARE = 0.02

#: ... by this number of octaves, which costs next to nothing.
SMALL_OCTAVES = -2.0

#: Norms and biases are quantised more finely than weights by this number of octaves.
VECTOR_OCTAVES = -3.0

#: Objects of fewer elements are estimated and encoded by one thread at a time while a version is stored: their work is
#: mostly Python and short kernels, and threads that pass the interpreter's lock around for each of them take longer
#: than one thread.
_ALONE = 1 << 17

#: Values of a moment that are compared with another moment's, at least; fewer than twice as many.
_COMPARED = 1 << 14

#: Roles from the one whose values matter least one by one.
_CAUTION = {role: number for number, role in enumerate(("weight", "vector", "first", "second", "relative", "other"))}

#: Memory of the chunks of a version, as a multiple of its size, without the integers of weights.
KEPT = 1.4


def parent_objects(units: Sequence[Unit], objects: Sequence[str], facts: Mapping[int, CoarseUnit]) -> dict[str, Parent]:
    """Return the objects of a version, given by id, by signature; `facts` of coarse ones are by unit number."""
    found = {}
    for number, (unit, identity) in enumerate(zip(units, objects, strict=True)):
        spread = facts[number].spread if number in facts else SPREAD
        found[unit.signature] = Parent(identity, spread)
    return found


def _masters(casts: Casts | None) -> dict[Unit, str]:
    """Return the units that weights round, with the roles of these."""
    return {} if casts is None else {master: unit.role for unit, master in casts.copies.items()}


class GradientSource(Protocol):
    """Gradients of tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes, by the tensors' paths."""

    def read(self, path: str, axes: Sequence[int], first: int, last: int) -> Floats:
        """Return the elements from `first` to before `last` of a gradient, in C order of `axes`."""


class Estimator:
    """Estimates and encodes the objects of one version.

    `parents` are the parent version's objects by signature, `gradients` those of large tensors: the input of
    Inshrinkerator's sensitivity. `casts` are the version's.
    """

    def __init__(
        self,
        reader: ObjectReader,
        values: Values,
        policy: Policy,
        parents: dict[str, Parent],
        gradients: GradientSource | None = None,
        casts: Casts | None = None,
    ) -> None:
        self._is_coarse = policy.is_coarse
        # Published schemes are as they are published, and a bound holds for each tensor.
        together = not self._is_coarse or (policy.scheme == LATTICE and not policy.is_bounded)
        self._casts = casts if together else None
        self._masters: dict[Unit, Estimate | None] = {}
        self._axes = {} if not gradients else _orders(values, gradients.shapes)
        self._gradients = gradients
        # Exact versions need no roles, and judging them reads values.
        self._values = JudgedValues(values, partial(_masters, self._casts)) if self._is_coarse else values
        self._policy = policy
        self._parents = parents
        self._reader = reader
        self._exact = ObjectEncoder(reader, keep=reader.keeps and KEPT * values.size <= reader.cache.limit)
        self._coarse = CoarseEncoder(reader, policy)
        scheme = None if policy.scheme == LATTICE else scheme_of(policy.scheme)
        self._scheme = scheme if isinstance(scheme, Scheme) else None
        self._codebooks = None if self._scheme is None else CodebookEncoder(reader, self._scheme)
        self._factors = FactorEncoder(reader, scheme) if isinstance(scheme, MatrixScheme) else None
        self._sizes: dict[object, float] = {}
        self._lock = Lock()
        self._small = Lock()
        self._judging = Lock()

    def estimate(self, unit: Unit) -> Estimate:
        """Return the options of a unit."""
        with self._turn(unit):
            return self._estimate(unit)

    def _turn(self, unit: Unit) -> AbstractContextManager[object]:
        """Return the context of a unit's work, which admits one small unit at a time."""
        return self._small if unit.count < _ALONE else nullcontext()

    def _estimate(self, unit: Unit) -> Estimate:
        if self._is_coarse:
            estimate = self.coarse_estimate(unit)
            if estimate is not None:
                return estimate
        source = self._source(unit)
        if source is not None and self._is_coarse and self._master(source.unit) is not None:
            source = None  # Its exact values are not stored.
        return self._exact.estimate(unit, partial(self._values.read, unit), self._parent(unit), source)

    def _source(self, unit: Unit) -> Source | None:
        """Return the values in the same version that a unit rounds, if any."""
        # Of units with the same values, one decides how all of them become coarse.
        found = None if self._casts is None else self._casts.source(unit, alone=self._is_coarse)
        if found is None:
            return None
        content, other = found
        work = self._expected(other, exact_work(other.count, other.chunk, other.dtype))
        return Source(content, other, partial(self._values.read, other), work)

    def _expected(self, unit: Unit, work: Work) -> Work:
        """Return the expected work of decoding a unit: that of its own record, and of the parent's chain."""
        parent = self._parent(unit)
        if parent is not None:
            with suppress(IntegrityError):
                work = work.plus(self._reader.chains.work(self._reader.resolver.record(parent.id)))
        return work

    def coarse_estimate(self, unit: Unit) -> Estimate | None:
        """Return the options of a unit as a coarse object; None if it must stay exact.

        A unit that rounds another one becomes the rounding of the coarse values of that one.
        """
        if not self.may_be_coarse(unit):
            return None
        source = self._source(unit)
        unit = self._judged(unit)
        if source is not None:
            master = self._master(source.unit)
            if master is None:
                return None
            own = layer(-(-unit.count // unit.chunk), unit.count, master.alone, grouped=False)
            source = replace(source, work=self._expected(source.unit, own))
            estimate = self._coarse.estimate_cast(unit, partial(self._values.read, unit), Master(source, master))
            if estimate is not None:
                return estimate
        read = partial(self._values.read, unit)
        before = self._parent(unit)
        if self._codebooks is not None:
            estimate = self._codebooks.estimate(unit, read, before, lambda: self._layer(unit))
            if estimate is not None:
                return estimate
        if self._factors is not None:
            estimate = self._factors.estimate(unit, read, before, lambda: self._steps(unit))
            if estimate is not None:
                return estimate
        return self._coarse.estimate(
            unit, read, before, lambda: self._steps(unit), lambda: self._size(unit), lambda: self._agreement(unit)
        )

    def _master(self, unit: Unit) -> Estimate | None:
        """Return the options of a unit that others round as a coarse object."""
        if unit not in self._masters:
            self._masters[unit] = self.coarse_estimate(unit)
        return self._masters[unit]

    def encode(self, content: str, estimate: Estimate, choice: Choice) -> Encoded:
        """Return an object as planned.

        Raises
        ------
        InputError
            Its bytes changed since they were hashed.
        """
        unit = estimate.unit
        way, debt = estimate.ways[choice.option.name], round(choice.debt)
        with self._turn(unit):
            read = self._values.checked(unit, rounded=estimate.is_coarse)
            if self._codebooks is not None and way.lattice is not None:
                return self._codebooks.encode(estimate, way, read, lambda: self._layer(unit), debt)
            if self._factors is not None and way.numbers is not None:
                return self._factors.encode(estimate, way, read)
            if estimate.is_coarse:
                return self._coarse.encode(estimate, way, read, debt)
            parent = self._parent(unit)
            if way.source is not None:
                way = replace(way, source=replace(way.source, read=self._values.checked(way.source.unit)))
            return self._exact.encode(content, estimate, way, read, debt, [] if parent is None else [parent.id])

    def may_be_coarse(self, unit: Unit) -> bool:
        """Return whether a unit may become coarse: statistics, counters and complex numbers never do."""
        return self.caution(unit) < _CAUTION["other"]

    def caution(self, unit: Unit) -> int:
        """Return how faithfully a unit of a coarse version must be stored: its role, as a number."""
        member = unit.members[0]
        extent = self._values.layouts[member.file].extents[member.extent]
        return _CAUTION["other" if extent.dtype in PARTS else self._judged(unit).role]

    def _judged(self, unit: Unit) -> Unit:
        """Return a unit of a coarse version with its role."""
        with self._judging:
            return self._values.judged(unit) if isinstance(self._values, JudgedValues) else unit

    def _size(self, unit: Unit) -> float:
        """Return the root mean square of the finite values of a unit's tensor; of several, the smallest."""
        if not unit.is_bundle and _has_several(self._values.layouts, unit):
            places = dict.fromkeys((member.file, member.extent) for member in unit.members)
            return min(self._size_of(place, self._stretches(place)) for place in places)
        name = unit.key if unit.is_bundle else _tensor(unit)
        parts = [part for part in self._values.units if name == (part.key if part.is_bundle else _tensor(part))]
        return self._size_of(name, [(part, 0, part.count) for part in parts])

    def _size_of(self, name: object, stretches: Iterable[tuple[Unit, int, int]]) -> float:
        """Return the root mean square of the finite values of some units' elements from a first to before a last."""
        with self._lock:
            if name not in self._sizes:
                total = count = 0.0
                for part, first, last in stretches:
                    squares, _, finite = statistics_of(self._values.read(part, first, last), part.dtype)
                    total, count = total + squares, count + finite
                self._sizes[name] = (total / max(count, 1)) ** 0.5
            return self._sizes[name]

    def _stretches(self, place: tuple[int, int]) -> Iterator[tuple[Unit, int, int]]:
        """Yield the elements of an extent of a file in the units."""
        for unit in self._values.units:
            first = 0
            for member, count in zip(unit.members, unit.member_counts, strict=True):
                if (member.file, member.extent) == place:
                    yield unit, first, first + count
                first += count

    def _agreement(self, unit: Unit) -> float | None:
        """Return the octaves by which a first moment exceeds the mean one, relative to the root of the second.

        None without a second moment, or if all values of either are 0.
        """
        with self._lock:
            return self._agreements.get(unit.key)

    @cached_property
    def _agreements(self) -> dict[str, float]:
        firsts, seconds = (_of_weights(self._values.units, role) for role in ("first", "second"))
        pairs = [(first, seconds[weight]) for weight, first in firsts.items() if weight in seconds]
        levels = {first: self._level(first) - self._level(second) / 2 for first, second in pairs}
        known = {first: level for first, level in levels.items() if isfinite(level)}
        mean = np.average([*known.values()], weights=[first.count for first in known]) if known else 0.0
        return {first.key: level - mean for first, level in known.items()}

    def _level(self, unit: Unit) -> float:
        """Return the mean binary logarithm of some of a unit's values; NaN if all are 0."""
        values = floats(self._values.read(unit, 0, unit.count)[:: unit.count // _COMPARED | 1], unit.dtype)
        known = np.abs(values[np.isfinite(values) & (values != 0)].astype(np.float64))
        return float(np.log2(known).mean()) if known.size else nan

    @cached_property
    def _small_share(self) -> float:
        small = sum(unit.nbytes for unit in self._values.units if unit.is_bundle and unit.role == "weight")
        return small / max(self._values.size, 1)

    def _steps(self, unit: Unit) -> Steps:
        """Return the steps of a weight, or of norms and biases."""
        with self._lock:
            shapes, common = self._common
        shape = shapes.get(unit.key, Sensitivity())
        level = -1e9 if common.level is None else common.level + self._finer(unit)
        return Steps(level, shape.rows, shape.cols, unit.key in common.still, common.is_related)

    @cached_property
    def _common(self) -> tuple[dict[str, Sensitivity], CommonStep]:
        """The sensitivities of weights by key, and their common step."""
        weights = [unit for unit in self._originals if unit.role in ("weight", "vector") and unit.dtype in STEP_RANGE]
        pairs = [(unit, self._moments[unit.key]) for unit in weights if unit.key in self._moments]
        shapes = sensitivities(pairs, self._values.read)
        items = [(unit, shapes.get(unit.key, Sensitivity()), self._parent(unit)) for unit in weights]
        return shapes, common_step(items, self._values.read, self._reader, self._policy.quality)

    def _parent(self, unit: Unit) -> Parent | None:
        return self._parents.get(unit.signature)

    def _finer(self, unit: Unit) -> float:
        """Return the octaves by which the step of a unit differs from that of large weights."""
        if unit.role == "vector":
            return VECTOR_OCTAVES
        return SMALL_OCTAVES if unit.is_bundle and self._small_share < SMALL_SHARE else 0.0

    def _layer(self, unit: Unit) -> Layer:
        """Return a unit for its scheme, without values."""
        kind, policy = self._layer_type(unit), self._policy
        layer = Layer(np.empty(0, np.float32), unit.dtype, policy.quality, policy.settings, kind)
        if self._scheme is None or self._scheme.statistics is None:
            return layer
        sensitivity = self._sensitivity(unit)
        with self._lock:
            statistics = self._statistics[kind]
        return replace(layer, sensitivity=sensitivity, statistics=statistics)

    @cached_property
    def _statistics(self) -> dict[str, Statistics]:
        """The scheme's statistics of all layers by type."""
        assert self._scheme is not None
        make = self._scheme.statistics
        assert make is not None

        def gathered(unit: Unit) -> tuple[str, Statistics]:
            found = make()
            values = as_float32(self._values.read(unit, 0, unit.count), unit.dtype)
            found.add(values, self._sensitivity(unit))
            return self._layer_type(unit), found

        units = [
            unit for unit in self._values.units
            if unit.dtype in CODEBOOK_DTYPES and not unit.is_bundle and unit.role not in CAREFUL
        ]  # fmt: skip
        merged: dict[str, Statistics] = {}
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            for kind, found in pool.map(gathered, units):
                merged.setdefault(kind, make()).merge(found)
        return merged

    def _layer_type(self, unit: Unit) -> str:
        """Return the layer type of a weight; every tensor of moments is its own type."""
        member = unit.members[0]
        extent = self._values.layouts[member.file].extents[member.extent]
        return layer_type(extent.path, len(extent.shape)) if unit.role == "weight" else _tensor(unit)

    def _sensitivity(self, unit: Unit) -> Floats | None:
        """Return Inshrinkerator's sensitivity of a weight's elements: |g w|, from second moments without a gradient."""
        path, given = _tensor(unit), self._gradients
        if given is not None and path in self._axes and not unit.is_bundle and unit.dtype in CODEBOOK_DTYPES:
            parts = [part for part in self._values.units if _tensor(part) == path]
            first = sum(part.count for part in parts[: parts.index(unit)])
            weight = as_float32(self._values.read(unit, 0, unit.count), unit.dtype)
            with np.errstate(all="ignore"):
                ranks: Floats = np.abs(given.read(path, self._axes[path], first, first + unit.count) * weight)
            return ranks
        second = self._moments.get(unit.key)
        if second is None or second.role != "second" or unit.dtype not in CODEBOOK_DTYPES:
            return None
        values = as_float32(self._values.read(unit, 0, unit.count), unit.dtype)
        return moment_sensitivity(values, as_float32(self._values.read(second, 0, second.count), second.dtype))

    @cached_property
    def _moments(self) -> dict[str, Unit]:
        """A moment of each weight by the weight's key: the second one, else the first."""
        return _of_weights(self._originals, "second") or _of_weights(self._originals, "first")

    @property
    def _originals(self) -> Sequence[Unit]:
        """All units but weights that round others."""
        copies = self._casts.copies if self._casts is not None and self._is_coarse else {}
        return [unit for unit in self._values.units if unit not in copies] if copies else self._values.units


def knows_sensitivity(units: Sequence[Unit], gradients: GradientSource | None) -> bool:
    """Return whether Inshrinkerator can rank any weight by sensitivity: by a gradient, or by second moments."""
    ranked = {unit.key: _tensor(unit) for unit in units if not unit.is_bundle and unit.dtype in CODEBOOK_DTYPES}
    given = set() if gradients is None else gradients.shapes.keys()
    return not (given.isdisjoint(ranked.values()) and ranked.keys().isdisjoint(_of_weights(units, "second")))


def _orders(values: Values, given: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Return the axes of each large tensor with a gradient in the order of its elements; `given` are their shapes.

    Raise `UsageError` for a gradient of another shape, or if none is of a tensor.
    """
    views = {
        (file, tensor.extent): tensor for file, layout in enumerate(values.layouts) for tensor in layout.tensors[::-1]
    }
    sizes: dict[str, int] = {}
    axes: dict[str, list[int]] = {}
    for unit in values.units:
        if unit.is_bundle:
            continue
        path = _tensor(unit)
        sizes[path] = sizes.get(path, 0) + unit.count
        tensor = views.get((unit.members[0].file, unit.members[0].extent))
        if path not in given or path in axes or tensor is None:
            continue
        shape = tensor.shape if tensor.box is None else tensor.box.whole
        if shape != given[path]:
            raise UsageError(f"The gradient of {path} has the shape {given[path]}, the tensor {shape}; give its shape.")
        axes[path] = sorted(range(len(shape)), key=[-stride for stride in tensor.strides].__getitem__)
    if sizes and given and not any(_is_known(path, values.layouts) for path in given):
        raise UsageError(f"No gradient has the path of a tensor, such as {next(iter(sizes))}; give the state's paths.")
    for path in sizes.keys() & given.keys():
        if path in axes and prod(given[path]) != sizes[path]:  # Some of its elements are in bundles.
            del axes[path]
        elif prod(given[path]) != sizes[path]:
            raise UsageError(
                f"The gradient of {path} has {prod(given[path])} elements, the tensor {sizes[path]}; give one for each."
            )
    return axes


def _has_several(layouts: Sequence[FileLayout], unit: Unit) -> bool:
    """Return whether a unit has elements of several tensors: it is a bundle, or a tensor came apart."""
    return len({layouts[member.file].extents[member.extent].path for member in unit.members}) > 1


def _is_known(path: str, layouts: Sequence[FileLayout]) -> bool:
    """Return whether a tensor of a version has this path; in a directory the file's path precedes it."""
    names = {path_to_text(tensor.path) for layout in layouts for tensor in layout.tensors}
    ends = [path, *(path[at + 1 :] for at in range(len(path)) if path[at] == "/" and len(layouts) > 1)]
    return not names.isdisjoint(ends)


def _of_weights(units: Sequence[Unit], role: str) -> dict[str, Unit]:
    """Return the moments of weights by the weights' keys: optimisers keep them in the order of the parameters.

    Weights and moments of one shape are paired in order if their numbers are equal; otherwise the pairing is unknown.
    """
    weights: dict[tuple[int, ...], list[Unit]] = {}
    moments: dict[tuple[int, ...], list[Unit]] = {}
    for unit in units:
        if not unit.is_bundle and unit.role in ("weight", role):
            (weights if unit.role == "weight" else moments).setdefault(unit.shape, []).append(unit)
    return {
        weight.key: moment
        for shape, alike in weights.items()
        if len(alike) == len(moments.get(shape, [])) and moments[shape][0].dtype in STEP_RANGE
        for weight, moment in zip(alike, moments[shape], strict=True)
    }


def _tensor(unit: Unit) -> str:
    """Return the path of the tensor of a unit that is not a bundle."""
    name, mark, part = unit.key.rpartition("#")
    return name if mark and part.isdigit() else unit.key
