"""Typed paths as text and back, and globs over them.

Segments are joined by `/`; an integer is `[n]`. In string segments a few characters are percent-escaped (as UTF-8). So
every path has one text, every text at most one path, and no segment is a reserved name of Zarr or a file system.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import methodcaller
from typing import Any, cast

from ckstore.errors import UsageError
from ckstore.formats.layout import Path, Segment

#: `/`, `%`, `[`, the backslash (Zarr treats it as a slash), control characters, line separators, characters that change
#: the direction of text, lone surrogates.
_ESCAPED = re.compile("[/%\\[\\\\\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_ESCAPES = re.compile(r"(?:%[0-9A-F]{2})+")
_INTEGER = re.compile(r"\[(0|-?[1-9][0-9]{0,30})\]")
#: Matches segments that are their own text; most are.
_OWN_TEXT = r"(?!\.\.?(?:/|\Z)|__|zarr\.json(?:/|\Z))[A-Za-z0-9_.~#: -]+"
_PLAIN = re.compile(_OWN_TEXT).fullmatch
_ALL_PLAIN = re.compile(f"(?:{_OWN_TEXT}/)*+{_OWN_TEXT}").fullmatch
_SPLIT = methodcaller("split", "/")
#: Whole segments that are escaped by their first character; the empty one is written as a lone `%`.
_WHOLE = {"": "%", ".": "%2E", "..": "%2E%2E", "zarr.json": "%7Aarr.json"}

#: The maximal number of names in a sentence.
_SHOWN = 3

#: Texts whose paths are cached: the versions of a run have the same ones.
_TEXTS = 1 << 14


def path_to_text(path: Path) -> str:
    """Return the text of a typed path.

    Examples
    --------
    >>> path_to_text(("optimizer", "state", 0, "exp_avg")), path_to_text(("a/b", "[0]"))
    ('optimizer/state/[0]/exp_avg', 'a%2Fb/%5B0]')
    """
    return "/".join(map(_segment_to_text, path))


@lru_cache(_TEXTS)
def text_to_path(text: str) -> Path:
    """Return the typed path of a text; raise `UsageError` for an invalid text.

    Examples
    --------
    >>> text_to_path("state/[0]/exp_avg")
    ('state', 0, 'exp_avg')
    """
    if not text:
        return ()
    path = tuple(map(_text_to_segment, text.split("/")))
    if path_to_text(path) != text:
        raise UsageError(f"{text!r} is not a tensor path: `ckstore ls` lists valid paths.")
    return path


def texts_of(paths: Sequence[Path]) -> list[str]:
    """Return the texts of many typed paths, in less time than one by one.

    Examples
    --------
    >>> texts_of([("state", 0), ("a/b",)])
    ['state/[0]', 'a%2Fb']
    """
    if {*map(type, chain.from_iterable(paths))} == {str}:
        texts = list(map("/".join, cast("Sequence[tuple[str, ...]]", paths)))
        joined = "/".join(texts)
        if joined.count("/") + 1 == sum(map(len, paths)) and _ALL_PLAIN(joined):
            return texts
    known = {segment: segment for path in paths for segment in path if type(segment) is str and _PLAIN(segment)}
    segments = _Converted(_segment_to_text, known)
    return ["/".join(map(segments.__getitem__, path)) for path in paths]


def paths_of(texts: Sequence[str]) -> list[Path]:
    """Return the typed paths of many texts; raise `UsageError` for an invalid text.

    Examples
    --------
    >>> paths_of(["state/[0]", "a%2Fb"])
    [('state', 0), ('a/b',)]
    """
    joined = "/".join(texts)
    if _ALL_PLAIN(joined):
        return list(map(tuple, map(_SPLIT, texts)))
    known = {segment: segment for segment in joined.split("/") if _PLAIN(segment)}
    segments = _Converted(_checked_segment, known)
    return [tuple(map(segments.__getitem__, text.split("/"))) if text else () for text in texts]


def check_texts(texts: Sequence[str]) -> None:
    """Raise `UsageError` for an invalid text; see `paths_of`."""
    joined = "/".join(filter(None, texts))
    if not _ALL_PLAIN(joined):
        for segment in set(joined.split("/")) if joined else ():
            if not _PLAIN(segment):
                _checked_segment(segment)


class _Converted(dict[Any, Any]):
    """The converted forms of segments; a call of Python only for each that is not known."""

    def __init__(self, convert: Callable[[Any], Any], known: dict[Any, Any]) -> None:
        super().__init__(known)
        self._convert = convert

    def __missing__(self, segment: Any) -> Any:
        return self.setdefault(segment, self._convert(segment))


def _checked_segment(text: str) -> Segment:
    segment = _text_to_segment(text)
    if not text or _segment_to_text(segment) != text:
        raise UsageError(f"{text!r} is not a segment of a tensor path: `ckstore ls` lists valid paths.")
    return segment


def match_texts(texts: Iterable[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[int]:
    """Return the numbers of the path texts that an include glob matches (all without one) and no exclude glob.

    In globs `*` matches any characters, also `/`, and `?` matches one. All other characters match themselves, also `[`.
    A glob that matches a path also matches everything below it.
    """
    listed = list(texts)
    numbers: Iterable[int] = range(len(listed))
    if include:
        is_included = _globs(include)
        numbers = [number for number in numbers if is_included(listed[number])]
    if exclude:
        is_excluded = _globs(exclude)
        numbers = [number for number in numbers if not is_excluded(listed[number])]
    return list(numbers)


def literal_segments(pattern: str) -> list[str]:
    """Return the first segments of a glob without wildcards: every match is that path or lies below it.

    Examples
    --------
    >>> literal_segments("model/h.*/weight"), literal_segments("model/"), literal_segments("*/weight")
    (['model'], ['model'], [])
    """
    segments = pattern.rstrip("/").split("/")
    wild = [number for number, segment in enumerate(segments) if "*" in segment or "?" in segment]
    return segments[: wild[0]] if wild else segments


def _globs(patterns: Iterable[str]) -> Callable[[str], object]:
    """Return a function that matches a whole text against globs."""
    return re.compile("|".join(map(_glob, patterns)), re.DOTALL).fullmatch


def _glob(pattern: str) -> str:
    parts = re.split(r"(\*+|\?)", pattern.rstrip("/"))
    wild = {"*": ".*", "?": "."}
    expression = "".join(wild.get(part[:1], "") if index % 2 else re.escape(part) for index, part in enumerate(parts))
    return f"(?:{expression}(?:/.*)?)"


@lru_cache(_TEXTS, typed=True)
def _segment_to_text(segment: Segment) -> str:
    if isinstance(segment, int):
        return f"[{segment}]"
    if segment in _WHOLE:
        return _WHOLE[segment]
    text = _ESCAPED.sub(_escape, segment)
    return "%5F" + text[1:] if text.startswith("__") else text


def _escape(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode("utf-8", "surrogatepass"))


@lru_cache(_TEXTS)
def _text_to_segment(text: str) -> Segment:
    integer = _INTEGER.fullmatch(text)
    if integer:
        return int(integer.group(1))
    if text == "%":
        return ""
    try:
        return _ESCAPES.sub(_unescape, text)
    except UnicodeDecodeError:
        return text


def _unescape(match: re.Match[str]) -> str:
    return bytes.fromhex(match.group().replace("%", "")).decode("utf-8", "surrogatepass")


def listed(names: Iterable[str]) -> str:
    """Return names for a sentence: the first ones of many.

    Examples
    --------
    >>> listed("abcd")
    'a, b, c, …'
    """
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
