"""docs/reference/limits.md states the bounds in the code: each value, and none is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckstore.storage.schema import expanded_limit

REPOSITORY = Path(__file__).resolve().parents[1]
LIBRARY = REPOSITORY / "ckstore"
PAGE = " ".join((REPOSITORY / "docs" / "reference" / "limits.md").read_text().split())

#: A number, its unit or a few words, and the constant: `30 s (`storage.connection.BUSY_TIMEOUT`)`.
STATED = re.compile(r"([\d,.]+)(?:\^(\d+))?( − 1)?((?: [A-Za-z]+| -of-N)*),? \(?`(\w+(?:\.\w+)+)`")
#: A member of an enumeration in C.
ENUMERATED = re.compile(r"^    ([A-Z_]+) = (\d+),", re.MULTILINE)
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "days": 24 * 3600}

#: Names of constants that are bounds.
BOUND = re.compile(
    r"_?(\w*_)?(MAX|MOST|LARGEST|LONGEST|DEEPEST|DEPTH|LIMIT|PATIENCE|TIMEOUT|GRACE|TRIES|STEPS|AHEAD|SECONDS)(_\w+)?"
)

#: Constants with such names that bound no input: sizes of buffers, pauses, forms of numbers, and fractions.
OTHERS = {
    "codecs.integer_header._LONGEST", "encoding.coarse._LARGEST_STEP", "encoding.value_roles._LARGEST_RATIO",
    "formats.detect._MAX_MESSAGE", "formats.torch.live_state._KEY_DEPTH",
    "formats.torch.pickle_writer._CALL_DEPTH", "objects.layouts._LONGEST_KIND", "scanning.marked._LONGEST",
    "formats.zip_directory._MAX_COMMENT", "integrations.apart._LONGEST", "intake.watching._PATIENCE",
    "lineage.search.STEPS", "reading.known_types._LARGEST_INTEGER", "reading.known_types._LONGEST_KEY",
    "report.findings._MOST", "report.numbers._LARGEST", "report.statistics._LARGEST_MATRIX", "runtime.blocks._MOST",
    "runtime.scratch._LARGEST", "runtime.zip_records.LIMIT", "steps._MOST_DIGITS",
    "storage.connection._LONGEST_PAUSE",
    "storage.connection._STEPS_AT_ONCE", "storage.pack_reader._LARGEST_READ", "storage.placements._LARGEST_RECENT",
    "storage.version_names._LARGEST_NUMBER",
    "varint.LONGEST",
}  # fmt: skip


def stated() -> dict[str, Fraction]:
    """Return the values on the page by constant."""
    found = {}
    for number, power, less, words, name in STATED.findall(PAGE):
        value = Fraction(number.replace(",", "")) ** int(power or 1)
        found[name] = value * UNITS.get((words.split() or [""])[0], 1) - bool(less)
    return found


@cache
def constants(module: str) -> dict[str, Any]:
    """Return the constants of a module, or a header, whose source says their number; tests alter some of them."""
    path = LIBRARY / f"{module.replace('.', '/')}.py"
    package = path.with_suffix("") / "__init__.py"
    if package.exists():
        path = package
    elif not path.exists():
        return {name: int(number) for name, number in ENUMERATED.findall(path.with_suffix(".h").read_text())}
    tree = ast.parse(path.read_text())
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            with suppress(Exception):
                exec(compile(ast.Module([node], []), module, "exec"), {"__builtins__": {}}, found)
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def bounds() -> Iterator[str]:
    """Yield the constants of the library whose names are those of bounds."""
    for path in sorted(LIBRARY.rglob("*.py")):
        module = ".".join(path.relative_to(LIBRARY).with_suffix("").parts).removesuffix(".__init__")
        yield from (f"{module}.{name}" for name in constants(module) if BOUND.fullmatch(name))


@pytest.mark.parametrize(("name", "value"), sorted(stated().items()))
def test_the_page_has_the_values_of_the_code(name: str, value: Fraction) -> None:
    module, _, constant = name.rpartition(".")
    assert value == constants(module)[constant]


def test_the_page_has_the_expansion_of_documents() -> None:
    assert "1 MiB and 128 times their stored bytes" in PAGE
    assert expanded_limit(3) == (1 << 20) + 128 * 3


def test_every_constant_on_the_page_has_a_value() -> None:
    assert set(re.findall(r"`(\w+(?:\.\w+)*\.\w*[A-Z]\w*)`", PAGE)) - stated().keys() == set()


def test_the_page_has_every_bound() -> None:
    assert set(bounds()) - stated().keys() == OTHERS
