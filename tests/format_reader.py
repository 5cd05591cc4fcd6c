"""A reader of stores, written from docs/format.md alone: slow, plain, and without ckstore's code.

But the kernels decode large integer payloads.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from ckstore.codecs.integers import decode_integers
from tests.layout_columns import rows
from tests.payload_reader import decode

Array = npt.NDArray[Any]

#: dtype: (bytes, mantissa bits, exponent bits); no exponent bits where the ordinal is the bits.
DTYPES = {
    "float64": (8, 52, 11), "float32": (4, 23, 8), "float16": (2, 10, 5), "bfloat16": (2, 7, 8),
    "float8_e4m3fn": (1, 3, 4), "float8_e5m2": (1, 2, 5), "int64": (8, 0, 0), "int32": (4, 0, 0), "uint8": (1, 0, 0),
    "bool": (1, 0, 0),
}  # fmt: skip
COMPLEX = {"complex64": 8}

#: Kinds of records of exact objects.
EXACT = ("raw", "full", "delta", "patches", "cast")

#: Payloads of up to this many integers are decoded in plain Python.
PLAIN = 5000


def blake(data: bytes, size: int) -> bytes:
    return blake3(data).digest(length=size)


def identifier(data: bytes) -> str:
    return blake(data, 20).hex()


def dictionary() -> bytes:
    """Return the dictionary of manifests, as the page prints it."""
    page = (Path(__file__).parents[1] / "docs" / "format.md").read_text()
    printed = page.split("The *dictionary* is these lines", 1)[1].split("\n\n")[1]
    return "".join(line[4:] for line in printed.splitlines()).encode()


def expanded(frame: bytes, dictionary: bytes = b"") -> bytes:
    raw = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.ZstdDecompressor(dict_data=raw if dictionary else None).decompress(frame)


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def rounded(words: Array, dtype: str) -> Array:
    """Return float32 bits rounded to another dtype."""
    wide = words.astype(np.int64)
    if dtype == "bfloat16":
        short = (wide + 0x7FFF + (wide >> 16 & 1)) % (1 << 32) >> 16
        return np.where(short & 0x7F80 == 0x7F80, short & 0x8000 | 0x7F7F, short).astype(np.uint16)
    sign, size = wide >> 16 & 0x8000, wide & 0x7FFFFFFF
    normal = np.minimum((size - (112 << 23) + 0xFFF + (size >> 13 & 1)) >> 13, 0x7BFF)
    shift, mantissa = np.clip(126 - (size >> 23), 1, 24), size & 0x7FFFFF | 0x800000
    small = mantissa + (1 << shift - 1) - 1 + (mantissa >> shift & 1) >> shift
    short = np.where(size >= 113 << 23, normal, np.where(size >= 102 << 23, small, 0))
    return (sign | short).astype(np.uint16)


def patched(before: Array, data: bytes, dtype: str) -> Array:
    """Return the bits that a patch makes of `before`."""
    assert zlib.crc32(data[4:]) == int.from_bytes(data[:4], "little")
    count, at = varint(data, 4)
    span, at = varint(data, at)
    end = at + span
    places: list[int] = []
    element = 0
    while at < end:
        apart, at = varint(data, at)
        more, at = varint(data, at)
        places += range(element + apart, element + apart + more + 1)
        element = places[-1] + 1
    assert at == end
    differences: list[int] = []
    for first in range(0, count, 64):
        many = min(64, count - first)
        header, at = data[at], at + 1
        shift, at = (0, at) if span else (data[at], at + 1)
        longer, at = (data[at], at + 1) if header >= 128 else (0, at)
        width = header % 128
        packed = int.from_bytes(data[at:], "little")
        numbers = [packed >> width * i & (1 << width) - 1 for i in range(many)]
        bit = many * width
        if not span:
            lows = [packed >> bit + shift * i & (1 << shift) - 1 for i in range(many)]
            bit += many * shift
            for low in lows:
                zeros = next(zeros for zeros in range(8 * len(data)) if packed >> bit + zeros & 1)
                places.append(element + low + (zeros << shift))
                element = places[-1] + 1
                bit += zeros + 1
        at += (bit + 7) // 8
        for _ in range(longer):
            numbers[data[at]] |= data[at + 1] << width
            at += 2
        differences += [number // 2 + 1 if number % 2 else -(number // 2 + 1) for number in numbers]
    assert data[at:] == bytes(8)
    assert len(places) == count > 0
    order = ordinals(before, dtype).copy()
    wide = np.array([difference % (1 << 64) for difference in differences], np.uint64)
    order[places] += wide.astype(order.dtype)
    return bits_of(order, dtype)


def digest(data: bytes) -> str:
    """Return the digest of a zip archive."""
    shortened, at = b"", 0
    while data[at : at + 4] == b"PK\3\4":
        packed, _, name, extra = struct.unpack_from("<2I2H", data, at + 18)
        start = at + 30 + name + extra
        if packed == 0xFFFFFFFF:
            packed = struct.unpack_from("<Q", data, at + 30 + name + 12)[0]
        content = data[start : start + packed]
        shortened += data[at:start] + (blake(content, 32) if packed >= 1 << 16 else content)
        at = start + packed
    return identifier(shortened + data[at:])


def packs_in(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the packs in a file, with their bytes."""
    if not path.name.endswith(".segment.zip"):
        yield path.name, path.read_bytes()
        return
    assert digest(path.read_bytes()) == path.name.split(".")[0]
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            assert member.compress_type == zipfile.ZIP_STORED
            yield member.filename, archive.read(member)


