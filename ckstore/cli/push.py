"""`ckstore push`: let another store have versions of this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckstore.cli.transferring import send, transfer_options
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore push /mnt/backup --run gpt", "all versions of a run that are not there yet"),
    ("ckstore push /mnt/backup gpt@400 gpt@500", "two versions, with all that restoring them takes"),
    ("ckstore push s3://models/team-a --run gpt", "to a store in an object store"),
    ("ckstore push /mnt/backup --dry-run", "of everything: what would be sent, and how many bytes"),
    exit_codes=[3, 12, 13],
)
@transfer_options
@click.pass_context
def command(ctx: click.Context, /, other: Path | str, versions: tuple[str, ...], **options: Any) -> None:
    """Send versions to another store.

    Each VERSION, or range A..B of versions of one run, or a whole run, or else everything becomes visible in OTHER, a
    store, one after the other. They keep id, run, step, time, metrics and, where these are free, their tags, and get
    numbers of OTHER's. What OTHER has of their content is not sent again. Versions that they are stored against come
    along as far as restoring takes it, but are not visible; the parent is the nearest ancestor that OTHER has.

    A version is there already where OTHER has its id, or the same content at its run and step; other content there is
    a conflict. A version that is damaged, or stored against what is, is left out, and the others are sent. Where this
    is interrupted, nothing is lost; repeated, it sends the rest.
    """
    from ckstore.store import Store

    with open_store(ctx) as store, Store(other, "r" if options["dry_run"] else "a") as target:
        send(ctx, store, target, versions, options)
