"""`ckstore ls`: list the tensors of a version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.output import json_option, print_json, print_table
from ckstore.cli.verb import VersionName, open_store, verb, version_of
from ckstore.errors import NotFoundError

if TYPE_CHECKING:
    from ckstore.formats.layout import Tensor
    from ckstore.version import Version


@verb(
    ("ckstore ls latest", "every tensor: path, dtype, shape"),
    ("ckstore ls gpt@400 'model/*' -l", "the model's, and how each is stored"),
    exit_codes=[13],
)
@click.argument("version", type=VersionName())
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option("-l", "--long", "is_long", is_flag=True, help="Add how each tensor is stored.")
@json_option
@click.pass_context
def command(ctx: click.Context, version: str, globs: tuple[str, ...], is_long: bool, as_json: bool) -> None:
    """List the tensors of a VERSION.

    All, or those whose path a GLOB matches: * stands for any characters, / among them, and ? for one; a GLOB that
    matches a path also matches what is below it.

    With -l: the lattice, whether integers are a base or a delta and the mode of the exact layer, the number of
    deltas back to a base, and the stored bytes an element. Small tensors are bundled, and have their bundle's
    figures.

    stderr says which parts of files are bytes and no tensors, and why.
    """
    from ckstore.cli.storage_facts import StorageFacts, tensor_object, tensor_storage

    with open_store(ctx) as store:
        found = version_of(store, version)
        chosen = matching(found, globs)
        stored = StorageFacts(found) if is_long else None
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
        headings += ["lattice", "layers", "depth", "bytes/el"]
        right += [5, 6]
    # Paths last: they are long, and of very different lengths.
    print_table([*headings, "path"], [(*_cells(item, is_long), item["path"]) for item in tensors], right)
    for line in left:
        click.echo(f"ckstore: {line}", err=True)


def matching(version: Version, globs: tuple[str, ...]) -> dict[str, tuple[int, Tensor]]:
    """(File number, tensor) by path, of the tensors that a glob matches; of all where there is none.

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
    """A sentence for each file that has parts which could be tensors and are not."""
    lines = []
    for number, layout in enumerate(version.layout.files):
        if layout.kind in ("npy", "npz", "gguf", "msgpack", "hdf5", "zip"):
            parts = version.stored.parsed(number).bytes_for
            said = [f"{name} ({why})" if name else why for name, why in parts.items()]
            if said:
                shown = ", ".join(said[:3]) + (", …" if len(said) > 3 else "")
                lines.append(f"{version.document.files[number].path} has bytes that are not tensors: {shown}.")
    return lines


def _cells(item: dict[str, Any], is_long: bool) -> list[object]:
    cells = [item["dtype"], "x".join(map(str, item["shape"])) or "()", f"{item['elements']:,}"]
    if is_long:
        rate = item["bytes_per_element"]
        layers = f"{item['layers']} (bundle)" if item["bundled"] else item["layers"]
        cells += [item["lattice"], layers, item["depth"], None if rate is None else f"{rate:.3f}"]
    return cells