class Pack:
    """One pack: its bytes, checked against its name, and its manifest."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.data = name, data
        assert digest(data) == name.split(".")[0]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            framed = archive.read("manifest")
            members = sorted(archive.infolist(), key=lambda member: member.header_offset)
            *names, last = [member.filename for member in members if member.filename != "zarr.json"]
            arrays = [name.removesuffix("/c/0") for name in names if name != "small"]
            assert last == "manifest"
            listed = ["zarr.json"] if members[-1].filename == "zarr.json" else []
            assert archive.namelist() == [*listed, *names, last]
            root = json.loads(archive.read("zarr.json")) if listed else None
            assert root is None or set(arrays) <= set(root["consolidated_metadata"]["metadata"])
            assert root is not None or not arrays
        self.document, self.blobs = self._manifest(framed)
        self.kind = self.document["kind"]
        assert root is None or root["attributes"] == {"ckstore": {"kind": self.kind}}

    def _manifest(self, data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
        rest = data[20:]
        assert data[:4] == b"CKM1"
        assert blake(rest, 16) == data[4:20]
        version, at = varint(rest, 0)
        assert version == 1
        method = rest[at]
        text_bytes, at = varint(rest, at + 1)
        frame_bytes, at = varint(rest, at)
        text = rest[at : at + frame_bytes]
        if method == 1:
            text = expanded(text, dictionary())
        assert len(text) == text_bytes
        content = json.loads(text)
        blobs: dict[str, bytes] = {}
        at += frame_bytes
        for name, size in content["blobs"]:
            blobs[name] = rest[at : at + size]
            at += size
        assert at == len(rest)
        return content["document"], blobs


def bucket_log(bucket: Path) -> list[dict[str, Any]]:
    """Return the records in the log of a bucket, given as a directory of its objects."""
    root = json.loads((bucket / "ckstore.json").read_bytes())
    assert root["format"] == 1
    lines: dict[int, bytes] = {}
    for path in (bucket / "log" / root["store"]).iterdir():
        data = path.read_bytes()
        assert blake(data[20:], 20) == data[:20]
        text = expanded(data[28:])
        assert len(text) == int.from_bytes(data[20:28], "little")
        for number, line in enumerate(reversed(text.split(b"\n"))):
            assert lines.setdefault(int(path.name) - number, line) == line
    found: list[dict[str, Any]] = []
    before = "0" * 40
    for number in range(1, len(lines) + 1):
        record = json.loads(lines[number])
        assert (record["format"], record["store"], record["number"]) == (1, root["store"], number)
        assert record["before"] == before
        before = identifier(lines[number])
        found.append(record)
    return found


def bucket_snapshot(bucket: Path) -> tuple[int, bytes]:
    """Return the number of the record of a bucket's snapshot, and the bytes of its catalog."""
    name = json.loads((bucket / "ckstore.json").read_bytes())["snapshot"]
    data = (bucket / name).read_bytes()
    number, _, digest_said = name.rpartition("/")[2].partition("-")
    assert identifier(data) == digest_said
    catalog = expanded(data[8:])
    assert len(catalog) == int.from_bytes(data[:8], "little")
    return int(number), catalog


