"""`ckstore pull`: fetch versions from another store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckstore.cli.transferring import send, transfer_options
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore pull /mnt/backup gpt@400", "fetch one version"),
    ("ckstore pull /mnt/backup --run gpt", "fetch the missing versions of a run"),
    ("ckstore pull /mnt/colleague gpt@400 --verify", "decode and compare it first"),
    exit_codes=[3, 12, 13],
)
@transfer_options
@click.pass_context
def command(ctx: click.Context, /, other: Path | str, versions: tuple[str, ...], **options: Any) -> None:
    """Fetch versions from another store.

    The reverse of `ckstore push`: VERSIONs and runs are named as in OTHER, which is only read. Only missing bytes are
    read.
    """
    from ckstore.store import Store

    with Store(other, "r") as source, open_store(ctx, "r" if options["dry_run"] else "a") as store:
        send(ctx, source, store, versions, options)
