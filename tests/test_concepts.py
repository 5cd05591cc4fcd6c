"""The concepts of ckstore are counted, and the counts are at most those of docs/decisions.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

import ckstore
from ckstore.cli.program import VERBS, program
from ckstore.objects.records import KINDS
from ckstore.storage.catalog import Catalog
from ckstore.storage.log_files import RECORDS
from ckstore.storage.remote.calls import CALLS

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = sorted((REPOSITORY / "ckstore").rglob("*.py"))

#: Pages that programs write from docstrings, help and measurements.
GENERATED = {"reference/python.md", "reference/cli.md", "schemes.md"}

#: Nodes that may have a docstring.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def options() -> set[str]:
    """Return the long names of the options of all verbs."""
    with click.Context(program) as context:
        commands = [program.get_command(context, verb) for verb in VERBS]
    found = [option for command in commands if command is not None for option in command.params]
    return {max(option.opts, key=len) for option in found if isinstance(option, click.Option)}


def catalog_calls() -> set[str]:
    """Return the public methods of the catalog that rooms above storage name."""
    public = {name for name in dir(Catalog) if not name.startswith("_")}
    above = [ast.parse(path.read_text()) for path in SOURCES if "storage" not in path.parts]
    nodes = (node for tree in above for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if node.attr in public and ast.unparse(node.value).endswith("catalog")}


def lines_of_code(source: str) -> int:
    """Return the number of lines without docstrings, comments, blanks and imports."""
    numbered = enumerate(source.splitlines(), 1)
    lines = {number for number, line in numbered if line.strip() and not line.lstrip().startswith("#")}
    for node in not_code(ast.parse(source)):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def not_code(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def counts() -> dict[str, int]:
    glossary = (REPOSITORY / "docs" / "reference" / "glossary.md").read_text()
    return {
        "kinds of records": len(KINDS),
        "kinds of log records": len(RECORDS),
        "calls in a bucket's log": len(CALLS),
        "methods of the catalog used above storage": len(catalog_calls()),
        "public names": len(ckstore.__all__),
        "verbs": len(VERBS),
        "options": len(options()),
        "terms of the glossary": len(re.findall(r"^\* \*\*", glossary, re.MULTILINE)),
        "modules": sum(path.name != "__init__.py" for path in SOURCES),
        "lines of Python": sum(lines_of_code(path.read_text()) for path in SOURCES),
        "words in docs": words_of_pages(),
    }


def words_of_pages() -> int:
    """Return the number of words of the pages that people write, tables and examples among them."""
    docs = REPOSITORY / "docs"
    pages = (path for path in docs.rglob("*.md") if path.relative_to(docs).as_posix() not in GENERATED)
    return sum(len(page.read_text().split()) for page in pages)


def limits() -> dict[str, int]:
    """Return the limits that docs/decisions.md states under Concepts."""
    page = (REPOSITORY / "docs" / "decisions.md").read_text()
    section = page.partition("\n### Concepts\n")[2].partition("\n### ")[0]
    found = re.findall(r"^\* ([^:]+): ([0-9,]+)", section, re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in found}


def test_no_concept_is_added_without_a_decision() -> None:
    found, most = counts(), limits()
    assert found.keys() == most.keys()
    grown = {name: (most[name], count) for name, count in found.items() if count > most[name]}
    assert not grown, "take something away, or state the new number and its reason in docs/decisions.md under Concepts"


def test_lines_of_code_are_counted_without_the_rest() -> None:
    source = (
        '"""Text."""\nimport re\n\n# A comment.\ndef find(text):\n    """Find."""\n    return re.find(\n        text)\n'
    )
    assert lines_of_code(source) == 3
