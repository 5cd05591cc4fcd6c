"""`ckstore watch`: store checkpoints as they appear in a directory, until it is stopped."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckstore.cli.options import STEP_SOURCES
from ckstore.cli.outcomes import print_outcome, warnings_printed
from ckstore.cli.verb import RunName, open_store, option, verb

if TYPE_CHECKING:
    from ckstore.scanning.steps import StepSource


@verb(
    ("ckstore watch runs/gpt --run gpt", "store every new checkpoint as a version"),
    ("ckstore watch runs/gpt --run gpt --delete-source", "move them into the store"),
    ("ckstore watch runs/gpt --run gpt --once", "store the complete checkpoints and exit"),
    exit_codes=[12],
)
@click.argument(
    "folders",
    metavar="DIRECTORY...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, file_okay=False, readable=False),
)
@option("--run NAME", "Run of the versions.  [default: main]", type=RunName())
@option(
    "--step-from",
    "Source of steps, as for `ckstore ingest`.  [default: contents if they differ, else names]",
    type=click.Choice(STEP_SOURCES[:2]),
)
@option("--delete-source", "Delete each input once its version is compared with it, if the policy keeps that whole.")
@option("--once", "Store the complete checkpoints and exit.")
@option(
    "--settle SECONDS",
    "Treat a file as complete after SECONDS without change (directories: 5x).",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
)
@option(
    "--poll SECONDS",
    "Poll every SECONDS, for network file systems.  [default: file events, else 1]",
    type=click.FloatRange(min=0.01),
)
@click.pass_context
def command(
    ctx: click.Context,
    folders: tuple[Path, ...],
    run: str | None,
    step_from: StepSource | None,
    delete_source: bool,
    once: bool,
    settle: float,
    poll: float | None,
) -> None:
    """Store checkpoints as they appear in a directory, until stopped.

    Each file or directory in DIRECTORY becomes one version once it is complete: it parses, holds tensors, and has not
    changed for --settle. Temporary names (.tmp and the like), links, inputs without tensors, stored inputs (by size and
    mtime, also after a restart) and steps that a policy would forget are skipped. When the disk is full, or DIRECTORY
    is missing, it waits. A checkpoint that is overwritten or deleted before its turn is reported.

    An interrupt stops it at once; SIGTERM lets it finish the current version. The next start continues.
    """
    stop = threading.Event()
    interrupted = False

    def interrupt(*_: object) -> None:
        # Python ignores exceptions in finalisers; then `stop` ends the loop.
        nonlocal interrupted
        interrupted = True
        stop.set()
        raise KeyboardInterrupt

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: stop.set()),
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
    }
    try:
        with warnings_printed(), open_store(ctx, "a") as store:
            for item in store.watch(
                folders, run=run, step_from=step_from, delete_source=delete_source, settle=settle, poll=poll,
                once=once, stop=stop,
            ):  # fmt: skip
                print_outcome(item)
        if interrupted:
            raise KeyboardInterrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
