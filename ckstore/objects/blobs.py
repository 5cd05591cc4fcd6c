"""Blobs: skeletons and other byte strings of a version, compressed alone or against the parent's.

A blob is the BLAKE3-8 of all that follows and of the result, a byte for the method, and a payload: the result itself, a
zstd frame of it, or the bytes that differ from a string of the same length.
"""

from __future__ import annotations

from blake3 import blake3

from ckstore.errors import IntegrityError
from ckstore.storage import deflate, zstd
from ckstore.storage.schema import expanded_limit

_PLAIN, _ALONE, _AGAINST, _CHANGES = range(4)
_DIGEST = 8
#: If the code against the reference is smaller than this fraction, other ways are not tried.
_HOPELESS = 16
#: zstd's levels: for strings that are soon coded again, for others, and for those above `_SMALL` bytes.
_QUICKLY, _SLOWLY, _LARGE = 1, 16, 9
_SMALL = 1 << 20
#: One byte in `_SIMILAR` may differ; an entry passes at most `_FAR` bytes.
_SIMILAR, _FAR = 8, 255


def compress_quickly(data: bytes) -> bytes:
    """Code a byte string by itself, in a tenth of the time."""
    best = _smaller(bytes([_PLAIN]) + data, bytes([_ALONE]) + zstd.compress(data, _QUICKLY), data)
    return _digest(best, data) + best


def compress_against(data: bytes, reference: bytes | None) -> bytes:
    """Code a byte string, of 1 KB to some MB, against a similar one, or by itself if that is smaller."""
    level = _SLOWLY if len(data) <= _SMALL else _LARGE
    best = bytes([_PLAIN]) + data
    if reference and (changes := _changes(data, reference)) is not None:
        best = _smaller(best, bytes([_CHANGES]) + deflate.compress(changes), data, reference)
    if reference and _HOPELESS * len(best) > len(data):
        best = _smaller(best, bytes([_AGAINST]) + zstd.compress(data, level, reference), data, reference)
    if _HOPELESS * len(best) > len(data):
        best = _smaller(best, bytes([_ALONE]) + zstd.compress(data, level), data)
    return _digest(best, data) + best


def _smaller(best: bytes, other: bytes, data: bytes, reference: bytes = b"") -> bytes:
    """Return the smaller code of a byte string; not the other one if that is below the limit of expansion."""
    return other if len(other) < len(best) and len(data) <= _most(_DIGEST + len(other), reference) else best


def _most(size: int, reference: bytes) -> int:
    """Return the most bytes that a blob of `size` bytes may expand to, which limits crafted blobs."""
    return expanded_limit(size) + len(reference)


def _digest(rest: bytes, data: bytes) -> bytes:
    # Over both: a flip of an unused bit in a zstd frame must be found, too.
    return blake3(rest).update(data).digest(length=_DIGEST)


def expand_against(blob: bytes, reference: bytes | None, expected: int | None = None) -> bytes:
    """Undo `compress_against` with the same reference.

    Raise `IntegrityError` if the blob is damaged, was coded against another reference, or declares a length other than
    `expected`: before memory is allocated.
    """
    try:
        data = _expanded(blob, reference or b"", expected)
    except (ValueError, IndexError) as error:
        raise IntegrityError(f"A skeleton is damaged: {error}; restore its pack from a copy.") from error
    if _digest(blob[_DIGEST:], data) != blob[:_DIGEST]:
        raise IntegrityError("A skeleton does not match its checksum; restore its pack and its parent's from a copy.")
    return data


def _expanded(blob: bytes, reference: bytes, expected: int | None) -> bytes:
    method, payload = blob[_DIGEST], blob[_DIGEST + 1 :]
    if method > _CHANGES:
        raise ValueError("its method is unknown to this ckstore")
    if method < _AGAINST:
        reference = b""
    elif not reference:
        raise ValueError("it needs a reference")
    length = len(payload)
    if method != _PLAIN:
        length = len(reference) if method == _CHANGES else zstd.length_of(payload)
    if length > _most(len(blob), reference) or expected not in (None, length):
        raise ValueError("its length is out of bounds")
    if method == _CHANGES:
        return _changed(deflate.expand(payload, 2 * _entries(length)), reference)
    return payload if method == _PLAIN else zstd.expand(payload, length, reference)


def _entries(length: int) -> int:
    """Return the most changes in a string of this length, with entries that only pass bytes."""
    return length // _SIMILAR + length // _FAR + 1


def _changes(data: bytes, reference: bytes) -> bytes | None:
    """Return the bytes to pass before each change, a byte each, and the changes; None for other strings."""
    if len(data) != len(reference):
        return None
    import numpy as np

    differing = np.frombuffer(data, np.uint8) ^ np.frombuffer(reference, np.uint8)
    if np.count_nonzero(differing) > len(data) // _SIMILAR:
        return None  # Eight bytes a place would be many times the string.
    places = np.flatnonzero(differing)
    passed = np.diff(places, prepend=0)
    ends = np.cumsum(np.maximum(passed - 1, 0) // _FAR + 1)
    columns = np.zeros((2, ends[-1] if ends.size else 0), np.uint8)
    columns[0] = _FAR
    columns[0, ends - 1] = passed - _FAR * (np.maximum(passed - 1, 0) // _FAR)
    columns[1, ends - 1] = differing[places]
    return columns.tobytes()


def _changed(code: bytes, reference: bytes) -> bytes:
    """Undo `_changes`."""
    import numpy as np

    if len(code) % 2:
        raise ValueError("its columns differ in length")
    passed, changes = np.frombuffer(code, np.uint8).reshape(2, -1)
    places = np.cumsum(passed, dtype=np.int64)
    if not passed[1:].all() or (places.size and places[-1] >= len(reference)):
        raise ValueError("it changes a byte twice, or bytes outside its reference")
    result = np.frombuffer(reference, np.uint8).copy()
    result[places] ^= changes
    return result.tobytes()
