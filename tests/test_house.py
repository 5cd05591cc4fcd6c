"""docs/contributing.md and the contracts of imports name the rooms, verbs and functions that are there."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.cli.program import VERBS

REPOSITORY = Path(__file__).resolve().parents[1]
ROOT = REPOSITORY / "ckstore"
PAGE = (REPOSITORY / "docs" / "contributing.md").read_text()

#: The page and the design documents, which name files and functions.
NAMING = [PAGE, *(path.read_text() for path in sorted((REPOSITORY / "docs" / "design").glob("*.md")))]

PSEUDOCODE = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))

#: Names of modules, and of their members, in the pages of pseudocode.
NAMED = re.compile(r"(?<![\w/.])((?:{})(?:\.\w+)+)".format("|".join(path.stem for path in sorted(ROOT.iterdir()))))


def contracts() -> dict[str, dict[str, Any]]:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        return {found["name"]: found for found in tomllib.load(file)["tool"]["importlinter"]["contracts"]}


def layers() -> list[list[str]]:
    """Return the rooms of each layer from the top; those in parentheses need not be there."""
    found = contracts()["A room imports only rooms below it"]["layers"]
    return [line.split(" | ") for line in found if not line.startswith("(")]


def sentence(path: Path) -> str:
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert text, f"{path} has no docstring"
    return text.splitlines()[0].removesuffix(".")


def rooms(name: str) -> list[str]:
    """Return a room and the packages in it."""
    path = ROOT / name
    return [name, *sorted(f"{name}/{inner.parent.name}" for inner in path.glob("*/__init__.py"))]


def test_the_map_has_every_room_with_its_level_and_its_sentence() -> None:
    shown = re.findall(r"^\* (\d+) `([\w/]+)`: (.+)$", PAGE, re.MULTILINE)
    there = [
        (str(level), room, sentence(ROOT / room))
        for level, names in enumerate(layers(), 1)
        for name in names
        for room in rooms(name)
    ]
    assert shown == there


def test_every_room_is_in_a_layer() -> None:
    listed = {name for names in layers() for name in names}
    assert listed == {found.name for found in pkgutil.iter_modules([str(ROOT)])}


def test_the_contract_of_verbs_has_all_of_them() -> None:
    listed = contracts()["Verbs of the command line do not know one another"]["modules"]
    assert listed == [f"ckstore.cli.{verb}" for verb in sorted(name.replace("-", "_") for name in VERBS)]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:ckstore|tests|tools|docs)/[^`\s]*)`", "".join(NAMING)))))
def test_files_named_on_the_pages_exist(path: str) -> None:
    assert (REPOSITORY / path).exists()


def test_members_named_in_design_documents_exist() -> None:
    sources = "".join(path.read_text() for path in ROOT.rglob("*.py"))
    for kind, member in re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", "".join(NAMING[1:])):
        assert re.search(rf"^class {kind}\b", sources, re.MULTILINE), kind
        assert not member or re.search(rf"^    def {member}\b", sources, re.MULTILINE), f"{kind}.{member}"


@pytest.mark.parametrize("name", sorted(set(NAMED.findall(PSEUDOCODE))))
def test_names_in_the_pseudocode_exist(name: str) -> None:
    parts = name.split(".")
    found: Any = ckstore
    for depth, part in enumerate(parts, 1):
        if (ROOT.joinpath(*parts[:depth])).is_dir() or ROOT.joinpath(*parts[:depth]).with_suffix(".py").is_file():
            found = importlib.import_module(".".join(["ckstore", *parts[:depth]]))
        else:
            found = getattr(found, part)


def test_no_modules_import_one_another() -> None:
    """Also for types alone, and within a room, where contracts of rooms do not look."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("ckstore", cache_dir=None)
    modules = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(modules).prepare()


def test_no_statement_numbers_its_parameters() -> None:
    """Python 3.12 warns of `?1` with a sequence of values (CPython 117995)."""
    assert [path for path in ROOT.rglob("*.py") if re.search(r"\?\d", path.read_text())] == []


def test_no_function_has_a_body_of_more_than_50_lines() -> None:
    """Without docstring, comments and blanks. ruff limits the branches."""
    long = {}
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[ast.get_docstring(node, clean=False) is not None :]
                last = node.end_lineno or 0
                found = [line.strip() for line in lines[body[0].lineno - 1 : last]] if body else []
                length = sum(line != "" and not line.startswith("#") for line in found)
                if length > 50:
                    long[f"{path.relative_to(ROOT)}: {node.name}"] = length
    assert not long


def test_type_checkers_see_every_public_name() -> None:
    body = ast.parse((ROOT / "__init__.py").read_text()).body
    [checked] = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(ckstore.__all__) <= imported
