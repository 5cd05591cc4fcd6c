"""Scanning packs without a catalog."""

from __future__ import annotations

import zipfile

import pytest
from blake3 import blake3
from msgspec import Struct

from ckstore.errors import FormatVersionError
from ckstore.storage import manifest
from ckstore.storage.pack import PackWriter
from ckstore.storage.scan_packs import DamagedPack, ScannedPack, scan_packs
from tests.storage.version_writer import write_version

pytestmark = pytest.mark.local


class Document(Struct):
    number: int
    created: str


def test_packs_come_in_the_order_in_which_they_were_written(filled, store):
    for step in range(6):
        write_version(filled, store, "more", step)
    scanned = list(scan_packs(store, Document))
    assert [pack.document.number for pack in scanned] == list(range(1, 10))
    for pack, row in zip(scanned, filled.versions(), strict=True):
        assert isinstance(pack, ScannedPack)
        assert (pack.info.name, pack.entry.offset, pack.entry.length) == (
            row.pack,
            row.manifest_offset,
            row.manifest_length,
        )
        assert pack.blobs == {"skeleton": b"bytes"}
        assert pack.info.bytes == row.stored_bytes


def test_damaged_packs_are_reported_and_kept(filled, store):
    paths = {row.number: store / "packs" / row.pack for row in filled.versions()}
    data = bytearray(paths[2].read_bytes())
    data[len(data) // 2] ^= 1
    paths[2].write_bytes(data)
    no_zip = store / "packs" / (blake3(b"x").hexdigest(length=20) + ".zip")
    no_zip.write_bytes(b"x")
    (store / "packs" / "README").write_text("not a pack")
    scanned = list(scan_packs(store, Document))
    assert [pack.document.number for pack in scanned if isinstance(pack, ScannedPack)] == [1, 3]
    damaged = {pack.info.name: pack.reason for pack in scanned if isinstance(pack, DamagedPack)}
    assert set(damaged) == {paths[2].name, no_zip.name}
    assert "digest in its name" in damaged[paths[2].name]
    assert paths[2].exists()


def test_a_pack_without_a_manifest_is_reported(store):
    with PackWriter(store, "encoded") as writer:
        writer.add_bytes("a", b"x")
        writer.gather()
        name = writer.finish().name
    [damaged] = scan_packs(store, Document)
    assert isinstance(damaged, DamagedPack)
    assert damaged.info.name == name
    assert "no readable manifest" in damaged.reason


def test_a_compressed_manifest_is_refused(store):
    """Made by another zip tool: offsets would point at deflated bytes."""
    path = store / "packs" / "made.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(manifest.MEMBER, manifest.encode_manifest({}, {}) * 10)
    path.rename(path.with_name(blake3(path.read_bytes()).hexdigest(length=20) + ".zip"))
    [damaged] = scan_packs(store, Document)
    assert isinstance(damaged, DamagedPack)


def test_a_later_format_stops_the_scan(store, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", 2)
    with PackWriter(store, "encoded") as writer:
        writer.add_manifest({}, {})
        writer.finish()
    monkeypatch.undo()
    with pytest.raises(FormatVersionError):
        list(scan_packs(store, Document))
