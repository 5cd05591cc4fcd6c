"""Names of runs and tags: one rule, so that no such name can be read as another name of a version.

The grammar of version names (`ckstore.storage.version_names`) and of ranges (`ckstore.retention.selection`) takes its
parts from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category, normalize

from msgspec import Meta

from ckstore.errors import UsageError
from ckstore.steps import step_of_text
from ckstore.storage.schema import rule

#: The name of the latest version, also of a run's after an @.
LATEST = "latest"
#: Separates a run from a step.
AT = "@"
#: Separates the ends of a range.
BETWEEN = ".."
#: A version by the extreme of a metric, perhaps of one run.
BY_METRIC = re.compile(r"(?:(.+)@)?(best|least|most):(.+)")
#: The beginning of an id.
ID_PREFIX = re.compile(r"[0-9a-f]{4,40}")
#: Longest name in bytes, as of a file.
LONGEST = 255
#: A name of a host, the purpose of a lease, and key and value of a row of `meta`.
Label = Annotated[str, Meta(pattern=r"\A[^\0]*\Z", max_length=LONGEST)]

#: Characters without a meaning yet: of patterns, and of ancestors as in git.
_RESERVED = "*?^~"
_HEXADECIMAL = re.compile(r"[0-9a-f]{4,}", re.IGNORECASE)
#: Words before a colon that have a meaning, or may get one; `ckstore:` begins the name of a version in other libraries.
_WORDS = "best|least|most|min|max|first|last|id|number|run|step|tag|version|ckstore"
_WORD = re.compile(rf"(?:{_WORDS}):", re.IGNORECASE)
_FORBIDDEN = re.compile(rf"[{re.escape(AT + _RESERVED)}]|\.{{2,}}|//+|:{{2,}}")
#: Bytes that a suggested name leaves for a number after it.
_ROOM = 8


@lru_cache(4096)
def objection(name: str) -> str:
    """Return the reason why a text cannot name a run or a tag, such as `is a number`; empty if it can.

    Examples
    --------
    >>> objection("gpt"), objection("17"), objection("0c7a"), objection("a..b")
    ('', 'is a number', 'could be the beginning of an id', 'has ..')
    """
    if not name:
        return "is empty"
    if not name.isprintable():
        return "has unprintable characters"
    if reason := _too_long(name):
        return reason
    if name != normalize("NFC", name):
        return "has letters and accents as separate characters"
    # Other forms of the same characters look alike: a number may have full-width digits.
    return next(filter(None, map(_misread, dict.fromkeys((name, normalize("NFKC", name))))), "")


def _too_long(name: str) -> str:
    """Return the reason why a text is too long for a name; empty if it is not."""
    return f"is longer than {LONGEST} bytes" if len(name.encode()) > LONGEST else ""


def _misread(name: str) -> str:
    """Return the meaning that a name has or may get besides a run or a tag."""
    if name != name.strip():
        return "has blanks at its ends"
    if found := _FORBIDDEN.search(name):
        return f"has {found[0]}"
    if name[0] in ".-/" or name[-1] in "./":
        return f"begins with {name[0]}" if name[0] in ".-/" else f"ends with {name[-1]}"
    if name.casefold() == LATEST:
        return "means the latest version"
    if found := _WORD.match(name):
        return f"begins with {found[0]}"
    if _is_number(name):
        return "is a number"
    return "could be the beginning of an id" if _HEXADECIMAL.fullmatch(name) else ""


def _is_number(name: str) -> bool:
    """Return whether a text is a number, in the notation of a step or another."""
    if step_of_text(name) is not None:
        return True
    try:
        float(name)
    except ValueError:
        return False
    return any(map(str.isnumeric, name))  # `nan` and `inf` are words.


def check_name(name: Any, kind: str) -> None:
    """Raise `UsageError` for a text that cannot name a `run` or a `tag`."""
    if not isinstance(name, str):
        raise UsageError(f"The name of a {kind} is text, not {name!r}; write {suggested(str(name), kind)!r}.")
    if len(name.encode(errors="surrogatepass")) > LONGEST:
        raise UsageError(
            f"A name of {len(name):,} characters ({name[:20]}…) is too long; choose one below {LONGEST + 1} bytes."
        )
    if reason := objection(name):
        near = suggested(name, kind)
        raise UsageError(f"{name!r} cannot name a {kind}: it {reason}; choose another, such as {near}.")


def suggested(name: str, before: str) -> str:
    """Return a name of a run or a tag that is like a text: of a long text, its end; if needed, `before` and the text.

    Examples
    --------
    >>> suggested("17", "run"), suggested("a..b", "run"), suggested("gpt", "run")
    ('run-17', 'a-b', 'gpt')
    """
    return next(one for one in _like(name, before) if not objection(one))


def _like(name: str, before: str) -> Iterator[str]:
    for form in ("NFC", "NFKC"):
        plain = _plain(normalize(form, name))
        yield plain
        if plain:
            yield _plain(f"{_plain(before)}-{plain}")
            yield _plain(f"run-{plain}")
    yield "tag-1" if before == "tag" else "run-1"


def _plain(name: str) -> str:
    """Return a text without characters that no name has; of a long text, its end."""
    name = _FORBIDDEN.sub("-", "".join(one if one.isprintable() else "-" for one in name))
    return name.encode()[_ROOM - LONGEST :].decode(errors="ignore").lstrip(" .-/").rstrip(" ./")


def _check_name(value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{type(value).__name__}`")
    if len(value) > LONGEST:  # The cache of `objection` would keep it.
        raise ValueError(f"{value[:20]!r}… is longer than {LONGEST} bytes, and cannot name a run or a tag")
    # A later Python may have written it, whose Unicode has more characters: those have no meaning in a name.
    known = value if value.isascii() else "".join("_" if category(one) == "Cn" else one for one in value)
    if reason := objection(known) or _too_long(value):
        raise ValueError(f"{value!r} {reason}, and cannot name a run or a tag")


if TYPE_CHECKING:
    Name = str
    Title = str
else:
    #: A name of a run or a tag.
    Name = rule(_check_name)
    #: A name of a run, or the empty one of the store.
    Title = rule(lambda value: _check_name(value) if value != "" else None)
