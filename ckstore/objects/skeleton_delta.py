"""Delta coding of small byte strings: a skeleton as copies from its parent's skeleton, and literal bytes.

The strings differ only in scattered scalars and names, and in shifts by longer names. The code is a list of (literal
bytes, jump in the reference, bytes to copy), stored by columns and compressed. Repeated changes (one name in every
header of a zip) become repeated numbers, which cost almost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blake3 import blake3

from ckstore.errors import IntegrityError
from ckstore.storage import deflate, zstd
from ckstore.storage.schema import expanded_limit
from ckstore.varint import read_varint, varint

#: A blob begins with a BLAKE3-8 of its rest and the result. The rest is a byte of these flags, the length of the result
#: (varint), with copies the length of their code (varint), and the payload: a zstd frame or a raw deflate stream,
#: whichever is smaller.
_ZSTANDARD, _COPIES = 1, 2
_DIGEST = 8
#: Minimal length of a copy: it saves bytes, is not a coincidence, and a crafted code has few enough.
_ANCHOR = 12
#: Distance around the expected place within which a match is searched before the whole reference.
_NEAR = 4096
#: Largest number of bytes skipped in search of a nearby match.
_SKIP = 128
#: Distance between the indexed places of the reference, for matches anywhere.
_GRID = 16
#: Strings of one length are compared at once if at most this part of their bytes differs, ...
_CHANGED = 1 / 8
#: ... and at most this many in one place.
_SHORT = 32
#: Limit of searches in the whole reference: two dissimilar strings must not take minutes.
_FAR_SEARCHES = 4096
#: If the code against the reference is smaller than this fraction, the string is not tried alone.
_HOPELESS = 16
#: zstd's level for strings that are soon coded again.
_QUICKLY = 1
#: Size above which zstd's slowest level does not pay.
_SMALL = 1 << 22


def compress_quickly(data: bytes) -> bytes:
    """Code a byte string by itself, in a tenth of the time and twice the size."""
    if not data:
        return _smallest([], data)  # The codec cannot read an empty frame.
    return _smallest([bytes([_ZSTANDARD]) + varint(len(data)) + zstd.compress(data, _QUICKLY)], data)


def compress_against(data: bytes, reference: bytes | None) -> bytes:
    """Code a byte string, of 1 KB to some MB, against a similar one, or by itself if that is smaller."""
    size = varint(len(data))
    candidates = []
    if reference:
        code = _encode(data, reference)
        head = size + varint(len(code))
        candidates += [bytes([method | _COPIES]) + head + payload for method, payload in _compress(code)]
        candidates = [one for one in candidates if max(len(data) - len(reference), len(code)) <= _most(one, None)]
    if not candidates or _HOPELESS * len(min(candidates, key=len)) > len(data):
        alone = [bytes([method]) + size + payload for method, payload in _compress(data)]
        return _smallest(alone, data, candidates)
    return _smallest([], data, candidates)


def _smallest(alone: Sequence[bytes], data: bytes, candidates: Sequence[bytes] = ()) -> bytes:
    """Return the smallest code of a byte string among those below the limit of expansion."""
    fitting = [*candidates, *(one for one in alone if len(data) <= _most(one, None))]
    best = min(fitting, key=len) if fitting else bytes([0]) + varint(len(data)) + deflate.compress(data, 0)
    return _digest(best, data) + best


def _most(blob: bytes, reference: bytes | None) -> int:
    """Return the most bytes that a blob may expand to, which limits crafted blobs."""
    return expanded_limit(len(blob)) + (len(reference) if reference else 0)


def expand_against(blob: bytes, reference: bytes | None, expected: int | None = None) -> bytes:
    """Undo `compress_against` with the same reference.

    Raise `IntegrityError` if the blob is damaged, was coded against another reference, or declares a length other than
    `expected`: before memory is allocated.
    """
    try:
        method = blob[_DIGEST]
        length, position = read_varint(blob, _DIGEST + 1)
        if method not in (0, _ZSTANDARD, _COPIES, _COPIES | _ZSTANDARD):
            raise ValueError("its method is unknown to this ckstore")
        if length > _most(blob, reference) or expected not in (None, length):
            raise ValueError("its length is out of bounds")
        if not method & _COPIES:
            data = _expand(method, blob[position:], length)
        elif reference:
            code_length, position = read_varint(blob, position)
            if code_length > _most(blob, None):
                raise ValueError("its length is out of bounds")
            data = _decode(_expand(method, blob[position:], code_length), reference, length)
        else:
            raise ValueError("it needs a reference")
    except (ValueError, IndexError, RuntimeError) as error:
        raise IntegrityError(f"A skeleton is damaged: {error}; restore its pack from a copy.") from error
    if len(data) != length or _digest(blob[_DIGEST:], data) != blob[:_DIGEST]:
        raise IntegrityError("A skeleton does not match its checksum; restore its pack and its parent's from a copy.")
    return data


def _digest(blob: bytes, data: bytes) -> bytes:
    # Over both: a flip of an unused bit in a zstd frame must be found, too.
    return blake3(blob).update(data).digest(length=_DIGEST)


def _encode(data: bytes, reference: bytes) -> bytes:
    literals, skips, jumps, copies = bytearray(), bytearray(), bytearray(), bytearray()
    expected = passed = 0
    unchanged = _unchanged(data, reference)
    for place, source, length in _matches(data, reference) if unchanged is None else unchanged:
        skips += varint(place - passed)
        # Skipped bytes usually replace as many bytes of the reference.
        jumps += varint(_zigzag(source - expected - (place - passed)))
        copies += varint(length)
        literals += data[passed:place]
        passed, expected = place + length, source + length
    literals += data[passed:]
    return b"".join([varint(len(skips)), varint(len(jumps)), varint(len(copies)), skips, jumps, copies, literals])


def _decode(code: bytes, reference: bytes, length: int) -> bytes:
    lengths = []
    position = 0
    for _ in range(3):
        size, position = read_varint(code, position)
        lengths.append(size)
    columns = []
    for size in lengths:
        columns.append(_read_varints(code[position : position + size]))
        position += size
    # Numbers are read one by one: a list of those of a crafted code would take 8 times its bytes.
    result = bytearray()
    expected = 0
    for skip, jump, copy in zip(*columns, strict=True):
        source = expected + skip + _unzigzag(jump)
        if source < 0 or source + copy > len(reference) or position + skip > len(code):
            raise ValueError("it copies from outside its reference")
        if copy < _ANCHOR:
            raise ValueError("it has a short copy")
        if len(result) + skip + copy > length:
            raise ValueError("it is longer than its stated length")
        result += code[position : position + skip]
        result += reference[source : source + copy]
        position += skip
        expected = source + copy
    result += code[position:]
    return bytes(result)


def _unchanged(data: bytes, reference: bytes) -> Iterator[tuple[int, int, int]] | None:
    """Return the copies as `_matches` does, at once, of strings that differ in short places only; None for others."""
    if len(data) != len(reference):
        return None
    import numpy as np

    differs = np.frombuffer(data, np.uint8) != np.frombuffer(reference, np.uint8)
    if np.count_nonzero(differs) > _CHANGED * len(data):
        return None  # Eight bytes a place would be many times the string.
    changed = np.flatnonzero(differs)
    starts, stops = np.append(0, changed + 1), np.append(changed, len(data))
    long = stops - starts >= _ANCHOR
    starts, stops = starts[long], stops[long]
    if (np.append(starts, len(data)) - np.append(0, stops)).max() > _SHORT:
        return None
    return zip(starts.data, starts.data, (stops - starts).data, strict=True)


def _matches(data: bytes, reference: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (place in data, place in the reference, length) of the copies, in order and without overlap."""
    grid: dict[bytes, int] = {}
    here = there = searches = 0
    while here < len(data):
        length = _common(data, here, reference, there)
        if length >= _ANCHOR:  # Only at the beginning it may be shorter.
            yield here, there, length
            here, there = here + length, there + length
        found = _near_match(data, here, reference, there)
        if found is None and searches < _FAR_SEARCHES:
            searches += 1
            grid = grid or _index(reference)
            found = _far_match(data, here, reference, grid)
        if found is None:
            return
        here, there = found


