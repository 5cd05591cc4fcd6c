"""The program: loads verbs by name, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from ckstore.cli.output import print_failure
from ckstore.cli.verb import VERSION_HELP, option, write_exit_codes
from ckstore.errors import CkstoreError, DiskFullError
from ckstore.runtime.access import DENIED, denied
from ckstore.runtime.address_space import check, limit, too_little

#: Every verb, in the order of the help. Its module `ckstore.cli.<name>`, with _ for -, defines `command` and is
#: imported on use.
VERBS = (
    "init", "ingest", "watch", "checkout", "follow", "mount", "log", "runs", "show", "ls", "diff", "patch", "report",
    "plot", "average", "tag", "metric", "policy", "stats", "verify", "encode", "thin", "forget", "undo", "gc", "rebase",
    "push", "pull", "recover", "completion",
)  # fmt: skip

#: Verbs without numerical work.
_LIGHT = ("init", "log", "runs", "tag", "metric", "forget", "undo", "completion")

#: Names that other tools give to verbs.
_SYNONYMS = {
    "add": "ingest", "cat": "checkout", "check": "verify", "clone": "pull", "commit": "ingest", "compact": "encode",
    "compare": "diff", "create": "init", "delete": "forget", "download": "pull", "du": "stats", "expire": "forget",
    "export": "checkout", "fetch": "pull", "find": "log --where CONDITION", "fork": "ingest PATH --parent VERSION",
    "fsck": "verify", "get": "checkout", "history": "log", "import": "ingest", "info": "show", "list": "log",
    "load": "checkout", "metrics": "metric", "prune": "gc", "put": "ingest", "reflog": "log --forgotten",
    "remove": "forget", "rename": "runs RUN --rename NAME", "repair": "recover", "restore": "checkout",
    "retain": "policy", "retention": "policy", "revert": "undo", "rm": "forget",
    "run": "runs, runs RUN --rename NAME or forget --run RUN", "save": "ingest", "snapshots": "log", "soup": "average",
    "status": "stats", "store": "ingest", "undelete": "undo", "unforget": "undo", "upload": "push", "versions": "log",
}  # fmt: skip

#: Options of other tools, and the same in ours.
_INSTEAD = {
    "--top": "ckstore log --sort best:METRIC -n N", "--since": "ckstore log --where 'age<2d'",
    "--until": "ckstore log --where 'age>2d'", "--wide": "ckstore log --columns all",
    "--config": "ckstore diff BEFORE AFTER", "--csv": "ckstore log --format csv", "--all": "ckstore checkout -o DIR",
    "--note": "ckstore ingest PATH --metric note=TEXT", "--keep-daily": "ckstore forget --keep-every 1d:N",
    "--keep-weekly": "ckstore forget --keep-every 1w:N", "--keep-hourly": "ckstore forget --keep-every 1h:N",
    "--keep-monthly": "ckstore forget --keep-every 30d:N", "--keep-yearly": "ckstore forget --keep-every 365d:N",
    "--keep-within": "ckstore forget --keep-last 30d",
}  # fmt: skip

#: Exit codes of the command line alone.
_USAGE = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class Program(click.Group):
    """A group that imports a verb's module when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all verbs."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the verb with a name, or None."""
        if cmd_name not in VERBS:
            return None
        command = import_module(f"ckstore.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb at the start of the arguments; the error suggests near matches."""
        name = args[0]
        if name not in VERBS and not name.startswith("-") and not ctx.resilient_parsing:
            near = [_SYNONYMS[name]] if name in _SYNONYMS else get_close_matches(name, VERBS, 2)
            hint = f"did you mean {' or '.join(near)}?" if near else "see `ckstore --help`."
            raise click.UsageError(f"Unknown verb {name}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; end quietly if the reader of its output has closed the pipe."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _silence()
            ctx.exit(_BROKEN_PIPE)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of versions and the exit codes."""
        with formatter.section("Versions"):
            formatter.write_text(VERSION_HELP)
        write_exit_codes(formatter, None)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import ckstore

        click.echo(f"ckstore {ckstore.__version__}")
        ctx.exit()


@click.command(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@option(
    "--store PATH",
    "Store directory or URL.  [default: $CKSTORE, or the nearest .ckstore upwards]",
    type=click.Path(readable=False),
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def program(ctx: click.Context, store: str | None) -> None:
    """Store versions of model checkpoints in little space and restore them byte for byte.

    `ckstore VERB --help` explains a verb.
    """
    if "NO_COLOR" in os.environ:
        ctx.color = False
    if ctx.invoked_subcommand not in _LIGHT:
        check()


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program, by default with the arguments of the process; an error is one sentence on stderr.

    Return the exit code.
    """
    if sys.stderr is None:  # It is closed; without this, a file of the store may get its number.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Names of files and tensors may not be printable in the terminal's encoding.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        code = _guarded(arguments)
        if sys.stdout is not None:  # None if the output is closed from the start.
            sys.stdout.flush()
    except BrokenPipeError:
        _silence()
        return _BROKEN_PIPE
    except OSError as error:
        if error.errno is None:
            raise
        _silence()
        return code or _failed(*_system_error(error))
    return code


def _guarded(arguments: Sequence[str] | None) -> int:
    try:
        result: Any = program.main(args=arguments, prog_name="ckstore", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return _USAGE
    except click.UsageError as error:
        return _failed(_usage(error), _USAGE)
    except click.ClickException as error:
        return _failed(error.format_message(), error.exit_code)
    except CkstoreError as error:
        return _failed(str(error), error.exit_code)
    except click.Abort:
        return _failed("interrupted; the store is consistent.", _INTERRUPTED)
    except (MemoryError, ImportError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        allowed = limit()
        return _failed("memory is used up; free some and try again." if allowed is None else too_little(allowed), 1)
    except OSError as error:
        if error.errno is None:
            raise
        return _failed(*_system_error(error))
    except UnicodeEncodeError as error:
        return _failed(f"{error.object!r} is not UTF-8; choose a name that is.", _USAGE)
    except SystemExit as error:
        # click has answered a shell's completion, and ends the process itself.
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return result if isinstance(result, int) else 0


def _lacks_memory(error: Exception) -> bool:
    """Return whether an error means too little memory; its type depends on the code that asked for memory."""
    said = ("can't start new thread", "failed to map segment", "cannot allocate memory")
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in said)


def _usage(error: click.UsageError) -> str:
    """Return click's message as one sentence with the remedy."""
    if isinstance(error, click.NoSuchOption) and error.option_name == "--store" and error.ctx is not None:
        return f"Put --store before the verb: `ckstore --store PATH {error.ctx.info_name}`."
    if isinstance(error, click.NoSuchOption) and error.option_name in _INSTEAD and error.ctx is not None:
        instead = _INSTEAD[error.option_name]
        if error.ctx.info_name in ("policy", "thin"):  # They keep versions by the same options.
            instead = instead.replace("forget", error.ctx.info_name)
        return f"There is no option {error.option_name}; write `{instead}`."
    message = error.format_message().replace("\n\t", " ")  # click lists choices on lines.
    if "`" in message or message.endswith("?"):
        return message
    verb = "ckstore" if error.ctx is None else error.ctx.command_path
    return f"{message.rstrip('.')}; see `{verb} --help`."


def _system_error(error: OSError) -> tuple[str, int]:
    """Return the sentence and the exit code of an error of the system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"No space for {error.filename or 'the output'}; free some and try again.", DiskFullError.exit_code
    if error.errno in DENIED and isinstance(error.filename, str):
        is_readable = os.access(error.filename, os.R_OK)
        return str(denied(error.filename, error, writing=is_readable or not os.path.exists(error.filename))), 1
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or os.strerror(error.errno or 0)}.", 1


def _failed(message: str, code: int) -> int:
    with suppress(OSError):  # The code tells of the error even if stderr takes nothing.
        print_failure(message)
    return code


def _silence() -> None:
    """Redirect stdout, which cannot be written to, so that the interpreter can flush it at exit."""
    if sys.stdout is None:
        return
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(descriptor, sys.stdout.fileno())
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)
