"""Writes docs/reference/cli.md and python.md from help and docstrings, so that help and reference are one text."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from ckstore.cli.program import VERBS, program
from ckstore.cli.verb import VERSION_HELP, Verb
from tools import reference_python

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"

#: Exit codes of every verb, and of every verb that opens a store.
_OF_ANY, _OF_STORE = ({*Verb("any", opens_store=opens).exit_codes} for opens in (False, True))

_HEAD = """\
# Command line

<!-- Written by tools/docs from the help of the verbs; edit those. -->

`ckstore [--store PATH] VERB` works on the store that `--store` names, else on `$CKSTORE`, else on the nearest
`.ckstore` in the working directory or above it. An error is one sentence on stderr with the remedy;
[exit codes](errors.md#exit-codes) tell its kind. Every verb has {of_any}; verbs that open a store also have {of_store}.
Some verbs have more:

{further}

`ckstore VERB --help` shows more examples. Progress bars and colours appear on terminals only; `NO_COLOR` turns colours
off. All verbs except {without_json} take {json}
"""


def reference() -> str:
    """Return the whole page."""
    with click.Context(program, info_name="ckstore") as context:
        options = {name: dict(_options(context, name)) for name in VERBS}
        [(json, _)] = Counter(found["--json"] for found in options.values() if "--json" in found).most_common(1)
        without = ", ".join(f"`{name}`" for name, found in options.items() if "--json" not in found)
        commands = {name: _verb(context, name) for name in VERBS}
        codes = {"of_any": _codes(_OF_ANY), "of_store": _codes(_OF_STORE - _OF_ANY), "further": _further(commands)}
        common = f"`--json` ({json[0].lower()}{json[1:].rstrip('.')})."
        head = _HEAD.format(**codes, without_json=without, json=common)
        parts = [head, f"## Names of versions\n\n{VERSION_HELP}\n", _verbs()]
        for name, command in commands.items():
            listed = [f"* {line}" for line in _list(name, options, {("--json", json): ""})]
            parts.append("\n".join(_section(command, click.Context(command, context, name), listed)))
    return "\n".join(parts)


def pages() -> dict[Path, str]:
    """Return the texts of the generated pages by path."""
    return {TARGET: reference(), reference_python.TARGET: reference_python.reference()}


def _verb(context: click.Context, name: str) -> Verb:
    command = program.get_command(context, name)
    assert isinstance(command, Verb)
    return command


def _options(context: click.Context, name: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a verb as its help shows them, with their meanings."""
    command = _verb(context, name)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            record = parameter.get_help_record(click.Context(command, context, name))
            assert record is not None
            yield record[0], " ".join(record[1].split())


def _list(name: str, options: dict[str, dict[str, str]], told: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yield the options of a verb; options of an earlier verb are only named, under that verb."""
    for verb in [*options][: [*options].index(name)]:
        for option in options[verb].items():
            told.setdefault(option, verb)
    again: dict[str, list[str]] = {}
    for option in options[name].items():
        if option not in told:
            yield f"`{option[0]}`: {option[1]}"
        elif told[option]:
            again.setdefault(told[option], []).append(f"`{option[0]}`")
    for verb, names in again.items():
        yield f"As for [`{verb}`](#{verb}): {', '.join(names)}."


def _verbs() -> str:
    return f"## Verbs\n\n{', '.join(f'[`{name}`](#{name})' for name in VERBS)}.\n"


def _paragraphs(command: click.Command) -> list[str]:
    text = inspect.cleandoc(command.help or "")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def _section(command: Verb, context: click.Context, options: list[str]) -> Iterator[str]:
    usage = " ".join(["ckstore", str(command.name), *command.collect_usage_pieces(context)])
    yield f"## {command.name}"
    yield ""
    yield f"    {usage}"
    for paragraph in _paragraphs(command):
        yield ""
        yield paragraph
    if options:
        yield ""
        yield from options
    for line, meaning in command.examples[:1]:
        yield from ("", f"Example: `{line}` ({meaning}).", "")


def _further(commands: dict[str, Verb]) -> str:
    """Return sentences on the exit codes that only some verbs have."""
    verbs: dict[int, list[str]] = {}
    for name, command in commands.items():
        own = {*command.exit_codes}
        for code in own - (_OF_STORE if own >= _OF_STORE else _OF_ANY):
            verbs.setdefault(code, []).append(f"`{name}`")
    return "\n".join(f"* {code}: {', '.join(names)}" for code, names in sorted(verbs.items()))


def _codes(codes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(codes)))


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: tools/docs [--check]")
    for target, text in pages().items():
        if sys.argv[1:] != ["--check"]:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        elif not target.is_file() or target.read_text() != text:
            sys.exit(f"{target} is stale: run tools/docs")


if __name__ == "__main__":
    main()
