"""The frame of a manifest: a checksummed JSON document and named blobs, as the last entry of every pack."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from ckstore.errors import FormatVersionError, IntegrityError
from ckstore.storage import zstd
from ckstore.storage.schema import Schema, expanded_limit, fields, plain_object, read_json, rows, text, whole

#: Name of the zip member of a pack that holds its manifest.
MEMBER = "manifest"
FORMAT = 1

_MAGIC = b"CKM1"
# magic, length and BLAKE3-16 of the rest: these stay the same in every format version, so that a damaged version number
# is recognised as damage and not as a later version.
_ENVELOPE = struct.Struct("<4sQ16s")
# format version, length of the JSON document, length of its zstd frame
_HEAD = struct.Struct("<IQQ")
_LEVEL = 15
_TABLE = rows(text(last=255), whole())


def encode_manifest(document: Mapping[str, Any], blobs: Mapping[str, bytes]) -> bytes:
    """Frame a document and its blobs, which are stored in this order as they are: compress them first if that pays."""
    table = [[name, len(blob)] for name, blob in blobs.items()]
    content = json.dumps({"document": document, "blobs": table}, separators=(",", ":")).encode()
    frame = zstd.compress(content, _LEVEL)
    if not len(frame) < len(content) <= expanded_limit(len(frame)):
        frame = content
    rest = b"".join([_HEAD.pack(FORMAT, len(content), len(frame)), frame, *blobs.values()])
    return _ENVELOPE.pack(_MAGIC, len(rest), blake3(rest).digest(length=16)) + rest


def decode_manifest(data: bytes, schema: Schema = plain_object) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Undo `encode_manifest`; check the document against a schema.

    Raises
    ------
    IntegrityError
        The bytes are damaged.
    FormatVersionError
        They were written by a later version of ckstore.
    """
    if len(data) < _ENVELOPE.size + _HEAD.size:
        raise _damaged("it is too short")
    magic, length, digest = _ENVELOPE.unpack_from(data)
    rest = memoryview(data)[_ENVELOPE.size :]
    if magic != _MAGIC or length != len(rest) or blake3(rest).digest(length=16) != digest:
        raise _damaged("its checksum does not match")
    version, text_length, frame_length = _HEAD.unpack_from(rest)
    if version > FORMAT:
        raise FormatVersionError(f"A manifest has format {version}, this ckstore reads {FORMAT}; install a later one.")
    if version != FORMAT or frame_length > len(rest) - _HEAD.size or text_length > expanded_limit(frame_length):
        raise _damaged("its header is out of bounds")
    try:
        frame = bytes(rest[_HEAD.size : _HEAD.size + frame_length])
        # A document that would shrink below the ratio of `expanded_limit` is stored uncompressed.
        content = read_json(
            frame if frame_length == text_length else zstd.expand(frame, text_length),
            fields({"document": schema, "blobs": _TABLE}),
        )
        blobs = _cut(bytes(rest[_HEAD.size + frame_length :]), content["blobs"])
    except (ValueError, RuntimeError) as error:
        raise _damaged(str(error)) from error
    return content["document"], blobs


def _cut(data: bytes, table: list[list[Any]]) -> dict[str, bytes]:
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
