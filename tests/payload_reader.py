"""A reader of integer payloads, written from docs/format.md alone: the reference of the entropy coder's kernels.

It is slow and plain, and uses none of ckstore's code.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

LONGEST = 12
FEWEST_ODDS = 48
DENSE, SPARSE, EQUAL = range(3)

#: A bin: its smallest number, and the number of raw bits of its numbers.
Bin = tuple[int, int]


class BinaryDecoder:
    """The directory's adaptive binary arithmetic decoder; contexts are named by tuples, and start with even odds."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.low = 0
        self.high = 0xFFFFFFFF
        self.position = 4
        self.code = int.from_bytes(data[:4].ljust(4, b"\0"), "big")
        self.odds: defaultdict[tuple[object, ...], list[int]] = defaultdict(lambda: [32768, 0])

    def bit(self, *context: object) -> int:
        """Decode one decision under the odds of a context, and adapt them."""
        chance, seen = self.odds[context]
        bit = self.decide(chance)
        chance += ((65536 if bit else 0) - chance) * (65536 // (seen + 2)) >> 16
        self.odds[context] = [min(max(chance, FEWEST_ODDS), 65536 - FEWEST_ODDS), min(seen + 1, 255)]
        return bit

    def decide(self, chance: int = 32768) -> int:
        """Decode one decision that is 1 with a chance of `chance` in 65536."""
        middle = self.low + ((self.high - self.low) * chance >> 16)
        bit = int(self.code <= middle)
        if bit:
            self.high = middle
        else:
            self.low = middle + 1
        while (self.low ^ self.high) < 1 << 24:
            coming = self.data[self.position] if self.position < len(self.data) else 0
            self.position += 1
            self.code = (self.code << 8 & 0xFFFFFFFF) | coming
            self.low = self.low << 8 & 0xFFFFFFFF
            self.high = (self.high << 8 & 0xFFFFFFFF) | 255
        return bit

    def raw(self, bits: int) -> int:
        """Decode a number of `bits` raw bits, highest first."""
        result = 0
        for _ in range(bits):
            result = 2 * result + self.decide()
        return result

    def tree(self, bits: int, *context: object) -> int:
        """Decode a number of `bits` bits, highest first, each conditioned on the bits before."""
        node = 1
        for _ in range(bits):
            node = 2 * node + self.bit(*context, node)
        return node - (1 << bits)

    def number(self, which: str) -> int:
        """Decode a number of up to 64 bits: its length, then the bits after the leading one; 0 if it is longer."""
        octave = self.tree(7, "number", which)
        if octave > 64:
            return 0
        return octave if octave < 2 else 1 << octave - 1 | self.raw(octave - 1)


@dataclass
class Group:
    """One group of the directory."""

    group_class: int
    count: int
    kind: int
    plane: int = 0
    constant: int = 0
    pairs: int = 0
    values: list[Bin] = field(default_factory=list)
    runs: list[Bin] = field(default_factory=list)
    codes: dict[tuple[int, int], int] = field(default_factory=dict)


def unzigzag(number: int) -> int:
    """Return the signed integer of a zigzag number: 0, 1, 2, 3 ... become 0, -1, 1, -2 ..."""
    return number >> 1 if number & 1 == 0 else -(number >> 1) - 1


def read_bins(decoder: BinaryDecoder, which: str) -> list[Bin]:
    """Read a table of bins: the non-empty leaves of the trees over the numbers below 0, and from 0 on."""
    top = decoder.tree(6, "top", which)
    bins: list[Bin] = []
    nodes = [top, top]
    least, before, occurs = -1 << top, top, 0
    while nodes:
        node = nodes.pop()
        if node and decoder.bit("split", which, min(max(node - before, -2), 13)):
            nodes += [node - 1, node - 1]
        else:
            occurs = decoder.bit("occurs", which, occurs)
            bins += [(least, node)] * occurs
            least += 1 << node
            before = node
    return bins


def read_lengths(decoder: BinaryDecoder, symbols: int, stride: int) -> list[int]:
    """Read code lengths, predicted from their neighbours; above 1, `stride` runs make a row of a product alphabet."""
    lengths: list[int] = []
    joint = int(stride > 1)
    last, turn = 6, 0
    for symbol in range(symbols):
        column = symbol % stride if joint else symbol
        left = lengths[symbol - 1] if column else 0
        above = lengths[symbol - stride] if joint and symbol >= stride else 0
        corner = lengths[symbol - stride - 1] if joint and symbol >= stride and column else 0
        if not decoder.bit("zero", joint, left > 0, above > 0):
            lengths.append(0)
            continue
        guess = last
        if left and above and corner:
            guess = left + above - corner
        elif left:
            guess = left
        elif above:
            guess = above + 1
        guess = min(max(guess, 1), LONGEST)
        difference = 0
        if decoder.bit("same", joint, turn):
            negative = decoder.bit("sign", joint, turn)
            difference = 1
            while difference < 12 and decoder.bit("more", joint, difference):
                difference += 1
            difference = -difference if negative else difference
            turn = 1 + negative
        else:
            turn = 0
        last = guess + difference
        lengths.append(last)
    return lengths


def canonical_codes(lengths: list[int]) -> dict[tuple[int, int], int]:
    """Map the canonical code of every symbol, (length, code read bit by bit, first bit highest), to the symbol."""
    codes = {}
    code = 0
    for length in range(1, LONGEST + 1):
        for symbol, symbol_length in enumerate(lengths):
            if symbol_length == length:
                codes[length, code] = symbol
                code += 1
        code <<= 1
    return codes


def read_group(decoder: BinaryDecoder, group_class: int, count: int) -> Group:
    """Read one group."""
    group = Group(group_class, count, decoder.tree(2, "kind"))
    if group.kind == EQUAL:
        group.constant = unzigzag(decoder.number("constant"))
        return group
    if group.kind != DENSE:
        group.pairs = decoder.number("pairs")
    if group.kind == DENSE:
        group.plane = (0, 1, 2, 4)[decoder.tree(2, "plane")]
    group.values = read_bins(decoder, "values")
    group.runs = read_bins(decoder, "runs") if group.kind == SPARSE else [(0, 0)]
    stride = len(group.runs)
    if decoder.bit("single"):
        group.codes = {(0, 0): decoder.raw(12)}
    else:
        group.codes = canonical_codes(read_lengths(decoder, len(group.values) * stride, stride))
    return group


def read_directory(data: bytes, count: int, grouped: bool) -> list[Group]:
    """Read all groups of a directory."""
    decoder = BinaryDecoder(data)
    if not grouped:
        return [read_group(decoder, 0, count)] if count else []
    groups = []
    before = 0
    for group_class in range(64):
        before = decoder.bit("present", before)
        if before:
            groups.append(read_group(decoder, group_class, decoder.number("count")))
    return groups


class BitReader:
    """One stream: bits from the lowest of each byte upwards."""

    def __init__(self, data: bytes) -> None:
        self.bits = int.from_bytes(data, "little")

    def raw(self, bits: int) -> int:
        """Return the next `bits` bits as a number."""
        result = self.bits & (1 << bits) - 1
        self.bits >>= bits
        return result

    def symbol(self, codes: dict[tuple[int, int], int]) -> int:
        """Return the next symbol."""
        length = code = 0
        while (length, code) not in codes:
            code = 2 * code + self.raw(1)
            length += 1
        return codes[length, code]

    def item(self, group: Group) -> tuple[int, int]:
        """Return the next zero run, 0 in dense groups, and the number after it."""
        value, run = divmod(self.symbol(group.codes), len(group.runs))
        (first_run, run_bits), (first, bits) = group.runs[run], group.values[value]
        zeros = first_run + self.raw(run_bits)
        return zeros, first + self.raw(bits)


def decode(directory: bytes, rest: bytes, sizes: tuple[int, ...], count: int, grouped: bool) -> list[int]:
    """Decode the elements of an intact payload, in coded order.

    Parameters
    ----------
    directory, rest
        The directory, and the bytes after it.
    sizes
        Bytes of streams 0 to 2.
    count, grouped
        The number of elements, and whether they have classes.
    """
    groups = read_directory(directory, count, grouped)
    at = sum(group.plane * group.count for group in groups)
    planes, streams = rest[:at], []
    for size in (*sizes, max(len(rest) - at - sum(sizes) - 8, 0)):
        streams.append(BitReader(rest[at : at + size]))
        at += size
    result: list[int] = []
    at = 0
    for group in groups:
        if group.kind == EQUAL:
            result += [group.constant] * group.count
            continue
        end = len(result) + group.count
        for i in range(group.count if group.kind == DENSE else group.pairs):
            run, number = streams[i % 4].item(group)
            low = int.from_bytes(planes[at : at + group.plane], "little")
            at += group.plane
            result += [0] * run + [number << 8 * group.plane | low]
        result += [0] * (end - len(result))
    return result
