"""Write one small version into a store; as a program, with a step of the commit protocol at which it is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from hashlib import sha1
from pathlib import Path
from typing import Any

from ckstore.storage import durable, log, manifest
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
        entry = writer.add_bytes(manifest.NAME, manifest.encode_manifest(document, {"skeleton": b"bytes"}))
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
        name: changes.pop(name) for name in list(changes) if name.startswith(("replace", "requires", "references"))
    }
    row = VersionRow(**{**fields, **changes})
    placements = [(key(identifier(f"object {number} {slot}")), pack.name, slot) for slot in range(objects)]
    catalog.commit_version(row, [pack], placements, **options)
    return row


def main() -> None:
    action, store, step = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

    def stop(name: str) -> None:
        if name == step and armed:
            os.kill(os.getpid(), signal.SIGKILL)

    armed = False
    durable.checkpoint = stop
    if action == "recover":
        from ckstore.storage.catalog_replacement import replace_catalog

        armed = True
        replace_catalog(store, lambda catalog, present: None)
        return
    with Catalog.open(store, "a") as catalog:
        if action == "version":
            reserve = catalog.reserve_number

            def reserve_then_arm() -> int:
                nonlocal armed
                number = reserve()
                armed = True
                return number

            catalog.reserve_number = reserve_then_arm  # type: ignore[method-assign]
            write_version(catalog, store, step=1)
        elif action == "tag":
            armed = True
            with catalog.transaction():
                log.append(store, {"change": "tag", "tag": "best", "version": 1})
                catalog.set_tag("best", 1)
        elif action == "spill":
            # A cache of one page: the file itself is changed before the commit, and only its journal can undo that.
            catalog._connection.execute("PRAGMA cache_size = 1")
            armed = True
            with catalog.transaction():
                catalog.move_objects((value * 7919, catalog.packs()[0].name, 0) for value in range(20_000))
        elif action == "many":
            for number in range(int(step)):
                write_version(catalog, store, run=f"process-{os.getpid()}", step=number)


if __name__ == "__main__":
    main()
