"""`ckstore tag`: name versions."""

from __future__ import annotations

import click

from ckstore.cli.output import json_option, name_of, print_json, print_line, print_table
from ckstore.cli.verb import TagName, VersionName, open_store, verb
from ckstore.errors import UsageError


@verb(
    ("ckstore tag gpt@400 best", "point the tag best at step 400 of run gpt"),
    ("ckstore tag", "list tags"),
    ("ckstore tag --delete best", "remove a tag; the version stays"),
    exit_codes=[13],
)
@click.argument("version", required=False, type=VersionName())
@click.argument("name", required=False, type=TagName())
@click.option("--delete", metavar="NAME", type=TagName(), help="Remove a tag.")
@click.option("--list", "listing", is_flag=True, help="List tags, as without arguments.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, version: str | None, name: str | None, delete: str | None, listing: bool, as_json: bool
) -> None:
    """Point a tag at a version, remove a tag, or list tags.

    An existing tag is moved. A tag cannot be a number, `latest` or the name of a run, and contains no @.
    """
    if delete is not None or listing or version is None:
        if version is not None or (delete is not None and listing):
            raise UsageError("Give a version and a name, or --delete NAME, or --list.")
        if delete is None:
            _list(ctx, as_json)
            return
        with open_store(ctx, "a") as store:
            store.untag(delete)
        print_line(f"Tag {delete} is removed.")
        return
    if name is None:
        raise UsageError(f"Give {version} a name: `ckstore tag {version} NAME`.")
    with open_store(ctx, "a") as store:
        if version not in store and name in store:
            raise UsageError(f"There is no version {version}; name the version first: `ckstore tag {name} {version}`.")
        row = store.catalog.resolve(version)
        before = store.catalog.tags().get(name)
        store.tag(row.number, name)
    moved = f", no longer version {before}" if before not in (None, row.number) else ""
    print_line(f"{name} is {name_of(row)}, version {row.number}{moved}.")


def _list(ctx: click.Context, as_json: bool) -> None:
    with open_store(ctx) as store:
        tags = store.catalog.tags()
        rows = [(tag, store.catalog.version(number)) for tag, number in tags.items()]
    if as_json:
        print_json([{"tag": tag, "version": row.number, "run": row.run, "step": row.step} for tag, row in rows])
    elif rows:
        print_table(
            ["tag", "version", "run", "step"], [(tag, row.number, row.run, row.step) for tag, row in rows], (1, 3)
        )
    else:
        print_line("No tags yet; `ckstore tag VERSION NAME` makes one.", err=True)