def _near_match(data: bytes, here: int, reference: bytes, there: int) -> tuple[int, int] | None:
    """Return the better of two continuations: as many bytes changed in both, or bytes added or removed."""
    candidates = []
    last = min(here + _SKIP, len(data) - _ANCHOR)
    span = max(min(last + _ANCHOR - here, len(reference) - there), 0)
    ours, theirs = data[here : here + span], reference[there : there + span]
    differing = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
    alike = differing.to_bytes(span, "little").find(bytes(_ANCHOR))
    if alike >= 0:
        candidates.append((here + alike, there + alike))
    for place in range(here, last + 1):
        source = reference.find(data[place : place + _ANCHOR], max(0, there - _NEAR // 8), there + _NEAR)
        if source >= 0:
            candidates.append((place, source))
            break
    if not candidates or candidates[0] == candidates[-1]:
        return candidates[0] if candidates else None
    return max(candidates, key=lambda found: min(_common(data, found[0], reference, found[1]), _NEAR) - found[0] + here)


def _far_match(data: bytes, here: int, reference: bytes, grid: dict[bytes, int]) -> tuple[int, int] | None:
    for place in range(here, len(data) - _GRID + 1):
        source = grid.get(data[place : place + _GRID])
        if source is not None:
            while place > here and source > 0 and data[place - 1] == reference[source - 1]:
                place, source = place - 1, source - 1
            return place, source
    return None


def _index(reference: bytes) -> dict[bytes, int]:
    return {reference[start : start + _GRID]: start for start in range(0, len(reference) - _GRID + 1, _GRID)}


def _common(left: bytes, i: int, right: bytes, j: int) -> int:
    """Return the number of equal bytes from `left[i]` and `right[j]` on."""
    limit = min(len(left) - i, len(right) - j)
    length, step = 0, 64
    while length < limit:
        size = min(step, limit - length)
        ours, theirs = left[i + length : i + length + size], right[j + length : j + length + size]
        if ours != theirs:
            differing = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
            return length + ((differing & -differing).bit_length() - 1) // 8
        length += size
        step *= 2
    return length


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _unzigzag(value: int) -> int:
    return -((value + 1) >> 1) if value & 1 else value >> 1


def _read_varints(code: bytes) -> Iterator[int]:
    position = 0
    while position < len(code):
        value = code[position]
        if value < 128:  # Most.
            position += 1
        else:
            value, position = read_varint(code, position)
        yield value


def _compress(data: bytes) -> list[tuple[int, bytes]]:
    return [(0, deflate.compress(data)), (_ZSTANDARD, zstd.compress(data, 19 if len(data) <= _SMALL else 9))]


def _expand(method: int, payload: bytes, length: int) -> bytes:
    return zstd.expand(payload, length) if method & _ZSTANDARD else deflate.expand(payload, length)
