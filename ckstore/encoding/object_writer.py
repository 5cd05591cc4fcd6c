"""Writes the objects of a commit into its packs, and derives the catalog's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from ckstore.codecs.integers import encode_integers
from ckstore.codecs.lattice import STEP_RANGE, Bits, is_mirrored
from ckstore.codecs.short_floats import SHORT
from ckstore.dtypes import ITEM_SIZES, NATIVE, zarr_type
from ckstore.encoding.estimate import Encoded
from ckstore.objects.documents import ManifestDocument, VersionDocument
from ckstore.objects.identity import array_name
from ckstore.objects.records import Coarse, Codebook, Delta, Factors, Linear, Patches, Raw, Record, Rounded
from ckstore.runtime.checksum import crc32, crc32_combine
from ckstore.storage import durable
from ckstore.storage.catalog import Placement, VersionRow
from ckstore.storage.pack import PackEntry, PackInfo, PackWriter
from ckstore.storage.rows import checked_keys

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HUFFMAN = {"name": "ckstore.huffman"}

#: The recipe of codebook deltas.
_LEVELS = "(base - this) mod levels"


class RawWriter:
    """Writes unencoded objects into a pack of their own, and keeps their records."""

    def __init__(self, pack: PackWriter) -> None:
        self.pack = pack
        self.records: list[Raw] = []

    def put(self, content: str, dtype: str, chunk: int, bits: Bits, digest: bytes | None = None) -> None:
        """Write one object: `bits` are those of its elements, `chunk` of them in a chunk.

        `digest` is the BLAKE3 of their bytes, if it is known.
        """
        chunks = [bits[first : first + chunk] for first in range(0, bits.size, chunk)]
        crcs = tuple(map(crc32, chunks))
        whole = 0
        for part, crc in zip(chunks, crcs, strict=True):
            whole = crc32_combine(whole, crc, part.nbytes)
        entry = self.pack.add_values(array_name(content), bits.size, zarr_type(dtype), bits.data, digest, whole)
        self.records.append(
            Raw(
                id=content, dtype=dtype, count=bits.size, chunk=chunk, at=(entry.offset, entry.length),
                alone=entry.length, crcs=crcs,
            )
        )  # fmt: skip

    def add_manifest(self, manifest: Callable[..., ManifestDocument]) -> None:
        """Add the manifest, after the last object; the function takes its kind and records."""
        self.pack.add_manifest(manifest(kind="raw", records=self.records), {})


class ObjectWriter:
    """Writes objects into the packs of a commit and keeps their records, without the names of unfinished packs.

    The pack of encoded objects also holds the manifest; `raw` is that of a hot version's unencoded objects.
    """

    def __init__(self, encoded: PackWriter, raw: PackWriter | None = None) -> None:
        self._encoded = encoded
        self._raw = None if raw is None else RawWriter(raw)
        self._adopted: list[tuple[PackInfo, Sequence[Raw]]] = []
        self.encoded_records: list[Record] = []
        self._shortcuts: list[Patches] = []
        self.finished: list[PackInfo] = []
        self._ids: set[str] = set()

    @classmethod
    def of_packs(cls, found: Sequence[tuple[PackInfo, ManifestDocument]]) -> Self:
        """Return a writer whose packs are finished, by these and their documents; the last one is the encoded one."""
        *others, (_, last) = found
        writer = cls(cast("PackWriter", None))
        writer.encoded_records = last.records
        for pack, document in others:
            writer.adopt(pack, [replace(cast("Raw", record), pack=pack.name) for record in document.records])
        return writer

    def put(self, encoded: Encoded) -> None:
        """Write one object, once, and keep its record."""
        record = encoded.record
        if record.id in self._ids:
            return
        self._ids.add(record.id)
        # A record that is stored again has the name of its former pack.
        if isinstance(record, Patches | Factors):
            entry = self._add_bytes(array_name(record.id), encoded)
        else:
            entry = self._add_integers(record, encoded.payloads)
        self.encoded_records.append(replace(record, at=(entry.offset, entry.length), pack=""))
        if encoded.shortcut is not None and isinstance(encoded.shortcut.record, Patches):
            entry = self._add_bytes(f"{array_name(record.id)}.shortcut", encoded.shortcut)
            self._shortcuts.append(replace(encoded.shortcut.record, at=(entry.offset, entry.length)))

    def _add_bytes(self, name: str, encoded: Encoded) -> PackEntry:
        return self._encoded.add_bytes(name, [payload or b"" for payload in encoded.payloads])

    def put_raw(self, content: str, dtype: str, chunk: int, bits: Bits, digest: bytes | None = None) -> None:
        """Write one object unencoded, as `RawWriter.put`."""
        assert self._raw is not None
        self._raw.put(content, dtype, chunk, bits, digest)

    def adopt(self, pack: PackInfo, records: Sequence[Raw]) -> None:
        """Add a finished pack of another process to the commit, with the records of its unencoded objects."""
        self._adopted.append((pack, records))

    @property
    def raw_records(self) -> list[Raw]:
        """The records of unencoded objects."""
        return [] if self._raw is None else self._raw.records

    def _add_integers(self, record: Record, payloads: Sequence[Buffer | None]) -> PackEntry:
        """Write the integers of a record as the array that plain Zarr reads."""
        payloads = list(payloads)
        if isinstance(record, Rounded) and payloads == [None]:  # A chunk that is absent shows 0, which differs.
            payloads = [encode_integers(np.zeros(record.count, np.int32))]
        dtype, steps = _shown(record)
        codecs: list[Mapping[str, Any]] = [_HUFFMAN]
        filters: list[Mapping[str, Any]] = []
        if steps:
            # A codec does not know the place of its chunk: numbers of rows would need all chunks together.
            is_placed = isinstance(record, Rounded) or "width" in steps["configuration"]
            (filters if is_placed else codecs).insert(0, steps)
        return self._encoded.add_array(
            array_name(record.id), record.count, record.chunk, dtype, codecs, {"ckstore": _attributes(record)},
            payloads, filters=filters, shown=isinstance(record, Coarse),
        )  # fmt: skip

    def begin_sync(self) -> None:
        """Start writing to disk after the last object."""
        for pack in self._packs:
            pack.begin_sync()

    @property
    def _packs(self) -> list[PackWriter]:
        """The packs with contents; the pack of the manifest is last."""
        return [self._raw.pack, self._encoded] if self._raw is not None and self._raw.records else [self._encoded]

    @property
    def records(self) -> list[Record]:
        """The records, without the names of unfinished packs."""
        return [*self.encoded_records, *self.raw_records, *(one for _, records in self._adopted for one in records)]

    def placed(self, packs: Sequence[PackInfo]) -> list[Record]:
        """Return the records with the names of the finished packs."""
        names = {pack.kind: pack.name for pack in packs}
        return [
            *(replace(record, pack=names["encoded"]) for record in self.encoded_records),
            *(replace(record, pack=names["raw"]) for record in self.raw_records),
            *(record for _, records in self._adopted for record in records),
        ]

    def places(self, packs: Sequence[PackInfo]) -> tuple[list[Placement], list[Placement]]:
        """Return the places of encoded and of raw objects in the finished packs; see also `checked_keys`."""
        found = checked_keys([record.id for record in self.records])
        names = {pack.kind: pack.name for pack in packs}
        encoded = [(found[record.id], names["encoded"], slot) for slot, record in enumerate(self.encoded_records)]
        raw = [(found[record.id], names["raw"], slot) for slot, record in enumerate(self.raw_records)]
        # Several processes may have written the same content: each key has one place.
        placed = {found[one.id]: (found[one.id], pack.name, slot) for pack, records in self._adopted
                  for slot, one in enumerate(records)}  # fmt: skip
        return encoded, [*raw, *placed.values()]

    def finish(
        self,
        document: VersionDocument | None,
        blobs: dict[str, bytes],
        *,
        again: bool = False,
        trial: bool = False,
    ) -> tuple[list[PackInfo], PackEntry]:
        """Finish the packs; return them, and the entry of the manifest of the last one.

        Without a `document`, or with `again`, they hold objects of older versions, stored again. With both, the
        document is the new one of an older version. A `trial` will not be committed: `recover` ignores it.
        """
        again = again or document is None
        # Exponents of one kind compress best as neighbours.
        self.encoded_records.sort(key=lambda record: (record.kind, record.base is None))
        manifest = partial(
            ManifestDocument,
            number=0 if document is None else document.number,
            created=durable.timestamp() if document is None or again else document.created,
            trial=trial,
            rebase=again,
        )
        packs = self._packs
        if self._raw is not None and self._raw.records:
            self._raw.add_manifest(manifest)
        place = self._encoded.gather()
        self.encoded_records = [replace(one, at=(place(one.at[0]), one.at[1])) for one in self.encoded_records]
        shortcuts = [replace(one, at=(place(one.at[0]), one.at[1])) for one in self._shortcuts]
        version = UNSET if document is None else document.encode()
        entry = self._encoded.add_manifest(
            manifest(kind="encoded", records=self.encoded_records, shortcuts=shortcuts, version=version), blobs
        )
        # Both are synchronised at once; the pack of the version is named last.
        for pack in packs:
            pack.seal()
        for pack in packs[:-1]:
            self.finished.append(pack.place())
        self.finished.append(packs[-1].finish())
        return [*(pack for pack, _ in self._adopted), *self.finished], entry


def _attributes(record: Record) -> dict[str, Any]:
    """Return the attributes of a record's array: kind and dtype; of a delta also the base's array, and the recipe."""
    said: dict[str, Any] = {"kind": record.kind}
    if record.dtype not in NATIVE:
        said["dtype"] = record.dtype
    if record.base is not None:
        said |= {"delta": True, "base": array_name(record.base), "recipe": _recipe(record)}
    if (isinstance(record, Delta) and record.context) or said.get("recipe") == _LEVELS:
        said["order"] = "context"
    return said


def _recipe(record: Record) -> str:
    """Return the formula of a delta's values, from those of its base and the shown ones: `docs/format.md`."""
    if isinstance(record, Codebook):
        return "base + this" if record.additive else _LEVELS
    if not isinstance(record, Linear):
        base = f"base[:{record.count}]" if record.part else "base"
        sign = f"sign({base}) * " if is_mirrored(record.dtype, record.count, record.chunk) else ""
        return f"ord({base}) + {sign}this"
    step, has_axes = record.step, record.rows or record.cols
    return f"2**({step} + rows + cols) * (project(base) + this)" if has_axes else f"2**{step} * (project(base) + this)"


