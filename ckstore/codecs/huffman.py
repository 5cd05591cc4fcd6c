"""The numcodecs codec `ckstore.huffman`: integers to entropy-coded, checksummed bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_bytes, ensure_contiguous_ndarray, ndarray_copy

from ckstore.codecs.integers import count_integers, decode_integers, encode_integers
from ckstore.errors import IntegrityError, UsageError

MAX_BYTES = 2**31 - 1
"""The largest array that is decoded without an output buffer: nine bytes can declare any number of zeros."""


class Huffman(Codec):  # type: ignore[misc]
    """Entropy coding of integers: small ones as Huffman symbols, large ones as symbols and raw bits, zeros as runs.

    Parameters
    ----------
    dtype : dtype-like
        Integer dtype of the elements, of 1, 2, 4 or 8 bytes; unsigned numbers count as signed modulo 2 to the width.

    Notes
    -----
    The codec codes one sequence of integers by the sequence's own order-0 statistics: give it differences rather than
    drifting values. It is lossless, and payloads carry checksums: damage raises `ckstore.errors.IntegrityError`.

    Payloads that ckstore itself wrote with classes (`ckstore.codecs.integers.encode_integers`) decode here too, but to
    their elements in *coded order*, stably sorted by class: the classes come from the array's base, which a codec does
    not have.

    Examples
    --------
    >>> import numpy as np
    >>> from ckstore.codecs.huffman import Huffman
    >>> codec = Huffman(dtype="int32")
    >>> steps = np.zeros(100_000, np.int32)
    >>> steps[::1000] = 1
    >>> payload = codec.encode(steps)
    >>> len(payload) < steps.nbytes / 1000
    True
    >>> bool((codec.decode(payload) == steps).all())
    True
    """

    codec_id = "ckstore.huffman"

    def __init__(self, dtype: Any) -> None:
        parsed = np.dtype(dtype)
        if parsed.kind not in "iu" or not parsed.isnative:
            raise UsageError(f"The codec ckstore.huffman takes integers in native byte order, not {parsed.str}.")
        self.dtype = parsed.name

    def encode(self, buf: Any) -> bytes:
        """Encode a buffer of whole elements; bytes are taken as elements of the codec's dtype."""
        array = ensure_contiguous_ndarray(buf, flatten=True)
        if array.dtype != self.dtype:
            if array.dtype.kind in "iu" and array.dtype.itemsize == np.dtype(self.dtype).itemsize:
                array = array.view(self.dtype)
            elif array.dtype.itemsize == 1 and array.nbytes % np.dtype(self.dtype).itemsize == 0:
                array = array.view(np.uint8).view(self.dtype)
            else:
                raise UsageError(f"The codec ckstore.huffman was made for {self.dtype}, not for {array.dtype.name}.")
        return encode_integers(array)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a payload to a one-dimensional array, or into `out`.

        Raises
        ------
        IntegrityError
            If the payload is damaged, holds elements of another dtype, or declares a size above 2 GiB.
        """
        payload = memoryview(ensure_bytes(buf))
        count, width = count_integers(payload)
        dtype = np.dtype(self.dtype)
        if width != dtype.itemsize:
            raise IntegrityError(f"The payload holds integers of {width} bytes: decode it with such a dtype.")
        if out is not None:
            target = ensure_contiguous_ndarray(out, flatten=False)
            if target.nbytes != count * width:
                raise IntegrityError(f"The payload holds {count} integers of {width} bytes, unlike the output.")
        elif count * width > MAX_BYTES:
            raise IntegrityError(
                "The payload declares more than 2 GiB of integers: it is damaged, or needs an output buffer."
            )
        decoded = np.empty(count, dtype)
        decode_integers(payload, decoded)
        return ndarray_copy(decoded, out)
