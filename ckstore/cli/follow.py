"""`ckstore follow`: keep a directory at the newest version of a run, and tell an engine of each."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckstore.cli.outcomes import warnings_printed
from ckstore.cli.output import print_json, print_line, size_text
from ckstore.cli.verb import VersionName, open_store, option, verb

if TYPE_CHECKING:
    from ckstore.following.follow import Followed


@verb(
    ("ckstore --store s3://runs/policy follow policy /local/policy", "keep /local/policy at the run's newest version"),
    ("ckstore follow policy /local/policy --once", "update to the present version and exit"),
    ("ckstore follow policy@best:reward best/", "keep the version with the highest reward"),
    ("ckstore follow policy served/ --exec 'curl -sf -d @- localhost:30000/reload'", "tell an engine of each version"),
    exit_codes=[12, 13],
)
@click.argument("name", metavar="VERSION", type=VersionName())
@click.argument("directory", type=click.Path(path_type=Path))
@option("--once", "Update to the present version and exit.")
@option(
    "--exec COMMAND",
    "Run a command of the shell after each update, with the version as JSON on stdin, until it succeeds.",
    name="command",
)
@option(
    "--poll SECONDS",
    "Poll every SECONDS: one request to a store in a bucket.",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
)
@option("--json", "Print each event as a line of JSON.", name="as_json")
@click.pass_context
def command(
    ctx: click.Context, name: str, directory: Path, once: bool, command: str | None, poll: float, as_json: bool
) -> None:
    """Keep DIRECTORY at the newest version of a name, such as that of a run, until stopped.

    An update reads the changes since the version that DIRECTORY has, and writes the chunks that differ, in place. While
    it does, .ckstore-version says `updating`; then `complete`, with the id, step and files. After a kill the next
    start goes on. Followers of one DIRECTORY share the work; files that were changed by hand are mended.

    A name without a version is waited for, as an unreachable store is. Versions in between are left out.

    The JSON for --exec has model_path, id, version, run, step and metrics; the environment has them as
    CKSTORE_MODEL_PATH and so on. A version that was applied before a restart is not applied again. No update begins
    while COMMAND runs.
    """
    from ckstore.following.follow import NotAppliedError, follow
    from ckstore.following.hooks import run_command

    def apply(item: Followed) -> None:
        _print("written", item, as_json=as_json)
        if command is None or item.was_applied:
            return
        if (why := run_command(command, item)) is not None:
            raise NotAppliedError(f"{why}; {item.name} is not applied.")
        if as_json:
            _print("executed", item, as_json=True)

    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        with warnings_printed(), open_store(ctx) as store:
            for _ in follow(store._repository, name, directory, once=once, poll=poll, stop=stop, apply=apply):
                pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(event: str, item: Followed, *, as_json: bool) -> None:
    if as_json:
        from ckstore.following.hooks import described

        facts = {
            "event": event, **described(item), "read": item.bytes_read, "written": item.bytes_written,
            "mended": item.is_mended, "seconds": round(item.seconds, 3), "lag": round(item.lag, 3),
        }  # fmt: skip
        print_json(facts, indent=None)
        return
    amounts = f"{size_text(item.bytes_read)} read, {size_text(item.bytes_written)} written  {item.seconds:.1f} s"
    print_line(f"{item.name} -> {item.path}  {amounts if item.bytes_written or item.bytes_read else 'unchanged'}")
