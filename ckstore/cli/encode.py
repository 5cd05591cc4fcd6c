"""`ckstore encode`: encode versions that are stored as they were written."""

from __future__ import annotations

import click

from ckstore.cli.options import named_options
from ckstore.cli.output import counted, json_option, print_json, print_line, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore encode", "encode all hot versions, after training"),
    ("ckstore encode --run gpt", "encode the hot versions of a run"),
    exit_codes=[13],
)
@named_options
@json_option
@click.pass_context
def command(ctx: click.Context, versions: tuple[str, ...], run: str | None, as_json: bool) -> None:
    """Encode hot versions.

    An ingest stores a version unencoded (hot), as fast as writing the file. It is encoded, in fewer bytes, when the
    next version of the run arrives. Values change only under a coarse policy, which makes a version coarse when it is
    encoded. An interrupt loses nothing.
    """
    with open_store(ctx, "a") as store:
        chosen = store.select(versions or None, run=run)
        total = sum(version.original_bytes for version in chosen if version.hot)
        with progress_bar("encode", total, shown=not as_json) as progress:
            report = store.encode(chosen, progress=progress)
    if as_json:
        print_json([{"versions": report.versions, "before": report.before, "after": report.after}])
    elif not report.versions:
        print_line("Nothing to do: all versions are encoded.")
    else:
        done = counted(len(report.versions), "version")
        print_line(f"Encoded {done}: {size_text(report.before)} before, {size_text(report.after)} now.")
