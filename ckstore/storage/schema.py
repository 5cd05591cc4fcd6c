"""Schemas of documents: types, ranges, lengths, depth. Every document is checked before any other code sees it.

A store is untrusted input. Each kind of document has its schema next to the code that reads it, such as

    files = rows(text(), whole(), optional(whole()))

A schema checks a column, the values of one field in all rows, at once: a list of a hundred thousand tensors costs as
many calls as one of three. Errors name the value, as in ``files: size: -1 is not a whole number from 0 to 9``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import isfinite
from reprlib import repr as shown
from typing import Any

#: Checks a column of values; raises `ValueError` for an invalid one.
Schema = Callable[[Sequence[Any]], None]

#: Limit of numbers of versions, elements, bytes and offsets, far above any real value.
LIMIT = 1 << 48
#: Limits of integers in SQLite and `stat`.
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
#: Integers up to this one can be compared with floats, and drawn.
_FLOAT = 1 << 1023
#: Levels of JSON in users' values.
DEPTH = 64
#: Largest number of characters of a string that is not a name.
_LONGEST = 1 << 26
_HEXADECIMAL = "0123456789abcdef"


def read_json(data: str | bytes, schema: Schema) -> Any:
    """Parse a JSON text and check it; raise `ValueError` if it is invalid."""
    try:
        document = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    schema([document])
    return document


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """Return a document as the one text that its digest is taken of."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def expanded_limit(stored: int) -> int:
    """Return the largest size that `stored` bytes may expand to: 1 MiB, and 128 times as many.

    Bytes with a higher ratio are stored uncompressed.
    """
    return (1 << 20) + 128 * stored


def anything(_: Sequence[Any]) -> None:
    """Accept any value, which is checked elsewhere."""


def _one_by_one(is_right: Callable[[Sequence[Any]], bool], noun: str) -> Schema:
    """Return a schema from a test of a whole column; its error names the first failing value."""

    def check(column: Sequence[Any]) -> None:
        if column and not is_right(column):
            raise ValueError(f"{shown(next(value for value in column if not is_right([value])))} is not {noun}")

    return check


def whole(first: int = 0, last: int = LIMIT - 1) -> Schema:
    """Accept integers from `first` to `last`."""
    return _one_by_one(
        lambda column: set(map(type, column)) == {int} and min(column) >= first and max(column) <= last,
        f"a whole number from {first} to {last}",
    )


def _is_finite(column: Sequence[Any]) -> bool:
    try:
        return set(map(type, column)) <= {int, float} and all(map(isfinite, column))
    except OverflowError:
        return False


def number(first: float = float("-inf"), last: float = float("inf")) -> Schema:
    """Accept finite numbers from `first` to `last`."""
    return _one_by_one(
        lambda column: _is_finite(column) and min(column) >= first and max(column) <= last, "a number in its range"
    )


def real(first: float = float("-inf")) -> Schema:
    """Accept numbers from `first` on, infinity and NaN included."""
    return _one_by_one(
        lambda column: set(map(type, column)) <= {int, float} and not any(value < first for value in column),
        f"a number from {first} on",
    )


def _is_text(column: Sequence[Any]) -> bool:
    if set(map(type, column)) != {str}:
        return False
    joined = "".join(column)
    if "\0" in joined:
        return False
    try:
        return joined.isascii() or bool(joined.encode())
    except UnicodeEncodeError:
        return False


def text(first: int = 0, last: int = _LONGEST) -> Schema:
    """Accept strings of `first` to `last` characters, without NUL and lone surrogates."""
    return _one_by_one(
        lambda column: _is_text(column) and first <= min(map(len, column)) <= max(map(len, column)) <= last,
        f"a text of {first} to {last} characters",
    )


def hexadecimal(digits: int) -> Schema:
    """Accept strings of `digits` lower-case hexadecimal digits."""
    return _one_by_one(
        lambda column: (
            _is_text(column) and set(map(len, column)) == {digits} and not "".join(column).strip(_HEXADECIMAL)
        ),
        f"{digits} hexadecimal digits",
    )


#: An id: BLAKE3-20.
ID = hexadecimal(40)

flag = _one_by_one(lambda column: set(map(type, column)) == {bool}, "true or false")


def matching(pattern: re.Pattern[str], noun: str) -> Schema:
    """Accept strings that a pattern matches as a whole."""
    return _one_by_one(lambda column: _is_text(column) and all(map(pattern.fullmatch, column)), noun)


