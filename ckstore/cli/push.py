"""`ckstore push`: send versions to another store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckstore.cli.transferring import send, transfer_options
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore push /mnt/backup --run gpt", "send the missing versions of a run"),
    ("ckstore push /mnt/backup gpt@400 gpt@500", "send two versions"),
    ("ckstore push s3://models/team-a --run gpt", "send to a bucket"),
    ("ckstore push /mnt/backup --dry-run", "preview versions and bytes"),
    exit_codes=[3, 12, 13],
)
@transfer_options
@click.pass_context
def command(ctx: click.Context, /, other: Path | str, versions: tuple[str, ...], **options: Any) -> None:
    """Send versions to another store.

    Versions, by default all, keep id, run, step, time and metrics, and tags that are free in OTHER; OTHER assigns
    numbers. Versions that are there get later tags and metrics that they lack, a signature too. Bytes that OTHER has
    are not sent again. Versions needed only to restore others are sent too but stay hidden; the parent is the nearest
    ancestor in OTHER.

    Versions that OTHER has forgotten are not sent, except with --restore.

    A version exists in OTHER if its id does, or the same content at its run and step; other content is a conflict.
    Damaged versions are skipped and reported. After an interrupt, repeat the command for the rest.
    """
    from ckstore.store import Store

    with open_store(ctx) as store, Store(other, "r" if options["dry_run"] else "a") as target:
        send(ctx, store, target, versions, options)
