"""The gate: values that no ckstore writes are refused, and the sentence names the field."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect

import ckstore
from ckstore.objects.documents import ManifestDocument, VersionDocument
from ckstore.storage import manifest
from ckstore.storage.schema import (
    DEPTH,
    Bit,
    Id,
    Integer,
    Natural,
    Plain,
    Positive,
    Size,
    Text,
    Time,
    Whole,
    Word,
    check,
    decode,
    decode_plain,
    fields,
    rows,
)

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Whole, b"-1"), (Whole, b"true"), (Whole, b"1.0"), (Whole, b"1e3"), (Whole, b"281474976710656"),
        (Whole, b"9" * 30), (Whole, b"9" * 5000), (Whole, b'"1"'), (Whole, b"null"), (Positive, b"0"),
        (Integer, b"9223372036854775808"), (Natural, b"-1"), (Bit, b"true"), (Bit, b"2"), (bool, b"1"),
        (Size, b"-0.5"), (Size, b"NaN"), (Size, b"Infinity"), (Size, b"1e999"), (Size, b"9" * 400), (Size, b"true"),
        (Id, b'"' + b"a" * 40 + b'\\n"'), (Id, b'"' + b"A" * 40 + b'"'), (Id, b'"' + b"a" * 41 + b'"'),
        (Time, b'"2026-07-01T12:00:00.000000Z\\n"'), (Text, b'"a\\u0000"'), (Text, b'"\\ud800"'), (Text, b'"\xff"'),
        (Word, b'""'), (Plain, b'{"a":"\\u0000"}'), (Plain, b'{"\\u0000":1}'), (Plain, b'{"a":1e999}'), (Plain, b"[]"),
        (Plain, b'{"a":' + b"9" * 310 + b"}"), (Plain, b'{"a":' + b"[" * DEPTH + b"]" * DEPTH + b"}"),
        (Plain, b'{"a":' + DEEP + b"}"), (fields({"a": Whole}), b'{"b":' + DEEP + b',"a":1}'),
        (fields({"a": Whole}), b"{}"), (fields({}, {"a": Whole}), b'{"a":null}'), (list[tuple[Whole, Whole]], b"[[1]]"),
        (list[tuple[Whole, Whole]], b"[[1,2,3]]"),
    ],
    ids=lambda value: value[:30].decode("latin-1") if isinstance(value, bytes) else "",
)  # fmt: skip
def test_other_values_are_refused(kind: Any, text: bytes) -> None:
    with pytest.raises(ValueError):
        decode(text, kind)


def test_values_of_the_types_come_back() -> None:
    deepest = b'{"a":' + b"[" * (DEPTH - 2) + b"1" + b"]" * (DEPTH - 2) + b"}"
    assert decode(deepest, Plain)["a"]
    assert decode_plain(deepest.decode()) == decode(deepest, Plain)
    kind = fields({"a": Whole, "b": Id}, {"c": Plain})
    said = {"a": (1 << 48) - 1, "b": "a" * 40, "c": {"d": [None, True, 1.5, -(10**300), "é"]}}
    assert decode(msgspec.json.encode({**said, "unknown": 7}), kind) == said


@pytest.mark.parametrize(
    "text",
    [
        '{"a":"\\u0000"}', '{"\\u0000":1}', '{"a":"\\ud800"}', '{"a":1e999}', "[]", "1", '{"a":' + "9" * 310 + "}",
        '{"a":' + "[" * (DEPTH - 1) + "1" + "]" * (DEPTH - 1) + "}",
        '{"a":' + '{"b":' * DEPTH + "1" + "}" * DEPTH + "}",
    ],
)  # fmt: skip
def test_short_values_have_the_same_rule(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_plain(text)


def test_rows_are_checked_as_they_are() -> None:
    kind = rows(Whole, Text, Bit)
    check([[(1, "a", 0), (2, "", 1)]], kind)
    for row in ((1, "a"), (1, "a", 0, 0), (1, b"a", 0), (1.0, "a", 0), (1, "a\0", 0), (None, "a", 0), (1, "a", True)):
        with pytest.raises(ValueError, match=r"at `\$\[0\]\[1\]"):
            check([[(1, "a", 0), row]], kind)


def unions(kind: Any, seen: set[Any]) -> Iterator[inspect.UnionType]:
    """Yield the unions in a type."""
    if isinstance(kind, inspect.UnionType):
        yield kind
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
    for name in getattr(kind, "__struct_fields__", ()):
        value = getattr(kind, name)
        for inner in value if isinstance(value, tuple) else (value,):
            yield from unions(inner, seen)


def test_no_pattern_is_in_a_union_with_a_container() -> None:
    """When msgspec 0.22 frees such a type, at the end of the process or before, it takes the pattern for a type."""
    found = [union for kind in (ManifestDocument, VersionDocument) for union in unions(inspect.type_info(kind), set())]
    assert len(found) > 5
    containers = inspect.ListType | inspect.DictType | inspect.VarTupleType | inspect.TupleType
    for union in found:
        has_pattern = any(isinstance(kind, inspect.StrType) and kind.pattern for kind in union.types)
        assert not (has_pattern and any(isinstance(kind, containers) for kind in union.types))


#: Reads the manifests of a store in eight threads, which begin at once; their types are new to the process.
READERS = """
    import sys, threading
    from ckstore.objects.documents import ManifestDocument
    from ckstore.storage import schema

    def read():
        start.wait()
        schema.decode(data, ManifestDocument)

    data = sys.stdin.buffer.read()
    start = threading.Barrier(8)
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.long
def test_threads_may_be_the_first_to_read_a_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """msgspec would end the process with a segmentation fault."""
    found: list[bytes] = []

    def kept(data: bytes, kind: Any) -> Any:
        if kind is ManifestDocument:
            found.append(bytes(data))
        return decode(data, kind)

    monkeypatch.setattr(manifest, "decode", kept)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": np.zeros((40, 30))}, run="a", step=1, hot=0)
    with ckstore.open(tmp_path / "store") as store:
        store["a@1"].describe()
    for _ in range(6):
        subprocess.run([sys.executable, "-c", textwrap.dedent(READERS)], input=found[0], check=True)
