"""The interface of lossy schemes on codebooks and factors, ours or of other distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ckstore.codecs.codebook import Bits, CodebookLattice, Floats, Indices
from ckstore.codecs.factors import FactorLattice, Matrix, Numbers

#: Qualities to try: half an octave apart, because steps are powers of two.
QUALITIES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.2, 16.0)


class Statistics(Protocol):
    """Statistics of the layers of one type, gathered layer by layer."""

    def add(self, values: Floats, sensitivity: Floats | None) -> None:
        """Add a layer."""

    def merge(self, other: Any) -> None:
        """Add the layers of another one."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A tensor to quantise.

    Attributes
    ----------
    values : (n,) float32
        Its finite values; for a scheme of changes, those since the decoded version before, or the values of a version
        in full.
    dtype
        Its dtype: `float32`, `bfloat16` or `float16`.
    quality
        The step size that the user wants, relative to the change by training; 1.5 by default, smaller is finer.
    settings
        The settings of the scheme in place of a quality, or None.
    kind
        Its type: `embedding`, `linear`, `convolution`, …; its own name for moments.
    is_whole
        Whether no later version corrects the error: values in full, or all changes of a chain in one.
    sensitivity
        The sensitivity |g w| of each element for a scheme with statistics, or None if it is unknown.
    statistics
        Statistics of all layers of this type, if the scheme gathers any.
    """

    values: Floats
    dtype: str
    quality: float
    settings: Any = None
    kind: str = ""
    is_whole: bool = True
    sensitivity: Floats | None = None
    statistics: Any = None


def nearest(lattice: CodebookLattice, layer: Layer) -> tuple[Indices, Bits]:
    """Return the index of the level nearest to each value."""
    return lattice.nearest(layer.values), np.empty(0, np.uint16)


@dataclass(frozen=True)
class Scheme:
    """A lossy scheme that quantises each large tensor to its own codebook (`docs/how-to/add-a-scheme.md`).

    Attributes
    ----------
    name
        In policies, and on the command line.
    codebook
        Returns the levels of a layer; `ckstore.codecs.codebook.codebook` makes them of numbers.
    assign
        Returns the index of each element among them (uint8), and the 16 bits of each protected one in order, if the
        codebook has any.
    of_changes
        Whether it quantises changes since the decoded version before, to be added, in place of values.
    qualities
        The qualities that a search tries, from the finest.
    statistics
        Makes empty statistics, if the scheme needs those of all layers of one type, or sensitivities.
    """

    name: str
    codebook: Callable[[Layer], CodebookLattice]
    assign: Callable[[CodebookLattice, Layer], tuple[Indices, Bits]] = nearest
    of_changes: bool = False
    qualities: tuple[float, ...] = QUALITIES
    statistics: Callable[[], Statistics] | None = None


@dataclass(frozen=True)
class MatrixScheme:
    """A lossy scheme that stores changes of weights since an exact base as products of two matrices.

    Attributes
    ----------
    name
        In policies, and on the command line.
    factors
        Returns the factors of changes, (rows, width) in float64, for errors of the size of a step, and a dtype;
        `ckstore.codecs.factors.factor_lattice` makes them of numbers. A vector has rows of one element.
    qualities
        The qualities that a search tries, from the finest.
    """

    name: str
    factors: Callable[[Matrix, float, str], tuple[FactorLattice, Numbers]]
    qualities: tuple[float, ...] = QUALITIES
