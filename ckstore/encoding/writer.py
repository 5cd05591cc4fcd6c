"""Writes the objects of a commit into its two packs, and derives the catalog's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckstore.codecs.exponents import exponents_to_text
from ckstore.codecs.lattice import Bits, LinearLattice, OrdinalLattice
from ckstore.codecs.short_floats import SHORT
from ckstore.dtypes import ITEM_SIZES, zarr_type
from ckstore.encoding.estimate import Encoded, Estimate
from ckstore.lineage.planner import Choice
from ckstore.objects.documents import VersionDocument
from ckstore.objects.identity import array_name
from ckstore.objects.records import ContentRecord, LatticeRecord, Mode, Record
from ckstore.runtime.checksum import crc32
from ckstore.storage import durable, manifest
from ckstore.storage.catalog import Placement, VersionRow, key
from ckstore.storage.pack import PackEntry, PackInfo, PackWriter

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HUFFMAN = {"name": "ckstore.huffman"}


class ObjectWriter:
    """Writes objects into the packs of a commit and keeps their records.

    Parameters
    ----------
    coarse
        The pack of integers, and of the manifest.
    exact
        The pack of exact layers, or, with kind `raw`, of unencoded objects.
    """

    def __init__(self, coarse: PackWriter, exact: PackWriter) -> None:
        self.coarse = coarse
        self.exact = exact
        self.raw: list[LatticeRecord] = []
        self.lattices: list[LatticeRecord] = []
        self.contents: list[ContentRecord] = []
        self.finished: list[PackInfo] = []
        self._ids: set[str] = set()

    def add(self, content: str, estimate: Estimate, choice: Choice, layers: Encoded, *, stored: bool) -> str:
        """Write one object as planned; return its lattice id.

        If the store already holds its integers (`stored`: no element moved by a step), only its exact layer is written:
        a second record of the same id could name itself as its base.
        """
        unit = estimate.unit
        way = estimate.plans[choice.option.name]
        lattice = way.lattice or estimate.lattice
        record = LatticeRecord(
            id=content if lattice is None else layers.identity,
            lattice=OrdinalLattice(unit.dtype) if lattice is None else lattice,
            count=unit.count,
            chunk=unit.chunk,
            base=None if way.base is None else way.base.id,
            context=way.context,
            factor=way.factor if lattice is None else 1.0,
            additive=way.additive,
            origin=estimate.origin,
            alone=estimate.alone,
            debt=round(choice.debt),
        )
        if stored:
            self._ids.add(record.id)
        self.put(content, record, None if way.parent is None else way.parent.id, layers, factor=way.factor)
        return record.id

    def put(
        self, content: str | None, record: LatticeRecord, parent: str | None, layers: Encoded, *, factor: float = 1.0
    ) -> None:
        """Write the layers of one object and keep its records.

        Parameters
        ----------
        content
            Its content id; None if only its integers are kept.
        parent, factor
            Content id that a chained or patched exact layer needs, and the factor of its values; None for an own layer.
        """
        if record.id not in self._ids and layers.coarse:
            self._ids.add(record.id)
            if layers.patched and any(layers.coarse):
                patches = [payload or b"" for payload in layers.coarse]
                entry = self.coarse.add_bytes(array_name(record.id), patches, None)
                record = replace(record, patches=tuple(map(len, patches)))
            else:
                entry = self._add_integers(record, layers.coarse)
            record = replace(record, offset=entry.offset, length=entry.length)
            if layers.aside:
                entry = self.coarse.add_bytes(f"{array_name(record.id)}.aside", layers.aside, None)
                record = replace(record, aside=(entry.offset, *map(len, layers.aside)))
            self.lattices.append(record)
        if content is not None and layers.exact:
            entry = self.exact.add_bytes(array_name(content), layers.exact, None)
            mode: Mode = "own" if parent is None else "patched" if layers.patched else "chained"
            lengths = tuple(len(frame) for frame in layers.exact)
            self.contents.append(
                ContentRecord(content, record.id, mode, parent, entry.offset, lengths, "", factor, record.debt)
            )

    def put_raw(self, content: str, dtype: str, chunk: int, bits: Bits) -> None:
        """Write one object unencoded: `bits` are those of its elements, `chunk` of them in a chunk."""
        crcs = tuple(crc32(bits[first : first + chunk]) for first in range(0, bits.size, chunk))
        entry = self.exact.add_values(array_name(content), bits.size, zarr_type(dtype), bits.data)
        self.raw.append(
            LatticeRecord(
                content, OrdinalLattice(dtype), bits.size, chunk, None, entry.offset, entry.length,
                alone=(entry.length, 0), crcs=crcs,
            )
        )  # fmt: skip

    def _add_integers(self, record: LatticeRecord, payloads: Sequence[Buffer | None]) -> PackEntry:
        """Write the integers of a record as the array that plain Zarr reads."""
        attributes: dict[str, Any] = {"kind": record.kind}
        if record.base is not None:
            attributes["delta"] = True
        if record.context:
            attributes["order"] = "context"
        codecs: list[Mapping[str, Any]] = [_HUFFMAN]
        filters: list[Mapping[str, Any]] = []
        if isinstance(record.lattice, LinearLattice):
            dtype = "float64" if record.dtype == "float64" else "float32"
            steps = _filter(record)
            # A codec does not know the place of its chunk: exponents of rows would need all chunks together.
            (filters if "width" in steps["configuration"] else codecs).insert(0, steps)
        else:
            dtype = f"int{8 * ITEM_SIZES[record.dtype]}" if record.is_exact else "int32"
        return self.coarse.add_array(
            array_name(record.id), record.count, record.chunk, dtype, codecs, {"ckstore": attributes}, payloads,
            filters=filters,
        )  # fmt: skip

    def begin_sync(self) -> None:
        """Start writing to disk after the last object."""
        self.coarse.begin_sync()
        self.exact.begin_sync()

    @property
    def records(self) -> list[Record]:
        """The records, without the names of unfinished packs."""
        return [*self.lattices, *self.contents, *self.raw]

    def placed(self, packs: Sequence[PackInfo]) -> list[Record]:
        """Return the records with the names of the finished packs."""
        names = {pack.kind: pack.name for pack in packs}
        return [
            *(replace(record, pack=names["coarse"]) for record in self.lattices),
            *(replace(record, pack=names["exact"]) for record in self.contents),
            *(replace(record, pack=names["raw"]) for record in self.raw),
        ]

    def places(self, packs: Sequence[PackInfo]) -> tuple[list[Placement], list[Placement], list[Placement]]:
        """Return the places of lattices, contents and raw objects in the finished packs."""
        names = {pack.kind: pack.name for pack in packs}
        lattices = [(key(record.id), names["coarse"], slot) for slot, record in enumerate(self.lattices)]
        contents = [(key(record.id), names["exact"], slot) for slot, record in enumerate(self.contents)]
        raw = [(key(record.id), names["raw"], slot) for slot, record in enumerate(self.raw)]
        return lattices, contents, raw

    def finish(
        self,
        document: VersionDocument | None,
        blobs: dict[str, bytes],
        number: int = 0,
        *,
        again: bool = False,
        trial: bool = False,
    ) -> tuple[list[PackInfo], PackEntry]:
        """Finish both packs; return them and the entry of the coarse one's manifest.

        Without a `document`, or with `again`, they hold objects of older versions, stored again. With both, the
        document is the new one of an older version. A `trial` will not be committed: `recover` ignores it.
        """
        again = again or document is None
        # Exponents of one kind compress best as neighbours.
        self.lattices.sort(key=lambda record: (record.kind, record.base is None))
        head: dict[str, Any] = {"format": 1, "number": number, "created": durable.timestamp()}
        if document is not None:
            head |= {"number": document.number}
        if document is not None and not again:
            head |= {"created": document.created}
        if trial:
            head |= {"trial": True}
        extra: list[Record] = [*self.contents, *self.raw]
        if extra:
            records = [record.to_json() for record in extra]
            body = head | {"kind": self.exact.kind, "records": records, "rebase": again}
            self.exact.add_bytes(manifest.NAME, manifest.encode_manifest(body, {}), None)
            self.exact.seal()
        else:
            self.exact.abort()
        body = head | {"kind": "coarse", "records": [record.to_json() for record in self.lattices]}
        if again:
            body["rebase"] = True
        if document is not None:
            body["version"] = document.to_json()
        entry = self.coarse.add_bytes(manifest.NAME, manifest.encode_manifest(body, blobs), None)
        # Both are synchronised at once; the pack of the version is named last.
        self.coarse.seal()
        for pack in (self.exact, self.coarse) if extra else (self.coarse,):
            self.finished.append(pack.finish())
        return self.finished, entry


def _filter(record: LatticeRecord) -> Mapping[str, Any]:
    """Return Zarr codec that makes lattice values of a linear base's integers, and of a delta's numbers of steps."""
    lattice = record.linear
    settings: dict[str, Any] = {"step": 0}
    if record.base is None:
        settings["step"] = lattice.step
        axes = {"rows": lattice.rows, "cols": lattice.cols}
        exponents = {name: exponents_to_text(axis) for name, axis in axes.items() if axis.size}
        if exponents:
            settings |= {**exponents, "width": lattice.width}
        if record.dtype in SHORT:
            settings["precision"] = record.dtype
    return {"name": "ckstore.quantized_residual", "configuration": settings}


def version_row(document: VersionDocument, packs: Sequence[PackInfo], entry: PackEntry) -> VersionRow:
    """Return the catalog's row of a version in finished packs; the last one is coarse, with its manifest at `entry`."""
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
