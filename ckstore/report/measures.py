"""The numbers of one tensor at one version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import PARTS, STEP_RANGE, Bits, floats
from ckstore.dtypes import bits_dtype
from ckstore.reading.real_values import parts_of, to_float64
from ckstore.runtime.blas import one_thread

Floats = npt.NDArray[Any]
Group = Literal["weights", "optimiser", "storage"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A number that a tensor has at a version: its key, its name, one sentence about it, and how to show it."""

    key: str
    label: str
    about: str
    scale: Literal["log", "linear"] = "log"
    group: Group = "weights"


#: All measures by key, in the order of a report.
MEASURES = {
    measure.key: measure
    for measure in (
        Measure("change", "relative change", "Distance from the version before, relative to the norm there."),
        Measure("ratio", "update-to-weight ratio", "Relative change per step since the version before."),
        Measure("rms", "root mean square", "Root mean square of the finite values."),
        Measure("distance", "distance from the start", "Distance from the first version, relative to the norm there."),
        Measure("unchanged", "unchanged elements", "Share of elements with the bits of the version before.", "linear"),
        Measure("nonfinite", "NaN or infinite", "Share of elements that are NaN or infinite.", "linear"),
        Measure(
            "rank",
            "effective rank",
            "Exponential of the entropy of the normalised singular values; beyond 256 rows and columns estimated.",
            "linear",
        ),
        Measure(
            "spectral", "spectral norm", "Largest singular value; estimated beyond 256 rows and columns.", "linear"
        ),
        Measure("v_low", "second moments, 1 %", "First percentile of the second moments.", "log", "optimiser"),
        Measure("v_high", "second moments, 99 %", "Last percentile of the second moments.", "log", "optimiser"),
        Measure("m_over_sqrt_v", "|m| / sqrt(v)", "Median of first moments over roots of second ones.", "log",
                "optimiser"),
        Measure("deviation", "error of coarse values", "Error relative to the root mean square.", "log", "storage"),
        Measure("bits", "bits an element", "Stored bits an element.", "linear", "storage"),
    )
}  # fmt: skip

#: The measures that need the values of a tensor, in the order of a row; the counts of a histogram may follow.
ROW = tuple(key for key, measure in MEASURES.items() if key != "ratio" and measure.group != "storage")

#: Bins of a histogram: they cover this multiple of the root mean square at the first version to either side.
BINS = 48
REACH = 6.0

#: Quantiles are taken of at most this many elements, evenly spaced.
QUANTILES = 1 << 16

#: Matrices with a side up to this have all singular values computed; of others, this many of the largest.
_WHOLE_SVD = 256
_SINGULAR_VALUES = 32
_OVERSAMPLED = 8


def float_values(bits: Bits, dtype: str) -> Floats | None:
    """Return the values of elements as a flat float array; the parts of complex ones; None of integers and booleans.

    Values are widened exactly; complex ones with a part that is not finite are NaN. A byte of float4 has two.

    Examples
    --------
    >>> float_values(np.array([0x38, 0x7F], "u1"), "float8_e4m3fn").tolist()
    [1.0, nan]
    >>> float_values(np.array([1, 2], "u8"), "int64") is None
    True
    """
    flat = bits.reshape(-1)
    if dtype in PARTS:
        part = PARTS[dtype]
        pairs = floats(flat.view(bits_dtype(part)), part).reshape(-1, 2)
        if not np.isfinite(pairs).all():
            pairs = np.where(np.isfinite(pairs).all(1, keepdims=True), pairs, np.nan)
        return pairs.reshape(-1)
    if dtype in STEP_RANGE:
        return floats(flat, dtype)
    return to_float64(flat, dtype) if dtype.startswith(("float8", "float4")) else None


@dataclass(frozen=True, slots=True)
class Reading:
    """Elements of a tensor at one version: `bits` in its shape, or a sample of them."""

    dtype: str
    bits: Bits

    def values(self) -> Floats | None:
        """Return the values; see `float_values`."""
        return float_values(self.bits, self.dtype)


