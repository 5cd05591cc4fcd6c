"""Plain words: phrases of translated English are counted by area, and the counts may only fall."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

#: The phrases, each as a pattern that its own text does not match. Every one has a plainer substitute: a noun for
#: "what", "next to" for "beside", "again" for "anew", "N" for "so many".
PHRASES = re.compile(
    r"\bwhat\b|\bwho(?:ever)?\b|\bof which\b|\bso many\b|\bbe it\b|\bbeside\b|\banew\b|\bat hand\b|\bforetold\b"
    r"|\bforesee|\bstands?\b|\bmeanwhile\b|\bunder way\b|\bthose that\b|\bis there\b",
    re.IGNORECASE,
)

#: Globs of each area, and the largest number of phrases in it. A limit may only fall: lower it with the count.
AREAS = {
    "code": (["ckstore/**/*.py"], 0),
    "tools": (["tools/**/*"], 0),
    "docs": (["docs/**/*.md", "README.md", "CHANGELOG.md"], 0),
    "tests": (["tests/**/*.py"], 11),
}


def texts(patterns: list[str]) -> dict[str, str]:
    """Return the text files of an area by name, without this one."""
    found = {}
    for path in sorted({path for pattern in patterns for path in REPOSITORY.glob(pattern)}):
        if path.is_file() and path != Path(__file__) and "__pycache__" not in path.parts:
            found[path.relative_to(REPOSITORY).as_posix()] = path.read_text(encoding="utf-8")
    return found


@pytest.mark.parametrize("area", AREAS)
def test_the_number_of_phrases_only_falls(area: str) -> None:
    patterns, limit = AREAS[area]
    counts = {name: len(PHRASES.findall(text)) for name, text in texts(patterns).items()}
    worst = sorted(counts.items(), key=lambda item: -item[1])[:5]
    assert sum(counts.values()) <= limit, f"write {area} in plain words; most phrases are in {worst}"


def test_phrases_are_found() -> None:
    assert len(PHRASES.findall("What stands beside it, of which so many are made anew; somewhat standing.")) == 6
