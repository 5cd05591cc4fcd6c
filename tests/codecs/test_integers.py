from __future__ import annotations

import contextlib
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs import integer_header
from ckstore.codecs.integer_plan import Workspace
from ckstore.codecs.integers import (
    add_integers,
    count_integers,
    decode_integers,
    encode_integers,
    entropy_bits,
    payload_bits,
)
from ckstore.errors import CkstoreError, IntegrityError, UsageError
from ckstore.kernels import entropy
from ckstore.kernels.entropy import SYMBOLS
from ckstore.varint import varint
from tests import payload_reader
from tests.kernels.inner import code_lengths

PAYLOADS = Path(__file__).parents[1] / "fixtures" / "payloads"
CHUNK = 1 << 18


def decoded(payload, like, classes=None):
    out = np.empty_like(like)
    decode_integers(payload, out, classes)
    return out


def in_coded_order(values, classes):
    return values if classes is None else values[np.argsort(classes, kind="stable")]


def by_reference(payload):
    header = integer_header.read_header(memoryview(payload))
    return payload_reader.decode(
        payload[header.directory : header.planes],
        payload[header.planes :],
        header.streams,
        header.count,
        header.grouped,
    )


def groups_of(payload):
    header = integer_header.read_header(memoryview(payload))
    return payload_reader.read_directory(payload[header.directory : header.planes], header.count, header.grouped)


def planes_of(payload):
    """Bytes of the plane of each dense group."""
    return [group.plane for group in groups_of(payload) if group.kind == payload_reader.DENSE]


def order_0_bits(values, classes=None):
    groups = [values] if classes is None else [values[classes == k] for k in np.unique(classes)]
    bits = 0.0
    for group in groups:
        counts = np.unique(group, return_counts=True)[1]
        bits += (counts * np.log2(group.size / counts)).sum()
    return bits


SHAPES = ("uniform", "normal", "sparse", "palette", "geometric", "outliers", "constant")


def draw_values(shape, size, width, rng):
    """Integers of a kind of distribution that exercises one or the other path of the coder."""
    reach = 1 << int(rng.integers(1, 8 * width))
    uniform = rng.integers(-reach, reach - 1, size, dtype=np.int64, endpoint=True)
    if shape == "uniform":
        values = uniform
    elif shape == "normal":
        values = (rng.standard_normal(size) * min(reach, 2**60) / 4).astype(np.int64)
    elif shape == "sparse":
        values = np.where(rng.random(size) < rng.random() ** 2, uniform, 0)
    elif shape == "palette":
        values = rng.choice(rng.integers(-reach, reach - 1, int(rng.integers(1, 30)), endpoint=True), size)
    elif shape == "geometric":
        values = rng.geometric(rng.random() * 0.9 + 0.05, size) - 1
    elif shape == "outliers":
        values = np.where(rng.random(size) < 0.05, uniform, (rng.standard_normal(size) * 3).astype(np.int64))
    else:
        values = np.full(size, uniform[0] if size else 0)
    return values.astype(f"i{width}")


@given(
    st.sampled_from(SHAPES),
    st.sampled_from([0, 1, 2, 3, 4, 5, 7, 100, 511, 600, 2500]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 64),
    st.integers(0, 2**32 - 1),
)
def test_round_trip_and_reference(shape, size, width, classes, seed):
    rng = np.random.default_rng(seed)
    values = draw_values(shape, size, width, rng)
    kinds = rng.integers(0, classes, size).astype(np.uint8) if classes else None
    payload = encode_integers(values, kinds)
    assert count_integers(payload) == (size, width)
    assert (decoded(payload, values, kinds) == values).all()
    coded = in_coded_order(values, kinds)
    assert (decoded(payload, values) == coded).all()
    assert by_reference(payload) == coded.tolist()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), st.sampled_from([1, 2, 4, 8]))
def test_round_trip_of_arbitrary_integers(numbers, width):
    values = np.array(numbers, np.int64).astype(f"i{width}")
    assert (decoded(encode_integers(values), values) == values).all()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 5, 700, 5000])
