"""Crafted stores and documents: signed as by an ingest, so that only their content is wrong."""

from __future__ import annotations

import io
import json
import resource
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3
from msgspec.structs import replace

import ckstore
from ckstore.checking.verify import VerifyReport
from ckstore.objects.documents import ManifestDocument
from ckstore.objects.records import Record
from ckstore.recovery.recover import recover
from ckstore.runtime.zip_records import CENTRAL, CENTRAL_MAGIC, END, read_central
from ckstore.storage import zstd
from ckstore.storage.manifest import MEMBER, decode_manifest, encode_manifest
from ckstore.storage.pack_reader import PackReader
from ckstore.storage.schema import encode
from ckstore.storage.zip_stream import digest_file
from ckstore.varint import varint
from tests.catalog_edits import sign, without_triggers
from tests.layout_columns import columns, packed, rows
from tests.layout_columns import document as layout_document

#: The time and memory that a store may cost a reader, besides reading a good store of its size.
SECONDS, BYTES = 2.0, 512 << 20


def read_record(document: dict[str, Any], pack: str = "p") -> Record:
    """Return a record as it comes out of a manifest."""
    said = {"kind": "encoded", "number": 1, "created": "2026-07-01T12:00:00.000000Z", "records": [document]}
    manifest, _ = decode_manifest(encode_manifest(said, {}), ManifestDocument)
    return manifest.records[0].placed(pack)


def plainly(record: Record) -> dict[str, Any]:
    """Return a record as it is in a manifest."""
    return dict(json.loads(encode(replace(record, pack=""))))


def sealed(text: bytes, tail: bytes = b"", length: int | None = None, version: int = 1, method: int = 1) -> bytes:
    """Return a manifest of this JSON text and these blobs, with the checksum that it must have."""
    frame = zstd.compress(text, 3)
    head = varint(version) + bytes([method]) + varint(len(text) if length is None else length) + varint(len(frame))
    rest = head + frame + tail
    return b"CKM1" + blake3(rest).digest(length=16) + rest


def with_manifest(pack: bytes, manifest: bytes) -> bytes:
    """Return the bytes of a pack with another manifest, which is its last member; all else stays in its place."""
    *head, size, place, comment = END.unpack(pack[-END.size :])
    directory = pack[place : place + size]
    last = directory.rfind(CENTRAL_MAGIC)
    record = read_central(directory, last)
    changed = record._replace(crc=zlib.crc32(manifest), packed=len(manifest), size=len(manifest))
    start = pack.index(b"CKM1", record.offset)
    body = pack[:start] + manifest + pack[start + record.size : place]
    directory = directory[:last] + CENTRAL.pack(*changed) + directory[last + CENTRAL.size :]
    return body + directory + END.pack(*head, len(directory), len(body), comment)


