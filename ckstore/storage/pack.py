"""Writing a pack: one immutable zip of one commit that holds a Zarr v3 hierarchy, named by its digest."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from msgspec import Meta

from ckstore.errors import CkstoreError, UsageError
from ckstore.runtime.access import DENIED, denied
from ckstore.runtime.checksum import crc32c
from ckstore.storage import durable, manifest, root
from ckstore.storage.writeback import Writeback
from ckstore.storage.zip_stream import ZipStream

if TYPE_CHECKING:
    from typing_extensions import Buffer

PackKind = Literal["encoded", "raw"]

#: Suffix of the names of packs of raw objects.
RAW = ".raw.zip"

_SUFFIXES: dict[PackKind, str] = {"encoded": ".zip", "raw": RAW}
_KINDS = {suffix: kind for kind, suffix in _SUFFIXES.items()}
_PACK_NAME = re.compile(r"([0-9a-f]{40})((?:\.raw)?\.zip)")
#: A pack's file name.
PackName = Annotated[str, Meta(pattern=rf"\A{_PACK_NAME.pattern}\Z")]
_ARRAY_NAME = re.compile(r"(?!__)[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_ABSENT = 2**64 - 1
#: Alignment of values that may be mapped: a cache line.
_ALIGNMENT = 64
#: Exact arrays of fewer bytes share one member: as Zarr arrays they would take 160 bytes more each.
_SMALL = 1 << 15
#: Name of that member.
_GATHERED = "small"
_BYTES_CODEC = {"name": "bytes", "configuration": {"endian": "little"}}


@dataclass(frozen=True, slots=True)
class PackEntry:
    """The place of an array's bytes in a pack; of a small array before `PackWriter.gather`, −1 less its place there."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PackInfo:
    """A finished pack: its file name below `packs/` (40 hexadecimal characters and `.zip` or `.raw.zip`), and size."""

    name: str
    bytes: int

    @property
    def kind(self) -> PackKind:
        """`encoded` or `raw`."""
        return "raw" if self.name.endswith(RAW) else "encoded"


def parse_pack_name(name: str) -> tuple[str, PackKind] | None:
    """Return the digest (40 hexadecimal characters) and kind in a pack's file name; None for any other name."""
    match = _PACK_NAME.fullmatch(name)
    return None if match is None else (match[1], _KINDS[match[2]])


