"""`ckstore show`: everything about one version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.output import (
    name_of,
    print_facts,
    print_json,
    print_table,
    ratio_text,
    size_text,
    time_text,
    version_object,
)
from ckstore.cli.verb import VersionName, open_store, verb

if TYPE_CHECKING:
    from ckstore.version import Version


@verb(
    ("ckstore show latest", "the version that was ingested last"),
    ("ckstore show gpt@400 --json", "for programs: one object, with a list of files"),
    exit_codes=[13],
)
@click.argument("version", type=VersionName())
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object.")
@click.pass_context
def command(ctx: click.Context, version: str, as_json: bool) -> None:
    """Show everything about one VERSION.

    Its files with their SHA-256, how its objects are stored and what that costs, metrics, tags, parent and
    children.
    """
    from ckstore.cli.storage_facts import StoredVersion

    with open_store(ctx) as store:
        found = store[version]
        number = found.row.number
        shown = {
            **version_object(found.row, [tag for tag, tagged in store.catalog.tags().items() if tagged == number]),
            "children": [row.number for row in store.catalog.children(number)],
            "contents": _contents(found),
            "storage": StoredVersion(found).summary(),
        }
        if as_json:
            print_json(shown)
        else:
            _print(found, shown)


def _contents(version: Version) -> list[dict[str, Any]]:
    return [
        {
            "path": entry.path,
            "kind": layout.kind,
            "bytes": entry.size,
            "tensors": len(layout.tensors),
            "sha256": entry.sha256,
        }
        for entry, layout in zip(version.document.files, version.layout.files, strict=True)
    ]


def _print(version: Version, shown: dict[str, Any]) -> None:
    row = version.row
    storage = shown["storage"]
    kind = "base" if row.base else f"delta, {row.depth} deep"
    layers = f"{storage['base']} in full, {storage['delta']} as deltas"
    exact = f"{storage['own']} own, {storage['chained']} chained, {storage['ordinal']} exact by themselves"
    print_facts([
        ("version", f"{row.number}  ({name_of(row)})"),
        ("id", row.uid),
        ("tags", ", ".join(shown["tags"]) or None),
        ("parent", row.parent),
        ("children", ", ".join(map(str, shown["children"])) or None),
        ("created", f"{time_text(row.created)} UTC"),
        ("source", row.source or None),
        ("size", f"{size_text(row.original_bytes)}, {row.tensors} tensors, {row.elements:,} elements"),
        ("stored", f"{size_text(row.stored_bytes)}, {ratio_text(row.original_bytes, row.stored_bytes)}"),
        ("kind", f"{kind}, {row.fidelity}"),
        ("restore cost", f"{row.cost:.2f}x of a full version"),
        ("objects", f"{storage['objects']}, of which {storage['here']} were added by this version"),
        ("integers", f"{layers}, {size_text(storage['coarse_bytes'])}"),
        ("exact layers", f"{exact}, {size_text(storage['exact_bytes'])}"),
        *((f"metric {name}", value) for name, value in row.metrics.items()),
    ])  # fmt: skip
    click.echo()
    print_table(
        ["file", "kind", "size", "tensors", "sha256"],
        [
            (item["path"], item["kind"], size_text(item["bytes"]), item["tensors"], item["sha256"])
            for item in shown["contents"]
        ],
        right=(2, 3),
    )
    for path, target in version.document.links:
        click.echo(f"{path} -> {target}")
