"""The manifest's frame: round trips, every flipped bit, later formats."""

from __future__ import annotations

import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import FormatVersionError, IntegrityError
from ckstore.storage import manifest, zstd
from ckstore.storage.manifest import decode_manifest, encode_manifest

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4), st.dictionaries(texts, st.binary(max_size=50), max_size=4))
def test_round_trip(document, blobs):
    data = encode_manifest(document, blobs)
    assert decode_manifest(data) == (document, blobs)
    assert list(decode_manifest(data)[1]) == list(blobs)


def test_every_flip_and_every_truncation_is_found():
    data = encode_manifest({"number": 1, "files": ["model.pt"]}, {"skeleton": b"\0\1\2", "empty": b""})
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            decode_manifest(bytes(flipped))
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            decode_manifest(data[:length])
    with pytest.raises(IntegrityError):
        decode_manifest(data + b"\0")


def sealed(version: int, text: bytes, tail: bytes = b"", length: int | None = None) -> bytes:
    """Return a manifest with a valid checksum and the given content."""
    frame = zstd.compress(text, 3)
    rest = struct.pack("<IQQ", version, len(text) if length is None else length, len(frame)) + frame + tail
    return b"CKM1" + struct.pack("<Q", len(rest)) + blake3(rest).digest(length=16) + rest


def test_a_later_format_is_distinguished_from_damage():
    assert decode_manifest(sealed(1, b'{"document":{},"blobs":[]}')) == ({}, {})
    with pytest.raises(FormatVersionError):
        decode_manifest(sealed(manifest.FORMAT + 1, b"whatever"))


@pytest.mark.parametrize(
    "data",
    [
        sealed(0, b'{"document":{},"blobs":[]}'),
        sealed(1, b"no json"),
        sealed(1, b"[" * 100_000),
        sealed(1, b"[]"),
        sealed(1, b'{"document":[],"blobs":[]}'),
        sealed(1, b'{"document":{}}'),
        sealed(1, b'{"document":{},"blobs":[["a",3]]}', b"xx"),
        sealed(1, b'{"document":{},"blobs":[["a",-1]]}', b"xx"),
        sealed(1, b'{"document":{},"blobs":[["a",1],["a",1]]}', b"xx"),
        sealed(1, b'{"document":{},"blobs":[["a",1.5]]}', b"xx"),
        sealed(1, b'{"document":{},"blobs":[["a",1]]}', b"xx"),
        sealed(1, b'{"document":{},"blobs":[[7,2]]}', b"xx"),
        sealed(1, b'{"document":{},"blobs":7}', b"xx"),
        sealed(1, b'{"document":{},"blobs":[]}', length=5),
        sealed(1, b'{"document":{},"blobs":[]}', length=2**62),
    ],
)
def test_crafted_manifests_are_refused(data):
    with pytest.raises(IntegrityError):
        decode_manifest(data)