def test_extremes_of_every_width(width, size):
    info = np.iinfo(f"i{width}")
    rng = np.random.default_rng(size)
    for choices in ([info.min, info.max], [info.min, 0], [info.min], [info.max, -1, 0, 1, info.min]):
        values = rng.choice(np.array(choices, f"i{width}"), size)
        payload = encode_integers(values)
        assert (decoded(payload, values) == values).all()
        assert by_reference(payload) == values.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_unsigned_integers_are_their_signed_views(dtype):
    values = np.array([0, 1, np.iinfo(dtype).max, np.iinfo(dtype).max // 2 + 1] * 200, dtype)
    signed = values.view(dtype[1:])
    assert encode_integers(values) == encode_integers(signed)
    assert (decoded(encode_integers(values), values) == values).all()


def bernoulli(bits, rng):
    """Values -1, 0, 1 of `bits` bits of entropy each."""
    low, high = 0.0, 0.5
    for _ in range(50):
        chance = (low + high) / 2
        entropy = -chance * np.log2(chance) - (1 - chance) * np.log2(1 - chance) + chance
        low, high = (chance, high) if entropy < bits else (low, chance)
    return ((rng.random(CHUNK) < low) * rng.choice([-1, 1], CHUNK)).astype(np.int32)


def laplacian(bits, rng):
    """Two-sided geometric values of `bits` bits of entropy each."""
    low, high = 1e-3, 1e6
    for _ in range(50):
        scale = np.sqrt(low * high)
        ratio = np.exp(-1 / scale)
        chances = (1 - ratio) / (1 + ratio) * ratio ** np.arange(int(50 * scale) + 2)
        chances = chances[chances > 0]
        entropy = -(chances * np.log2(chances)).sum() - (chances[1:] * np.log2(chances[1:])).sum()
        low, high = (scale, high) if entropy < bits else (low, scale)
    stop = 1 - np.exp(-1 / low)
    return (rng.geometric(stop, CHUNK) - rng.geometric(stop, CHUNK)).astype(np.int32)


def few_bytes(bits):
    """Bits that header, tables and ends of streams may take where all else is next to nothing."""
    return 8 * 40 if bits < 0.1 else 0


@pytest.mark.parametrize("bits", [0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0])
def test_density_of_signs(bits):
    values = bernoulli(bits, np.random.default_rng(1))
    payload = encode_integers(values)
    assert len(payload) * 8 <= 1.02 * order_0_bits(values) + few_bytes(bits)
    assert payload_bits(values)[0] == pytest.approx(len(payload) * 8, rel=0.03)


@pytest.mark.parametrize("bits", [0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 8.0, 12.0])
def test_density_of_differences(bits):
    values = laplacian(bits, np.random.default_rng(2))
    payload = encode_integers(values)
    assert len(payload) * 8 <= 1.02 * order_0_bits(values) + few_bytes(bits)
    assert payload_bits(values)[0] == pytest.approx(len(payload) * 8, rel=0.03)


@pytest.mark.parametrize("bits", [13.0, 14.0, 16.0])
def test_density_where_a_chunk_is_too_short_for_its_own_entropy(bits):
    # 2^18 elements show at most 18 bits of order-0 entropy, and too little long before: the source's is the measure.
    assert len(encode_integers(laplacian(bits, np.random.default_rng(3)))) * 8 <= 1.02 * bits * CHUNK


def test_density_of_groups():
    rng = np.random.default_rng(4)
    classes = rng.integers(0, 20, CHUNK).astype(np.uint8)
    values = np.rint(rng.standard_normal(CHUNK) * 0.2 * 1.3**classes).astype(np.int32)
    payload = encode_integers(values, classes)
    assert len(payload) * 8 <= 1.02 * order_0_bits(values, classes)
    assert len(payload) < 0.95 * len(encode_integers(values))
    assert entropy_bits(values, classes) == pytest.approx(order_0_bits(values, classes), rel=0.01)
    sizes = len(encode_integers(values)) * 8, len(payload) * 8
    assert payload_bits(values, classes) == pytest.approx(sizes, rel=0.01)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_sizes_of_equal_integers(dtype):
    limits = np.iinfo(dtype)
    for value in (0, 1, -1, limits.min, limits.max):
        values = np.full(CHUNK, value, dtype)
        assert payload_bits(values)[0] == pytest.approx(len(encode_integers(values)) * 8, abs=128)
    assert payload_bits(np.array([limits.min, limits.max], dtype))[0] < 1000


def test_density_of_wide_residuals_where_most_are_zero():
    rng = np.random.default_rng(5)
    residuals = np.rint(rng.standard_normal(CHUNK) * 2**18).astype(np.int32)
    values = np.where(rng.random(CHUNK) < 0.86, 0, residuals).astype(np.int32)
    # Entropy of the zeros' places, and of a normal distribution for the others.
    source = 0.5842 + 0.14 * (0.5 * np.log2(2 * np.pi * np.e) + 18)
    assert len(encode_integers(values)) * 8 <= 1.02 * source * CHUNK


def test_raw_floats_code_their_exponents():
    rng = np.random.default_rng(6)
    floats = (rng.standard_normal(CHUNK) * 0.02).astype(np.float32).view(np.int32)
    ordinals = np.where(floats < 0, floats ^ 0x7FFFFFFF, floats)
    exponents = (floats >> 23) & 255
    assert len(encode_integers(ordinals)) * 8 <= 1.01 * (24 * CHUNK + order_0_bits(exponents))
    # In 16 bits, the leading bits of the mantissa are symbols too.
    halves = (ordinals >> 16).astype(np.int16)
    assert len(encode_integers(halves)) * 8 <= 1.01 * (8 * CHUNK + order_0_bits(exponents))


def test_noise_costs_no_more_than_it_is():
    rng = np.random.default_rng(7)
    for width in (1, 2, 4, 8):
        values = rng.integers(-(1 << 8 * width - 1), (1 << 8 * width - 1) - 1, 20_000, endpoint=True).astype(
            f"i{width}"
        )
        assert len(encode_integers(values)) <= values.nbytes * 1.001 + 64


@pytest.mark.parametrize("value", [0, 7, -(2**31)])
def test_a_constant_costs_a_few_bytes(value):
    assert len(encode_integers(np.full(CHUNK, value, np.int32))) <= 16


def small_payloads():
    rng = np.random.default_rng(8)
    classes = rng.integers(0, 3, 700).astype(np.uint8)
    dense = (rng.standard_normal(700) * 5).astype(np.int32)
    sparse = np.zeros(9000, np.int16)
    sparse[rng.choice(9000, 2400, replace=False)] = rng.choice([-300, -1, 1], 2400)
    yield "adaptive", rng.integers(-2, 3, 60).astype(np.int8), None
    yield "constant", np.full(1000, -5, np.int64), None
    yield "empty", np.empty(0, np.int32), None
    yield "dense", dense, None
    yield "sparse", sparse, None
    yield "groups", dense, classes
    yield "wide", rng.integers(-(2**62), 2**62, 600), None
    yield "planes", rng.integers(-(2**11), 2**11, 1100).astype(np.int16), None
    kinds = rng.integers(0, 2, 2400).astype(np.uint8)
    yield "planes of groups", np.rint(rng.standard_normal(2400) * np.where(kinds, 2e3, 1e6)).astype(np.int32), kinds


SMALL = [pytest.param(values, classes, id=name) for name, values, classes in small_payloads()]


@pytest.mark.parametrize(("values", "classes"), SMALL)
def test_every_flipped_bit_is_found(values, classes):
    payload = encode_integers(values, classes)
    out = np.empty_like(values)
    for position in range(len(payload)):
        damaged = bytearray(payload)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(IntegrityError):
            decode_integers(damaged, out, classes)


@pytest.mark.parametrize(("values", "classes"), SMALL)
def test_every_missing_or_surplus_byte_is_found(values, classes):
    payload = encode_integers(values, classes)
    out = np.empty_like(values)
    for damaged in [payload[:end] for end in range(len(payload))] + [payload + b"\0", payload + b"\1", b"\1" + payload]:
        with pytest.raises(IntegrityError):
            decode_integers(damaged, out, classes)


@pytest.mark.parametrize(("values", "classes"), SMALL)
def test_crafted_payloads_are_refused_or_harmless(values, classes):
    payload = encode_integers(values, classes)
    rng = np.random.default_rng(9)
    guard = np.full(values.size + 64, 77, values.dtype)
    for _ in range(1500):
        crafted = bytearray(payload)
        where = rng.integers(0, min(len(crafted), int(rng.choice([40, 200, 10**6]))), int(rng.integers(1, 4)))
        for position in where:
            crafted[position] = rng.integers(0, 256)
        if rng.random() < 0.2:
            crafted = crafted[: int(rng.integers(2, len(crafted) + 1))]
        with contextlib.suppress(IntegrityError):
            decode_integers(bytes(crafted), guard[32 : 32 + values.size])
        assert (guard[:32] == 77).all()
        assert (guard[32 + values.size :] == 77).all()


@given(st.binary(max_size=300), st.integers(0, 63), st.integers(0, 2000))
def test_arbitrary_bytes_are_refused_or_harmless(data, flags, size):
    count = bytes((2,)) + size.to_bytes(2, "little")
    out = np.empty(size, f"i{1 << (flags & 3)}")
    payload = bytes((1, flags)) + bytes(4) + count + data
    with contextlib.suppress(IntegrityError):
        decode_integers(payload, out)


@pytest.mark.parametrize("size", [0, 1, 31, 5000])
@pytest.mark.parametrize("largest", [0, 1, 100, 30_000, 1 << 22])
@pytest.mark.parametrize("shift", [0, 1, 7, 22, 30])
def test_integers_are_added_to_shifted_sums(size, largest, shift):
    generator = np.random.default_rng(size + largest + shift)
    stored = generator.integers(-largest, largest + 1, size).astype(np.int32)
    sums = generator.integers(-(1 << 24), (1 << 24) + 1, size).astype(np.int32)
    expected = ((sums.astype(np.int64) + ((1 << shift) >> 1)) >> shift) + stored
    add_integers(encode_integers(stored), sums, shift)
    assert np.array_equal(sums, expected)


def test_damage_leaves_sums_unchanged():
    payload = bytearray(encode_integers(np.arange(3000, dtype=np.int32)))
    sums = np.arange(3000, dtype=np.int32)
    payload[-40] ^= 4
    with pytest.raises(IntegrityError):
        add_integers(payload, sums, 1)
    with pytest.raises(IntegrityError):
        add_integers(encode_integers(np.arange(2999, dtype=np.int32)), sums)
    assert np.array_equal(sums, np.arange(3000))


def test_other_classes_are_found():
    rng = np.random.default_rng(10)
    values = rng.integers(-5, 5, 3000).astype(np.int32)
    classes = rng.integers(0, 4, 3000).astype(np.uint8)
    payload = encode_integers(values, classes)
    # The same number of each class, elsewhere: only the classes' own checksum can tell.
    for wrong in (np.roll(classes, 1), np.zeros_like(classes), 63 - classes):
        with pytest.raises(IntegrityError, match="other classes"):
            decode_integers(payload, np.empty_like(values), wrong)
    with pytest.raises(IntegrityError, match="without classes"):
        decode_integers(encode_integers(values), np.empty_like(values), classes)


def test_invalid_arguments_are_refused():
    values = np.arange(10, dtype=np.int32)
    payload = encode_integers(values)
    with pytest.raises(IntegrityError, match="10 integers of 4 bytes, not 9"):
        decode_integers(payload, np.empty(9, np.int32))
    with pytest.raises(IntegrityError, match="not 10 of 2"):
        decode_integers(payload, np.empty(10, np.int16))
    with pytest.raises(IntegrityError, match="format 2"):
        decode_integers(b"\2" + payload[1:], values.copy())
    for bad in (values.astype(float), values.reshape(2, 5), values[::2], values.astype(">i4")):
        with pytest.raises(UsageError):
            encode_integers(bad)
    with pytest.raises(UsageError, match="63"):
        encode_integers(values, np.full(10, 64, np.uint8))
    with pytest.raises(UsageError):
        encode_integers(values, np.zeros(9, np.uint8))
    assert issubclass(IntegrityError, CkstoreError)


@pytest.mark.parametrize("count", [0, 1, 3, 127, 128, 255, 256, 4096, 65_537])
def test_an_encoded_count_is_as_short_as_the_format_says(count):
    assert encode_integers(np.zeros(count, np.int16))[6:].startswith(count_bytes(count))


def test_counts_beyond_32_bits_are_stated_and_refused_before_anything_is_allocated():
    for count in (1 << 31, 1 << 40, (1 << 33) + 5):
        encoded = count_bytes(count)
        assert integer_header.read_count(memoryview(encoded), 0) == (count, len(encoded))
        payload = bytes((1, 0)) + bytes(4) + encoded + b"xyz"
        assert count_integers(payload) == (count, 1)
        with pytest.raises(IntegrityError):
            decode_integers(payload, np.empty(3, np.int8))


def test_threads_do_not_disturb_each_other():
    rng = np.random.default_rng(11)
    jobs = []
    for i in range(24):
        values = (rng.standard_normal(20_000) * 2.0 ** (i - 4)).astype(np.int32)
        classes = rng.integers(0, 1 + i, values.size).astype(np.uint8) if i % 2 else None
        jobs.append((values, classes, encode_integers(values, classes)))

    def both_ways(job):
        values, classes, payload = job
        return encode_integers(values, classes) == payload and (decoded(payload, values, classes) == values).all()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both_ways, jobs * 4))


