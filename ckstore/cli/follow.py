"""`ckstore follow`: keep a directory at the newest version of a run, and tell an engine of each."""

from __future__ import annotations

import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckstore.cli.options import signed_option
from ckstore.cli.outcomes import warnings_printed
from ckstore.cli.output import print_json, print_line, size_text
from ckstore.cli.verb import VersionName, open_store, option, verb

if TYPE_CHECKING:
    from ckstore.following.follow import Followed


@verb(
    ("ckstore --store s3://runs/policy follow policy /local/policy", "keep /local/policy at the run's newest version"),
    ("ckstore follow policy /local/policy --once", "update to the present version and exit"),
    ("ckstore follow policy@best:reward best/", "keep the version with the highest reward"),
    ("ckstore follow policy eval/ --every 500 --include '*.safetensors'", "keep the weights of each 500th step"),
    ("ckstore follow policy served/ --exec 'curl -sf -d @- localhost:30000/reload'", "tell an engine of each version"),
    exit_codes=[12, 13],
)
@click.argument("name", metavar="VERSION", type=VersionName())
@click.argument("directory", type=click.Path(path_type=Path))
@option("--once", "Update to the present version and exit.")
@option("--swap", "Make DIRECTORY a link, and update two directories in turn: for engines that map the files.")
@option("--include GLOB", "Keep only matching files.", multiple=True)
@option("--every N", "Follow steps that are multiples of N alone.", type=click.IntRange(1), default=1)
@signed_option
@option(
    "--exec COMMAND",
    "Run a command of the shell after each update, with the version as JSON on stdin, until it succeeds.",
    name="command",
)
@option(
    "--post URL",
    "POST each version to an engine until it succeeds: SGLang's update_weights_from_disk, vLLM's collective_rpc, or"
    " another URL that takes the JSON of --exec.",
)
@option(
    "--metrics-port PORT",
    "Serve figures for Prometheus on 127.0.0.1.",
    type=click.IntRange(0, 65535),
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
    ctx: click.Context,
    name: str,
    directory: Path,
    once: bool,
    swap: bool,
    include: tuple[str, ...],
    every: int,
    signed_by: Path | None,
    command: str | None,
    post: str | None,
    metrics_port: int | None,
    poll: float,
    as_json: bool,
) -> None:
    """Keep DIRECTORY at the newest version of a name, such as that of a run, until stopped.

    An update reads the changes since the version that DIRECTORY has, and writes the chunks that differ, in place. While
    it does, .ckstore-version says `updating`; then `complete`, with the id, step and files. After a kill the next
    start goes on. Followers of one DIRECTORY share the work; files that were changed by hand are mended.

    A name without a version is waited for, as an unreachable store is. Versions in between are left out.

    The JSON for --exec has model_path, id, version, run, step and metrics; the environment has them as
    CKSTORE_MODEL_PATH and so on. After a failure, --exec and --post are tried again, with a newer version if there is
    one. A version that was applied before a restart is not applied again. No update begins while COMMAND runs.
    """
    from ckstore.following import hooks
    from ckstore.following.follow import NotAppliedError, follow

    if post is not None:
        hooks.check_url(post)
    figures = hooks.Figures()
    last: Followed | None = None

    def apply(item: Followed) -> None:
        nonlocal last
        if last is None or last.version.uid != item.version.uid or item.bytes_written:
            figures.note(item)
            _print("written", item, as_json=as_json)
        last = item
        if item.was_applied and not item.bytes_written:
            return
        try:
            if command is not None:
                hooks.run_command(command, item)
            if post is not None:
                hooks.post(post, item)
        except NotAppliedError:
            figures.note_failure()
            raise
        if as_json:
            _print("applied", item, as_json=True)

    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        with (
            warnings_printed(),
            open_store(ctx) as store,
            nullcontext() if metrics_port is None else hooks.served(figures, metrics_port),
        ):
            for _ in follow(
                store._repository, name, directory, once=once, poll=poll, stop=stop, apply=apply, swap=swap,
                include=include, every=every, signed_by=signed_by,
            ):  # fmt: skip
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