class Payload:
    """The header of an integer payload, its checksum compared, and its integers in coded order."""

    def __init__(self, data: bytes) -> None:
        assert data[0] == 1
        flags = data[1]
        self.width, narrow = 1 << (flags & 3), 1 << (flags >> 2 & 3)
        self.grouped, streamed = bool(flags & 16), bool(flags & 32)
        first, at = data[6], 7
        if first >= 128:
            self.count = 1 << first - 128
        else:
            self.count, at = int.from_bytes(data[at : at + first], "little"), at + first
        if self.grouped:
            self.classes_check = int.from_bytes(data[at : at + 4], "little")
            at += 4
        sizes = []
        for _ in range(4 if streamed else 0):
            size, at = varint(data, at)
            sizes.append(size)
        end = at + sizes[0] if streamed else len(data)
        if self.count <= PLAIN:
            values = decode(data[at:end], data[end:], tuple(sizes[1:]), self.count, self.grouped)
            self.coded = np.array(values, np.int64).astype(f"i{self.width}")
        else:
            self.coded = np.empty(self.count, f"i{self.width}")
            decode_integers(data, self.coded)
        decoded = zlib.crc32(self.coded.astype(f"<i{narrow}").tobytes())
        assert int.from_bytes(data[2:6], "little") == zlib.crc32(data[:2] + data[6:], decoded)

    def natural(self, classes: Array | None) -> Array:
        """Return the integers in natural order."""
        assert self.grouped == (classes is not None)
        if classes is None:
            return self.coded
        assert zlib.crc32(classes.astype(np.uint8).tobytes()) == self.classes_check
        result = np.empty_like(self.coded)
        result[np.argsort(classes, kind="stable")] = self.coded
        return result


def ordinals(bits: Array, dtype: str) -> Array:
    """Return the ordinals modulo 2 to the width, as unsigned integers."""
    if not DTYPES[dtype][2]:
        return bits
    sign = bits.dtype.type(1 << 8 * bits.itemsize - 1)
    return np.where(bits & sign, ~(bits ^ sign), bits)


def bits_of(ordinal: Array, dtype: str) -> Array:
    if not DTYPES[dtype][2]:
        return ordinal
    sign = ordinal.dtype.type(1 << 8 * ordinal.itemsize - 1)
    return np.where(ordinal & sign, ~ordinal ^ sign, ordinal)


def exponent_field(bits: Array, dtype: str) -> Array:
    _, mantissa, exponent = DTYPES[dtype]
    return (bits >> bits.dtype.type(mantissa)).astype(np.int64) & ((1 << exponent) - 1)


def ordinal_classes(bits: Array, dtype: str) -> Array:
    size, mantissa, exponent = DTYPES[dtype]
    shift, ceiling, limit = (1, 64, 63) if size == 1 else (mantissa, (1 << exponent) - 1, 10)
    magnitude = (bits.astype(np.uint64) & np.uint64((1 << 8 * size - 1) - 1)) >> np.uint64(shift)
    levels = magnitude.astype(np.int64)
    top = levels[levels < ceiling].max(initial=0)
    return np.clip(top - levels, 0, limit)