class CraftedStore:
    """A store that anything is changed in, signed again, and the catalog with it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sql(self, *statements: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        """Change the catalog and the claims, or ask them."""
        with without_triggers(self.path / "catalog.sqlite") as database:
            database.execute("ATTACH ? AS claims", [str(self.path / "claims.sqlite")])
            database.execute("PRAGMA writable_schema = ON")
            found = [row for statement in statements for row in database.execute(statement, parameters).fetchall()]
            sign(database)
            return found

    def packs(self) -> list[str]:
        """Return the catalog's packs, first ones first."""
        return [name for (name,) in self.sql("SELECT name FROM packs ORDER BY id")]

    def read(self, pack: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the document and the blobs of a pack's manifest."""
        reader = PackReader.of(self.path)
        entry = reader.find_entry(pack, MEMBER)
        return decode_manifest(reader.pread(pack, entry.offset, entry.length), dict[str, Any])

    def write(self, pack: str, document: Any, blobs: Mapping[str, bytes]) -> str:
        """Put another manifest into a pack. Returns the pack's name then."""
        try:
            table = [[name, len(blob)] for name, blob in blobs.items()]
            text = json.dumps({"document": document, "blobs": table}).encode()
            manifest = sealed(text, b"".join(blobs.values()))
        except RecursionError:
            raise AssertionError("give the text to `write_bytes`") from None
        version = document.get("version") if isinstance(document, dict) else None
        return self.write_bytes(pack, with_manifest((self.path / "packs" / pack).read_bytes(), manifest), version)

    def write_bytes(self, pack: str, data: bytes, version: Any = None) -> str:
        """Replace a pack's bytes; the catalog describes the new ones as it did the old ones."""
        name = digest_file(io.BytesIO(data)) + pack[40:]
        (self.path / "packs" / pack).unlink()
        (self.path / "packs" / name).write_bytes(data)
        length = END.unpack(data[-END.size :])
        directory = data[length[-2] : length[-2] + length[-3]]
        size = read_central(directory, directory.rfind(CENTRAL_MAGIC)).size
        number = f"(SELECT id FROM packs WHERE name = '{name}')"
        self.sql(
            f"UPDATE packs SET name = '{name}', bytes = {len(data)} WHERE name = '{pack}'",
            f"UPDATE versions SET manifest_length = {size} WHERE pack = {number}",
            f"UPDATE meta SET value = '{name}' WHERE value = '{pack}'",
            f"INSERT OR REPLACE INTO meta (key, value) VALUES ('{pack}', '{name}')",
        )
        try:
            said = [version["run"], version["step"], version["created"],
                    [[file[0], file[2]] for file in version["files"]]]  # fmt: skip
            uid = blake3(json.dumps(said, separators=(",", ":")).encode()).hexdigest(length=20)
            self.sql(f"UPDATE versions SET uid = x'{uid}' WHERE pack = {number}")
        except (TypeError, LookupError):
            pass  # Then it is no version, whatever its id.
        return name

    def change(self, pack: str, change: Callable[[dict[str, Any]], Any]) -> str:
        """Change a pack's document in place."""
        document, blobs = self.read(pack)
        change(document)
        return self.write(pack, document, blobs)

    def change_layout(self, pack: str, change: Callable[[dict[str, Any]], Any]) -> str:
        """Change the layout document of the version in a pack in place."""
        from ckstore.objects.blobs import compress_against, expand_against

        document, blobs = self.read(pack)
        layout = rows(expand_against(blobs["layout"], None))
        change(layout)
        return self.write(pack, document, blobs | {"layout": compress_against(layout_document(layout), None)})

    def change_columns(self, pack: str, change: Callable[[list[list[Any]]], Any]) -> str:
        """Change the columns of the layout document of the version in a pack in place."""
        from ckstore.objects.blobs import compress_against, expand_against

        document, blobs = self.read(pack)
        found = columns(expand_against(blobs["layout"], None))
        change(found)
        return self.write(pack, document, blobs | {"layout": compress_against(packed(found), None)})

    def log(self, change: Mapping[str, Any], sequence: int = 1, text: bytes | None = None) -> Path:
        """Write a log record with the digest that it must have."""
        record = {"format": 1, "sequence": sequence, "created": "2026-07-01T12:00:00.000000Z", **change}
        data = json.dumps(record, sort_keys=True, separators=(",", ":")).encode() if text is None else text
        digest = blake3(data).hexdigest(length=8)
        if text is None:
            data = json.dumps({**record, "digest": digest}, sort_keys=True, separators=(",", ":")).encode()
        path = self.path / "log" / f"{sequence:012d}-{digest}.json"
        path.write_bytes(data)
        return path


@contextmanager
def limits() -> Iterator[None]:
    """Limit the time and memory of a block; memory that the process already has is not counted."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    # Processor time: load by other processes is not counted; the test's own timeout ends an endless wait.
    begin = time.process_time()
    try:
        yield
        took = time.process_time() - begin
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert took < SECONDS, f"it took {took:.1f} s"


def pulled(path: Path, place: Path) -> VerifyReport:
    """Return the problems of versions that another store refused to pull; the pulled ones have none."""
    shutil.rmtree(place, ignore_errors=True)
    with ckstore.init(place) as target, ckstore.open(path, "r") as source:
        report = target.pull(source, verify=True)
        assert target.verify().problems == []
        return VerifyReport(problems=[str(item.error) for item in report.failed])


def everything(path: Path, out: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every call on a store and its name."""

    def of(ask: Callable[[ckstore.Store], Any], mode: Any = "r") -> Callable[[], Any]:
        def asked() -> Any:
            with ckstore.open(path, mode) as store:
                return ask(store)

        return asked

    def check_out(store: ckstore.Store) -> None:
        out.mkdir(exist_ok=True)
        for row in store._catalog.versions():
            store[row.number].checkout(out / str(row.number), force=True)

    def opened(store: ckstore.Store) -> Iterator[Any]:
        return (store[row.number] for row in store._catalog.versions())

    yield "log", of(lambda store: [store._catalog.versions(), store._catalog.runs(), store._catalog.tags()])
    yield "checkout", of(check_out)
    yield "state_dict", of(lambda store: [store[row.number].state_dict() for row in store._catalog.versions()])
    yield (
        "tensors",
        of(lambda store: [version[path].numpy() for version in opened(store) for path in version]),
    )
    yield "stats", of(lambda store: store.stats())
    yield "verify", of(lambda store: store.verify())
    yield "policy", of(lambda store: [store.policy(row.name) for row in store._catalog.runs()])
    yield "pull", lambda: pulled(path, out.parent / "pulled")
    yield "gc", of(lambda store: store.gc(grace=0.0), "a")
    yield "rebase", of(lambda store: store.rebase(dry_run=True), "a")
    yield "recover", lambda: recover(path)
    yield "log again", of(lambda store: [store._catalog.versions(), store._catalog.runs(), store._catalog.tags()])
    yield "checkout again", of(check_out)