def both(*schemas: Schema) -> Schema:
    """Accept values that meet all schemas."""

    def check(column: Sequence[Any]) -> None:
        for schema in schemas:
            schema(column)

    return check


def either(strings: Schema, others: Schema) -> Schema:
    """Accept strings of one schema, and other values of another."""

    def check(column: Sequence[Any]) -> None:
        strings([value for value in column if type(value) is str])
        others([value for value in column if type(value) is not str])

    return check


def one_of(*choices: str) -> Schema:
    """Accept one of some strings."""
    return _one_by_one(
        lambda column: set(map(type, column)) == {str} and set(column) <= set(choices), f"one of {', '.join(choices)}"
    )


#: Format of `durable.timestamp`; times are compared as text.
TIME = matching(re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z"), "a time")


def optional(schema: Schema) -> Schema:
    """Accept null, or a value of the schema."""
    return lambda column: schema([value for value in column if value is not None])


def _lists(first: int, last: int, noun: str) -> Schema:
    """Accept lists of `first` to `last` values of any kind."""
    return _one_by_one(
        lambda column: (
            set(map(type, column)) <= {list, tuple} and first <= min(map(len, column)) <= max(map(len, column)) <= last
        ),
        noun,
    )


def items(schema: Schema, first: int = 0, last: int = LIMIT) -> Schema:
    """Accept lists of `first` to `last` values of the schema."""
    lists = _lists(first, last, f"a list of {first} to {last} values")

    def check(column: Sequence[Any]) -> None:
        lists(column)
        schema(list(chain.from_iterable(column)))

    return check


def row(*schemas: Schema, rest: Schema | None = None) -> Schema:
    """Accept lists of one value of each schema, followed by any number of the schema `rest` if given."""
    length = len(schemas)
    lists = _lists(length, length if rest is None else LIMIT, f"a list of {length} values")

    def check(column: Sequence[Any]) -> None:
        if not column:
            return
        lists(column)
        for place, schema in enumerate(schemas):
            _named(f"[{place}]", schema, [value[place] for value in column])
        if rest is not None:
            rest([item for value in column for item in value[length:]])

    return check


def rows(*schemas: Schema, rest: Schema | None = None) -> Schema:
    """Accept lists of any number of rows."""
    return items(row(*schemas, rest=rest))


def _objects(column: Sequence[Any]) -> None:
    for value in column:
        if type(value) is not dict:
            raise ValueError(f"{shown(value)} is not an object")


def fields(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Accept objects with all required fields; check optional fields if present, and ignore others."""

    def check(column: Sequence[Any]) -> None:
        if not column:
            return
        _objects(column)
        for name, schema in required.items():
            if not all(name in value for value in column):
                raise ValueError(f"{name} is missing")
            _named(name, schema, [value[name] for value in column])
        for name, schema in (optional or {}).items():
            _named(name, schema, [value[name] for value in column if name in value])

    return check


def by(name: str, schemas: Mapping[str, Schema]) -> Schema:
    """Accept objects of the schema that the value of a field selects."""
    known = one_of(*schemas)

    def check(column: Sequence[Any]) -> None:
        fields({name: known})(column)
        for value, schema in schemas.items():
            schema([item for item in column if item[name] == value])

    return check


def plain(column: Sequence[Any]) -> None:
    """Accept JSON values, nested to `DEPTH` levels, with numbers in the range of a float."""
    for _ in range(DEPTH):
        if not column:
            return
        inner: list[Any] = []
        texts: list[str] = []
        for value in column:
            if type(value) is dict:
                texts += value
                inner += value.values()
            elif type(value) is list:
                inner += value
            elif type(value) is str:
                texts.append(value)
            elif value is not None and type(value) not in (bool, int, float):
                raise ValueError(f"{shown(value)} is not a plain value")
            elif type(value) is int and not -_FLOAT < value < _FLOAT:
                raise ValueError(f"{shown(value)} is beyond the largest float")
        text()(texts)
        column = inner
    raise ValueError(f"it is nested more than {DEPTH} levels deep")


def plain_object(column: Sequence[Any]) -> None:
    """Accept objects of JSON values."""
    _objects(column)
    plain(column)


def _named(name: str, schema: Schema, column: Sequence[Any]) -> None:
    try:
        schema(column)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
