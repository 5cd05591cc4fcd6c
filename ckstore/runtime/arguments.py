"""Checks of the arguments of the Python API: a name means one kind of value in all calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from operator import index
from reprlib import repr as short
from typing import Any, ParamSpec, TypeVar

from ckstore.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

#: Turns a value into the plain one that it means; raises `TypeError`, `ValueError` or `OverflowError`.
Kind = Callable[[Any], Any]


def _flag(value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # NumPy's.
        return bool(value)
    raise TypeError


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if (number := index(value)).bit_length() > 63:
        raise OverflowError
    return number


def _float(value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise TypeError
    return float(value)


def _number(value: Any) -> int | float:
    number = _float(value)
    if number != number:
        raise ValueError
    return value if isinstance(value, int) else number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # SQLite takes no lone surrogates.
    return value


def _path(value: Any) -> Any:
    if b"\0" in (text := os.fsencode(_text_or_path(value))) or not text:
        raise ValueError
    return value


def _text_or_path(value: Any) -> str | os.PathLike[str]:
    if isinstance(value, bytes):
        raise TypeError
    text: str | os.PathLike[str] = os.fspath(value)
    return text


def _one_or_several(kind: Kind) -> Kind:
    """Return the kind of one value, or of an iterable of several."""

    def several(value: Any) -> Any:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | os.PathLike):
            return [kind(item) for item in value]
        return kind(value)

    return several


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    return tuple(map(_text, value))


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError
    return value


def _function(value: Any) -> Any:
    if not callable(value):
        raise TypeError
    return value


def _with(method: str) -> Kind:
    def has(value: Any) -> Any:
        if isinstance(value, type) or not callable(getattr(value, method, None)):
            raise TypeError
        return value

    return has


def _one_of(*choices: Any) -> tuple[Kind, str]:
    """Return the kind of some choices, of any types."""

    def chosen(value: Any) -> Any:
        if isinstance(value, bool | str) or type(value).__name__ == "bool_":
            return choices[choices.index(value)]
        raise TypeError

    listed = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices]
    return chosen, f"{', '.join(listed[:-1])} or {listed[-1]}"


def _classes(value: Any) -> tuple[type, ...]:
    found = tuple(value)
    if not all(isinstance(item, type) for item in found):
        raise TypeError
    return found


def _version_name(value: Any) -> Any:
    """Return the name of a version: a text, a number, or the number of a `Version`."""
    value = getattr(value, "number", value)
    if isinstance(value, str):
        return _text(value)
    return _whole(value)


#: A number that the callee checks: NaN is one.
FLOAT = (_float, "a number")
FLAG, WHOLE, NUMBER = (_flag, "True or False"), (_whole, "a whole number"), (_number, "a number")
TEXT, TEXTS = (_text, "a text"), (_texts, "a list of texts")
FUNCTION, PATH = (_function, "a function"), (_path, "a path")
PATHS = (_one_or_several(_path), "a path, or a list of them")
NAME = (_version_name, "the name of a version, a number or a text")
PERIOD = (_version_name, "a whole number, or a duration such as 30d")
NAMES = (_one_or_several(_version_name), "names of versions, numbers or texts")

#: The kinds of arguments, and nouns for errors, by name. `run` and `tag` have a rule of their own.
KINDS: Mapping[str, tuple[Kind, str]] = {
    **dict.fromkeys(
        ("allow_empty", "create", "delete_source", "dry_run", "force", "forgotten", "keep_tagged", "ledger", "once",
         "prune", "recursive", "replace", "restore", "shared", "swap", "verify"), FLAG
    ),
    **dict.fromkeys(("cache_bytes", "count", "every", "hot", "nbytes", "workers"), WHOLE),
    **dict.fromkeys(("keep_every", "keep_last"), PERIOD),
    **dict.fromkeys(("ema", "grace", "poll", "quality", "sample", "settle"), NUMBER),
    **dict.fromkeys(("format", "metric", "mode", "on_unknown", "run", "sort", "tag"), TEXT),
    **dict.fromkeys(("exclude", "globs", "include", "measures", "remove"), TEXTS),
    **dict.fromkeys(("each", "function", "progress"), FUNCTION),
    **dict.fromkeys(("after", "before", "parent", "version"), NAME),
    **dict.fromkeys(("cache", "key", "signed_by", "target"), PATH),
    **dict.fromkeys(("folders", "paths"), PATHS),
    "allow": (_classes, "a list of classes"),
    "executor": (_with("submit"), "an executor"),
    "metrics": (_mapping, "a mapping of numbers by name"),
    "options": (_mapping, "a mapping of texts"),
    "busy": _one_of("wait", "skip"),
    "mmap": _one_of(True, False, "checked"),
    "step_from": _one_of("name", "content", "order"),
    "out": (_with("write"), "a binary file"),
    "stop": (_with("is_set"), "a `threading.Event`"),
    "versions": NAMES,
}  # fmt: skip


def plain(name: str, value: Any, kind: tuple[Kind, str] | None = None) -> Any:
    """Return the plain value of an argument, by its own kind or by that of its name; raise `UsageError` for others.

    Examples
    --------
    >>> import numpy as np
    >>> plain("keep_last", np.int64(3)), plain("dry_run", True)
    (3, True)
    """
    convert, noun = kind or KINDS[name]
    try:
        return convert(value)
    except UnicodeEncodeError:
        raise UsageError(f"`{name}` {shown(value)} is not UTF-8; write another.") from None
    except OverflowError:
        raise UsageError(f"`{name}` is too large: {shown(value)}; give a number of at most 64 bits.") from None
    except (TypeError, ValueError):
        raise UsageError(f"`{name}` takes {noun}, not {shown(value)}.") from None


def shown(value: Any) -> str:
    """Return a short text of any value, for errors.

    Examples
    --------
    >>> shown(2.5), shown(10**5000)
    ('2.5', 'an integer of thousands of digits')
    """
    try:
        return short(value)
    except ValueError:
        return "an integer of thousands of digits"


def checked(**others: tuple[Kind, str] | None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check the arguments of a function by `KINDS`, and by `others` of its own; None leaves one unchecked.

    An argument that is its default is passed on. The function gets plain values: integers in place of NumPy's.
    """

    def made(function: Callable[P, T]) -> Callable[P, T]:
        code: Any = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        by_place = names[: code.co_argcount]
        kinds = {name: kind for name, kind in {**KINDS, **others}.items() if name in names and kind is not None}
        given = function.__defaults__ or ()
        placed = names[code.co_argcount - len(given) : code.co_argcount]
        defaults = {**dict(zip(placed, given, strict=True)), **(function.__kwdefaults__ or {})}

        def of(name: str, value: Any) -> Any:
            is_given = name in kinds and not (name in defaults and value is defaults[name])
            return plain(name, value, kinds[name]) if is_given else value

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> T:
            listed: Any = [of(name, value) for name, value in zip(by_place, arguments, strict=False)]
            said: Any = {name: of(name, value) for name, value in named.items()}
            listed += arguments[len(listed) :]
            return function(*listed, **said)

        return call

    return made


def plain_fields(item: Any, **others: tuple[Kind, str] | None) -> None:
    """Check the fields of a frozen dataclass as `checked` does arguments."""
    kinds = {**KINDS, **others}
    for name, field in item.__dataclass_fields__.items():  # Not `fields`, which takes a call for each.
        value, kind = getattr(item, name), kinds.get(name)
        if kind is not None and value is not field.default:
            object.__setattr__(item, name, plain(name, value, kind))
