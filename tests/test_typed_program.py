"""The program with types: it runs, and uses every public name. Its types are checked with the library's."""

from __future__ import annotations

import ast
from pathlib import Path

import ckstore
from tests import typed_program


def test_a_program_with_types_uses_every_public_name(tmp_path: Path) -> None:
    tree = ast.parse(Path(typed_program.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(ckstore.__all__) <= used
    typed_program.main(tmp_path)
