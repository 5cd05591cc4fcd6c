"""Factors: the change of a matrix since its base as a product of two matrices of integers, from singular vectors.

The change of one fine-tune has few directions (`docs/decisions.md`, "One fine-tune against its base"). A direction of
size s has the numbers s·u / step and s·v / step: errors of all elements are alike, whatever the direction. It is kept
if its energy is worth the bits of its numbers. Weights of the directions are fitted by least squares to the rounded
numbers, and scaled so that the decoded change has as much of the change's own direction as the change itself: training
that still improves the model goes that way.
"""

from __future__ import annotations

import numpy as np

from ckstore.codecs.factors import MOST_DIRECTIONS, FactorLattice, Matrix, Numbers, factor_lattice
from ckstore.codecs.scheme import MatrixScheme
from ckstore.runtime.blas import one_thread

#: A direction is kept if its energy is at least this multiple of that of a step for each of its numbers.
_WORTH = 0.3

#: The largest common scale: where most of a change is lost, more would be noise.
_SCALE = 1.25

#: Weights that least squares find lie between these multiples of the first ones: a rounded direction may be nearly 0.
_GAINS = (0.125, 2.0)


def factors(changes: Matrix, step: float, dtype: str) -> tuple[FactorLattice, Numbers]:
    """Return the lattice and the numbers of changes (rows, width), whose rounding errors have the size of a step."""
    with one_thread():
        left, sizes, right = _directions(changes, _WORTH * step**2 * sum(changes.shape))
        left, right = np.rint(left * (sizes / step)), np.rint(right * (sizes / step)[:, None])
        kept = np.flatnonzero(left.any(axis=0) & right.any(axis=1))
        if not kept.size:
            return factor_lattice(dtype, np.ones(1), np.zeros((len(changes), 1)), np.zeros((1, changes.shape[1])))
        left, right = left[:, kept], right[kept]
        return factor_lattice(dtype, _weights(changes, left, right, step**2 / sizes[kept]), left, right)


def _directions(changes: Matrix, least: float) -> tuple[Matrix, Matrix, Matrix]:
    """Return singular vectors and values of the directions with at least some energy, the largest first."""
    is_wide = len(changes) <= changes.shape[1]
    energies, vectors = np.linalg.eigh(changes @ changes.T if is_wide else changes.T @ changes)
    kept = np.flatnonzero(energies > max(least, 0.0))[::-1][:MOST_DIRECTIONS]
    sizes, vectors = np.sqrt(energies[kept]), vectors[:, kept]
    if is_wide:
        return vectors, sizes, (vectors.T @ changes) / sizes[:, None]
    return (changes @ vectors) / sizes, sizes, vectors.T


def _weights(changes: Matrix, left: Matrix, right: Matrix, expected: Matrix) -> Matrix:
    """Return the weights of rounded directions, scaled; `expected` are those of directions that are not rounded."""
    products = (left.T @ left) * (right @ right.T)
    known = ((left.T @ changes) * right).sum(axis=1)
    gains = np.linalg.lstsq(products * expected, known, rcond=1e-9)[0]
    weights: Matrix = expected * np.clip(gains, *_GAINS)
    along = float(weights @ known) / float(np.square(changes).sum())
    return weights * (min(1 / along, _SCALE) if along > 0 else 1.0)


#: Its qualities are those of the lattices.
SCHEME = MatrixScheme("factors", factors)
