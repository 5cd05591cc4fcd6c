"""Checks the catalog against what it could be built from again: the manifests of the packs, and the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckstore.encoding.writer import version_row
from ckstore.errors import CkstoreError
from ckstore.storage import log, manifest
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import PackInfo

if TYPE_CHECKING:
    from ckstore.store import Store
    from ckstore.version import Version

#: What a manifest says of a version and nothing changes later: `recover` would write the same.
_FIELDS = (
    "uid", "run", "step", "created", "manifest_offset", "manifest_length", "original_bytes", "stored_bytes",
    "elements", "tensors", "files", "fidelity", "metrics", "source",
)  # fmt: skip


def catalog_problems(store: Store, versions: Sequence[Version]) -> Iterator[str]:
    """A sentence for everything in the catalog that contradicts the log or the manifests of `versions`."""
    yield from _tags(store)
    exact = _exact_packs(store)
    present = {row.number for row in store.catalog.versions()}
    for version in versions:
        try:
            wrong = _wrong_fields(store, version, exact, present)
        except CkstoreError:
            continue  # The manifest cannot be read; that is said where the version itself is checked.
        if wrong:
            yield (
                f"The catalog says otherwise than the manifest of version {version.row.number} ({', '.join(wrong)}); "
                "run `ckstore recover` to rebuild it."
            )


def _wrong_fields(
    store: Store, version: Version, exact: dict[tuple[int, str], PackInfo], present: set[int]
) -> list[str]:
    row, document = version.row, version.document
    packs = [exact[found] for found in [(_written_as(store, row), document.created)] if found in exact]
    packs.append(PackInfo(row.pack, store.packs.size(row.pack), "coarse"))
    expected = version_row(document, packs, store.packs.find_entry(row.pack, manifest.MEMBER))
    if row.step is None and expected.step is not None and store.catalog.at_step(row.run, expected.step) is not None:
        expected = replace(expected, step=None)  # Two versions claim that step; see `ckstore.operations.recover`.
    if row.parent is not None and expected.parent == _written_as(store, store.catalog.version(row.parent)):
        expected = replace(expected, parent=row.parent)
    wrong = [name for name in _FIELDS if getattr(row, name) != getattr(expected, name)]
    # A version that was forgotten handed its children to its own parent, which is older.
    allowed = row.parent is None or row.parent < (expected.parent or 0)
    if row.parent != expected.parent and (expected.parent is None or expected.parent in present or not allowed):
        wrong.append("parent")
    return wrong


def _written_as(store: Store, row: VersionRow) -> int:
    """The number that a version was committed with: `recover` gives one of two that claim a number another one."""
    number: int = store.resolver.manifest(row.pack).document["number"]
    return number


def _exact_packs(store: Store) -> dict[tuple[int, str], PackInfo]:
    """The pack of exact layers that each version was committed with, by its number and time."""
    found = {}
    for pack in store.catalog.packs():
        if pack.kind == "exact":
            try:
                document = store.resolver.manifest(pack.name).document
                if not document.get("rebase"):
                    info = PackInfo(pack.name, store.packs.size(pack.name), "exact")
                    found[document["number"], document["created"]] = info
            except CkstoreError:
                continue  # Every pack is checked by itself.
    return found


def _tags(store: Store) -> Iterator[str]:
    try:
        records = log.read_all(store.path)
    except CkstoreError as error:
        yield str(error)
        return
    # An interrupted change may stand in the log without having taken place; never the other way round.
    logged = {(record["tag"], record["version"]) for record in records if record.get("change") == "tag"}
    for tag, number in store.catalog.tags().items():
        if (tag, number) not in logged:
            yield f"Tag {tag} means version {number}, which the log does not say; run `ckstore recover`."
