from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs import integer_header
from ckstore.codecs.integers import count_integers, decode_integers, encode_integers, entropy_bits, payload_bits
from ckstore.errors import CkstoreError, IntegrityError, UsageError
from ckstore.kernels import entropy_reference

PAYLOADS = Path(__file__).parents[1] / "fixtures" / "payloads"
CHUNK = 1 << 18


def decoded(payload, like, classes=None):
    out = np.empty_like(like)
    decode_integers(payload, out, classes)
    return out


def in_coded_order(values, classes):
    return values if classes is None else values[np.argsort(classes, kind="stable")]


def by_reference(payload):
    view = memoryview(payload)
    header = integer_header.read_header(view)
    streams = [bytes(view[start:end]) for start, end in zip(header.stream_starts, header.stream_ends, strict=True)]
    directory = bytes(view[header.directory : header.streams])
    return entropy_reference.decode(directory, streams, header.count, header.grouped)[0]


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
    """Values -1, 0, 1 of so many bits of entropy each."""
    low, high = 0.0, 0.5
    for _ in range(50):
        chance = (low + high) / 2
        entropy = -chance * np.log2(chance) - (1 - chance) * np.log2(1 - chance) + chance
        low, high = (chance, high) if entropy < bits else (low, chance)
    return ((rng.random(CHUNK) < low) * rng.choice([-1, 1], CHUNK)).astype(np.int32)


def laplacian(bits, rng):
    """Two-sided geometric values of so many bits of entropy each."""
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


@pytest.mark.parametrize("bits", [0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0])
def test_density_of_signs(bits):
    values = bernoulli(bits, np.random.default_rng(1))
    payload = encode_integers(values)
    assert len(payload) * 8 <= 1.02 * order_0_bits(values)
    assert payload_bits(values) == pytest.approx(len(payload) * 8, rel=0.03)


@pytest.mark.parametrize("bits", [0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 8.0, 12.0])
def test_density_of_differences(bits):
    values = laplacian(bits, np.random.default_rng(2))
    payload = encode_integers(values)
    assert len(payload) * 8 <= 1.02 * order_0_bits(values)
    assert payload_bits(values) == pytest.approx(len(payload) * 8, rel=0.03)


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


def with_right_checksum(payload):
    """The payload with the checksum of itself set right, so that what is wrong reaches the decoder."""
    if len(payload) > 10 and payload[1] & 32:
        check = google_crc32c.value(bytes(payload[:2] + payload[10:]))
        payload = payload[:2] + check.to_bytes(4, "little") + payload[6:]
    return bytes(payload)


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
            decode_integers(with_right_checksum(crafted), guard[32 : 32 + values.size])
        assert (guard[:32] == 77).all()
        assert (guard[32 + values.size :] == 77).all()


@given(st.binary(max_size=300), st.integers(0, 63), st.integers(0, 2000))
def test_arbitrary_bytes_are_refused_or_harmless(data, flags, size):
    count = bytes((2,)) + size.to_bytes(2, "little")
    out = np.empty(size, f"i{1 << (flags & 3)}")
    payload = bytes((1, flags)) + bytes(4) + (bytes(4) if flags & 32 else b"") + count + data
    with contextlib.suppress(IntegrityError):
        decode_integers(with_right_checksum(payload), out)


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


def test_what_cannot_be_right_is_refused():
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


def test_counts_beyond_32_bits_are_stated_and_refused_before_anything_is_allocated():
    for count in (1 << 31, 1 << 40, (1 << 33) + 5):
        encoded = integer_header.count_bytes(count)
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


def test_payload_types():
    values = np.arange(1000, dtype=np.int16)
    payload = encode_integers(values)
    for kind in (bytes, bytearray, memoryview):
        assert (decoded(kind(payload), values) == values).all()


@pytest.mark.parametrize("path", sorted(PAYLOADS.glob("*.bin")), ids=lambda path: path.stem)
def test_old_payloads_decode(path):
    facts = json.loads(path.with_suffix(".json").read_text())
    with np.load(PAYLOADS / "expected.npz") as arrays:
        values = arrays[facts["values"]]
        classes = arrays[facts["classes"]] if facts["classes"] else None
    assert (decoded(path.read_bytes(), values, classes) == values).all()


def test_there_are_old_payloads():
    assert len(list(PAYLOADS.glob("format-1-*.bin"))) >= 8
