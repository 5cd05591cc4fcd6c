"""The common parts of all verbs: help with examples and exit codes, opening of the store, and names of versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from ckstore.cli.output import print_line
from ckstore.errors import CkstoreError, PartialError, UsageError
from ckstore.storage.names import BETWEEN

if TYPE_CHECKING:
    from ckstore.repository import Mode
    from ckstore.store import Store
    from ckstore.table import Table
    from ckstore.version import Version

#: Exit codes and their meanings.
EXIT_CODES = {
    0: "done",
    1: "error: damaged input or unreadable file",
    2: "invalid arguments",
    3: "partial success: some inputs failed",
    4: "integrity error: stored bytes are damaged",
    10: "no store found",
    11: "store locked by another process",
    12: "conflict: different content exists",
    13: "version, run, tag or tensor not found",
    14: "store written by a later version of ckstore",
    15: "object store unreachable",
    16: "disk full",
    130: "interrupted; the store is consistent",
}

#: Exit codes of all verbs, and those of all verbs that open a store.
_OF_ANY = (0, 1, 2, 16, 130)
_OF_ANY_STORE = (*_OF_ANY, 4, 10, 11, 14, 15)

VERSION_HELP = (
    "A VERSION is a number, a tag, `latest` (ingested last), `run@step`, `run@latest` or the name of a run (its "
    "highest step), best:METRIC (the lowest loss or error, the highest of other metrics), least:METRIC, most:METRIC, "
    "or at least the first four characters of an id. Verbs for several versions also take ranges A..B of one run: by "
    "step, or between two numbers by number, with both ends."
)


class Verb(click.Command):
    """A command whose help shows examples, each with its purpose, and ends with its exit codes.

    Those of any verb, and of any that opens an existing store, are added.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: Iterable[tuple[str, str]] = (),
        exit_codes: Iterable[int] = (),
        opens_store: bool = True,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self.examples = tuple(examples)
        self.exit_codes = tuple(sorted({*(_OF_ANY_STORE if opens_store else _OF_ANY), *exit_codes}))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; an error that names parameters of the API names the options."""
        try:
            return super().invoke(ctx)
        except CkstoreError as error:
            error.args = (with_options(str(error)),)
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, names of versions if relevant, and exit codes."""
        if self.examples:
            with formatter.section("Examples"):
                for line, meaning in self.examples:
                    formatter.write_text(f"# {meaning}")
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        if self.names_versions:
            with formatter.section("Versions"):
                formatter.write_text(VERSION_HELP)
        write_exit_codes(formatter, self.exit_codes)

    @property
    def names_versions(self) -> bool:
        """Whether an argument or option is the name of a version."""
        return any(isinstance(parameter.type, VersionName) for parameter in self.params)


def option(declaration: str, text: str, *, name: str | None = None, **settings: Any) -> Callable[..., Any]:
    """Return the decorator for an option such as `--keep-last N`; one without a metavar or a type is a flag."""
    flag, _, metavar = declaration.partition(" ")
    names = (flag,) if name is None else (flag, name)
    if not metavar and "type" not in settings:
        settings["is_flag"] = True
    return click.option(*names, metavar=metavar or None, help=text, **settings)


format_option = option(
    "--format FORMAT", "Print a table or csv.  [default: table]", type=click.Choice(("table", "csv")), name="form"
)


def with_options(text: str) -> str:
    """Return a sentence of the library with options in place of parameters: `--keep-last` for `keep_last`.

    Functions, which are in parentheses, are left out.
    """
    command = click.get_current_context().command
    names = {"store": "--store", "force": "`ckstore ingest --force`"}
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and parameter.name is not None:
            names[parameter.name] = parameter.make_metavar(click.Context(command)).strip("[].")
        for option in parameter.opts if isinstance(parameter, click.Option) else ():
            names[option.lstrip("-").replace("-", "_")] = names[str(parameter.name)] = option
    if "fidelity" in names:
        names["policy"] = names["fidelity"]
    return re.sub(r"`(\w+)`", lambda found: names.get(found[1], found[0]), re.sub(r" \(`\w+`\)", "", text))


def exit_for_failures(ctx: click.Context, errors: Sequence[CkstoreError], count: int, noun: str, done: str) -> None:
    """End the program after errors: with exit code 3 if others of `count` inputs succeeded, else with their code."""
    if errors and len(errors) < count:
        raise PartialError(f"{len(errors)} of {count} {noun} could not be {done}; the others were.")
    if errors:
        codes = {error.exit_code for error in errors}
        ctx.exit(codes.pop() if len(codes) == 1 else 1)


