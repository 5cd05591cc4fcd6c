"""Typed paths and their texts: one to one, whatever the segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import UsageError
from ckstore.formats.paths import match_texts, path_to_text, paths_of, text_to_path, texts_of

SPECIAL = [
    "",
    ".",
    "..",
    "...",
    "/",
    "%",
    "%2F",
    "[0]",
    "[",
    "__a",
    "_",
    "__",
    "zarr.json",
    "\ud800",
    "a\x00b",
    "0",
    "c",
]
segments = st.one_of(
    st.text(), st.integers(-(2**63), 2**64), st.sampled_from(SPECIAL), st.text(alphabet="/%[]_.0a\ud800\udc00")
)
paths = st.lists(segments, max_size=5).map(tuple)


@given(paths)
def test_text_and_back(path: tuple[str | int, ...]) -> None:
    text = path_to_text(path)
    assert text_to_path(text) == path
    assert [type(segment) for segment in text_to_path(text)] == [type(segment) for segment in path]
    text.encode("utf-8")


@given(paths.filter(bool))
def test_no_segment_is_a_reserved_name(path: tuple[str | int, ...]) -> None:
    for segment in path_to_text(path).split("/"):
        assert segment not in ("", ".", "..", "zarr.json")
        assert not segment.startswith("__")
        assert all(ord(character) >= 0x20 for character in segment)


@given(st.text(alphabet="/%[]_.0123456789ABCDEFabz-é"))
def test_every_text_is_of_one_path_or_refused(text: str) -> None:
    try:
        path = text_to_path(text)
    except UsageError:
        return
    assert path_to_text(path) == text


@pytest.mark.parametrize(
    "text", ["a//b", "/a", "a/", "[01]", "[x]", "[-0]", "%2f", "%41", "%ZZ", "__a", "%FF", ".", "a/.."]
)
def test_texts_of_no_path(text: str) -> None:
    with pytest.raises(UsageError):
        text_to_path(text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("optimizer", "state", 0, "exp_avg"), "optimizer/state/[0]/exp_avg"),
        (("a.b",), "a.b"),
        (("a", "b"), "a/b"),
        (("a/b", "50%", "[0]"), "a%2Fb/50%25/%5B0]"),
        (("__a", "", ".", "..", "zarr.json"), "%5F_a/%/%2E/%2E%2E/%7Aarr.json"),
        ((-3,), "[-3]"),
        ((), ""),
    ],
)
def test_examples(path: tuple[str | int, ...], text: str) -> None:
    assert path_to_text(path) == text


def test_globs() -> None:
    listed = ["model/w", "model/h.0/b", "state/[0]/m", "state/[10]/m", "models", "model"]
    assert match_texts(listed) == [0, 1, 2, 3, 4, 5]
    assert match_texts(listed, ["model/*"]) == [0, 1]
    assert match_texts(listed, ["model"]) == [0, 1, 5]
    assert match_texts(listed, ["state/[0]/*"]) == [2]
    assert match_texts(listed, ["state/[?]/m"]) == [2]
    assert match_texts(listed, ["*/m", "models"]) == [2, 3, 4]
    assert match_texts(listed, ["model*"], ["*/b", "models"]) == [0, 5]
    assert match_texts(listed, exclude=["**"]) == []


TEXTS = [
    "a/b", "..", "a/../b", "./a", "a/.", "__x", "a/__x", "zarr.json", "a/zarr.json/b", "zarr.jsonx", "a//b", "/a", "a/",
    "...", ".a", "a/[0]", "[-0]", "%", "%41", "",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_many_texts_are_read_as_one(text: str) -> None:
    try:
        expected = text_to_path(text)
    except UsageError:
        for others in ([], ["plain"]):
            with pytest.raises(UsageError):
                paths_of([*others, text])
        return
    assert paths_of([text]) == [expected]
    assert paths_of(["plain/text", text]) == [("plain", "text"), expected]
    assert texts_of([("x", 1), expected]) == ["x/[1]", text]
