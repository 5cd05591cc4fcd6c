"""The common part of `push` and `pull`: options, output and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.options import named_options, with_all
from ckstore.cli.output import counted, json_option, name_of, print_json, print_line, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import exit_for_failures, option, tags_of
from ckstore.table import version_record

if TYPE_CHECKING:
    from ckstore.store import Store
    from ckstore.transfer.transfer import Transferred


def _place(_: click.Context, __: click.Parameter, given: str) -> Path | str:
    from ckstore.storage.root import place

    return place(given)


#: The arguments and options of a verb that sends versions.
transfer_options = with_all(
    click.argument("other", metavar="OTHER", type=click.Path(), callback=_place),
    named_options,
    option("--dry-run", "Change nothing; list versions and bytes."),
    option("--verify", "Decode and compare each version before it becomes visible."),
    option("--restore", "Also send versions that the receiving store has forgotten."),
    json_option,
)


def send(ctx: click.Context, source: Store, target: Store, versions: tuple[str, ...], options: dict[str, Any]) -> None:
    """Send versions, print the outcome of each, and set the exit code."""
    dry_run, as_json, arrives = options["dry_run"], options["as_json"], ctx.info_name == "pull"
    chosen = source.select(versions or None, run=options["run"])
    total = 0 if dry_run else sum(version.original_bytes for version in chosen)
    with progress_bar(ctx.info_name or "", total, shown=not as_json) as progress:
        report = source.push(
            target, chosen, dry_run=dry_run, verify=options["verify"], restore=options["restore"], progress=progress
        )
    if as_json:
        tags = tags_of(target)
        print_json([
            *(_object(item, tags) for item in report.versions),
            *({"version": row.number, "run": row.run, "step": row.step, "forgotten": True} for row in report.forgotten),
            *({"version": item.version.number, "run": item.version.run, "step": item.version.step,
               "error": str(item.error), "kind": item.error.kind, "exit_code": item.error.exit_code}
              for item in report.failed),
        ])  # fmt: skip
    else:
        for item in report.versions:
            print_line(_line(item))
        for failed in report.failed:
            name, message = name_of(failed.version), str(failed.error)
            print_line(f"ckstore: {message if name in message else f'{name}: {message}'}", err=True)
        said = ("Would receive" if arrives else "Would send") if dry_run else "Received" if arrives else "Sent"
        place, repeats = ("here", "fetches") if arrives else ("there", "sends")
        there = f"; {counted(len(report.there), 'version')} {place} already" if report.there else ""
        print_line(f"{said} {counted(len(report.versions), 'version')}, {size_text(report.bytes)}{there}.")
        if report.forgotten:
            were, them = ("was", "it") if len(report.forgotten) == 1 else ("were", "them")
            count = counted(len(report.forgotten), "version")
            print_line(f"{count} {were} forgotten {place}; --restore {repeats} {them} again.")
    done = "received" if arrives else "sent"
    exit_for_failures(ctx, [item.error for item in report.failed], len(chosen), "versions", done)


def _line(item: Transferred) -> str:
    name = name_of(item.version)
    if item.arrived is not None:
        after = "" if item.arrived.parent is None else f", after version {item.arrived.parent}"
        name = f"{name} -> version {item.arrived.number}{after}"
    return f"{name}  {size_text(item.bytes)}"


def _object(item: Transferred, tags: dict[int, list[str]]) -> dict[str, Any]:
    row = item.version if item.arrived is None else item.arrived
    own = [] if item.arrived is None else tags.get(row.number, [])
    return {**version_record(row, own), "sent": item.bytes, "from": item.version.number}