def _shown(record: Record) -> tuple[str, Mapping[str, Any]]:
    """Return the Zarr data type of a record's array, and the filter that makes values of its integers, if any."""
    wide = "float64" if record.dtype == "float64" else "float32"
    short = {"precision": record.dtype} if record.dtype in SHORT else {}
    if isinstance(record, Linear):
        settings: dict[str, Any] = {"step": 0}
        if record.base is None:
            settings = {"step": record.step, **_axes(record), **short}
        return wide, {"name": "ckstore.quantized_residual", "configuration": settings}
    if isinstance(record, Rounded):
        settings = {"shift": record.shift, "level": record.level, **_axes(record), **short}
    elif isinstance(record, Codebook) and (record.base is None or record.additive):
        protected = {"protected": True} if record.protected else {}
        settings = {"centroids": record.centroids, **protected, **short}
    elif record.base is None and record.dtype in STEP_RANGE:
        settings = short
    else:
        return f"int{8 * ITEM_SIZES[record.dtype]}" if record.is_exact else "int32", {}
    return wide, {"name": "ckstore.levels", "configuration": settings}


def _axes(record: Linear | Rounded) -> dict[str, Any]:
    """Return the exponents of rows and columns, and the width of a row if there are any."""
    axes: dict[str, Any] = {name: axis for name, axis in (("rows", record.rows), ("cols", record.cols)) if axis}
    return axes | {"width": record.width} if axes else axes


def version_row(document: VersionDocument, packs: Sequence[PackInfo], entry: PackEntry) -> VersionRow:
    """Return the catalog's row of a version in finished packs; the last one has its manifest at `entry`."""
    summary = document.summary
    return VersionRow(
        number=document.number,
        uid=document.uid,
        run=document.run,
        step=document.step,
        parent=document.parent,
        created=document.created,
        pack=packs[-1].name,
        manifest_offset=entry.offset,
        manifest_length=entry.length,
        original_bytes=summary["original_bytes"],
        stored_bytes=summary.get("stored_bytes", sum(pack.bytes for pack in packs)),
        elements=summary["elements"],
        tensors=summary["tensors"],
        files=len(document.files),
        depth=summary["depth"],
        cost=summary["cost"],
        base=summary["base"],
        fidelity=document.fidelity,
        hot=document.hot is not None,
        dropped=document.dropped,
        metrics=document.metrics,
        source=document.source,
    )
