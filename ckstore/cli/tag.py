"""`ckstore tag`: name versions."""

from __future__ import annotations

from contextlib import suppress

import click

from ckstore.cli.output import json_option, name_of, print_json, print_line, print_table
from ckstore.cli.verb import TagName, VersionName, open_store, option, verb
from ckstore.errors import NotFoundError, UsageError


@verb(
    ("ckstore tag gpt@400 best", "point the tag best at step 400 of run gpt"),
    ("ckstore tag gpt best", "point it at the highest step of run gpt, as it is now"),
    ("ckstore tag", "list tags"),
    ("ckstore tag --delete best", "remove a tag; the version stays"),
    exit_codes=[13],
)
@click.argument("version", required=False, type=VersionName())
@click.argument("name", required=False, type=TagName())
@option("--delete NAME", "Remove a tag.", type=TagName())
@json_option
@click.pass_context
def command(ctx: click.Context, version: str | None, name: str | None, delete: str | None, as_json: bool) -> None:
    """Point a tag at a version, remove a tag, or list tags.

    An existing tag is moved. A tag, like a run, has a name that means nothing else: no number, no beginning of an id
    (four or more of 0-9 and a-f), not `latest`, `best:…` or `a..b`, without @, and not the name of a run.
    """
    if as_json and (delete is not None or version is not None):
        raise UsageError("--json lists tags; leave it out to set or remove one.")
    if delete is not None or version is None:
        if version is not None:
            raise UsageError("Give a version and a name, or --delete NAME.")
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
        before = store._catalog.tagged(name)
        store.tag(version, name)
        found = store._catalog.resolve(name)
        no_longer = "" if before in (None, found.number) else f", no longer version {before}"
        print_line(f"{name} is {name_of(found)}, version {found.number}{no_longer}.")


def _list(ctx: click.Context, as_json: bool) -> None:
    with open_store(ctx) as store:
        found = {}
        for tag, number in store._catalog.tags().items():
            with suppress(NotFoundError):  # Another process has forgotten it since.
                found[tag] = store._catalog.version(number)
    rows = [{"tag": tag, "version": row.number, "run": row.run, "step": row.step} for tag, row in found.items()]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(list(rows[0]), [list(row.values()) for row in rows], (1, 3))
    else:
        print_line("No tags yet; `ckstore tag VERSION NAME` makes one.", err=True)
