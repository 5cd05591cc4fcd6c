"""`ckstore pull`: take versions out of another store into this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckstore.cli.transferring import send, transfer_options
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore pull /mnt/backup gpt@400", "one version, with all that restoring it takes"),
    ("ckstore pull /mnt/backup --run gpt", "all versions of a run that are not here yet"),
    ("ckstore pull /mnt/colleague gpt@400 --verify", "decoded and compared, before it becomes visible"),
    exit_codes=[3, 12, 13],
)
@transfer_options
@click.pass_context
def command(ctx: click.Context, /, other: Path | str, versions: tuple[str, ...], **options: Any) -> None:
    """Take versions out of another store.

    `ckstore push`, seen from the other side: each VERSION, named as in OTHER, or a run there, or everything becomes
    visible here. Only what is missing is read of OTHER, in which nothing is changed.
    """
    from ckstore.store import Store

    with Store(other, "r") as source, open_store(ctx, "r" if options["dry_run"] else "a") as store:
        send(ctx, source, store, versions, options)
