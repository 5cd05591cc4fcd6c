"""`ckstore metric`: show, set and remove the metrics of a version."""

from __future__ import annotations

from typing import Any

import click

from ckstore.cli.options import metrics_of
from ckstore.cli.output import json_option, print_facts, print_json, print_line
from ckstore.cli.verb import VersionName, open_store, option, verb, version_of
from ckstore.errors import UsageError


@verb(
    ("ckstore metric gpt@400 val_loss=2.31 note=good", "set metrics"),
    ("ckstore metric gpt@400", "show the metrics of a version"),
    ("ckstore metric gpt@400 --delete note", "remove a metric"),
    ("ckstore tag best:val_loss best", "tag the version with the lowest val_loss"),
    exit_codes=[13],
)
@click.argument("version", type=VersionName())
@click.argument("metrics", metavar="[NAME=VALUE]...", nargs=-1, callback=metrics_of)
@option("--delete NAME", "Remove a metric.", multiple=True)
@json_option
@click.pass_context
def command(ctx: click.Context, version: str, metrics: dict[str, Any], delete: tuple[str, ...], as_json: bool) -> None:
    """Show, set or remove metrics of a version.

    `best:NAME`, `least:NAME` and `most:NAME` name versions; `gpt@best:NAME` is that of a run.
    """
    if as_json and (metrics or delete):
        raise UsageError("--json shows metrics; leave it out to set them.")
    with open_store(ctx, "a" if metrics or delete else "r") as store:
        found = version_of(store, version)
        if metrics or delete:
            store.set_metrics(found, metrics, remove=delete)
        kept = dict(store[found].metrics)
    if as_json:
        print_json([kept])
    elif kept:
        print_facts(kept.items())
    else:
        print_line(f"Version {found.number} has no metrics.", err=True)
