"""The generated pages of docs/reference equal the help of the verbs and the docstrings of the public names."""

from __future__ import annotations

import inspect

import pytest

import ckstore
from ckstore.cli.program import VERBS
from tools import reference


def test_the_pages_are_not_stale() -> None:
    for page, text in reference.pages().items():
        assert page.is_file(), "run tools/docs"
        assert page.read_text() == text, "run tools/docs"


def test_every_public_name_has_a_docstring() -> None:
    for name in ckstore.__all__:
        kind = getattr(ckstore, name)
        assert inspect.getdoc(kind), name
        for member, value in vars(kind).items() if inspect.isclass(kind) else ():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_documented(verb: str) -> None:
    page = reference.TARGET.read_text()
    assert f"\n## {verb}\n" in page
    assert f"[`{verb}`](#{verb})" in page
