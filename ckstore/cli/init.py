"""`ckstore init`: create a store."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from ckstore.cli.output import print_line
from ckstore.cli.verb import option, verb
from ckstore.errors import UsageError


@verb(
    ("ckstore init", "create .ckstore in the working directory; directories below find it"),
    ("ckstore init /data/checkpoints", "create a store elsewhere, for --store or $CKSTORE"),
    ("ckstore init --shared", "let the directory's group write to it"),
    ("ckstore init s3://models/team-a", "create a store in a bucket; also gs://, az:// and hf://"),
    exit_codes=[12, 15],
    opens_store=False,
)
@click.argument("path", required=False, type=click.Path())
@option("--shared", "Let the directory's group write to the store, whatever the umask of its members.")
@option(
    "--option NAME=VALUE",
    "Option for the client of an object store, such as endpoint=https://…; this machine remembers it.",
    name="options",
    multiple=True,
)
@click.pass_context
def command(ctx: click.Context, path: str | None, shared: bool, options: Sequence[str]) -> None:
    """Create an empty store.

    PATH is a directory or the URL of a bucket prefix; by default --store, or .ckstore in the working directory.
    Credentials come from the environment and are never stored.
    """
    from ckstore.storage import root
    from ckstore.store import init

    given = [option.partition("=") for option in options]
    if not all(name and equals for name, equals, _ in given):
        raise UsageError("An option has a name and a value: --option endpoint=https://…")
    target = path or ctx.find_root().params.get("store") or root.DEFAULT_NAME
    place = root.place(target)
    outer = None
    if not (isinstance(place, str) or os.environ.get(root.VARIABLE)):
        outer = root.nearest_store(place.absolute().parent)
    init(target, shared=shared, options={name: value for name, _, value in given}).close()
    print_line(f"Made a store at {target}.")
    if outer is not None and not isinstance(place, str):
        other = os.path.relpath(outer)
        if place.name == root.DEFAULT_NAME:
            print_line(f"Commands in its directory use it now, no longer {other}.")
        else:
            print_line(f"Without --store, commands still use {other}.")
