"""Huffman code lengths of at most 12 bits from counts, and the canonical codes of lengths."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.words import Array, counted, int64, spliced

LONGEST = 12
"""The longest code in bits: a decoding table of 2^12 entries stays in the first-level cache."""


_SYMBOL_BITS = 13
"""Bits of a key that hold its symbol."""
_SYMBOL_MASK = (1 << _SYMBOL_BITS) - 1
# Not a plain integer: numba would compile callees again for every literal.
_TALLY = int64(16)


@spliced
def _sort(keys: Array) -> None:
    """Sort in place, by Shell's method with the gaps of Ciura (2001)."""
    for gap in (1750, 701, 301, 132, 57, 23, 10, 4, 1):
        for i in range(gap, keys.size):
            key = keys[i]
            at = i
            while at >= gap and keys[at - gap] > key:
                keys[at] = keys[at - gap]
                at -= gap
            keys[at] = key


@counted
def code_lengths(counts: Array, symbols: int, lengths: Array) -> tuple[int, int]:
    """Write the code length of each of `symbols` counts into `lengths` (uint8; 0 if the count is 0).

    Huffman's lengths by the in-place algorithm of Moffat and Katajainen (1995), cut at 12 bits, then completed to a
    full code from the rarest symbols upwards. Returns (the only symbol that occurs or -1, sum of count x length).
    """
    used = 0
    for symbol in range(symbols):
        lengths[symbol] = 0
        used += counts[symbol] > 0
    keys = np.empty(used, np.int64)
    used = 0
    for symbol in range(symbols):
        if counts[symbol] > 0:
            keys[used] = (int64(counts[symbol]) << _SYMBOL_BITS) | symbol
            used += 1
    if used == 1:
        return keys[0] & _SYMBOL_MASK, 0
    _sort(keys)
    work = np.empty(used, np.int64)
    for i in range(used):
        work[i] = keys[i] >> _SYMBOL_BITS
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
    # work[i] is now the length of the i-th rarest symbol, longest first.
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
        lengths[keys[i] & _SYMBOL_MASK] = work[i]
        bits += (keys[i] >> _SYMBOL_BITS) * work[i]
    return -1, bits


@counted
def canonical_codes(lengths: Array, symbols: int, codes: Array) -> int:
    """Write the canonical code of each symbol into `codes` (uint32: bit-reversed code | length << 16).

    Returns 0, or 1 if the lengths do not form a complete prefix code of at most 12 bits.
    """
    tally = np.empty(_TALLY, np.int64)
    first = np.empty(_TALLY, np.int64)
    for length in range(16):
        tally[length] = 0
    for symbol in range(symbols):
        if lengths[symbol] > LONGEST:
            return 1
        tally[lengths[symbol]] += 1
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