class PackWriter:
    """Writes one pack. As a context manager, it removes an unfinished pack. Not for several threads at once."""

    def __init__(self, store: Path, kind: PackKind) -> None:
        self.kind: PackKind = kind
        self._directory = store / root.PACKS
        self._path = durable.temporary_path(self._directory)
        self._names: set[str] = {_GATHERED, "zarr.json"}
        self._arrays: dict[str, Mapping[str, Any]] = {}
        self._small = bytearray()
        self._done = self._is_new = False
        self._digest = ""
        try:
            self._zip = ZipStream(self._path)
            self._writeback = Writeback(self._zip.fileno())
        except OSError as error:
            if error.errno in DENIED:
                raise denied(self._directory, error, writing=True) from error
            reason = f"{self._directory}: {error.strerror}"
            raise CkstoreError(f"No pack can be created in {reason}; check that it is writable.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def add_array(
        self,
        name: str,
        count: int,
        chunk: int,
        dtype: str,
        codecs: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any] | None,
        payloads: Sequence[Buffer | None],
        *,
        filters: Sequence[Mapping[str, Any]] = (),
        shown: bool = False,
    ) -> PackEntry:
        """Add a one-dimensional array: the payload of its only chunk, or a shard of those of several.

        Return the place of the only payload, without bytes if it is None; or of the shard: the payloads in order, then
        the index (`read_shard_index`).

        Parameters
        ----------
        name
            One path segment of letters, digits, `_`, `-` and `.`.
        count, chunk
            Elements of the array, and of each chunk.
        dtype
            Zarr v3 data type of the decoded values, for instance `int32`. The fill value is 0.
        codecs, filters
            Zarr v3 metadata of the chunks' codecs, and of array-to-array codecs, which process all chunks as one.
        payloads
            The encoded chunks; None for a chunk that is all zeros.
        shown
            Whether plain Zarr opens the array even if it is small.
        """
        chunks = -(-count // chunk)
        if count < 1 or len(payloads) != chunks:
            raise UsageError(f"Array {name} of {count} elements has {chunks} chunks, not {len(payloads)}.")
        views = [None if payload is None else memoryview(payload).cast("B") for payload in payloads]
        stored = [view for view in views if view is not None]
        if chunks == 1:
            metadata = _array_metadata(count, count, dtype, [*filters, *codecs], attributes)
            return self._add(name, metadata, stored, shown=shown)
        index: list[int] = []
        offset = 0
        for view in views:
            if view is None:
                index += (_ABSENT, _ABSENT)
            else:
                index += (offset, view.nbytes)
                offset += view.nbytes
        table = struct.pack(f"<{2 * chunks}Q", *index)
        shard = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [chunk],
                "codecs": list(codecs),
                "index_codecs": [_BYTES_CODEC, {"name": "crc32c"}],
            },
        }
        metadata = _array_metadata(count, chunks * chunk, dtype, [*filters, shard], attributes)
        stored.append(memoryview(table + crc32c(table).to_bytes(4, "little")))
        return self._add(name, metadata, stored, shown=shown)

    def add_bytes(self, name: str, data: Buffer | Sequence[Buffer]) -> PackEntry:
        """Add bytes, at least one, as an array of uint8 in one chunk; several pieces are concatenated."""
        parts: Sequence[Buffer] = data if isinstance(data, (list, tuple)) else [cast("Buffer", data)]
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(view.nbytes for view in views)
        if size == 0:
            raise UsageError(f"Array {name} would have no bytes; leave it out.")
        return self._add(name, _array_metadata(size, size, "uint8", [{"name": "bytes"}], None), views)

    def add_values(self, name: str, count: int, dtype: str, data: Buffer, digest: bytes | None, crc: int) -> PackEntry:
        """Add values, as little-endian bytes, as an array in one chunk that may be mapped into memory.

        In a pack of kind `raw` its place is aligned to 64 bytes. `digest` is the BLAKE3 of the bytes, if it is known,
        `crc` their CRC-32.
        """
        metadata = _array_metadata(count, count, dtype, [_BYTES_CODEC], None)
        return self._add(name, metadata, [memoryview(data).cast("B")], digest, crc, shown=True)

    def add_copy(self, name: str, metadata: Mapping[str, Any] | None, data: Buffer) -> PackEntry:
        """Add a copy of another pack's array: its Zarr metadata, if any, and the bytes of its only chunk or shard."""
        return self._add(name, metadata, [memoryview(data).cast("B")], shown=True)

    def gather(self) -> Callable[[int], int]:
        """Write the small arrays; return a function that turns the offset of any entry into its offset in the pack."""
        small, self._small = self._small, bytearray()
        gathered = self._add_member(_GATHERED, [memoryview(small)]).offset if small else 0
        return lambda offset: offset if offset >= 0 else gathered - 1 - offset

    def add_manifest(self, document: Any, blobs: Mapping[str, bytes]) -> PackEntry:
        """Add the manifest, which is no array, after everything else."""
        data = manifest.encode_manifest(document, blobs)
        self._claim(manifest.MEMBER)
        return self._add_member(manifest.MEMBER, [memoryview(data)])

    def begin_sync(self) -> None:
        """Start writing the pack's bytes to disk, while the last ones are being prepared."""
        self._writeback.begin()

    def seal(self) -> None:
        """Write the last bytes, and start syncing them; `finish` waits for the sync."""
        if self._small:
            raise UsageError("This pack has small arrays; gather them first.")
        if not self._digest:
            metadata = json.dumps(_group_metadata(self.kind, self._arrays), separators=(",", ":")).encode()
            with durable.write_explained(self._directory, self._zip.size):
                if self._arrays:
                    self._zip.add_deflated("zarr.json", metadata)
                self._digest = self._zip.finish()
            durable.checkpoint("pack-written")
            self._writeback.end()

    def place(self) -> PackInfo:
        """Make the pack's bytes durable, and name it; `finish` of a later pack makes the name durable, too."""
        self.seal()
        size = self._zip.size
        with durable.write_explained(self._directory, size):
            self._writeback.finish()
            self._zip.close()
        name = self._digest + _SUFFIXES[self.kind]
        durable.checkpoint("pack-synced")
        self._done = True
        target = self._directory / name
        self._is_new = not target.exists()
        try:
            os.replace(self._path, target)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        return PackInfo(name, size)

    def finish(self) -> PackInfo:
        """Make the pack durable under its name; leave no file if the disk is full."""
        pack = self.place()
        try:
            durable.checkpoint("pack-renamed")
            durable.sync_directory(self._directory)
        except BaseException:
            # The caller does not know its name: `recover` would take it for a version's. An equal one may be older.
            if self._is_new:
                (self._directory / pack.name).unlink(missing_ok=True)
            raise
        return pack

    def abort(self) -> None:
        """Remove the unfinished pack; does nothing after `finish`."""
        if self._done:
            return
        self._done = True
        try:
            self._writeback.cancel()
            with suppress(OSError):
                self._zip.close()
        finally:
            self._path.unlink(missing_ok=True)

    def _claim(self, name: str) -> None:
        if self._done:
            raise UsageError("This pack is finished; start another one.")
        if name in self._names or not _ARRAY_NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot name an array of this pack: it is taken, or not one plain segment.")
        self._names.add(name)

    def _add(
        self,
        name: str,
        metadata: Mapping[str, Any] | None,
        views: Sequence[memoryview],
        digest: bytes | None = None,
        crc: int | None = None,
        *,
        shown: bool = False,
    ) -> PackEntry:
        """Add the only chunk or shard of an array, which has Zarr metadata unless it is small and not `shown`."""
        self._claim(name)
        size = sum(view.nbytes for view in views)
        if metadata is None or (size < _SMALL and not shown):
            entry = PackEntry(-1 - len(self._small), size)
            for view in views:
                self._small += view
            return entry
        self._arrays[name] = metadata
        return self._add_member(f"{name}/c/0", views, digest, crc) if size else PackEntry(self._zip.size, 0)

    def _add_member(
        self, name: str, views: Sequence[memoryview], digest: bytes | None = None, crc: int | None = None
    ) -> PackEntry:
        align = _ALIGNMENT if self.kind == "raw" else 1
        try:
            entry = PackEntry(*self._zip.add_stored(name, views, align=align, digest=digest, crc=crc))
            self._writeback.wrote(entry.length)
        except OSError:  # Here, as entering the context takes calls.
            with durable.write_explained(self._directory, sum(view.nbytes for view in views)):
                raise
        return entry


def _group_metadata(kind: PackKind, arrays: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata of the root group, with those of all arrays: one member of the zip in place of many."""
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"ckstore": {"kind": kind}},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": arrays},
    }


def _array_metadata(
    count: int, shard: int, dtype: str, codecs: list[Mapping[str, Any]], attributes: Mapping[str, Any] | None
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [count],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": codecs,
    }
    if attributes:
        document["attributes"] = dict(attributes)
    return document
