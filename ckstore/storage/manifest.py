"""The frame of a manifest: a checksummed JSON document and named blobs, as the last entry of every pack."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Annotated, Any

from blake3 import blake3
from msgspec import Meta, Raw, Struct

from ckstore.errors import FormatVersionError, IntegrityError
from ckstore.storage import zstd
from ckstore.storage.schema import FORMAT, Whole, decode, encode, expanded_limit, refuse_later
from ckstore.varint import read_varints, varints

#: Name of the zip member of a pack that holds its manifest.
MEMBER = "manifest"

_MAGIC = b"CKM1"
# The magic and the BLAKE3-16 of the rest stay the same in every format version, so that a damaged version number is
# recognised as damage and not as a later version.
_ENVELOPE = struct.Struct("<4s16s")
#: How the JSON document is stored: as it is, or as a zstd frame with the dictionary.
_PLAIN, _ZSTANDARD = 0, 1
_LEVEL = 16
#: Text that documents share, the most frequent last: a short document takes half the bytes with it.
DICTIONARY = (
    b'"coarse":{"scheme":"lattice","parameters":{"quality":1.5},"units":{"0":["'
    b'"hot":{"policy":"{\\"fidelity\\":\\"exact\\"}","budget":2.0},"likeness":"","dropped":["'
    b'"stands_for":["{"kind":"raw","crcs":[{"kind":"rounded","shift":,"level":,"rows":"PPPP","cols":"PPPP'
    b'{"kind":"codebook","centroids":"{"kind":"patches","sizes":[{"kind":"linear","step":-,"origin":"'
    b'"},{"kind":"full","id":"","dtype":"bfloat16","count":'
    b'{"document":{"number":1,"created":"2026-01-01T00:00:00.000000Z","kind":"encoded","records":['
    b'{"kind":"delta","id":"","dtype":"float32","count":1024,"chunk":262144,"at":[42,1000],"alone":1000,"base":"",'
    b'"debt":2},{"kind":"delta","id":"","dtype":"float32","count":1024,"chunk":262144,"at":[42,1000],"alone":1000,'
    b'"base":"","context":true}],"rebase":true,"version":{"number":10,"run":"run","step":100,"parent":10,'
    b'"created":"2026-01-01T00:00:00.000000Z","fidelity":"exact","directory":false,"files":[["checkpoint_10.pt",10000,'
    b'"",420,17959697,{"name":"skeleton.0","against":{"name":"skeleton.0","pack":".zip","against":{"name":"skeleton.0",'
    b'"pack":".zip"}}}]],"links":[],"directories":[],"layout":{"name":"layout","against":{"name":"layout","pack":".zip",'
    b'"against":{"name":"layout","pack":".zip"}}},"crcs":{"name":"crcs"},"objects":["",""],"metrics":{"loss":,"made":{'
    b'"commit":"","dirty":false,"command":"train.py","host":"","python":"3.11.0","torch":"2.0.0+cu120"},"config":{}},'
    b'"source":"/checkpoint_10.pt","facts":{"step":100,"epoch":1},"summary":{"original_bytes":10000,"elements":1000,'
    b'"tensors":10,"depth":1,"cost":1.1000,"base":false},"replaces":null}},"blobs":[["skeleton.0",100],["layout",24],'
    b'["crcs",73]]}'
)


class _Content(Struct):
    """The JSON text of a manifest."""

    document: Raw
    blobs: list[tuple[Annotated[str, Meta(pattern=r"\A[^\0]{0,255}\Z")], Whole]]


def encode_manifest(document: Any, blobs: Mapping[str, bytes]) -> bytes:
    """Frame a document and its blobs, which are stored in this order as they are: compress them first if that pays."""
    content = encode({"document": document, "blobs": [(name, len(blob)) for name, blob in blobs.items()]})
    method, frame = _ZSTANDARD, zstd.compress(content, _LEVEL, DICTIONARY)
    if not len(frame) < len(content) <= expanded_limit(len(frame)):
        method, frame = _PLAIN, content
    rest = varints(FORMAT, method, len(content), len(frame), frame, *blobs.values())
    return _ENVELOPE.pack(_MAGIC, blake3(rest).digest(length=16)) + rest


def decode_manifest(data: bytes, kind: Any) -> tuple[Any, dict[str, bytes]]:
    """Undo `encode_manifest`; return the document as a value of a type.

    Raises
    ------
    IntegrityError
        The bytes are damaged.
    FormatVersionError
        They were written by a later version of ckstore.
    """
    if len(data) < _ENVELOPE.size:
        raise _damaged("it is too short")
    magic, digest = _ENVELOPE.unpack_from(data)
    rest = data[_ENVELOPE.size :]
    if magic != _MAGIC or blake3(rest).digest(length=16) != digest:
        raise _damaged("its checksum does not match")
    try:
        [version], at = read_varints(rest, 0)
        refuse_later("A manifest", version, FORMAT)
        (text_length, frame_length), start = read_varints(rest, at + 1, 2)
        end = start + frame_length
        if version != FORMAT or end > len(rest) or text_length > expanded_limit(frame_length):
            raise ValueError("its header is out of bounds")
        content = decode(_expanded(rest[at], rest[start:end], text_length), _Content)
        blobs = _cut(rest[end:], content.blobs)
        document = decode(content.document, kind)
    except FormatVersionError:
        raise
    except (ValueError, IndexError) as error:
        raise IntegrityError(
            f"A manifest cannot be read, although its checksum matches ({error}); install the latest ckstore, or"
            " restore its pack from a copy."
        ) from error
    return document, blobs


def _expanded(method: int, frame: bytes, length: int) -> bytes:
    if method == _ZSTANDARD:
        return zstd.expand(frame, length, DICTIONARY)
    if method != _PLAIN or len(frame) != length:
        raise ValueError("its header is out of bounds")
    return frame


def _cut(data: bytes, table: list[tuple[str, int]]) -> dict[str, bytes]:
    blobs: dict[str, bytes] = {}
    offset = 0
    for name, length in table:
        if name in blobs or length > len(data) - offset:
            raise ValueError("its table of blobs is out of bounds")
        blobs[name] = data[offset : offset + length]
        offset += length
    if offset != len(data):
        raise ValueError("it has unassigned bytes")
    return blobs


def _damaged(reason: str) -> IntegrityError:
    return IntegrityError(f"A manifest is damaged: {reason}; restore its pack from a copy.")
