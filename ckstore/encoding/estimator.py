"""Decides for each object of a version whether it becomes exact or coarse, and hands it to the encoder of that kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from types import MappingProxyType
from typing import Protocol

import numpy as np

from ckstore.codecs.codebook import CODEBOOK_DTYPES, Floats, as_float32
from ckstore.codecs.lattice import PARTS, STEP_RANGE, Bits, statistics_of
from ckstore.codecs.schemes.dynaquant import RankStatistics, Treatment, moment_sensitivity
from ckstore.encoding.coarse import CoarseEncoder, Steps
from ckstore.encoding.codebooks import CodebookEncoder
from ckstore.encoding.common_step import SPREAD, CoarseParent, CommonStep, common_step
from ckstore.encoding.estimate import Encoded, Estimate, ReadUnit
from ckstore.encoding.exact import ObjectEncoder
from ckstore.encoding.layer_types import layer_type
from ckstore.encoding.sensitivity import Sensitivity, sensitivities
from ckstore.errors import UsageError
from ckstore.formats.layout import FileLayout
from ckstore.lineage.planner import Choice, plan
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.reader import ObjectReader
from ckstore.objects.units import Unit
from ckstore.policy import Policy
from ckstore.runtime.threads import worker_count

#: While all small weights take less than this part of the version, they are kept finer than others ...
SMALL_SHARE = 0.02

#: ... by so many octaves: what it costs is next to nothing.
SMALL_OCTAVES = -2.0

#: Objects of fewer elements are estimated and encoded by one thread at a time while a version is stored: what they take
#: is mostly Python and short kernels, and threads that hand the interpreter's lock to each other for every one of these
#: take longer than one thread.
_ALONE = 1 << 17

#: Memory that the chunks of a version take, as a multiple of its size: the integers of weights come on top.
_KEPT = 1.4


@dataclass(frozen=True, slots=True)
class ParentObject:
    """An object of the parent version: its ids, and where it is coarse what it is off; see `CoarseParent`."""

    lattice: str
    content: str | None
    spread: float = SPREAD


def parent_objects(
    units: Sequence[Unit], objects: Sequence[tuple[str, str | None]], facts: Mapping[int, CoarseUnit]
) -> dict[tuple[str, str], ParentObject]:
    """The objects of a version, each (lattice id, content id or None), by key and signature of their units.

    Parameters
    ----------
    facts
        What the version records of those that are coarse, by number of the unit.
    """
    found = {}
    for number, (unit, (lattice, content)) in enumerate(zip(units, objects, strict=True)):
        spread = facts[number].spread if number in facts else SPREAD
        found[unit.key, unit.signature] = ParentObject(lattice, content, spread)
    return found


class Values(Protocol):
    """Units of a version and their values."""

    @property
    def units(self) -> Sequence[Unit]:
        """All objects."""

    @property
    def layouts(self) -> Sequence[FileLayout]:
        """How the files are cut."""

    @property
    def size(self) -> int:
        """Bytes of the version."""

    def read(self, unit: Unit, first: int, last: int) -> Bits:
        """Bits of the elements from `first` to before `last` of a unit."""

    def checked(self, unit: Unit) -> ReadUnit:
        """What reads a unit, now that it was compared; raises `InputError` where it is not what it was."""


class Estimator:
    """Estimates and encodes the objects of one version.

    Parameters
    ----------
    reader
        Decodes what they are stored against.
    values
        The version.
    policy
        How faithful it is to be.
    parents
        The parent version's objects by key and signature.
    gradients
        Of large tensors, by path, flat: what Inshrinkerator's sensitivity is made of.
    """

    def __init__(
        self,
        reader: ObjectReader,
        values: Values,
        policy: Policy,
        parents: dict[tuple[str, str], ParentObject],
        gradients: Mapping[str, Floats] = MappingProxyType({}),
    ) -> None:
        sizes = {_tensor(unit): 0 for unit in values.units if not unit.is_bundle}
        for unit in values.units:
            if not unit.is_bundle:
                sizes[_tensor(unit)] += unit.count
        for path, gradient in gradients.items():
            if sizes.get(path, gradient.size) != gradient.size:
                raise UsageError(
                    f"The gradient of {path} has {gradient.size} elements, the tensor {sizes[path]}; give one for each."
                )
        if sizes and gradients and not sizes.keys() & gradients.keys():
            raise UsageError(
                f"No gradient has the path of a large tensor, such as {next(iter(sizes))}; give the state's paths."
            )
        self._gradients = gradients
        self._values = values
        self._policy = policy
        self._parents = parents
        self._reader = reader
        self._exact = ObjectEncoder(reader, keep=reader.keeps and _KEPT * values.size <= reader.cache.limit)
        self._coarse = CoarseEncoder(reader, policy)
        self._codebooks = None if policy.scheme == "lattice" else CodebookEncoder(reader, policy)
        self._sizes: dict[str, float] = {}
        self._lock = Lock()
        self._small = Lock()

    def estimate(self, unit: Unit) -> Estimate:
        """Options of a unit."""
        with self._turn(unit):
            return self._estimate(unit)

    def _turn(self, unit: Unit) -> AbstractContextManager[object]:
        """What a unit's work is done in: that of small ones by one thread at a time."""
        return self._small if unit.count < _ALONE else nullcontext()

    def _estimate(self, unit: Unit) -> Estimate:
        if self._policy.is_coarse:
            estimate = self.coarse_estimate(unit)
            if estimate is not None:
                return estimate
        read = partial(self._values.read, unit)
        parent = self._parents.get((unit.key, unit.signature))
        if parent is None:
            return self._exact.estimate(unit, read, None)
        return self._exact.estimate(unit, read, parent.content, parent.lattice)

    def coarse_estimate(self, unit: Unit) -> Estimate | None:
        """Options of a unit without an exact layer; None where it has to stay exact."""
        if not self.may_be_coarse(unit):
            return None
        read = partial(self._values.read, unit)
        before = self._parent(unit)
        if self._codebooks is not None:
            estimate = self._codebooks.estimate(unit, read, before, lambda: self._treatment(unit))
            if estimate is not None:
                return estimate
        return self._coarse.estimate(unit, read, before, lambda: self._steps(unit), lambda: self._size(unit))

    def encode(self, content: str, estimate: Estimate, choice: Choice) -> tuple[Estimate, Choice, Encoded]:
        """The layers of an object as they were planned, or where that was far off, as they are planned anew.

        Raises
        ------
        InputError
            Its bytes changed since they were hashed.
        """
        with self._turn(estimate.unit):
            return self._encode(content, estimate, choice)

    def _encode(self, content: str, estimate: Estimate, choice: Choice) -> tuple[Estimate, Choice, Encoded]:
        unit = estimate.unit
        read = self._values.checked(unit)
        way = estimate.plans[choice.option.name]
        if self._codebooks is not None and way.lattice is not None:
            coarse = self._codebooks.encode(estimate, way, read, lambda: self._treatment(unit))
            return estimate, choice, coarse
        if estimate.is_coarse:
            return estimate, choice, self._coarse.encode(estimate, way, read)
        parent = self._parents.get((unit.key, unit.signature))
        replaced = [] if parent is None else [one for one in (parent.lattice, parent.content) if one is not None]
        layers = self._exact.encode(content, estimate, way, read, replaced)
        if estimate.foretold is not None and estimate.foretold.is_exceeded(estimate.layers(choice, layers)):
            assert parent is not None  # It is the parent's sizes that are remembered.
            anew = self._exact.estimate(unit, read, parent.content, parent.lattice, anew=True)
            other = plan([anew.candidates], choice.option.cost)[0]
            if other.option.stored < sum(layers.nbytes):
                estimate, choice = anew, other
                layers = self._exact.encode(content, estimate, estimate.plans[choice.option.name], read, replaced)
        self._exact.remember(content, estimate, choice, layers)
        return estimate, choice, layers

    def may_be_coarse(self, unit: Unit) -> bool:
        """Whether a unit is one of those that become coarse: norms, biases, counters and complex numbers never do."""
        member = unit.members[0]
        extent = self._values.layouts[member.file].extents[member.extent]
        return unit.role != "other" and extent.dtype not in PARTS

    def _size(self, unit: Unit) -> float:
        """Root mean square of the finite values of the tensor that a unit is, or is a part of."""
        name = unit.key if unit.is_bundle else _tensor(unit)
        with self._lock:
            if name not in self._sizes:
                total = count = 0.0
                for part in self._values.units:
                    if name == (part.key if part.is_bundle else _tensor(part)):
                        squares, _, finite = statistics_of(self._values.read(part, 0, part.count), part.dtype)
                        total, count = total + squares, count + finite
                self._sizes[name] = (total / max(count, 1)) ** 0.5
            return self._sizes[name]

    @cached_property
    def _small_share(self) -> float:
        small = sum(unit.nbytes for unit in self._values.units if unit.is_bundle and unit.role == "weight")
        return small / max(self._values.size, 1)

    def _steps(self, unit: Unit) -> Steps:
        """The steps that a weight is to have."""
        with self._lock:
            shapes, common = self._common
        shape = shapes.get(unit.key, Sensitivity())
        level = -1e9 if common.level is None else common.level + self._finer(unit)
        return Steps(level, shape.rows, shape.cols, unit.key in common.still, common.is_related)

    @cached_property
    def _common(self) -> tuple[dict[str, Sensitivity], CommonStep]:
        """Sensitivities of weights by key, and the step that all of them share."""
        weights = [unit for unit in self._values.units if unit.role == "weight" and unit.dtype in STEP_RANGE]
        pairs = [(unit, self._moments[unit.key]) for unit in weights if unit.key in self._moments]
        shapes = sensitivities(pairs, self._values.read)
        items = [(unit, shapes.get(unit.key, Sensitivity()), self._parent(unit)) for unit in weights]
        return shapes, common_step(items, self._values.read, self._reader, self._policy.quality)

    def _parent(self, unit: Unit) -> CoarseParent | None:
        parent = self._parents.get((unit.key, unit.signature))
        return None if parent is None else CoarseParent(parent.lattice, parent.spread)

    def _finer(self, unit: Unit) -> float:
        """Octaves by which the step of small weights differs from that of others."""
        return SMALL_OCTAVES if unit.is_bundle and self._small_share < SMALL_SHARE else 0.0

    def _treatment(self, unit: Unit) -> Treatment:
        """How Inshrinkerator quantises a unit: split where the shares are met over all layers of its type."""
        sensitivity = self._sensitivity(unit)
        kind = self._layer_type(unit)
        with self._lock:
            ranks = self._ranks[kind]
        known = sensitivity is not None
        settings = self._policy.dynaquant(known=known)
        levels = settings.embedding_levels if kind == "embedding" else settings.levels
        return Treatment(ranks.split(settings, known=known), levels, sensitivity)

    @cached_property
    def _ranks(self) -> dict[str, RankStatistics]:
        """The ranks of the elements of all layers by type."""

        def ranks(unit: Unit) -> tuple[str, RankStatistics]:
            found = RankStatistics()
            values = as_float32(self._values.read(unit, 0, unit.count), unit.dtype)
            found.add(values, self._sensitivity(unit))
            return self._layer_type(unit), found

        units = [
            unit for unit in self._values.units
            if unit.dtype in CODEBOOK_DTYPES and not unit.is_bundle and unit.role != "second"
        ]  # fmt: skip
        merged: dict[str, RankStatistics] = {}
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            for kind, found in pool.map(ranks, units):
                merged.setdefault(kind, RankStatistics()).merge(found)
        return merged

    def _layer_type(self, unit: Unit) -> str:
        """The type of layer that a weight belongs to; every tensor of moments is a type of its own."""
        member = unit.members[0]
        extent = self._values.layouts[member.file].extents[member.extent]
        return layer_type(extent.path, len(extent.shape)) if unit.role == "weight" else _tensor(unit)

    def _sensitivity(self, unit: Unit) -> Floats | None:
        """Inshrinkerator's sensitivity of a weight's elements: |g w|, from second moments without a gradient."""
        gradient = self._gradients.get(_tensor(unit))
        if gradient is not None and not unit.is_bundle and unit.dtype in CODEBOOK_DTYPES:
            parts = [part for part in self._values.units if _tensor(part) == _tensor(unit)]
            first = sum(part.count for part in parts[: parts.index(unit)])
            weight = as_float32(self._values.read(unit, 0, unit.count), unit.dtype)
            with np.errstate(all="ignore"):
                ranks: Floats = np.abs(gradient[first : first + unit.count] * weight)
            return ranks
        second = self._moments.get(unit.key)
        if second is None or second.role != "second" or unit.dtype not in CODEBOOK_DTYPES:
            return None
        values = as_float32(self._values.read(unit, 0, unit.count), unit.dtype)
        return moment_sensitivity(values, as_float32(self._values.read(second, 0, second.count), second.dtype))

    @cached_property
    def _moments(self) -> dict[str, Unit]:
        """A moment of each weight by the weight's key: the second one, or where there are none the first."""
        return _of_weights(self._values.units, "second") or _of_weights(self._values.units, "first")


def knows_sensitivity(units: Sequence[Unit], gradients: Mapping[str, Floats]) -> bool:
    """Whether Inshrinkerator can rank any weight by sensitivity: by a gradient, or by second moments."""
    ranked = {unit.key: _tensor(unit) for unit in units if not unit.is_bundle and unit.dtype in CODEBOOK_DTYPES}
    return not (gradients.keys().isdisjoint(ranked.values()) and ranked.keys().isdisjoint(_of_weights(units, "second")))


def _of_weights(units: Sequence[Unit], role: str) -> dict[str, Unit]:
    """The moments of weights by the weights' keys: optimisers keep them in the order of the parameters.

    Weights and moments of one shape belong together in their order, where there are as many of the one as of the other;
    otherwise nobody knows which is whose.
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
    """Path of the tensor that a unit that is no bundle is, or is a part of."""
    name, mark, part = unit.key.rpartition("#")
    return name if mark and part.isdigit() else unit.key
