"""docs/reference/cli.md says what the verbs say."""

from __future__ import annotations

import pytest

from ckstore.cli.program import VERBS
from tools import reference


def test_the_page_is_not_stale() -> None:
    assert reference.TARGET.is_file(), "run tools/docs"
    assert reference.TARGET.read_text() == reference.reference(), "run tools/docs"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_documented(verb: str) -> None:
    page = reference.TARGET.read_text()
    assert f"\n## {verb}\n" in page
    assert f"[`{verb}`](#{verb})" in page
