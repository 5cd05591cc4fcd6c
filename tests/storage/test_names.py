"""The names of runs and tags: none can be read as another name of a version."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import NotFoundError, UsageError
from ckstore.integrations.names import run_and_step, version_name
from ckstore.retention.selection import _cuts, select_versions
from ckstore.steps import step_of_text
from ckstore.storage.names import AT, BETWEEN, LATEST, LONGEST, Name, Title, check_name, objection, suggested
from ckstore.storage.remote.calls import check_calls
from ckstore.storage.rows import VersionRow
from ckstore.storage.schema import check
from ckstore.storage.version_names import resolve

pytestmark = pytest.mark.local

#: What may be asked of the catalog for a name, besides a tag and a run of that name.
ROW = VersionRow(
    7, "0c7a" + "0" * 36, "gpt", 3, None, "2026-07-01T12:00:00.000000Z", "p", 0, 0, 0, 0, 0, 0, 0, 0, 1.0, True,
    "exact", metrics={"x": 1.0},
)  # fmt: skip


class Everything:
    """A catalog that has every version, by every kind of name, but one run and no tag of a name."""

    def __init__(self, without: str = "") -> None:
        self.without = without

    def version(self, number: int) -> VersionRow:
        return ROW

    def versions(self, run: str | None = None) -> list[VersionRow]:
        return [ROW]

    def runs(self) -> list[object]:
        return []

    def tags(self) -> dict[str, int]:
        return {}

    def tagged(self, tag: str) -> int | None:
        return None

    def latest(self) -> VersionRow | None:
        return ROW

    def highest(self, run: str) -> VersionRow | None:
        return None if run == self.without else ROW

    def at_step(self, run: str, step: int) -> VersionRow | None:
        return ROW

    def extreme(self, metric: str, run: str | None, *, lowest: bool) -> VersionRow | None:
        return ROW

    def with_uid(self, prefix: str) -> list[VersionRow]:
        return [ROW]

    def resolve(self, spec: str | int) -> VersionRow:
        return resolve(self, spec)  # type: ignore[arg-type]

    def last_number(self) -> int:
        return 1 << 60


CHOSEN = ["gpt", "main", "a.b", "a/b", "lr=0.1,seed=3", "best", "last", "step-100", "2026-07-01T12:00:00", "v1.2",
          "ü", "café", "ab", "ada", "gpt 2", "nan", "inf", "日本", "llama3:8b", "prod:v1", "r|<b>", "run#3", "0x",
          "e"]  # fmt: skip
REFUSED = {
    "": "is empty", "0": "is a number", "17": "is a number", "+3": "is a number", "1_000": "is a number",
    "10k": "is a number", "1e5": "is a number", "0.1": "is a number", "-3": "begins with -", "٣": "is a number",
    "１２": "is a number", "²": "is a number", "0c7a": "could be the beginning of an id",
    "FACE": "could be the beginning of an id", "deadbeef": "could be the beginning of an id",
    "f" * 64: "could be the beginning of an id", "latest": "means the latest version",
    "Latest": "means the latest version", "ｌａｔｅｓｔ": "means the latest version",
    "best:val_loss": "begins with best:", "least:x": "begins with least:", "most:x": "begins with most:",
    "Best:x": "begins with Best:", "id:3": "begins with id:", "ckstore:gpt": "begins with ckstore:", "a..b": "has ..",
    ".": "begins with .", "..": "has ..", ".hidden": "begins with .", "a.": "ends with .", "…": "has ...",
    "@": "has @", "gpt@3": "has @", "gpt＠3": "has @", "gpt~1": "has ~", "gpt^": "has ^", "gpt*": "has *",
    "gpt?": "has ?", "-x": "begins with -", "/a": "begins with /", "a/": "ends with /", "a//b": "has //",
    "a::b": "has ::", " a": "has blanks at its ends", "a\n": "has unprintable characters",
    "a\u202eb": "has unprintable characters", "a\u200bb": "has unprintable characters",
    "\ud800": "has unprintable characters", "cafe\u0301": "has letters and accents as separate characters",
    "x" * 256: "is longer than 255 bytes", "ü" * 128: "is longer than 255 bytes",
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_names_to_choose(name: str) -> None:
    assert objection(name) == ""
    for kind in ("run", "tag"):
        check_name(name, kind)
        assert suggested(name, kind) == name
    check([name], list[Name])


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["run", "tag"])
def test_names_with_another_meaning(name: str, kind: str) -> None:
    assert objection(name) == REFUSED[name]
    with pytest.raises(UsageError) as caught:
        check_name(name, kind)
    sentence = str(caught.value)
    assert len(sentence) < 300
    assert sentence.count("\n") == 0
    assert caught.value.exit_code == 2
    if len(name) < LONGEST // 2:
        assert f"cannot name a {kind}: it {REFUSED[name]}; choose another, such as " in sentence
    if not any(map(str.isalnum, name)):
        assert sentence.endswith(f" {kind}-1.")
    with pytest.raises(ValueError, match="cannot name a run or a tag"):
        check(["fine", name], list[Name])


@pytest.mark.parametrize(("name", "near"), [(3, "'run-3'"), (None, "'None'"), (b"x", "\"b'x'\""), (2.5, "'run-2.5'")])
def test_a_name_is_text(name: object, near: str) -> None:
    with pytest.raises(UsageError, match=f"name of a run is text, not {re.escape(repr(name))}; write {near}"):
        check_name(name, "run")
    with pytest.raises(ValueError, match="Expected `str`"):
        check([name], list[Name])


@pytest.mark.parametrize(
    "call",
    [
        ["set_tag", {"name": "n" * (1 << 20), "number": 1}],
        ["set_policy", {"run": "n" * (1 << 20), "text": None}],
        ["use_packs", {"number": 1, "uses": [["0" * 40 + ".zip", "0," * (1 << 20) + "0"]]}],
    ],
)
def test_a_long_name_in_a_log_is_neither_kept_nor_quoted(call: list[Any]) -> None:
    known = objection.cache_info().currsize
    with pytest.raises(ValueError, match=r"255 bytes|<= 16000") as problem:
        check_calls([call])
    assert len(str(problem.value)) < 200
    assert objection.cache_info().currsize == known


def test_the_store_has_the_empty_name_in_policies() -> None:
    check(["", "gpt"], list[Title])
    with pytest.raises(ValueError, match="'17' is a number"):
        check(["", "17"], list[Title])


#: A character that no version of Unicode has.
UNASSIGNED = "\U00040000"


def test_a_stored_name_may_have_characters_of_a_later_unicode() -> None:
    """A later Python knows them, so that a name was given; an earlier one must not call the store damaged."""
    with pytest.raises(UsageError, match="unprintable"):
        check_name(UNASSIGNED, "run")
    for kind in (list[Name], list[Title]):
        check([f"a{UNASSIGNED}"], kind)
        for wrong in (
            f"{UNASSIGNED}..",
            f"\0{UNASSIGNED}",
            f"\x1b{UNASSIGNED}",
            UNASSIGNED * LONGEST,
            f"{UNASSIGNED}\ud800",
        ):
            with pytest.raises(ValueError, match=r"cannot name|surrogates"):
                check([wrong], kind)


#: The grammar of names of versions, without those of runs and tags.
NUMBERS = st.one_of(st.integers(0, 1 << 70).map(str), st.text("0123456789", min_size=1, max_size=30))
IDS = st.text("0123456789abcdefABCDEF", min_size=4, max_size=40)
METRICS = st.builds(
    "{}{}:{}".format, st.sampled_from(["", "gpt@"]), st.sampled_from(["best", "least", "most"]), st.text(min_size=1)
)
STEPS = st.one_of(st.integers(-100, 1 << 62).map(str), st.sampled_from(["10k", "1e5", "1_000", "3.0", LATEST]))
OF_RUNS = st.builds(f"{{}}{AT}{{}}".format, st.text(), STEPS)
SINGLE = st.one_of(NUMBERS, IDS, st.just(LATEST), METRICS, OF_RUNS)
RANGES = st.builds(f"{{}}{BETWEEN}{{}}".format, SINGLE, SINGLE)
BLANK = st.builds("{}{}{}".format, st.sampled_from(["", " "]), st.one_of(SINGLE, RANGES), st.sampled_from(["", " "]))


@given(name=BLANK)
def test_no_other_name_of_a_version_names_a_run_or_a_tag(name: str) -> None:
    assert objection(name)


#: Parts of the grammar in any order, so that much of it looks like a name of another kind.
PARTS = st.lists(
    st.one_of(
        st.sampled_from([*"0123456789abcdef@.:/-~ ", "..", "latest", "best:", "gpt", "e5", "k", "ü", "＠", "１", "∙"]),
        st.characters(),
    ),
    min_size=1,
    max_size=8,
).map("".join)
ACCEPTED = PARTS.map(lambda text: suggested(text, "run"))


def test_the_catalog_of_this_test_has_every_other_name() -> None:
    for name in ("7", LATEST, "gpt@3", f"gpt@{LATEST}", "gpt@best:x", "best:x", "0c7a", "0C7A", "x@1e5"):
        assert resolve(Everything(name), name) is ROW, name  # type: ignore[arg-type]


@given(name=ACCEPTED)
def test_a_name_of_a_run_or_a_tag_has_no_other_meaning(name: str) -> None:
    for text in (name, unicodedata.normalize("NFKC", name)):
        catalog = Everything(text)
        with pytest.raises(NotFoundError):
            resolve(catalog, text)  # type: ignore[arg-type]
        with pytest.raises(NotFoundError):
            select_versions(catalog, [text])  # type: ignore[arg-type]
    assert version_name(name) is None
    assert version_name(f"ckstore:{name}") == name
    assert run_and_step(name) == (name, None)
    assert run_and_step(f"{name}@3") == (name, 3)
    assert step_of_text(name) is None
    assert not name.startswith("-")
    assert "::" not in name


@given(first=ACCEPTED, second=ACCEPTED)
def test_a_range_of_names_has_two_ends(first: str, second: str) -> None:
    assert list(_cuts(f"{first}{BETWEEN}{second}")) == [(first, second)]
    assert list(_cuts(f"{first}@1{BETWEEN}{second}@2")) == [(f"{first}@1", f"{second}@2")]


@given(name=st.one_of(PARTS, BLANK, st.text()), before=st.one_of(st.just("run"), PARTS))
def test_a_suggested_name_is_a_name(name: str, before: str) -> None:
    near = suggested(name, before)
    assert objection(near) == ""
    assert len(near.encode()) <= LONGEST
    if not objection(name) and len(name.encode()) < LONGEST - 8:
        assert near == name