def test_a_workspace_has_room_for_a_chunk_and_no_more():
    room = Workspace()
    room.reserve(1 << 18)
    spare = entropy.DIRECTORY_BYTES + entropy.STREAM_SPARE + 10 * entropy.CELLS + 1024
    assert room._encoder.nbytes <= (1 << 18) * (3 * 2 + 3 * 8 + entropy.PLANE_BYTES + entropy.STREAM_BYTES) + spare


def test_read_only_mapped_and_misaligned_arrays():
    values = np.arange(-400, 400, dtype=np.int32)
    payload = encode_integers(values)
    shifted = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view(np.int32)
    assert not shifted.flags.aligned
    assert encode_integers(shifted) == payload
    out = np.zeros(values.nbytes + 1, np.uint8)[1:].view(np.int32)
    decode_integers(payload, out)
    assert (out == values).all()
    classes = np.frombuffer(bytes(i % 3 for i in range(800)), np.uint8)
    grouped = encode_integers(shifted, classes)
    decode_integers(grouped, out, classes)
    assert (out == values).all()
    out.flags.writeable = False
    with pytest.raises(UsageError):
        decode_integers(payload, out)


@pytest.mark.parametrize("path", sorted(PAYLOADS.glob("*.bin")), ids=lambda path: path.stem)
def test_old_payloads_decode(path):
    facts = json.loads(path.with_suffix(".json").read_text())
    with np.load(PAYLOADS / "expected.npz") as arrays:
        values, classes = arrays[facts["values"]], arrays[facts["classes"]] if facts["classes"] else None
    payload = path.read_bytes()
    assert (decoded(payload, values, classes) == values).all()
    signed = in_coded_order(values, classes).view(f"i{values.itemsize}")
    assert by_reference(payload) == signed.tolist()


