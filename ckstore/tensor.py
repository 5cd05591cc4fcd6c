"""One tensor of a version, read when it is sliced."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckstore.dtypes import ITEM_SIZES, numpy_dtype, require_torch, torch_dtype
from ckstore.formats.layout import Tensor
from ckstore.reading.buffers import read_tensor
from ckstore.reading.gather import Selection
from ckstore.reading.indexing import parse_key
from ckstore.reading.real_values import float4_numbers, plain_numbers

if TYPE_CHECKING:
    import torch

    from ckstore.reading.stored_version import StoredVersion


class LazyTensor:
    """A tensor of a version that is read when it is sliced; a slice decodes only the chunks that it touches.

    Made by ``version[path]``. It has no arithmetic: slice it, or call `numpy` or `torch`, to get an array.

    Attributes
    ----------
    path
        Typed path as text.
    dtype_name
        Name of the dtype in torch, such as `bfloat16`.

    Examples
    --------
    >>> tensor = store["best"]["model/weight"]
    >>> tensor.shape, tensor.dtype, tensor[:2, 0]
    ((256, 128), dtype('float32'), array([ 1.1198572 , -0.69164145], dtype=float32))
    """

    def __init__(self, stored: StoredVersion, path: str, file: int, tensor: Tensor) -> None:
        self._stored = stored
        self.path = path
        self.dtype_name = tensor.dtype
        self._file = file
        self._tensor = tensor

    def __repr__(self) -> str:
        kind = f"{self.dtype_name} {list(self.shape)}"
        return f"<ckstore.LazyTensor {self.path} {kind} of version {self._stored.row.number}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        return self._tensor.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of slices: for bfloat16 and float8 that of ml_dtypes, or float32, which holds their values.

        complex32 becomes complex64. Slices of float4 are bytes of two numbers each; `numpy` returns the numbers.
        """
        return numpy_dtype(self.dtype_name)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of its elements."""
        return self.size * ITEM_SIZES[self.dtype_name]

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of the boxes of elements that are stored together."""
        from ckstore.views.groups import chunk_shape

        return chunk_shape(self.shape, self._tensor.strides)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("A tensor without axes has no length.")
        return self.shape[0]

    def __getitem__(self, key: Any) -> npt.NDArray[Any] | Any:
        """Return the elements of a NumPy index: integers, slices, `...`, None, index arrays and masks.

        Several index arrays read the smallest set of rows and columns that has all their elements.
        """
        wanted, rest = parse_key(key, self.shape)
        return self._shown(self._bits(wanted))[rest]

    def _shown(self, bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return elements in the dtype of slices."""
        same = bits.itemsize == self.dtype.itemsize
        return bits.view(self.dtype) if same else plain_numbers(bits, self.dtype_name)

    def _no_arithmetic(self, *_: object) -> Any:
        raise TypeError(f"{self.path} is not loaded; slice it first, as in tensor[...], or call .numpy() or .torch().")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_arithmetic
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = _no_arithmetic

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("A stored tensor has no memory of its own: an array of it is always a copy.")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def numpy(self) -> npt.NDArray[Any]:
        """Return all elements as a new array; of float4, two to a byte, the numbers: its last axis is twice as long.

        Examples
        --------
        >>> store["best"]["model/bias"].numpy().sum()
        np.float32(0.0)
        """
        bits = self._bits([range(size) for size in self.shape])
        return float4_numbers(bits) if self.dtype_name == "float4_e2m1fn_x2" else self._shown(bits)

    def torch(self, key: Any = ...) -> torch.Tensor:
        """Return all elements, or those of a NumPy index, as a new torch tensor of the tensor's dtype.

        Examples
        --------
        >>> store["best"]["model/weight"].torch().shape
        torch.Size([256, 128])
        """
        require_torch()
        import torch

        wanted, rest = parse_key(key, self.shape)
        bits = np.asarray(self._bits(wanted)[rest])
        # torch takes signed integers, but not all unsigned ones, over from NumPy; and NumPy makes 0-d ones 1-d.
        carried = np.ascontiguousarray(bits).view("c16" if bits.dtype.kind == "V" else f"i{bits.itemsize}")
        return torch.from_numpy(carried.reshape(bits.shape)).view(torch_dtype(self.dtype_name))

    def _bits(self, wanted: Sequence[Selection]) -> npt.NDArray[Any]:
        """Return the elements at all combinations of positions, as unsigned integers (complex128: 16 raw bytes).

        Parameters
        ----------
        wanted
            A range, or ascending positions, for each axis.
        """
        return read_tensor(self._stored, self._file, self._tensor, wanted)
