"""Runs programs that use a library, each in a process of its own."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked import run_forked


def run_with(library: str, program: str, tmp_path: Path, ranks: Sequence[dict[str, str]] = ({},)) -> None:
    """Run the ranks of a program in an empty directory, with another one for temporary files."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: `pip install --group frameworks`")
    place, temporary = tmp_path / "place", tmp_path / "temporary"
    place.mkdir()
    temporary.mkdir()
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    environments = [{**rank, "TMPDIR": str(temporary)} for rank in ranks]
    found = run_forked("torch", Path("../program.py"), *environments, cwd=place)
    assert [code for code, _ in found] == [0] * len(ranks), "\n".join(printed for _, printed in found)
