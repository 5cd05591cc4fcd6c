"""`ckstore ls`: list the tensors of a version."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING

import click

from ckstore.cli.output import form_cells, json_option, print_json, print_line, print_table
from ckstore.cli.verb import VersionName, open_store, verb, version_of, with_options
from ckstore.runtime.collector import collection_seldom

if TYPE_CHECKING:
    from ckstore.reading.storage_facts import Figures
    from ckstore.version import Version


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
@collection_seldom()
def command(ctx: click.Context, version: str, globs: tuple[str, ...], is_long: bool, as_json: bool) -> None:
    """List the tensors of a version.

    GLOB selects paths: * matches any characters, including /, and ? matches one. A GLOB that matches a path also
    matches everything below it.

    -l adds the form (exact: raw, full, delta, patches or cast; coarse: a lattice), the number of deltas back to an
    object in full, and stored bits an element. Small tensors show the figures of their bundle.

    stderr lists files, or parts of files, that are opaque bytes, and why.
    """
    from ckstore.reading.storage_facts import StorageFacts, tensor_object

    with open_store(ctx) as store:
        found = version_of(store, version)
        if as_json and is_long:
            print_json(found.describe(globs)["tensors"])
            return
        forms, paths = found._stored.forms(), found.match(globs)
        if as_json:
            print_json([tensor_object(path, *forms[path]) for path in paths])
            return
        cells = [_cells(*forms[path]) for path in paths]
        headings, right = ["dtype", "shape", "elements"], [2]
        if is_long:
            figures = StorageFacts(found._stored).of_tensors(paths)
            cells = [(*shown, *_form_cells(stored)) for shown, stored in zip(cells, figures, strict=True)]
            headings += ["form", "depth", "bits"]
            right += [4, 5]
        if not globs:
            _print_opaque(found)
    # Paths come last: they are long, and vary most in length.
    print_table(headings, cells, right, paths)


def _print_opaque(version: Version) -> None:
    """Print a sentence for each reason why files, or parts of files, are bytes."""
    whole: dict[str, list[str]] = {}
    for path, parts in version.opaque().items():
        if parts.keys() == {""}:
            whole.setdefault(parts[""], []).append(path)
        else:
            said = [f"{name} ({why})" if name else why for name, why in parts.items()]
            print_line(f"ckstore: {path} has bytes that are not tensors: {_first(said)}.", err=True)
    for why, paths in whole.items():
        are = "is" if len(paths) == 1 else "are"
        print_line(f"ckstore: {_first(paths)} {are} bytes: {with_options(why)}.", err=True)


def _first(items: list[str]) -> str:
    return ", ".join(items[:3]) + (", …" if len(items) > 3 else "")


@cache
def _cells(dtype: str, shape: tuple[int, ...]) -> tuple[object, ...]:
    return dtype, "x".join(map(str, shape)) or "()", f"{prod(shape):,}"


@cache
def _form_cells(figures: Figures) -> tuple[object, ...]:
    form, bits = form_cells(figures)
    return form, figures.depth, bits
