"""The format of the entropy coder in plain Python: slow, obviously right, what the kernels are tested against.

`decode` takes the directory, the planes and the four streams of a payload (what stands before them is
`ckstore.codecs.integers`' business) and returns the elements in coded order as Python integers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

LONGEST = 12
FEWEST_ODDS = 48
DENSE, SPARSE, EQUAL, ADAPTIVE = range(4)


class BinaryDecoder:
    """The directory's adaptive binary arithmetic decoder; contexts are named by tuples, and start even."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.low = 0
        self.high = 0xFFFFFFFF
        self.position = 4
        self.code = int.from_bytes(data[:4].ljust(4, b"\0"), "big")
        self.odds: defaultdict[tuple[object, ...], list[int]] = defaultdict(lambda: [32768, 0])

    def bit(self, *context: object) -> int:
        """Decode one decision; without a context, evenly."""
        chance, seen = self.odds[context] if context else (32768, 0)
        middle = self.low + ((self.high - self.low) * chance >> 16)
        bit = int(self.code <= middle)
        if bit:
            self.high = middle
        else:
            self.low = middle + 1
        if context:
            chance += ((65536 if bit else 0) - chance) * (65536 // (seen + 2)) >> 16
            self.set_odds(chance, min(seen + 1, 255), *context)
        self.shift()
        return bit

    def shift(self) -> None:
        """Move the bytes that low and high share out, and the next ones in."""
        while (self.low ^ self.high) < 1 << 24:
            coming = self.data[self.position] if self.position < len(self.data) else 0
            self.position += 1
            self.code = (self.code << 8 & 0xFFFFFFFF) | coming
            self.low = self.low << 8 & 0xFFFFFFFF
            self.high = (self.high << 8 & 0xFFFFFFFF) | 255

    def set_odds(self, chance: int, seen: int, *context: object) -> None:
        """Set the chance of a 1 (of 65536) and how many decisions it is worth."""
        self.odds[context] = [min(max(chance, FEWEST_ODDS), 65536 - FEWEST_ODDS), seen]

    def raw(self, bits: int) -> int:
        """Decode an even number of so many bits, highest first: eight at a time while the interval has 24 bits."""
        result = 0
        while bits:
            part = 1
            if self.high - self.low >= 1 << 24:
                part = min(bits, 8)
                unit = (self.high - self.low) >> part
                piece = min((self.code - self.low) // unit, (1 << part) - 1)
                self.low += unit * piece
                if piece < (1 << part) - 1:
                    self.high = self.low + unit - 1
                self.shift()
            else:
                piece = self.bit()
            result = result << part | piece
            bits -= part
        return result

    def tree(self, bits: int, *context: object) -> int:
        """Decode a number of so many bits, highest first, each under the bits before; the seventh bit is even."""
        node = 1
        for _ in range(bits):
            node = 2 * node + (self.bit(*context, node) if node < 64 else self.raw(1))
        return node - (1 << bits)

    def number(self, which: str) -> int:
        """Decode a number of up to 64 bits: its length, then the bits after the leading one; 0 if it is longer."""
        octave = self.tree(7, "number", which)
        if octave > 64:
            return 0
        return octave if octave < 2 else 1 << octave - 1 | self.raw(octave - 1)

    def magnitude(self, name: str, middle: int = 0) -> int:
        """Decode a number of an adaptive group: length in unary, two bits under contexts, the others evenly."""
        octave = middle
        if self.bit(name, "octave", middle):
            octave += 1
            while octave < 64 and self.bit(name, "octave", octave):
                octave += 1
        else:
            while octave > 0 and not self.bit(name, "octave", octave - 1):
                octave -= 1
        if octave < 2:
            return octave
        result = 1
        node = 1
        for _ in range(min(octave - 1, 2)):
            bit = self.bit(name, "lead", octave, node)
            result = 2 * result + bit
            node = 2 * node + bit
        rest = octave - 1 - min(octave - 1, 2)
        return result << rest | self.raw(rest)


@dataclass
class Layout:
    """Which leading bits of a number are its symbol: what a symbol stands for is (first number, raw bits)."""

    symbols: list[tuple[int, int]]


@dataclass
class Group:
    """One group as the directory describes it."""

    group_class: int
    count: int
    kind: int
    plane: int = 0
    constant: int = 0
    pairs: list[tuple[int, int]] = field(default_factory=list)
    pair_count: int = 0
    values: Layout | None = None
    runs: Layout | None = None
    codes: dict[tuple[int, int], int] = field(default_factory=dict)


def zigzag(value: int) -> int:
    """Zigzag number of a signed integer."""
    return 2 * value if value >= 0 else -2 * value - 1


def unzigzag(number: int) -> int:
    """Signed integer of a zigzag number."""
    return number >> 1 if number & 1 == 0 else -(number >> 1) - 1


def read_layout(decoder: BinaryDecoder, which: str) -> Layout:
    """Read a layout: floor, top octave, and the resolution of every octave between."""
    floor = decoder.tree(7, "floor", which)
    top = decoder.tree(7, "top", which)
    symbols = [(0, floor)]
    resolution, exact = -1, 1
    for octave in range(floor + 1, top + 1):
        rank = 0
        while rank < 28 and decoder.bit("layout", exact, min(rank, 15)):
            rank += 1
        resolution += exact + (rank // 2 if rank % 2 == 0 else -(rank + 1) // 2)
        exact = int(resolution == octave - 1)
        raw = octave - 1 - resolution
        symbols += [((1 << resolution | lead) << raw, raw) for lead in range(1 << resolution)]
    return Layout(symbols)


def read_lengths(decoder: BinaryDecoder, symbols: int, stride: int) -> list[int]:
    """Read code lengths, each guessed from its neighbours; `stride` run classes make a row of a product alphabet."""
    lengths: list[int] = []
    joint = int(stride > 0)
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
    """Canonical code of every symbol: (length, code read bit by bit, first bit highest) to symbol."""
    codes = {}
    code = 0
    for length in range(1, LONGEST + 1):
        for symbol, symbol_length in enumerate(lengths):
            if symbol_length == length:
                codes[length, code] = symbol
                code += 1
        code <<= 1
    return codes


def expect_geometric(decoder: BinaryDecoder, count: int, pairs: int, outward: bool) -> int:
    """Set the odds of zero runs to those of independent non-zeros: P(run >= x) = (1 - pairs / count)^x.

    Returns the bit length that each run is compared with first.
    """
    while count >= 1 << 31:
        count >>= 1
        pairs >>= 1
    power = min(((count - pairs) << 32) // count, (1 << 32) - 1)
    middle = 0
    powers = [power]
    while len(powers) < 64:
        powers.append(powers[-1] * powers[-1] >> 32)
    while outward and powers[middle] > 5 << 29:
        middle += 1
    decoder.set_odds(powers[middle] >> 16, 64, "run", "octave", middle)
    for octave, power in enumerate(powers, 1):
        if octave > middle:
            decoder.set_odds(power >> 16, 64, "run", "octave", octave)
        half = (power << 16) // (power + (1 << 32))
        if octave - 1 < middle:
            decoder.set_odds(half, 64, "run", "octave", octave - 1)
        decoder.set_odds(half, 64, "run", "lead", octave + 1, 1)
        decoder.set_odds(half, 64, "run", "lead", octave + 2, 2)
        decoder.set_odds(half, 64, "run", "lead", octave + 2, 3)
    return middle


def read_group(decoder: BinaryDecoder, group_class: int, count: int, planed: bool, outward: bool) -> Group:
    """Read one group; where groups may have planes, dense ones say how many bytes of each element theirs takes."""
    group = Group(group_class, count, decoder.tree(2, "kind"))
    if planed and group.kind == DENSE:
        group.plane = (0, 1, 2, 4)[decoder.tree(2, "plane")]
    if group.kind == EQUAL:
        group.constant = decoder.number("constant")
    elif group.kind == ADAPTIVE:
        group.pair_count = decoder.number("pairs")
        middle = expect_geometric(decoder, count, group.pair_count, outward)
        for _ in range(group.pair_count):
            run = decoder.magnitude("run", middle)
            size = decoder.magnitude("value")
            group.pairs.append((run, 2 * size + decoder.bit("value", "sign", size > 0)))
    else:
        group.values = read_layout(decoder, "values")
        symbols, stride = len(group.values.symbols), 0
        if group.kind == SPARSE:
            group.pair_count = decoder.number("pairs")
            group.runs = read_layout(decoder, "runs")
            stride = len(group.runs.symbols)
            symbols *= stride
        if decoder.bit("single"):
            group.codes = {(0, 0): decoder.raw(12)}
        else:
            group.codes = canonical_codes(read_lengths(decoder, symbols, stride))
    return group


def read_directory(data: bytes, count: int, grouped: bool, planed: bool, outward: bool) -> list[Group]:
    """Read all groups of a directory."""
    decoder = BinaryDecoder(data)
    if not grouped:
        return [read_group(decoder, 0, count, planed, outward)] if count else []
    groups = []
    before = 0
    for group_class in range(64 if count else 0):
        before = decoder.bit("present", before)
        if before:
            groups.append(read_group(decoder, group_class, decoder.number("count"), planed, outward))
    return groups


class BitReader:
    """One stream: bits from the lowest of each byte upwards."""

    def __init__(self, data: bytes) -> None:
        self.bits = int.from_bytes(data, "little")

    def raw(self, bits: int) -> int:
        """The next so many bits as a number."""
        result = self.bits & (1 << bits) - 1
        self.bits >>= bits
        return result

    def symbol(self, codes: dict[tuple[int, int], int]) -> int:
        """The next symbol."""
        length = code = 0
        while (length, code) not in codes:
            code = 2 * code + self.raw(1)
            length += 1
        return codes[length, code]


def decode(
    directory: bytes, planes: bytes | None, streams: list[bytes], count: int, grouped: bool, outward: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Decode a sound payload; `planes` is None in formats that have none.

    Returns the elements in coded order, and (class, count) of each group.
    """
    readers = [BitReader(stream) for stream in streams]
    result: list[int] = []
    at = 0
    groups = read_directory(directory, count, grouped, planes is not None, outward)
    for group in groups:
        elements: list[int] = []
        if group.kind == EQUAL:
            elements = [unzigzag(group.constant)] * group.count
        elif group.kind == DENSE and group.values is not None:
            for i in range(group.count):
                first, raw = group.values.symbols[readers[i % 4].symbol(group.codes)]
                elements.append(unzigzag(first + readers[i % 4].raw(raw)))
            if planes is not None and group.plane:
                for i, value in enumerate(elements):
                    low = int.from_bytes(planes[at : at + group.plane], "little")
                    elements[i] = unzigzag(zigzag(value) << 8 * group.plane | low)
                    at += group.plane
        else:
            if group.kind == SPARSE and group.values is not None and group.runs is not None:
                for i in range(group.pair_count):
                    value_symbol, run_symbol = divmod(readers[i % 4].symbol(group.codes), len(group.runs.symbols))
                    first, raw = group.runs.symbols[run_symbol]
                    run = first + readers[i % 4].raw(raw)
                    first, raw = group.values.symbols[value_symbol]
                    group.pairs.append((run, first + readers[i % 4].raw(raw)))
            for run, value in group.pairs:
                elements += [0] * run + [unzigzag(value + 1)]
            elements += [0] * (group.count - len(elements))
        result += elements
    return result, [(group.group_class, group.count) for group in groups]
