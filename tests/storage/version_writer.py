"""Write one small version into a store; as a program, change its catalog and get killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from hashlib import sha1
from pathlib import Path
from typing import Any

from ckstore.storage import durable
from ckstore.storage.catalog import Catalog, VersionRow, key
from ckstore.storage.pack import PackWriter


def identifier(text: str) -> str:
    return sha1(text.encode()).hexdigest()


def write_version(
    catalog: Catalog, store: Path, run: str = "gpt", step: int | None = 0, objects: int = 3, **changes: Any
) -> VersionRow:
    """Reserve a number, write a pack, commit; `replace` and fields of the row may be given."""
    number = catalog.reserve_number()
    document = {"number": number, "run": run, "step": step, "created": durable.timestamp()}
    with PackWriter(store, "encoded") as writer:
        for slot in range(objects):
            payloads = [bytes([number % 256, slot]), None, b"\7"]
            writer.add_array(str(slot), 5, 2, "uint8", [{"name": "bytes"}], None, payloads)
        writer.gather()
        entry = writer.add_manifest(document, {"skeleton": b"bytes"})
        pack = writer.finish()
    fields: Mapping[str, Any] = {
        "number": number,
        "uid": identifier(f"version {number}"),
        "run": run,
        "step": step,
        "parent": None,
        "created": document["created"],
        "pack": pack.name,
        "manifest_offset": entry.offset,
        "manifest_length": entry.length,
        "original_bytes": 100,
        "stored_bytes": pack.bytes,
        "elements": 15,
        "tensors": objects,
        "files": 1,
        "depth": 0,
        "cost": 1.0,
        "base": True,
        "fidelity": "exact",
        "metrics": {"loss": 0.5},
        "source": "model.pt",
    }
    options = {
        name: changes.pop(name)
        for name in list(changes)
        if name.startswith(("replace", "requires", "references", "bands"))
    }
    row = VersionRow(**{**fields, **changes})
    placements = [(key(identifier(f"object {number} {slot}")), pack.name, slot) for slot in range(objects)]
    catalog.commit_version(row, [pack], placements, **options)
    return row


def main() -> None:
    """Spill a large change into the file, and get killed before its commit."""

    def stop(name: str) -> None:
        if name == "before-commit":
            os.kill(os.getpid(), signal.SIGKILL)

    durable.checkpoint = stop
    with Catalog.open(Path(sys.argv[1]), "a") as catalog, catalog.transaction():
        # A cache of one page: the file itself is changed before the commit, and only its journal can undo that.
        catalog._connection.execute("PRAGMA cache_size = 1")
        catalog.move_objects((value * 7919, catalog.packs()[0].name, 0) for value in range(20_000))


if __name__ == "__main__":
    main()
