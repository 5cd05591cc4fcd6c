"""Types of documents and rows, with ranges, lengths and patterns, against which msgspec checks all that is read.

A store is untrusted input: nothing is used before this gate has checked it. The type of a document is next to the code
that reads it. Errors name the field, as in ``Expected `int` >= 0 - at `$.files[0][1]` ``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta, Struct

from ckstore.errors import FormatVersionError
from ckstore.runtime import forks

#: The latest version of the format that this ckstore reads and writes.
FORMAT = 1
#: Limit of numbers of versions, elements, bytes and offsets, far above any real value.
LIMIT = 1 << 48
#: Limits of integers in SQLite and `stat`.
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
#: Integers up to this one can be compared with floats, and drawn.
_FLOAT = 1 << 1023
#: Levels of JSON in users' values.
DEPTH = 64
#: Fewer characters than an integer beyond the largest float has.
_SHORT = 300
#: The largest float.
LARGEST = sys.float_info.max

Whole = Annotated[int, Meta(ge=0, lt=LIMIT)]
Positive = Annotated[int, Meta(ge=1, lt=LIMIT)]
Integer = Annotated[int, Meta(ge=LOWEST, le=HIGHEST)]
#: An integer of 63 bits.
Natural = Annotated[int, Meta(ge=0, le=HIGHEST)]
#: Finite numbers.
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Size = Annotated[float, Meta(ge=0, le=LARGEST)]
Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z", max_length=1 << 26)]
Word = Annotated[str, Meta(pattern=r"\A[^\0]+\Z", max_length=1 << 26)]
#: A BLAKE3-20.
Id = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]
#: Format of `durable.timestamp`; times are compared as text.
Time = Annotated[str, Meta(pattern=r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z\Z")]
#: A truth value in SQLite.
Bit = Literal[0, 1]


class _Rule(type):
    """The metaclass of types with a rule: values stay as they are, and `isinstance` believes that they were checked."""

    def __instancecheck__(cls, value: object) -> bool:
        return True


def rule(check: Callable[[Any], None]) -> Any:
    """Return the type of the values for which a function raises no `ValueError`, for rules that msgspec lacks."""
    return _Rule("rule", (), {"check": staticmethod(check)})


def _check_plain(value: Any) -> None:
    """Check an object of JSON values: nested to `DEPTH` levels, with numbers in the range of a float."""
    if type(value) is not dict:
        raise ValueError(f"Expected `object`, got `{type(value).__name__}`")
    level: list[Any] = [value]
    texts: list[str] = []
    for _ in range(DEPTH):
        inner: list[Any] = []
        for item in level:
            if type(item) is dict:
                texts += item
                inner += item.values()
            elif type(item) is list:
                inner += item
            elif type(item) is str:
                texts.append(item)
            elif item is not None and type(item) not in (bool, int, float):
                raise ValueError(f"{type(item).__name__} is not a plain value")
            elif type(item) is int and not -_FLOAT < item < _FLOAT:
                raise ValueError("an integer is beyond the largest float")
        if not inner:
            break
        level = inner
    else:
        raise ValueError(f"it is nested more than {DEPTH} levels deep")
    if b"\0" in "".join(texts).encode():  # It raises an error for a lone surrogate.
        raise ValueError("a text has a NUL")


if TYPE_CHECKING:
    Plain = dict[str, Any]
else:
    Plain = rule(_check_plain)


def decode(data: str | bytes, kind: Any) -> Any:
    """Return a JSON text as a value of a type; raise `ValueError` if it is none. Unknown fields are ignored."""
    try:
        return (_decoders.get(kind) or _decoder(kind)).decode(data)
    except RecursionError:
        raise _deep() from None


def decode_plain(data: str) -> dict[str, Any]:
    """Return a JSON text as `Plain`.

    A short text without escapes has no number, no text and no depth that the rule refuses.
    """
    is_simple = len(data) <= _SHORT and "\\u" not in data and data.count("{") + data.count("[") < DEPTH
    found: dict[str, Any] = decode(data, dict[str, Any] if is_simple else Plain)
    return found


def check(value: Any, kind: Any) -> None:
    """Raise `ValueError` unless a value is of a type."""
    try:
        if kind not in _decoders:
            _decoder(kind)
        msgspec.convert(value, kind, dec_hook=_checked)
    except RecursionError:
        raise _deep() from None


def encode(value: Any) -> bytes:
    """Return a value as JSON; raise `ValueError` if a text has a lone surrogate or it is nested too deeply."""
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise _deep() from None


def rows(*columns: Any) -> type[Struct]:
    """Return the type of a list of one item, the rows of a query, from the types of the columns.

    It is a class, for which msgspec caches its analysis: of a type of tuples it would repeat it at each call.
    """
    return msgspec.defstruct("Rows", [("rows", list[tuple[columns]])], array_like=True)  # type: ignore[valid-type]


def fields(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Any:
    """Return the type of dictionaries with these fields; others are ignored."""
    kinds = {**required, **{name: NotRequired[kind] for name, kind in (optional or {}).items()}}
    return TypedDict("fields", kinds)  # type: ignore[operator]


def refuse_later(place: object, version: int, known: int, does: str = "reads") -> None:
    """Raise `FormatVersionError` if a version of the format is above the one that this ckstore knows."""
    if version > known:
        raise FormatVersionError(
            f"{place} has format {version}, this ckstore {does} up to {known}; install a later ckstore."
        )


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """Return a document as the one text that its digest is taken of."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def expanded_limit(stored: int) -> int:
    """Return the largest size that `stored` bytes may expand to: 1 MiB, and 128 times as many.

    Bytes with a higher ratio are stored uncompressed.
    """
    return (1 << 20) + 128 * stored


#: A decoder of each type that msgspec has analysed.
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = forks.Lock()


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder of a type.

    msgspec keeps its analysis of a class on the class before it is complete: another thread that used it then would
    crash. So one thread at a time analyses types, and types are used once they are analysed.
    """
    with _lock:
        if kind not in _decoders:
            _decoders[kind] = msgspec.json.Decoder(kind, dec_hook=_checked)
        return _decoders[kind]


def _checked(kind: Any, value: Any) -> Any:
    """Return a value of a type with a rule."""
    kind.check(value)
    return value


def _deep() -> ValueError:
    return ValueError("it is nested too deeply")
