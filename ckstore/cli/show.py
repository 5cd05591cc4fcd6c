"""`ckstore show`: show the details of a version."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.output import (
    form_cells,
    name_of,
    percent_text,
    print_facts,
    print_json,
    print_line,
    print_table,
    ratio_text,
    size_text,
    time_text,
)
from ckstore.cli.verb import VersionName, open_store, option, verb
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.provenance import RESERVED

if TYPE_CHECKING:
    from ckstore.objects.documents import Deviation
    from ckstore.reading.storage_facts import Figures
    from ckstore.version import Version


@verb(
    ("ckstore show latest", "show the version ingested last"),
    ("ckstore show gpt@400 --json", "print one JSON object"),
    ("ckstore show best --sha256", "hash its files with SHA-256"),
    exit_codes=[4, 13],
)
@click.argument("version", type=VersionName())
@option("--sha256", "Decode the files to print their SHA-256.")
@option("--json", "Print JSON: one object.", name="as_json")
@click.pass_context
@collection_seldom()
def command(ctx: click.Context, version: str, sha256: bool, as_json: bool) -> None:
    """Show details of a version.

    Prints files with their BLAKE3, metrics, tags, parent and children, and how the objects are stored. Each tensor has
    its form and step, stored bits an element, and the errors of a coarse version: maximal, root mean square, and
    relative to the root mean square of the values.
    """
    with open_store(ctx) as store:
        found = store[version]
        shown = found.describe() if as_json else found._summary()
        if sha256:
            digests = found.sha256()
            for item in shown["contents"]:
                item["sha256"] = digests.get(item["path"])
        if as_json:
            print_json(shown)
        else:
            _print(found, shown, "sha256" if sha256 else "blake3")


def _print(version: Version, shown: dict[str, Any], digest: str) -> None:
    from ckstore.reading.storage_facts import StorageFacts
    from ckstore.table import flat

    row = version._stored.row
    storage = shown["storage"]
    kind = "hot" if row.hot else "base" if row.base else f"delta, {row.depth} deep"
    against, shared = storage["stored_against_others"], storage["objects"] - storage["here"]
    exact = sum(storage[kind] for kind in ("raw", "full", "delta", "patches", "cast"))
    coarse = storage["objects"] - exact
    print_facts([
        ("version", f"{row.number}  ({name_of(row)})"),
        ("id", row.uid),
        ("tags", ", ".join(shown["tags"]) or None),
        ("parent", row.parent),
        ("children", ", ".join(map(str, shown["children"])) or None),
        ("superseded", "yes, the run went back to an earlier version" if row.superseded else None),
        ("created", f"{time_text(row.created)} UTC"),
        ("source", row.source or None),
        ("size", f"{size_text(row.original_bytes)}, {row.tensors} tensors, {row.elements:,} elements"),
        ("stored", f"{size_text(row.stored_bytes)}, {ratio_text(row.original_bytes, row.stored_bytes)}"),
        ("kind", f"{kind}, {row.fidelity}"),
        ("dropped", _dropped_text(version)),
        ("coarse", None if shown["coarse"] is None else ", ".join(f"{k} {v}" for k, v in shown["coarse"].items())),
        ("restore cost", f"{row.cost:.2f}x of a full version"),
        ("objects", f"{storage['objects']}: {storage['here']} new, {shared} shared with other versions"),
        ("as differences", f"{against} of {storage['objects']}"),
        ("exact objects", f"{exact}, {size_text(storage['exact_bytes'])}"),
        ("coarse objects", f"{coarse}, {size_text(storage['coarse_bytes'])}" if coarse else None),
        *((f"metric {name}", _metric(shown, name, value)) for name, value in version.metrics.items()),
        *(
            (name.replace(".", " ", 1), value)
            for group in RESERVED
            for name, value in flat(shown[group], group).items()
        ),
    ])  # fmt: skip
    print_line()
    print_table(
        ["file", "kind", "size", "tensors", digest],
        [
            (item["path"], item["kind"], size_text(item["bytes"]), item["tensors"], item[digest])
            for item in shown["contents"]
        ],
        right=(2, 3),
    )
    for path, target in version._stored.document.links:
        print_line(f"{path} -> {target}")
    if paths := version.match():
        figures = StorageFacts(version._stored).of_tensors(paths)
        cells = list(map(_cells, figures, map(version.deviations().get, paths)))
        print_line()
        print_table(["form", "bits", "max error", "rms error", "relative"], cells, range(1, 5), paths)


def _metric(shown: dict[str, Any], name: str, value: object) -> object:
    """Describe a metric, with the file that it was read from."""
    source = shown["metrics_from"].get(name)
    return value if source is None else f"{value}  (from {source})"


def _dropped_text(version: Version) -> str | None:
    """Describe the dropped tensors of a version."""
    if not version.dropped:
        return None
    return f"{', '.join(version.dropped)}: {len(version)} of {version._stored.row.tensors} tensors are left"


@lru_cache
def _cells(figures: Figures, error: Deviation | None) -> tuple[str | None, ...]:
    if error is None:
        return *form_cells(figures), "0", "0", "0"
    return *form_cells(figures), f"{error.max_abs:.3g}", f"{error.rms:.3g}", percent_text(error.relative)
