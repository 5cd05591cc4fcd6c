"""A reader of integer payloads, written from docs/format.md alone: the reference of the entropy coder's kernels.

It is slow and plain, and uses none of ckstore's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

LONGEST = 12
MEASURED = 4096
DENSE, SPARSE, EQUAL = range(3)

#: A bin: its smallest number, and the number of raw bits of its numbers.
Bin = tuple[int, int]


class BitReader:
    """Bits from the lowest of each byte upwards, then zeros."""

    def __init__(self, data: bytes) -> None:
        self.bits = int.from_bytes(data, "little")

    def raw(self, bits: int) -> int:
        """Return the next `bits` bits as a number."""
        result = self.bits & (1 << bits) - 1
        self.bits >>= bits
        return result

    def number(self) -> int:
        """Return a number of seven bits per byte, of 64 bits at most."""
        result = shift = 0
        while shift < 64:
            byte = self.raw(8)
            result |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        return result & (1 << 64) - 1

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


@dataclass
class Group:
    """One group of the directory."""

    group_class: int
    count: int
    kind: int
    plane: int = 0
    constant: int = 0
    pairs: int = 0
    spans: list[int] = field(default_factory=list)
    values: list[Bin] = field(default_factory=list)
    runs: list[Bin] = field(default_factory=list)
    codes: dict[tuple[int, int], int] = field(default_factory=dict)


def unzigzag(number: int) -> int:
    """Return the signed integer of a zigzag number: 0, 1, 2, 3 ... become 0, -1, 1, -2 ..."""
    return number >> 1 if number & 1 == 0 else -(number >> 1) - 1


def read_bins(reader: BitReader) -> list[Bin]:
    """Read a table of bins: the non-empty leaves of the trees over the numbers below 0, and from 0 on."""
    top = reader.raw(6)
    bins: list[Bin] = []
    nodes = [top, top]
    least = -1 << top
    while nodes:
        node = nodes.pop()
        if node and reader.raw(1):
            nodes += [node - 1, node - 1]
        else:
            bins += [(least, node)] * reader.raw(1)
            least += 1 << node
    return bins


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


def read_group(reader: BitReader, group_class: int, count: int) -> Group:
    """Read one group."""
    group = Group(group_class, count, reader.raw(2))
    if group.kind == EQUAL:
        group.constant = unzigzag(reader.number())
        return group
    if group.kind == DENSE:
        group.plane = (0, 1, 2, 4)[reader.raw(2)]
    else:
        group.pairs = reader.number()
        group.spans = [reader.number() for _ in range(4 if group.pairs >= MEASURED else 0)]
    group.values = read_bins(reader)
    group.runs = read_bins(reader) if group.kind == SPARSE else [(0, 0)]
    if reader.raw(1):
        group.codes = {(0, 0): reader.raw(12)}
    else:
        group.codes = canonical_codes([reader.raw(4) for _ in range(len(group.values) * len(group.runs))])
    return group


def read_directory(data: bytes, count: int, grouped: bool) -> list[Group]:
    """Read all groups of a directory."""
    reader = BitReader(data)
    if not grouped:
        return [read_group(reader, 0, count)] if count else []
    return [read_group(reader, reader.raw(6), reader.number()) for _ in range(reader.raw(7))]


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
        items = group.count if group.kind == DENSE else group.pairs
        places = [len(result)]
        for i in range(items):
            stream = i % 4
            if group.kind == DENSE or group.spans:
                stream = min(i // (items // 4), 3) if items > 3 else 3
            run, number = streams[stream].item(group)
            low = int.from_bytes(planes[at : at + group.plane], "little")
            at += group.plane
            result += [0] * run + [number << 8 * group.plane | low]
            if i + 1 in (items // 4, items // 4 * 2, items // 4 * 3, items):
                places.append(len(result))
        if group.spans and [end - begin for begin, end in pairwise(places)] != group.spans:
            raise ValueError("spans")
        result += [0] * (end - len(result))
    return result
