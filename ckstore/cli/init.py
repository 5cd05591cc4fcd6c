"""`ckstore init`: make a store."""

from __future__ import annotations

from pathlib import Path

import click

from ckstore.cli.verb import verb


@verb(
    ("ckstore init", "make .ckstore in the working directory; all directories below find it"),
    ("ckstore init /data/checkpoints", "make a store elsewhere, for --store or $CKSTORE"),
    exit_codes=[12],
    opens_store=False,
)
@click.argument("path", required=False, type=click.Path())
@click.pass_context
def command(ctx: click.Context, path: str | None) -> None:
    """Make an empty store.

    At PATH; by default where --store says, or as .ckstore in the working directory.
    """
    from ckstore.storage.root import DEFAULT_NAME
    from ckstore.store import init

    target = Path(path or ctx.find_root().params.get("store") or DEFAULT_NAME)
    init(target).close()
    click.echo(f"Made a store at {target}.")
