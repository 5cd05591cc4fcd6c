"""Stores and documents that someone crafted: signed as by an ingest, so that only what they say is wrong."""

from __future__ import annotations

from typing import Any

from ckstore.objects.documents import MANIFEST
from ckstore.objects.records import Record, record_from_json
from ckstore.storage.manifest import decode_manifest, encode_manifest


def read_record(document: dict[str, Any], pack: str = "p") -> Record:
    """A record as it comes out of a manifest."""
    kind = "exact" if document["layer"] == "exact" else "coarse"
    said = {"kind": kind, "number": 1, "created": "2026-07-01T12:00:00.000000Z", "records": [document]}
    manifest, _ = decode_manifest(encode_manifest(said, {}), MANIFEST)
    return record_from_json(manifest["records"][0], pack)
