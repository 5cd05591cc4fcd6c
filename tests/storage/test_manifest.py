"""The manifest's frame: round trips, every flipped bit, later formats."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import FormatVersionError, IntegrityError
from ckstore.storage import manifest
from ckstore.storage.manifest import encode_manifest
from tests.crafted import sealed


def decode_manifest(data):
    return manifest.decode_manifest(data, dict[str, Any])


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
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


@pytest.mark.parametrize("size", [10, 1 << 13, 1 << 16])
def test_a_document_of_any_length(size):
    """Documents are compressed with a dictionary, incompressible ones stored."""
    for text in (
        random.Random(1).randbytes(size).hex(),
        "a" * size,
        random.Random(2).randbytes(size).decode("latin-1").replace("\0", "0"),
    ):
        document = {"number": 1, "created": text}
        data = encode_manifest(document, {"blob": b"x"})
        assert decode_manifest(data) == (document, {"blob": b"x"})


def test_a_short_document_takes_few_bytes():
    version = {"fidelity": "exact", "directory": False, "links": [], "directories": [], "metrics": {}, "facts": {}}
    document = {"format": 1, "number": 7, "kind": "encoded", "records": [], "version": version}
    assert len(encode_manifest(document, {})) < 80


def test_a_later_format_is_distinguished_from_damage():
    assert decode_manifest(sealed(b'{"document":{},"blobs":[]}')) == ({}, {})
    with pytest.raises(FormatVersionError):
        decode_manifest(sealed(b"whatever", version=manifest.FORMAT + 1))
    for unknown in (sealed(b'{"document":{},"blobs":[]}', method=7), sealed(b'{"document":[],"blobs":[]}')):
        with pytest.raises(IntegrityError, match=r"although its checksum matches .*; install the latest ckstore"):
            decode_manifest(unknown)


@pytest.mark.parametrize(
    "data",
    [
        sealed(b'{"document":{},"blobs":[]}', version=0),
        sealed(b'{"document":{},"blobs":[]}', method=0),
        sealed(b'{"document":{},"blobs":[]}', method=2),
        sealed(b'{"document":{},"blobs":[]}', method=3),
        sealed(b"no json"),
        sealed(b"[" * 100_000),
        sealed(b"[]"),
        sealed(b'{"document":[],"blobs":[]}'),
        sealed(b'{"document":{}}'),
        sealed(b'{"document":{},"blobs":[["a",3]]}', b"xx"),
        sealed(b'{"document":{},"blobs":[["a",-1]]}', b"xx"),
        sealed(b'{"document":{},"blobs":[["a",1],["a",1]]}', b"xx"),
        sealed(b'{"document":{},"blobs":[["a",1.5]]}', b"xx"),
        sealed(b'{"document":{},"blobs":[["a",1]]}', b"xx"),
        sealed(b'{"document":{},"blobs":[[7,2]]}', b"xx"),
        sealed(b'{"document":{},"blobs":7}', b"xx"),
        sealed(b'{"document":{},"blobs":[]}', length=5),
        sealed(b'{"document":{},"blobs":[]}', length=2**62),
    ],
)
def test_crafted_manifests_are_refused(data):
    with pytest.raises(IntegrityError):
        decode_manifest(data)
