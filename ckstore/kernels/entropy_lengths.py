"""Huffman code lengths of at most 12 bits from counts, and the canonical codes of lengths."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy_words import Array, inner, int64

LONGEST = 12
"""Longest code in bits: a decoding table of 2^12 entries stays in the first cache."""


@inner
def _sort(keys: Array) -> None:
    """Heap sort in place: no allocation, no worst case."""
    size = keys.size
    for start in range(size // 2 - 1, -1, -1):
        _sift(keys, start, size)
    for end in range(size - 1, 0, -1):
        keys[0], keys[end] = keys[end], keys[0]
        _sift(keys, 0, end)


@inner
def _sift(keys: Array, root: int, end: int) -> None:
    key = keys[root]
    while True:
        child = 2 * root + 1
        if child >= end:
            break
        if child + 1 < end and keys[child + 1] > keys[child]:
            child += 1
        if keys[child] <= key:
            break
        keys[root] = keys[child]
        root = child
    keys[root] = key


@inner
def code_lengths(counts: Array, symbols: int, lengths: Array) -> tuple[int, int]:
    """Write the code length of each of `symbols` counts into `lengths` (uint8; 0 where the count is 0).

    Huffman's lengths by the in-place algorithm of Moffat and Katajainen (1995), cut at 12 bits and made a complete
    code again from the rarest symbols upwards. Returns (the only symbol that occurs or -1, sum of count x length).
    """
    used = 0
    for symbol in range(symbols):
        lengths[symbol] = 0
        used += counts[symbol] > 0
    keys = np.empty(used, np.int64)
    used = 0
    for symbol in range(symbols):
        if counts[symbol] > 0:
            keys[used] = (int64(counts[symbol]) << 13) | symbol
            used += 1
    if used == 1:
        return keys[0] & 8191, 0
    _sort(keys)
    work = np.empty(used, np.int64)
    for i in range(used):
        work[i] = keys[i] >> 13
    leaf = 2
    root = 0
    work[0] += work[1]
    for node in range(1, used - 1):
        if leaf >= used or work[root] < work[leaf]:
            work[node] = work[root]
            work[root] = node
            root += 1
        else:
            work[node] = work[leaf]
            leaf += 1
        if leaf >= used or (root < node and work[root] < work[leaf]):
            work[node] += work[root]
            work[root] = node
            root += 1
        else:
            work[node] += work[leaf]
            leaf += 1
    work[used - 2] = 0
    for node in range(used - 3, -1, -1):
        work[node] = work[work[node]] + 1
    available = 1
    inner = 0
    depth = 0
    root = used - 2
    node = used - 1
    while available > 0:
        while root >= 0 and work[root] == depth:
            inner += 1
            root -= 1
        while available > inner:
            work[node] = depth
            node -= 1
            available -= 1
        available = 2 * inner
        depth += 1
        inner = 0
    # work[i] is now the length of the i-th rarest symbol: longest first.
    total = 0
    for i in range(used):
        work[i] = min(work[i], LONGEST)
        total += 1 << (LONGEST - work[i])
    i = 0
    while total > 1 << LONGEST:
        while work[i] == LONGEST:
            i += 1
        total -= 1 << (LONGEST - work[i] - 1)
        work[i] += 1
    for i in range(used - 1, -1, -1):
        while total + (1 << (LONGEST - work[i])) <= 1 << LONGEST:
            total += 1 << (LONGEST - work[i])
            work[i] -= 1
    bits = 0
    for i in range(used):
        lengths[keys[i] & 8191] = work[i]
        bits += (keys[i] >> 13) * work[i]
    return -1, bits


@inner
def canonical_codes(lengths: Array, symbols: int, codes: Array) -> int:
    """Write the canonical code of each symbol into `codes` (uint32: bit-reversed code | length << 16).

    Returns 0, or 1 where the lengths are no complete prefix code of at most 12 bits.
    """
    tally = np.zeros(16, np.int64)
    for symbol in range(symbols):
        if lengths[symbol] > LONGEST:
            return 1
        tally[lengths[symbol]] += 1
    first = np.zeros(16, np.int64)
    code = 0
    total = 0
    for length in range(1, LONGEST + 1):
        first[length] = code
        code = (code + tally[length]) << 1
        total += tally[length] << (LONGEST - length)
    if total != 1 << LONGEST:
        return 1
    for symbol in range(symbols):
        length = int64(lengths[symbol])
        code = first[length]
        first[length] += 1
        reverse = 0
        for _ in range(length):
            reverse = (reverse << 1) | (code & 1)
            code >>= 1
        codes[symbol] = np.uint32(reverse | (length << 16))
    return 0
