"""`ckstore metric`: show, set and remove the metrics of a version."""

from __future__ import annotations

from pathlib import Path

import click

from ckstore.cli.options import metrics_of
from ckstore.cli.output import json_option, print_facts, print_json, print_line, print_table
from ckstore.cli.verb import VersionName, open_store, option, verb, version_of
from ckstore.errors import UsageError


@verb(
    ("ckstore metric gpt@400 val_loss=2.31 note=good", "set metrics"),
    ("ckstore metric gpt@400", "show the metrics of a version"),
    ("ckstore metric gpt@200 gpt@400", "show the metrics of several, next to each other"),
    ("ckstore metric gpt@400 --delete note", "remove a metric"),
    ("ckstore metric gpt@400 --sign private.pem", "sign the files, for --signed-by of other verbs"),
    ("ckstore tag best:val_loss best", "tag the version with the lowest val_loss"),
    exit_codes=[13],
)
@click.argument("versions", metavar="VERSION... [NAME=VALUE]...", nargs=-1, required=True, type=VersionName())
@option("--delete NAME", "Remove a metric.", multiple=True)
@option("--sign KEY", "Sign the files of the version with a private key.", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def command(
    ctx: click.Context, versions: tuple[str, ...], delete: tuple[str, ...], sign: Path | None, as_json: bool
) -> None:
    """Show, set or remove metrics of a version, or show those of several next to each other.

    `best:NAME`, `least:NAME` and `most:NAME` name versions; `gpt@best:NAME` is that of a run.
    """
    names = [name for name in versions if "=" not in name] or list(versions[:1])
    metrics = metrics_of(ctx, ctx.command.params[0], tuple(text for text in versions if text not in names))
    writes = bool(metrics or delete or sign)
    if len(names) > 1 and writes:
        raise UsageError(f"Name one version to change, not {len(names)}; {names[1]!r} is not of the form NAME=VALUE.")
    if as_json and writes:
        raise UsageError("--json shows metrics; leave it out to set them.")
    with open_store(ctx, "a" if writes else "r") as store:
        found = [version_of(store, name) for name in names]
        if sign is not None:  # First, as a key may be wrong.
            store.sign(found[0], sign)
        if metrics or delete:
            store.set_metrics(found[0], metrics, remove=delete)
        kept = [dict(store[version.number].metrics) for version in found]
    if as_json:
        print_json(kept)
    elif len(found) > 1:
        rows = [
            [name, *(values.get(name) for values in kept)] for name in dict.fromkeys(name for v in kept for name in v)
        ]
        print_table(["metric", *(version.name for version in found)], rows, range(1, len(found) + 1))
    elif kept[0]:
        print_facts(kept[0].items())
    elif sign is None:
        print_line(f"Version {found[0].number} has no metrics.", err=True)
    if sign is not None:
        print_line(f"Version {found[0].number} is signed.", err=True)
