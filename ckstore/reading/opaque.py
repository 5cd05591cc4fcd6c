"""Finds the bytes of a version that are not tensors though they could be, with the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckstore.errors import InputError

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

#: Kinds of files without opaque parts that could be tensors.
_WITHOUT_BYTES = ("torch-zip", "torch-legacy", "safetensors", "dcp", "dcp-metadata")


def opaque_parts(version: StoredVersion) -> dict[str, dict[str, str]]:
    """Return the reasons by path of the file and name of the part; see `Version.opaque`."""
    found: dict[str, dict[str, str]] = {}
    pruned = {file for file, _ in version.contents.dropped}  # A file that lacks tensors cannot be parsed again.
    for number, layout in enumerate(version.layout.files):
        path = version.document.files[number].path
        if layout.kind == "opaque":
            why = _why_opaque(version, number)
            if why or len(version.layout.files) == 1:
                found[path] = {"": why or "of a kind whose tensors cannot be read"}
        elif layout.kind in _WITHOUT_BYTES or number in pruned:
            continue
        elif parts := version.parsed(number).bytes_for:
            found[path] = dict(parts)
    return found


def _why_opaque(version: StoredVersion, number: int) -> str:
    """Return the reason why a file has no tensors, if known."""
    try:
        parsed = version.parsed(number)
    except InputError as error:
        return f"damaged ({error.__cause__ or error})"
    if parsed.kind != "opaque":
        return "stored with `force`, or before files of its kind could be read"
    return parsed.bytes_for.get("", "")