def write_exit_codes(formatter: click.HelpFormatter, codes: Iterable[int] | None) -> None:
    """Write the section of exit codes: the given ones, or all."""
    with formatter.section("Exit codes"):
        formatter.write_dl([(str(code), EXIT_CODES[code]) for code in codes or EXIT_CODES])


def verb(
    *examples: tuple[str, str], exit_codes: Iterable[int] = (), opens_store: bool = True
) -> Callable[[Callable[..., Any]], Verb]:
    """Turn a function into the verb named after its module; the parameters are those of `Verb`."""

    def made(function: Callable[..., Any]) -> Verb:
        name = function.__module__.rpartition(".")[2].replace("_", "-")
        given = {"examples": examples, "exit_codes": exit_codes, "opens_store": opens_store}
        return click.command(name, cls=Verb, **given)(function)

    return made


def store_path(ctx: click.Context) -> Path | str:
    """Return the store's directory or URL; one given with `--store` is checked when it is opened."""
    from ckstore.storage.root import find_store, place

    named = ctx.find_root().params.get("store")
    return find_store() if named is None else place(named)


def open_store(ctx: click.Context, mode: Mode = "r") -> Store:
    """Open the store of the command line; use it in `with`."""
    from ckstore.store import Store

    return Store(store_path(ctx), mode)


def tags_of(store: Store) -> dict[int, list[str]]:
    """Return the tags of tagged versions by number."""
    found: dict[int, list[str]] = {}
    for tag, version in store.tags().items():
        found.setdefault(version.number, []).append(tag)
    return found


def version_of(store: Store, name: str) -> Version:
    """Return the version with a name; if the name moves with every ingest, stderr shows its present meaning."""
    from ckstore.storage.names import LATEST

    version = store[name]
    run, _, step = name.strip().rpartition("@")
    if step == LATEST or (not run and step == version.run):
        meant = "" if version.name == name else f"{version.name}, "
        print_line(f"ckstore: {name} is {meant}version {version.number}.", err=True)
    return version


def note_runs(store: Store, names: Iterable[str], does: str) -> None:
    """Say of each name of a run that it means the last version."""
    for name in names:
        if name in store and (version := store[name]).run == name and name not in version.tags:
            count = len(store.versions(name))
            if count > 1:
                print_line(
                    f"ckstore: {name} is its last version, {version.name}; --run {name} {does} all {count}.", err=True
                )


class _Name(StringParamType):
    """A name in the store; the shell completes it."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names with this prefix."""
        try:
            with open_store(ctx) as store:
                found = self._known(store.log())
        except CkstoreError:
            return []
        return [CompletionItem(name, help=note) for name, note in found.items() if name.startswith(incomplete)]

    def _known(self, versions: Table) -> dict[str, str]:
        raise NotImplementedError


class VersionName(_Name):
    """The name of a version: a tag, a run, or a step of a run."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name; raise `UsageError` for a range where a verb takes two versions."""
        ends = str(value).partition(BETWEEN)
        if ctx is not None and param is not None and all(ends) and param.nargs == 1:
            verb = ctx.command
            if sum(isinstance(other.type, VersionName) and other.required for other in verb.params) == 2:
                raise UsageError(f"{value} is a range; write `ckstore {verb.name} {ends[0]} {ends[2]}`.")
        return value

    def _known(self, versions: Table) -> dict[str, str]:
        names = {"latest": "ingested last"}
        names |= {tag: f"tag of version {record['version']}" for record in versions for tag in record["tags"]}
        names |= {record["run"]: "highest step of the run" for record in versions}
        steps = [record for record in versions if record["step"] is not None]
        steps.sort(key=lambda record: not record["superseded"])
        return names | {f"{record['run']}@{record['step']}": f"version {record['version']}" for record in steps}


class RunName(_Name):
    """The name of a run."""

    name = "run"

    def _known(self, versions: Table) -> dict[str, str]:
        return {record["run"]: "run" for record in versions}


class TagName(_Name):
    """The name of a tag."""

    name = "tag"

    def _known(self, versions: Table) -> dict[str, str]:
        return {tag: "tag" for record in versions for tag in record["tags"]}
