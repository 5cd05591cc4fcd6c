"""Names of dtypes in NumPy, Zarr and torch, which each lack some of them."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

from ckstore.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Item size in bytes of every dtype that an extent can have.
ITEM_SIZES: dict[str, int] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "complex32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

#: dtypes that NumPy and Zarr have under the same name.
NATIVE = frozenset({
    "bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64",
    "complex64", "complex128",
})  # fmt: skip

#: dtypes that ml_dtypes has; its float4 is another one, an element a byte.
_ML_DTYPES = frozenset({
    "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
})  # fmt: skip


@cache
def bits_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype that carries elements of `dtype` bit for bit: an unsigned integer, or 16 raw bytes for complex128.

    Examples
    --------
    >>> bits_dtype("bfloat16")
    dtype('uint16')
    """
    import numpy as np

    size = ITEM_SIZES[dtype]
    return np.dtype(f"u{size}" if size <= 8 else f"V{size}")


@cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype: ml_dtypes' for one that NumPy lacks, if ml_dtypes is installed, else `plain_dtype`.

    Examples
    --------
    >>> numpy_dtype("float32"), numpy_dtype("complex32")
    (dtype('float32'), dtype('complex64'))
    """
    import numpy as np

    if dtype in _ML_DTYPES:
        try:
            import ml_dtypes
        except ImportError:
            return np.dtype(plain_dtype(dtype))
        return np.dtype(getattr(ml_dtypes, dtype, plain_dtype(dtype)))
    return np.dtype(plain_dtype(dtype))


def plain_dtype(dtype: str) -> str:
    """Return a dtype of NumPy and Zarr with all numbers of another one; of float4, two to a byte, the bytes.

    Examples
    --------
    >>> plain_dtype("int8"), plain_dtype("bfloat16"), plain_dtype("float4_e2m1fn_x2")
    ('int8', 'float32', 'uint8')
    """
    if dtype == "complex32":
        return "complex64"
    return dtype if dtype in NATIVE else "float32" if dtype in _ML_DTYPES else f"uint{8 * ITEM_SIZES[dtype]}"


@cache
def zarr_type(dtype: str) -> str:
    """Zarr's name of the dtype; an unsigned integer of the same width for one that Zarr lacks.

    Examples
    --------
    >>> zarr_type("complex64"), zarr_type("float8_e5m2")
    ('complex64', 'uint8')
    """
    return dtype if dtype in NATIVE else f"uint{8 * ITEM_SIZES[dtype]}"


def require_torch() -> None:
    """Raise `UsageError` where torch is not installed."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(
            "torch is not installed; install it, or read tensors with NumPy, as `version[path][...]`."
        ) from None


@cache
def torch_dtype(dtype: str) -> Any:
    """The torch dtype; raises `UsageError` where the installed torch has none of that name."""
    import torch

    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no dtype {dtype}; install a later one, or read it with NumPy.")
    return found


def resolve_views(bits: npt.NDArray[Any], dtype: str, lazy: Collection[str]) -> None:
    """Turn stored values into the values of a conj or neg view of them, in place.

    Parameters
    ----------
    bits
        Elements of `dtype` bit for bit, contiguous; see `bits_dtype`.
    lazy
        See `Tensor.lazy`. Integers are negated modulo their width.

    Examples
    --------
    >>> import numpy as np
    >>> values = np.array([1 + 2j, -3 + 0j], "complex64")
    >>> resolve_views(values.view("u8"), "complex64", ["conj"])
    >>> values.tolist()
    [(1-2j), (-3-0j)]
    """
    if not lazy:
        return
    is_complex = dtype.startswith("complex")
    size = ITEM_SIZES[dtype] // (2 if is_complex else 1)
    parts = bits.reshape(-1).view(f"u{size}")
    sign = parts.dtype.type(1 << (8 * size - 1))
    if "conj" in lazy:
        parts[1::2] ^= sign
    if "neg" in lazy and "int" in dtype:
        parts[:] = -parts
    elif "neg" in lazy:
        parts ^= sign