def test_old_payloads_exist():
    assert len(list(PAYLOADS.glob("format-1-*.bin"))) >= 17


@pytest.mark.parametrize("size", [2, 63, 5000, 1 << 18])
@pytest.mark.parametrize("chance", [0.0001, 0.01, 0.3, 1.0])
def test_few_non_zeros(chance, size):
    rng = np.random.default_rng(size)
    values = np.where(rng.random(size) < min(chance, 1000 / size), rng.integers(-9, 10, size), 0).astype(np.int8)
    values[size // 3 : size // 2] = 0
    values[rng.integers(size)] = 3
    payload = encode_integers(values)
    assert (decoded(payload, values) == values).all()
    assert by_reference(payload) == values.tolist()
    # The place and the value of each of them, and a table.
    present = np.count_nonzero(values)
    assert len(payload) <= 70 + present * (np.log2(size / present) + 1.45 + np.log2(18)) / 8


def noise(bits, size, dtype, seed=14):
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    return np.random.default_rng(seed).integers(low, high, size, np.int64, endpoint=True).astype(dtype)


def normal(scale, size, dtype, seed=15):
    return np.rint(np.random.default_rng(seed).standard_normal(size) * scale).astype(dtype)


@pytest.mark.parametrize(
    ("values", "plane"),
    [
        pytest.param(noise(8, 1024, np.int8), 0, id="noise of a byte"),
        pytest.param(noise(16, 5000, np.int16), 1, id="noise of two bytes"),
        pytest.param(noise(32, 5003, np.int32), 2, id="noise of four bytes"),
        pytest.param(noise(64, 2002, np.int64), 4, id="noise of eight bytes"),
        pytest.param(noise(16, 5000, np.int64), 1, id="noise of two bytes in eight"),
        pytest.param(noise(40, 3001, np.int64), 4, id="a byte above the plane"),
        pytest.param(noise(62, 1500, np.int64), 4, id="wide numbers above the plane"),
        pytest.param(normal(3000, 20_000, np.int16), 1, id="normal, 13 bits"),
        pytest.param(normal(5e6, 20_000, np.int32), 2, id="normal, 24 bits"),
        pytest.param(normal(12, 20_000, np.int8), 0, id="symbols"),
        pytest.param(noise(8, 1023, np.int8), 0, id="too few"),
        pytest.param(np.where(np.arange(20_000) % 4, normal(5e6, 20_000, np.int32), 0), 0, id="many zeros"),
    ],
)
def test_planes_take_bytes_that_cost_next_to_nothing(values, plane):
    payload = encode_integers(values)
    assert planes_of(payload) == [plane]
    assert (decoded(payload, values) == values).all()
    if values.size <= 3001:
        assert by_reference(payload) == values.tolist()


@pytest.mark.parametrize("scale", [100, 300, 1e3, 1e4, 1e5, 1e6, 1e8])
def test_planes_do_not_make_a_payload_larger(scale):
    values = normal(scale, CHUNK, np.int32)
    source = 0.5 * np.log2(2 * np.pi * np.e) + np.log2(scale)
    assert len(encode_integers(values)) * 8 <= 1.006 * source * CHUNK


def test_groups_with_and_without_planes():
    rng = np.random.default_rng(16)
    classes = rng.integers(0, 6, 12_000).astype(np.uint8)
    scales = np.array([12.0, 3e3, 1e6, 0.3, 1e8, 0.0])
    values = np.rint(rng.standard_normal(12_000) * scales[classes]).astype(np.int32)
    payload = encode_integers(values, classes)
    assert planes_of(payload) == [0, 1, 2, 2]
    assert (decoded(payload, values, classes) == values).all()


def test_planes_that_do_not_fit_are_refused():
    values = noise(16, 5000, np.int16)
    payload = encode_integers(values)
    assert planes_of(payload) == [1]
    header = integer_header.read_header(memoryview(payload))
    out = np.empty_like(values)
    # Fewer bytes than a plane takes, and more.
    for rest in (payload[header.planes + 1 :], payload[header.planes : header.planes + 1] + payload[header.planes :]):
        with pytest.raises(IntegrityError):
            decode_integers(with_check(payload[: header.planes] + rest, values), out)
    # A plane of two bytes for integers that one byte holds.
    crafted = crafted_payload(
        crafted_directory(np.random.default_rng(0), 4, (3,), plane=2), [b"", b"", b""], 4, 1, 1, out
    )
    with pytest.raises(IntegrityError):
        decode_integers(crafted, np.empty(4, np.int8))


def with_check(payload, elements):
    """The payload with the checksum that is right for these elements, in the bytes that hold each of them."""
    narrow = 1 << (payload[1] >> 2 & 3)
    check = zlib.crc32(elements.astype(f"<i{narrow}").tobytes() + payload[:2] + payload[6:])
    return payload[:2] + check.to_bytes(4, "little") + payload[6:]


def test_overhead_excludes_planes_and_streams():
    for values in (noise(16, 1100, np.int16), normal(9, 4000, np.int16), np.full(5, 3, np.int8)):
        payload = encode_integers(values)
        header = integer_header.read_header(memoryview(payload))
        elements = len(payload) - header.planes - integer_header.PADDING if header.streamed else 0
        assert integer_header.overhead_bytes(payload[:64], len(payload)) == len(payload) - elements


@pytest.mark.parametrize("bits", range(1, 8))
def test_joined_numbers_of_any_count(bits):
    values = noise(bits, 70_000, np.int8)
    for surplus in (*range(17), 31, 33):
        part = values[: 34_000 + surplus]
        assert (decoded(encode_integers(part), part) == part).all()
    classes = (np.arange(values.size) % 3 == 0).astype(np.uint8)
    assert (decoded(encode_integers(values, classes), values, classes) == values).all()


@pytest.mark.parametrize("seed", range(8))
def test_numbers_missing_in_the_sample_are_coded_too(seed):
    rng = np.random.default_rng(seed)
    values = normal(1.5 * (seed + 1), 80_000, np.int16, seed)
    rare = rng.choice(values.size, int(rng.integers(1, 9)), replace=False)
    values[rare] = rng.integers(-500, 500, rare.size)
    assert (decoded(encode_integers(values), values) == values).all()
    # Every other block has numbers of its own.
    values += ((np.arange(values.size) >> 10) % 2 * 100).astype(np.int16)
    assert (decoded(encode_integers(values), values) == values).all()


def test_estimates_and_payloads_in_turn():
    rng = np.random.default_rng(17)
    classes = rng.integers(0, 9, 9000).astype(np.uint8)
    jobs = [(normal(3.0**i, 9000, np.int32, i), classes if i % 2 else None) for i in range(9)]
    alone = [(encode_integers(*job), payload_bits(*job)) for job in jobs]
    for place in rng.integers(0, len(jobs), 60).tolist():
        assert payload_bits(*jobs[place]) == alone[place][1]
        other = int(rng.integers(0, len(jobs)))
        assert encode_integers(*jobs[other]) == alone[other][0]


def payloads_of_every_path():
    """Values and classes that take the decoder along each of its ways: see `kernels/entropy/read.c`."""
    rng = np.random.default_rng(12)

    def normal(scale, size, dtype=np.int32):
        return np.rint(rng.standard_normal(size) * scale).astype(dtype)

    def sparse(chance, numbers, size, dtype=np.int32):
        return np.where(rng.random(size) < chance, numbers, 0).astype(dtype)

    outliers = normal(12.0, 40_003)
    outliers[rng.integers(0, outliers.size, 60)] = rng.integers(-(1 << 20), 1 << 20, 60)
    yield "small odd numbers", 2 * normal(2.5, 20_001, np.int8) + 1, None
    yield "small numbers", normal(12.0, 40_001, np.int8), None
    yield "small numbers, larger ones between", outliers, None
    yield "bytes of one bit", rng.integers(0, 2, 30_001).astype(np.int8), None
    yield "bytes of few bits, rare longer ones", normal(1.5, 30_002) * rng.choice([1, 25], 30_002, p=[0.99, 0.01]), None
    yield "bytes in pairs", sparse(0.4, normal(2.0, 60_003, np.int8), 60_003), None
    yield (
        "bytes in pairs, one quarter of the elements",
        np.where(np.arange(90_003) < 30_000, normal(1.0, 90_003), 0),
        None,
    )
    runs = np.where(np.arange(90_003) // 40 % 3 == 0, normal(1.0, 90_003), 0)
    runs[40_000:40_500] = 0
    yield "bytes in pairs, longer runs between", runs, None
    yield "bytes in wider integers", normal(12.0, 40_002, np.int64), None
    yield "numbers of equal length", rng.integers(-64, 64, 9001).astype(np.int16), None
    yield "whole numbers and planes", normal(3e6, 12_007), None
    yield "numbers of up to 28 bits", rng.choice(rng.integers(-(1 << 20), 1 << 20, 900), 6000).astype(np.int32), None
    yield "numbers of up to 44 bits", (rng.laplace(size=3001) * (1 << 57)).astype(np.int64), None
    yield "wide numbers", rng.choice(rng.integers(-(1 << 62), 1 << 62, 900), 3001), None
    yield "planes of two bytes", (rng.laplace(size=5003) * (1 << 26)).astype(np.int32), None
    yield "planes of four bytes", (rng.standard_normal(9000) * 2.0**45).astype(np.int64), None
    yield "noise", rng.integers(-(1 << 31), 1 << 31, 9001).astype(np.int32), None
    yield "short pairs", sparse(0.2, rng.choice([-1, 1], 30_001), 30_001), None
    yield (
        "pairs, longer ones between",
        sparse(0.03, rng.choice([-1, 1, 300], 120_001, p=[0.5, 0.49, 0.01]), 120_001),
        None,
    )
    yield "long pairs", sparse(0.15, rng.integers(-(1 << 21), 1 << 21, 30_000), 30_000), None
    yield "pairs of any width", sparse(0.15, rng.integers(-(1 << 62), 1 << 62, 30_000), 30_000, np.int64), None
    yield "pairs without bits", np.where(np.arange(9999) % 3 == 2, 5, 0).astype(np.int32), None
    classes = rng.geometric(0.3, 60_001).clip(0, 40).astype(np.uint8)
    yield "groups", np.rint(rng.standard_normal(60_001) * 1.8 ** (classes % 30)).astype(np.int32), classes
    yield "groups in wider integers", (rng.integers(0, 3, 60_001) * (classes % 3)).astype(np.int64), classes


PATHS = [pytest.param(values, classes, id=name) for name, values, classes in payloads_of_every_path()]


@pytest.mark.parametrize(("values", "classes"), PATHS)
def test_every_path_round_trips(values, classes):
    payload = encode_integers(values, classes)
    guard = np.full(values.size + 64, 77, values.dtype)
    out = guard[32 : 32 + values.size]
    # Twice, with other values between: the arrays that a thread uses again have no say.
    for _ in range(2):
        decode_integers(payload, out, classes)
        assert (out == values).all()
        decode_integers(payload, out)
        assert (out == in_coded_order(values, classes)).all()
        decoded(encode_integers(values[::-1].copy(), classes), values, classes)
    assert (guard[:32] == 77).all()
    assert (guard[32 + values.size :] == 77).all()


@pytest.mark.long
@pytest.mark.parametrize(("values", "classes"), PATHS)
def test_damage_on_any_path_is_found_or_changes_nothing(values, classes):
    payload = encode_integers(values, classes)
    guard = np.full(values.size + 64, 77, values.dtype)
    out = guard[32 : 32 + values.size]
    rng = np.random.default_rng(13)
    ends = (*range(min(120, len(payload))), *range(max(0, len(payload) - 40), len(payload)))
    for position in (*ends, *rng.integers(0, len(payload), 300).tolist()):
        damaged = bytearray(payload)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(IntegrityError):
            decode_integers(damaged, out, classes)
        # Bits that nothing is read from change nothing: the last ones of a stream, the padding.
        with contextlib.suppress(IntegrityError):
            decode_integers(with_check(bytes(damaged), in_coded_order(values, classes)), out, classes)
            assert (out == values).all()
    for end in rng.integers(7, len(payload) - 8, 60).tolist():
        for damaged in (payload[:end], payload[: end // 2] + payload[end:]):
            with pytest.raises(IntegrityError):
                decode_integers(with_check(damaged, in_coded_order(values, classes)), out, classes)
    assert (guard[:32] == 77).all()
    assert (guard[32 + values.size :] == 77).all()


def draw_bins(rng, top, alphabet):
    """Draw the raw bits of a table of at most `alphabet` bins of numbers of up to `top` bits."""
    bins = [top, top]
    while len(bins) < min(alphabet, int(rng.choice([2, 8, 80, 4096]))):
        place = int(rng.integers(len(bins)))
        if bins[place] == 0:
            if not any(bins):
                break
            continue
        bins[place : place + 1] = [bins[place] - 1] * 2
    return bins


def crafted_directory(rng, items, tops, plane=0):
    """A directory of one group of `items` elements or pairs, with bins and codes that no encoder would choose."""
    groups = np.zeros(1, entropy.GROUP)
    lowers = np.zeros((1, entropy.TABLE), np.int64)
    raws = np.zeros((1, entropy.TABLE), np.uint8)
    lengths = np.zeros((1, SYMBOLS), np.uint8)
    paired = len(tops) > 1
    values = draw_bins(rng, tops[0], 500 if paired else 4096)
    runs = draw_bins(rng, tops[1], 4096 // len(values)) if paired else [0]
    for first, bins, top in ((0, values, tops[0]), (len(values), runs, tops[-1])):
        lowers[0, first : first + len(bins)] = list(accumulate((1 << raw for raw in bins[:-1]), initial=-1 << top))
        raws[0, first : first + len(bins)] = bins
    symbols = len(values) * len(runs)
    counts = np.zeros(symbols, np.int64)
    # Runs below 0 are impossible: the bins of these do not occur.
    possible = np.arange(symbols)
    if paired:
        possible = possible[lowers[0, len(values) + possible % len(runs)] >= 0]
    occurring = rng.choice(possible, min(possible.size, int(rng.choice([1, 2, 20, 4096]))), replace=False)
    counts[occurring] = (1.0 + rng.random() * 3) ** rng.integers(0, 12, occurring.size) + 1
    groups["single"][0], _ = code_lengths(counts, symbols, lengths[0])
    groups["count"][0] = 1 << 40
    groups["kind"][0] = entropy.SPARSE if paired else entropy.DENSE
    groups["pairs"][0] = items
    groups["plane"][0] = plane
    groups["top"][0] = tops[0]
    groups["run_top"][0] = tops[-1]
    groups["bins"][0] = len(values)
    groups["run_bins"][0] = len(runs)
    buffer = np.zeros(1 << 20, np.uint8)
    addresses = np.array([*(array.ctypes.data for array in (groups, lowers, raws, lengths)), 0, 0], np.uint64)
    size = entropy.write_directory(buffer, False, 1 << 40, 1, addresses.ctypes.data)
    return buffer[:size].tobytes()


def count_bytes(count: int) -> bytes:
    """Return a number of elements as docs/format.md has it."""
    if count and count & (count - 1) == 0:
        return bytes((128 + count.bit_length() - 1,))
    size = (count.bit_length() + 7) // 8
    return bytes((size,)) + count.to_bytes(size, "little")


def crafted_payload(directory, streams, count, width, narrow, elements):
    """A payload of one group with the right checksum of its elements."""
    sizes = b"".join(map(varint, map(len, (directory, *streams[:3]))))
    flags = width.bit_length() - 1 | narrow.bit_length() - 1 << 2 | integer_header.STREAMED
    start = bytes((1, flags)) + bytes(4) + count_bytes(count)
    return with_check(b"".join((start, sizes, directory, *streams, bytes(8))), elements)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(120))
def test_bins_that_no_encoder_chooses_are_read_as_the_reference_does(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    paired = seed % 2
    items = int(rng.choice([1, 3, 700, 1100, 2500 if paired else 9000]))
    narrow = int(rng.choice([1, 2, 4, 8]))
    width = int(rng.choice([narrow, 8]))
    top = int(rng.integers(0, 8 * narrow - 1, endpoint=True))
    directory = crafted_directory(rng, items, (top, int(rng.integers(0, 7)))[: 1 + paired])
    streams = [rng.bytes(20 * items // 4 + 40) for _ in range(4)]
    count = items << 7 if paired else items

    taken = {}
    begin, read_raw = payload_reader.BitReader.__init__, payload_reader.BitReader.raw

    def beginning(reader, data):
        taken[reader] = 0
        begin(reader, data)

    def counting(reader, bits):
        taken[reader] += bits
        return read_raw(reader, bits)

    monkeypatch.setattr(payload_reader.BitReader, "__init__", beginning)
    monkeypatch.setattr(payload_reader.BitReader, "raw", counting)
    unread = crafted_payload(directory, streams, count, width, narrow, np.empty(0))
    elements = np.array(by_reference(unread), f"<i{width}")
    _, *bits = taken.values()  # The first reads the directory.
    streams = [stream[: bits[i] + 7 >> 3] for i, stream in enumerate(streams)]
    guard = np.full(count + 64, 77, elements.dtype)
    out = guard[32 : 32 + count]
    decode_integers(crafted_payload(directory, streams, count, width, narrow, elements), out)
    assert (out == elements).all()
    # A directory or a stream that is too short, or too long.
    for wrong in (directory[:-1], directory + b"\0"):
        with pytest.raises(IntegrityError):
            decode_integers(crafted_payload(wrong, streams, count, width, narrow, elements), out)
    for stream in range(4):
        for wrong in (streams[stream][:-1], streams[stream] + b"\0"):
            damaged = [*streams[:stream], wrong, *streams[stream + 1 :]]
            if wrong != streams[stream]:
                with pytest.raises(IntegrityError):
                    decode_integers(crafted_payload(directory, damaged, count, width, narrow, elements), out)
    assert (guard[:32] == 77).all()
    assert (guard[32 + count :] == 77).all()


@pytest.mark.parametrize(
    ("groups", "whole"),
    [
        ([(2, 3), (9, 2)], True),
        ([(9, 2), (2, 3)], False),
        ([(2, 3), (2, 2)], False),
        ([(2, 3), (5, 0), (9, 2)], False),
        ([(2, 3), (9, 1)], False),
        ([(2, 3), (9, 3)], False),
    ],
)
def test_groups_ascend_by_class_and_add_up(groups, whole):
    classes = np.array([2, 9, 2, 2, 9], np.uint8)
    bits = at = 0
    fields = [(len(groups), 7)]
    for label, count in groups:
        fields += [(label, 6), (count, 8), (payload_reader.EQUAL, 2), (0, 8)]
    for value, size in fields:
        bits |= value << at
        at += size
    start = bytes((1, integer_header.GROUPED)) + bytes(4) + count_bytes(5)
    check = zlib.crc32(classes).to_bytes(4, "little")
    payload = with_check(start + check + bits.to_bytes(at + 7 >> 3, "little"), np.zeros(5, np.int8))
    out = np.ones(5, np.int8)
    if whole:
        assert not decoded(payload, out, classes).any()
    else:
        with pytest.raises(IntegrityError):
            decode_integers(payload, out, classes)
