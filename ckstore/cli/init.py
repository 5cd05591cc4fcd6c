"""`ckstore init`: make a store."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ckstore.cli.output import print_line
from ckstore.cli.verb import verb
from ckstore.errors import UsageError


@verb(
    ("ckstore init", "make .ckstore in the working directory; all directories below find it"),
    ("ckstore init /data/checkpoints", "make a store elsewhere, for --store or $CKSTORE"),
    ("ckstore init s3://models/team-a", "make a store in an object store; gs:// and az:// too"),
    exit_codes=[12, 15],
    opens_store=False,
)
@click.argument("path", required=False, type=click.Path())
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="What the client of an object store is told, such as endpoint=https://…; remembered on this machine.",
)
@click.pass_context
def command(ctx: click.Context, path: str | None, options: Sequence[str]) -> None:
    """Make an empty store.

    At PATH, a directory or the URL of an object store; by default where --store says, or as .ckstore in the working
    directory. Credentials for an object store come from the environment, and are kept nowhere.
    """
    from ckstore.storage.root import DEFAULT_NAME
    from ckstore.store import init

    given = [option.partition("=") for option in options]
    if not all(name and equals for name, equals, _ in given):
        raise UsageError("An option has a name and a value: --option endpoint=https://…")
    target = path or ctx.find_root().params.get("store") or DEFAULT_NAME
    init(target, options={name: value for name, _, value in given}).close()
    print_line(f"Made a store at {target}.")