class Reader:
    """A store without its catalog.

    Attributes
    ----------
    versions
        (Pack, version document) by number.
    objects
        (Pack, record) by id.
    """

    def __init__(self, store: Path) -> None:
        files = [path for path in (store / "packs").iterdir() if not path.name.startswith(".tmp-")]
        packs = [Pack(*pack) for path in files for pack in packs_in(path)]
        packs.sort(key=lambda pack: (pack.document["created"], pack.document["number"], pack.name))
        self.packs = {former: pack for pack in packs for former in pack.document.get("stands_for", [])}
        self.packs |= {pack.name: pack for pack in packs}
        self.versions: dict[int, tuple[Pack, dict[str, Any]]] = {}
        self.objects: dict[str, tuple[Pack, dict[str, Any]]] = {}
        log = {path.stem: path.read_bytes() for path in (store / "log").glob("[0-9]*.json")}
        for path in (store / "log").glob("[0-9]*.log"):
            log |= {line[:29].decode(): line[30:] for line in path.read_bytes().splitlines()}
        self.log = [self._log_record(name, log[name]) for name in sorted(log)]
        for pack in sorted(packs, key=lambda pack: pack.kind == "raw"):
            for record in pack.document["records"]:
                if record["id"] not in self.objects or (pack.document.get("rebase") and pack.kind != "raw"):
                    self.objects[record["id"]] = pack, record
            if "version" in pack.document:
                self.versions[pack.document["number"]] = pack, pack.document["version"]

    @staticmethod
    def _log_record(name: str, data: bytes) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(data)
        digest = record.pop("digest")
        assert blake(json.dumps(record, sort_keys=True, separators=(",", ":")).encode(), 8).hex() == digest
        assert name == f"{record['sequence']:012d}-{digest}"
        return record

    def blob(self, pack: Pack, reference: dict[str, Any]) -> bytes:
        """Return the expanded bytes of a blob."""
        held = self.packs[reference["pack"]] if "pack" in reference else pack
        data = held.blobs[reference["name"]]
        method, result = data[8], data[9:]
        if method == 1:
            result = expanded(result)
        elif method == 2:
            result = expanded(result, self.blob(held, reference["against"]))
        elif method == 3:
            changed, at = bytearray(self.blob(held, reference["against"])), 0
            columns = zlib.decompress(result, -15)
            for passed, change in zip(columns[: len(columns) // 2], columns[len(columns) // 2 :], strict=True):
                at += passed
                changed[at] ^= change
            result = bytes(changed)
        assert blake(data[8:] + result, 8) == data[:8]
        return result

    @staticmethod
    def _patch(pack: Pack, record: dict[str, Any], chunk: int) -> bytes:
        start = record["at"][0] + sum(record["sizes"][:chunk])
        return pack.data[start : start + record["sizes"][chunk]]

    def _payload(self, pack: Pack, record: dict[str, Any], chunk: int) -> Payload | None:
        start, length = record["at"]
        shard = pack.data[start : start + length]
        chunks = -(-record["count"] // record["chunk"])
        if chunks == 1:
            return Payload(shard) if length else None
        table = shard[-16 * chunks - 4 : -4]
        assert google_crc32c.value(table) == int.from_bytes(shard[-4:], "little")
        offset, size = struct.unpack_from("<QQ", table, 16 * chunk)
        return None if offset == 2**64 - 1 else Payload(shard[offset : offset + size])

    @staticmethod
    def _length(record: dict[str, Any], chunk: int) -> int:
        return min(record["chunk"], record["count"] - chunk * record["chunk"])

    def exponents(self, record: dict[str, Any], chunk: int) -> Array:
        """Return the exponent of the step of each element of a chunk."""
        places = chunk * record["chunk"] + np.arange(self._length(record, chunk))
        result = np.full(places.size, record["step"], np.int64)
        return result + self._by_axes(record, places)

    @staticmethod
    def _by_axes(record: dict[str, Any], places: Array) -> Array:
        """Return the offsets that rows and columns add to the elements at these places of an object."""
        axes = (("rows", places // record["width"]), ("cols", places % record["width"]))
        return sum((exponents_of(record, name)[index] for name, index in axes if name in record), np.zeros(1, np.int64))

    def integers(self, identity: str, chunk: int) -> Array:
        """Return the integers of a chunk of an object on a linear or rounded lattice."""
        pack, record = self.objects[identity]
        payload = self._payload(pack, record, chunk)
        stored = 0 if payload is None else payload.natural(None).astype(np.int64)
        if "base" not in record:
            return stored + np.zeros(self._length(record, chunk), np.int64)
        below = self.integers(record["base"], chunk)
        base = self.objects[record["base"]][1]
        shift = self.exponents(record, chunk) - self.exponents(base, chunk)
        right, left = np.minimum(np.maximum(shift, 1), 40), np.minimum(np.maximum(-shift, 0), 30)
        projected = np.where(
            shift > 0,
            (below + (1 << right - 1)) >> right,
            np.where(shift < 0, np.clip(below << left, -(1 << 24), 1 << 24), below),
        )
        return projected + stored

    def _before(self, record: dict[str, Any], chunk: int) -> Array:
        """Return the elements of the base of a delta, or of patches, that are those of a chunk."""
        if not record.get("part"):
            return self.ordinal_bits(record["base"], chunk)
        base = self.objects[record["base"]][1]
        assert base["count"] > record["count"]
        assert record["chunk"] == base["chunk"] or record["count"] <= record["chunk"]
        whole = [self.ordinal_bits(record["base"], number) for number in range(-(-base["count"] // base["chunk"]))]
        first = chunk * record["chunk"]
        return np.concatenate(whole)[first : first + self._length(record, chunk)]

    def ordinal_bits(self, identity: str, chunk: int) -> Array:
        """Return the values of a chunk of an object on an ordinal lattice, as bits."""
        pack, record = self.objects[identity]
        size = DTYPES[record["dtype"]][0]
        if record["kind"] == "raw":
            first = record["at"][0] + chunk * record["chunk"] * size
            assert record["at"][0] % 64 == 0
            data = pack.data[first : first + self._length(record, chunk) * size]
            assert zlib.crc32(data) == record["crcs"][chunk]
            return np.frombuffer(data, f"<u{size}")
        if record["kind"] == "cast":
            data = self._patch(pack, record, chunk)
            bits = rounded(self.ordinal_bits(record["base"], chunk), record["dtype"])
            bits = patched(bits, data[4:], record["dtype"]) if data[4:] else bits
            assert zlib.crc32(bits.tobytes()) == int.from_bytes(data[:4], "little")
            return bits
        if record["kind"] == "patches":
            before, data = self._before(record, chunk), self._patch(pack, record, chunk)
            return patched(before, data, record["dtype"]) if data else before
        predicted = np.zeros(self._length(record, chunk), f"u{size}")
        if "base" in record:
            predicted = self._before(record, chunk)
        payload = self._payload(pack, record, chunk)
        if payload is None:
            return predicted
        classes = ordinal_classes(predicted, record["dtype"]) if record.get("context") else None
        residuals = payload.natural(classes).view(f"u{size}")
        if "base" in record and min(record["count"], record["chunk"]) >= 1 << 16 and DTYPES[record["dtype"]][2]:
            is_negative = predicted >> predicted.dtype.type(8 * size - 1) == 1
            residuals = np.where(is_negative, -residuals, residuals)
        return bits_of(ordinals(predicted, record["dtype"]) + residuals, record["dtype"])

    def coarse_bits(self, identity: str, chunk: int) -> Array:
        """Return the values of a chunk of an object on its lattice alone, as bits."""
        record = self.objects[identity][1]
        dtype = record["dtype"]
        size, mantissa, width = DTYPES[dtype]
        if record["kind"] == "factors":
            return self.sums(identity, chunk)
        integers = self.integers(identity, chunk)
        sign, largest = 1 << 8 * size - 1, (((1 << width) - 1) << mantissa) - 1
        if record["kind"] == "rounded":
            places = chunk * record["chunk"] + np.arange(integers.size)
            octaves = record["level"] + self._by_axes(record, places)
            order = (integers << record["shift"]) + (octaves << mantissa - 2)
            bits = np.minimum(np.abs(order), largest) | np.where(order < 0, sign, 0)
            return np.where(8 * np.abs(order) <= 5 << record["shift"], 0, bits).astype(f"u{size}")
        with np.errstate(over="ignore", under="ignore"):
            values = np.ldexp(integers.astype(np.float64), self.exponents(record, chunk))
            values = values.astype("float64" if dtype == "float64" else "float32")
            values = values.astype("float16") if dtype == "float16" else values
        bits = values.view(f"u{values.itemsize}")
        if dtype == "bfloat16":
            bits = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        overflown = (bits & bits.dtype.type(sign - 1)) > largest
        return np.where(overflown, bits & bits.dtype.type(sign) | bits.dtype.type(largest), bits)

    def factors(self, identity: str) -> Array:
        """Return the numbers of an object of factors: weights, left and right ones."""
        pack, record = self.objects[identity]
        rank, width = record["rank"], record["width"]
        groups = np.array([k.bit_length() for k in range(rank)])
        classes = [np.full(rank, 18), np.tile(groups, record["count"] // width), np.repeat(groups + 9, width)]
        start, length = record["at"]
        return Payload(pack.data[start : start + length]).natural(np.concatenate(classes)).astype(np.int64)

    def sums(self, identity: str, chunk: int) -> Array:
        """Return the values of a chunk of an object of factors, as bits."""
        record = self.objects[identity][1]
        rank, width, dtype = record["rank"], record["width"], record["dtype"]
        weights, left, right = np.split(self.factors(identity), [rank, rank * (1 + record["count"] // width)])
        left, right = left.reshape(-1, rank), right.reshape(rank, width)
        sizes = [np.maximum(1, abs(found)) for found in (weights, left.max(0), left.min(0), right.max(1), right.min(1))]
        assert (sizes[0] * np.maximum(*sizes[1:3]) * np.maximum(*sizes[3:])).sum() < 2**31
        first = chunk * record["chunk"] // width
        product = (left[first : first + self._length(record, chunk) // width] * weights) @ right
        base = self.bits(record["base"], chunk)
        words = (base.astype(np.uint32) << 16) if dtype == "bfloat16" else base
        before = base.view(np.float16).astype(np.float32) if dtype == "float16" else words.view(np.float32)
        tiny, largest = 2.0**-126, float(np.finfo(np.float32).max)
        before = np.where(np.isfinite(before) & (abs(before) >= tiny), before, 0).astype(np.float64)
        values = np.clip(before + np.ldexp(product.astype(np.float64).ravel(), record["step"]), -largest, largest)
        words = np.where(abs(values) < tiny, 0, values).astype(np.float32).view(np.uint32)
        return words if dtype == "float32" else rounded(words, dtype)

    def bits(self, identity: str, chunk: int) -> Array:
        """Return the values of a chunk of an object, as bits."""
        is_exact = self.objects[identity][1]["kind"] in EXACT
        return self.ordinal_bits(identity, chunk) if is_exact else self.coarse_bits(identity, chunk)

    def files(self, number: int) -> Iterator[tuple[str, bytes]]:
        """Yield the files of a version as (path, bytes), except files with dropped tensors."""
        pack, version = self.versions[number]
        layout = rows(self.blob(pack, version["layout"]))
        extents: dict[tuple[int, int], bytearray] = {}
        units = version.get("coarse", {"units": {}})["units"]
        decoded = {int(unit): values for unit, (values, *_) in units.items()}
        coarse = set()
        held: dict[tuple[int, int], int] = {}
        for unit, ((key, _, dtype, shape, _, members), identity) in enumerate(
            zip(layout["units"], version["objects"], strict=True)
        ):
            chunk = chunk_length(shape)
            count = int(np.prod(shape))
            chunks = range(-(-count // chunk))
            if unit in decoded:
                coarse |= {file for file, *_ in members}
            whole = b"".join(self.bits(identity, index).tobytes() for index in chunks)
            self._check_ids(identity, decoded.get(unit, identity), dtype, chunk, count, whole, layout, members)
            at = 0
            for file, extent, first, length in members:
                item = item_bytes(layout["files"][file]["extents"][extent][1])
                _, _, extent_shape, _ = layout["files"][file]["extents"][extent]
                target = extents.setdefault((file, extent), bytearray(int(np.prod(extent_shape)) * item))
                target[first * item : (first + length) * item] = whole[at : at + length * item]
                at += length * item
                held[file, extent] = held.get((file, extent), 0) + length
            assert at == len(whole), key
        crcs = list(np.frombuffer(self.blob(pack, version["crcs"]), "<u4"))
        for index, ((path, size, _, _, _, reference), cut) in enumerate(
            zip(version["files"], layout["files"], strict=True)
        ):
            skeleton = self.blob(pack, reference)
            data = bytearray()
            taken = 0
            for number_of, (start, *_) in enumerate(cut["extents"]):
                gap = start - len(data)
                data += skeleton[taken : taken + gap]
                taken += gap
                data += extents.get((index, number_of), b"")
            data += skeleton[taken:]
            for _, begin, end, positions in cut["checked"]:
                crc = crcs.pop(0)
                if index in coarse:
                    crc = zlib.crc32(data[begin:end])
                if len(data) < size:
                    continue
                for position in positions:
                    assert data[position : position + 4] == bytes(4)
                    data[position : position + 4] = int(crc).to_bytes(4, "little")
            if "dropped" not in version or all(
                held.get((index, number_of), 0) == int(np.prod(extent_shape))
                for number_of, (_, _, extent_shape, _) in enumerate(cut["extents"])
            ):
                assert len(data) == size
                yield path, bytes(data)

    def _check_ids(
        self, identity: str, content: str, dtype: str, chunk: int, count: int, whole: bytes, layout: Any, members: Any
    ) -> None:
        text = f"{dtype}|{chunk}|".encode()
        at = 0
        for file, extent, _, length in members:
            size = length * item_bytes(layout["files"][file]["extents"][extent][1])
            text += blake(whole[at : at + size], 32)
            at += size
        assert identifier(text) == content
        record = self.objects[identity][1]
        assert (record["kind"] in EXACT) == (identity == content)
        if identity == content:
            return
        if record["kind"] == "factors":
            cut = [record[name] for name in ("step", "width", "rank")]
            text = f"factors|{dtype}|{'|'.join(map(str, cut))}|{count}|{chunk}|{record['base']}|".encode()
            assert identifier(text + blake(self.factors(identity).astype("<i4").tobytes(), 20)) == identity
            return
        if record["kind"] == "rounded":
            text = f"rounded|{dtype}|{record['shift']}|{record['level']}|{record['width']}|{count}|{chunk}|".encode()
        else:
            text = f"linear|{dtype}|{record['step']}|{record['width']}|{count}|{chunk}|".encode()
        text += b"|".join(exponents_of(record, name).astype("<i2").tobytes() for name in ("rows", "cols"))
        for index in range(-(-count // chunk)):
            text += blake(self.integers(identity, index).astype("<i4").tobytes(), 20)
        assert identifier(text) == identity


def exponents_of(record: dict[str, Any], name: str) -> Array:
    """Return the exponents of rows or of columns."""
    said = record.get(name, [])
    if isinstance(said, str):
        said = [code - 80 - (code > 92) for code in said.encode()]
    return np.array(said, np.int64)


def item_bytes(dtype: str) -> int:
    return COMPLEX[dtype] if dtype in COMPLEX else DTYPES[dtype][0]


def chunk_length(shape: list[int]) -> int:
    inner = 1
    for size in reversed(shape):
        if inner * size > 2**18:
            break
        inner *= size
    return 1 if inner == 0 else inner * max(1, 2**18 // inner)
