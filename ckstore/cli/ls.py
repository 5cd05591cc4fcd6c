"""`ckstore ls`: list the tensors of a version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.output import json_option, print_json, print_line, print_table
from ckstore.cli.verb import VersionName, open_store, verb, version_of
from ckstore.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from ckstore.formats.layout import Tensor
    from ckstore.version import Version

#: Kinds of files whose opaque parts could be tensors.
_WITH_BYTES = ("npy", "npz", "gguf", "msgpack", "hdf5", "zip")


@verb(
    ("ckstore ls latest", "list all tensors: path, dtype, shape"),
    ("ckstore ls gpt@400 'model/*' -l", "list some tensors and how they are stored"),
    exit_codes=[13],
)
@click.argument("version", type=VersionName())
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option("-l", "--long", "is_long", is_flag=True, help="Show how each tensor is stored.")
@json_option
@click.pass_context
def command(ctx: click.Context, version: str, globs: tuple[str, ...], is_long: bool, as_json: bool) -> None:
    """List the tensors of a version.

    GLOB selects paths: * matches any characters, including /, and ? matches one. A GLOB that matches a path also
    matches everything below it.

    -l adds the form (exact: raw, full, delta or patches; coarse: a lattice), the number of deltas back to an object in
    full, and stored bits an element. Small tensors show the figures of their bundle.

    stderr lists files, or parts of files, that are opaque bytes, and why.
    """
    from ckstore.reading.storage_facts import StorageFacts, tensor_object, tensor_storage

    with open_store(ctx) as store:
        found = version_of(store, version)
        chosen = matching(found, globs)
        stored = StorageFacts(found.stored) if is_long else None
        left = [] if globs or as_json else _bytes_of(found)
        tensors = []
        for path, (file, tensor) in chosen.items():
            tensors.append(tensor_object(path, tensor))
            if stored is not None:
                tensors[-1] |= tensor_storage(stored, file, tensor)
    if as_json:
        print_json(tensors)
        return
    headings, right = ["dtype", "shape", "elements"], [2]
    if is_long:
        headings += ["form", "depth", "bits"]
        right += [4, 5]
    # Paths come last: they are long, and vary most in length.
    print_table([*headings, "path"], [(*_cells(item, is_long), item["path"]) for item in tensors], right)
    for line in left:
        print_line(f"ckstore: {line}", err=True)


def matching(version: Version, globs: tuple[str, ...]) -> dict[str, tuple[int, Tensor]]:
    """Return (file number, tensor) by path, for the tensors that a glob matches; all without globs.

    Raises
    ------
    NotFoundError
        No tensor matches.
    """
    from difflib import get_close_matches

    from ckstore.formats.paths import match_paths, text_to_path

    texts = list(version.paths)
    numbers = match_paths(map(text_to_path, texts), globs)
    if globs and not numbers:
        near = get_close_matches(globs[0], texts, 3, 0.4)
        hint = f"near: {', '.join(near)}" if near else f"see `ckstore ls {version.row.number}`"
        raise NotFoundError(f"Version {version.row.number} has no tensor that matches {' or '.join(globs)}; {hint}.")
    return {texts[number]: version.paths[texts[number]] for number in numbers}


def _bytes_of(version: Version) -> list[str]:
    """Return a sentence for each file with opaque parts that could be tensors, and for files without any."""
    lines = []
    opaque: dict[str, list[str]] = {}
    for number, layout in enumerate(version.layout.files):
        path = version.document.files[number].path
        if layout.kind == "opaque":
            why = _why_opaque(version, number)
            if why or len(version.layout.files) == 1:
                opaque.setdefault(why or "of a kind whose tensors cannot be read", []).append(path)
        elif layout.kind in _WITH_BYTES:
            parts = version.stored.parsed(number).bytes_for
            said = [f"{name} ({why})" if name else why for name, why in parts.items()]
            if said:
                lines.append(f"{path} has bytes that are not tensors: {_first(said)}.")
    for why, paths in opaque.items():
        lines.append(f"{_first(paths)} {'is' if len(paths) == 1 else 'are'} bytes: {why}.")
    return lines


def _why_opaque(version: Version, number: int) -> str:
    """Return the reason why a file has no tensors, if known."""
    try:
        parsed = version.stored.parsed(number)
    except InputError as error:
        return f"damaged ({error.__cause__ or error})"
    if parsed.kind != "opaque":
        return "stored with --force, or before files of its kind could be read"
    return parsed.bytes_for.get("", "")


def _first(items: list[str]) -> str:
    return ", ".join(items[:3]) + (", …" if len(items) > 3 else "")


def _cells(item: dict[str, Any], is_long: bool) -> list[object]:
    cells = [item["dtype"], "x".join(map(str, item["shape"])) or "()", f"{item['elements']:,}"]
    if is_long:
        form = f"{item['form']} (bundle)" if item["bundled"] else item["form"]
        cells += [form, item["depth"], None if item["bits"] is None else f"{item['bits']:.3f}"]
    return cells