def measure(
    now: Reading,
    before: Reading | None,
    first: Reading | None,
    *,
    is_matrix: bool = False,
    is_second_moment: bool = False,
    first_moments: Reading | None = None,
    has_histogram: bool = False,
    start: float | None = None,
    nonfinite: float | None = None,
) -> npt.NDArray[np.float32]:
    """Return the row of a tensor: the measures of `ROW`, NaN for those without a meaning.

    Parameters
    ----------
    now, before, first
        The same elements at the version, at the one before, and at the first one; others of another dtype do not count.
    is_matrix
        Compute singular values.
    is_second_moment
        Compute quantiles; with `first_moments`, also of the ratio of both.
    has_histogram
        Let the counts of a histogram follow.
    start
        The root mean square at the first version, by which its bins are chosen; None for this one's.
    nonfinite
        The share of elements that are not finite, where the readings are samples.
    """
    found: dict[str, float] = {}
    counts: npt.NDArray[Any] = np.full(BINS * has_histogram, np.nan)
    before, first = (other if other and other.dtype == now.dtype else None for other in (before, first))
    if before is not None and now.bits.size:
        found["unchanged"] = float((now.bits == before.bits).mean())
    values = now.values()
    if values is not None and values.size:
        found["rms"], share = _sizes(values, values.size // parts_of(now.dtype))
        found["nonfinite"] = share if nonfinite is None else nonfinite
        for key, other in (("change", before), ("distance", first)):
            if other is not None:
                found[key] = relative_distance(values, other.values())
        if is_matrix and found["nonfinite"] == 0:
            with one_thread():
                found["rank"], found["spectral"] = spectrum(values.reshape(len(now.bits), -1))
        if is_second_moment:
            found |= _moments(values, None if first_moments is None else first_moments.values())
        if has_histogram:
            counts = histogram(values, found["rms"] if start is None else start)
    with np.errstate(over="ignore"):
        return np.array([*(found.get(key, np.nan) for key in ROW), *counts]).astype(np.float32)


def unmoved(row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the row of a version whose elements have the bits of the version before, from the row of that one."""
    row = row.copy()
    row[ROW.index("unchanged")] = 1
    row[ROW.index("change")] = 0 if row[ROW.index("rms")] > 0 else np.nan
    return row


def nonfinite(bits: Bits, dtype: str) -> float:
    """Return the share of elements that are NaN or infinite; 0 for integers."""
    values = float_values(bits, dtype)
    return 0.0 if values is None else _sizes(values, values.size // parts_of(dtype))[1]


def _sizes(values: Floats, elements: int) -> tuple[float, float]:
    """Return the root mean square of finite elements, and the share of other elements."""
    from ckstore.kernels.lattice import statistics

    total, _, finite = statistics(values)
    count = finite * elements // values.size  # Complex values have two parts.
    return (total / count) ** 0.5 if count else np.nan, 1 - count / elements


def relative_distance(values: Floats, others: Floats | None) -> float:
    """Return the distance of values from others, relative to the norm of the others; NaN where that is 0.

    Elements that are not finite in both do not count.
    """
    from ckstore.kernels.coarse import deviation

    if others is None:
        return np.nan
    _, squares, total, _ = deviation(others, values)
    return float((squares / total) ** 0.5) if total > 0 else np.nan


def spectrum(matrix: Floats) -> tuple[float, float]:
    """Return the effective rank and the spectral norm of a matrix.

    The effective rank (Roy and Vetterli 2007) is the exponential of the entropy of the singular values, divided by
    their sum. Of a matrix whose sides exceed 256, a randomised SVD (Halko et al. 2011) with a fixed seed finds the 32
    largest; the remaining energy is divided equally among the others.
    """
    # Scaled by a power of two, huge and tiny values have finite squares, and all singular values the same bits.
    exponent = int(np.frexp(np.abs(matrix).max(initial=0))[1])
    matrix = np.ldexp(matrix, -exponent)
    lengths = min(matrix.shape)
    if lengths <= _WHOLE_SVD:
        singular = np.linalg.svd(matrix.astype(np.float64, copy=False), compute_uv=False)
    else:
        singular = _largest_singular_values(matrix.astype(np.float32, copy=False))
        rest = float(np.square(matrix, dtype=np.float64).sum() - np.square(singular).sum())
        missing = lengths - singular.size
        singular = np.concatenate([singular, np.full(missing, max(rest, 0.0) / missing) ** 0.5])
    total = float(singular.sum())
    if total == 0:
        return np.nan, 0.0
    shares = singular[singular > 0] / total
    with np.errstate(over="ignore", under="ignore"):
        return float(np.exp(-(shares * np.log(shares)).sum())), float(np.ldexp(singular[0], exponent))


def _largest_singular_values(matrix: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    random = np.random.default_rng(0).standard_normal((matrix.shape[1], _SINGULAR_VALUES + _OVERSAMPLED), np.float32)
    basis = np.linalg.qr(matrix @ random)[0]
    for _ in range(2):
        basis = np.linalg.qr(matrix @ np.linalg.qr(matrix.T @ basis)[0])[0]
    return np.linalg.svd((basis.T @ matrix).astype(np.float64), compute_uv=False)[:_SINGULAR_VALUES]


def _moments(second: Floats, first: Floats | None) -> dict[str, float]:
    """Return the outer percentiles of second moments, and the median of magnitudes of first ones over their roots."""
    stride = max(1, -(-second.size // QUANTILES))
    v = second[::stride].astype(np.float64)
    known = v[np.isfinite(v)]
    found = {}
    if known.size:
        found["v_low"], found["v_high"] = np.quantile(known, [0.01, 0.99])
    if first is not None:
        m = first[::stride].astype(np.float64)
        both = np.isfinite(m) & np.isfinite(v) & (v > 0)
        if both.any():
            found["m_over_sqrt_v"] = np.median(np.abs(m[both]) / np.sqrt(v[both]))
    return found


def edges(norm: float) -> npt.NDArray[np.float64]:
    """Return the edges of a histogram's bins from the root mean square at the first version.

    Values beyond the edges are counted in the first and last bin.
    """
    scale = norm if 0 < norm < np.inf else 1.0
    return np.linspace(-REACH * scale, REACH * scale, BINS + 1)


def histogram(values: Floats, norm: float) -> npt.NDArray[np.int64]:
    """Return the number of finite values in each bin, among at most 65,536 that are evenly spaced."""
    some = values[:: max(1, -(-values.size // QUANTILES))]
    bins = edges(norm)
    return np.histogram(np.clip(some[np.isfinite(some)], bins[0], bins[-1]), bins)[0]
