"""Places that a mutant may change, and their changes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools.mutants import REPOSITORY, ROOMS, apply, changed, places, span

SOURCE = '''
LIMIT = 2
def least(values: list[int] | None = None, *, first: int = 0) -> int:
    """Add 1."""
    while values and values[0] < LIMIT:
        values.pop()
    return first + 1
'''


def test_each_place_is_changed_once() -> None:
    mutants = [ast.unparse(changed(SOURCE, at)) for at in range(len(places(SOURCE)))]
    for code in (
        "first: int=1",
        "values or values[0]",
        "values[1] <",
        "<= LIM",
        "= 3",
        "pass",
        "first - 1",
        "first + 2",
    ):
        assert sum(code in mutant for mutant in mutants) == 1, code
    assert len(set(mutants)) == len(mutants) == 8


def test_tests_are_chosen_by_the_lines_of_a_place() -> None:
    assert [(found.start, found.stop) for found in (span(SOURCE, line) for line in (2, 3, 5, 6, 7))] == [
        (0, len(SOURCE)), (3, 8), (5, 6), (6, 7), (7, 8),
    ]  # fmt: skip


def test_imported_code_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "least.py"
    path.write_text(SOURCE)
    found = []
    for at in range(len(places(SOURCE))):
        module = ModuleType("ckstore.least")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "ckstore.least", module)
        exec(compile(SOURCE, path, "exec"), vars(module))
        apply(path, at)
        values = [2, 1]
        try:
            found.append((module.LIMIT, module.least(values), len(values)))
        except IndexError:
            found.append("IndexError")
    assert sorted(map(str, found)) == [
        "(2, -1, 2)", "(2, 1, 0)", "(2, 1, 2)", "(2, 2, 2)", "(2, 2, 2)", "(3, 1, 0)", "IndexError", "IndexError",
    ]  # fmt: skip


def test_rooms_exist() -> None:
    for modules, tests in ROOMS.values():
        for path in (*(f"ckstore/{module}.py" for module in modules), *tests):
            file, _, test = path.partition("::")
            assert REPOSITORY.joinpath(file).exists(), path
            assert not test or f"\ndef {test}(" in REPOSITORY.joinpath(file).read_text(), path
