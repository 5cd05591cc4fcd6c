"""Places that a mutant may change, and their changes."""

from __future__ import annotations

import ast

from tools.mutants import REPOSITORY, ROOMS, changed, places

SOURCE = '''
def least(values: list[int] | None = None, *, first: int = 0) -> int:
    """Add 1."""
    while values and values[0] < 2:
        values.pop()
    return first + 1
'''


def test_each_place_is_changed_once() -> None:
    mutants = [ast.unparse(changed(SOURCE, at)) for at in range(len(places(SOURCE)))]
    for code in ("first: int=1", "values or values[0]", "values[1] <", "<= 2", "< 3", "pass", "first - 1", "first + 2"):
        assert sum(code in mutant for mutant in mutants) == 1, code
    assert len(set(mutants)) == len(mutants) == 8


def test_rooms_exist() -> None:
    for modules, tests in ROOMS.values():
        for path in (*(f"ckstore/{module}.py" for module in modules), *tests):
            assert REPOSITORY.joinpath(path).exists(), path
