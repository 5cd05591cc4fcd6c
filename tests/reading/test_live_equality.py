"""States in memory: a store returns accepted states unchanged, and refuses any other in one sentence."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import pathlib
import re
import tempfile
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckstore
from ckstore.errors import UsageError
from ckstore.formats.torch.live_state import MAX_TENSORS, describe_state_dict
from ckstore.policy import Policy, Retention
from tests.equality import assert_identical
from tests.formats.test_torch_files import DTYPES, UNTYPED


class Pair(NamedTuple):
    left: Any


def stored(state: Any, place: Path, **options: Any) -> Any:
    with ckstore.init(place) as store:
        store.ingest(state, **options)
        return store[1].state_dict()


def loaded(state: Any, place: Path) -> Any:
    """Return the state that torch loads from a checkout."""
    with ckstore.init(place / "loaded") as store:
        store.ingest(state)
        store[1].checkout(place / "a.pt")
    return torch.load(place / "a.pt", weights_only=False)


# Generated states

_ARRAY_DTYPES = [
    "?", "<i1", "<u2", ">i4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", "<U3", "S2", "<M8[D]", "<m8[ns]", "V3", "<f16",
    [("a", "<i4"), ("b", [("c", "<f4", (2,)), ("d", ">u2")])], [(("title", "a"), "<i2")],
]  # fmt: skip
_NAMES = st.sampled_from(
    ["a", "b", "a.b", "a/b", "[1]", "1", "", "\0", "\udc80", "ä", "state", "key", "__dict__", "~2"]
)
_SMALL = st.integers(-(2**60), 2**60)
_NUMBERS = st.one_of(st.none(), st.booleans(), _SMALL, st.floats(), st.complex_numbers(), st.binary(max_size=4))
_VALUES = st.one_of(
    _NUMBERS,
    _NAMES,
    st.integers(-(2**1999), 2**1999),
    st.sampled_from(
        [
            dt.date(2024, 2, 29), dt.datetime(2024, 10, 27, 2, 30, fold=1), dt.time(1, tzinfo=dt.UTC), dt.timedelta(-1),
            decimal.Decimal("sNaN3"), decimal.Decimal("-0.00"), fractions.Fraction(-(2**90), 7), pathlib.Path("a/b"),
            range(2**65), slice(None, 3), torch.Size([2, 0]), torch.bfloat16, torch.device("cuda", 1), int,
            np.float32, np.dtype(">f4"), np.dtype([("a", [("b", "<i4")])]), np.dtype((np.record, [("a", "<i4")])),
            uuid.UUID(int=5, is_safe=uuid.SafeUUID.safe), np.str_(""), np.float16(-0.0), np.datetime64("NaT"),
            np.rec.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")])[0], np.longdouble(1) / 3, np.bool_(True),
        ]
    ),
)  # fmt: skip
_KEYS = st.one_of(
    _NAMES, _NUMBERS, st.tuples(_NAMES, st.tuples(_NUMBERS)),
    st.sampled_from([pathlib.Path("a"), np.int64(3), torch.float16, dt.date(2024, 1, 1), (1, (np.int8(2), 3))]),
)  # fmt: skip
_REFUSED: list[Callable[[], Any]] = [
    object, lambda: Pair(1), lambda: torch.eye(2).to_mkldnn(), lambda: torch.ones(1, device="meta"),
    lambda: np.array([None]), lambda: np.ma.array([1.0]), lambda: np.zeros(1, "V0"), lambda: 2**3000,
    lambda: {frozenset({1}): 1}, lambda: {(1, (np.int8(2), (3,))): 1}, lambda: {2**61: 1},
    lambda: np.floating, lambda: torch._efficientzerotensor(2),
]  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(_ARRAY_DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    data = np.frombuffer(draw(st.binary(min_size=32, max_size=32)) * 300, np.uint8)
    count = int(np.prod(shape))
    if dtype.kind == "U":
        made = np.array(["ab", "", "ä"] * 9)[:count].astype(dtype)
    else:
        made = np.frombuffer(data[: count * dtype.itemsize].tobytes(), dtype) if count else np.empty(0, dtype)
        made = made != 0 if dtype.kind == "b" else made
    made = made.reshape(shape)
    made = draw(st.sampled_from([np.array, np.transpose, np.asfortranarray, lambda one: one[..., ::-1]]))(
        made if made.ndim else made.reshape(1)
    )
    return made.reshape(()) if made.size == 1 and draw(st.booleans()) else made


class States:
    """Draws states whose parts are held at several places, and tensors that share storages."""

    def __init__(self, draw: st.DrawFn, *, is_sound: bool) -> None:
        self._draw = draw
        self._is_sound = is_sound
        self._pool: list[Any] = []
        self._storages: dict[torch.dtype, torch.Tensor] = {}

    def value(self, depth: int) -> Any:
        draw = self._draw
        kind = draw(st.integers(0, 11 if depth else 6))
        if kind == 0 and self._pool:
            return draw(st.sampled_from(self._pool))
        if kind <= 2:
            return draw(_VALUES)
        if kind == 3:
            made = draw(arrays())
        elif kind <= 6:
            made = self.tensor(depth)
        elif kind == 7 and not self._is_sound and draw(st.booleans()):
            return draw(st.sampled_from(_REFUSED))()
        else:
            made = self.container(depth - 1)
        self._pool.append(made)
        return made

    def container(self, depth: int) -> Any:
        draw = self._draw
        items = [self.value(depth) for _ in range(draw(st.integers(0, 3)))]
        pairs = dict(zip(draw(st.lists(_KEYS, max_size=3, unique_by=repr)), items, strict=False))
        names = {
            f"{name} ": item for name, item in zip(draw(st.lists(_NAMES, max_size=3, unique=True)), items, strict=False)
        }
        elements = draw(st.lists(_KEYS, max_size=3, unique_by=repr))
        kind = draw(st.integers(0, 10))
        if kind == 0:
            made = collections.OrderedDict(pairs)
            vars(made).update({f"_{name}": value for name, value in zip("ab", draw(st.lists(_VALUES)), strict=False)})
            return made
        return (
            list, tuple, lambda _: pairs, lambda _: pairs, lambda _: collections.defaultdict(list, pairs),
            collections.deque, lambda _: set(elements), lambda _: frozenset(elements),
            lambda _: argparse.Namespace(**names), lambda _: types.SimpleNamespace(**names),
        )[kind - 1](items)  # type: ignore[operator,no-any-return]  # fmt: skip

    def tensor(self, depth: int) -> torch.Tensor:
        draw = self._draw
        dtype = draw(st.sampled_from(DTYPES + UNTYPED))
        if dtype not in self._storages or draw(st.booleans()):
            data = torch.frombuffer(bytearray(draw(st.binary(min_size=24, max_size=24)) * 16), dtype=torch.uint8)
            self._storages[dtype] = (data % 2 if dtype == torch.bool else data).view(dtype)
        base = self._storages[dtype]
        start = draw(st.integers(0, 4))
        made = draw(
            st.sampled_from(
                [
                    lambda one: one, lambda one: one[start : start + 12].view(3, 4), lambda one: one[start],
                    lambda one: one[start : start + 12].view(3, 4).t(), lambda one: one[start : start + 9 : 2],
                    lambda one: one[start : start + 1].expand(3), lambda one: one[:0].view(0, 2),
                    lambda one: one[:8].view(1, 2, 4).permute(2, 0, 1), lambda one: one.clone(),
                ]
            )
        )(base)  # fmt: skip
        if dtype.is_complex:
            made = draw(st.sampled_from([made, made.conj(), torch._neg_view(made)]))
        floats = dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
        grad = floats and draw(st.booleans())
        if draw(st.integers(0, 3)) == 0:
            made = torch.nn.Parameter(made, requires_grad=grad)
        elif grad:
            made = made.detach().requires_grad_()
        if draw(st.integers(0, 4)) == 0:
            made = made.detach() if made.requires_grad and not isinstance(made, torch.nn.Parameter) else made
            made.note = self.value(depth - 1) if depth > 0 else 1  # type: ignore[attr-defined]
        return made


@st.composite
def states(draw: st.DrawFn, *, is_sound: bool) -> Any:
    made = States(draw, is_sound=is_sound)
    return {"kept": torch.ones(1), "x": [made.value(3) for _ in range(draw(st.integers(1, 4)))]}


@given(states(is_sound=True))
def test_a_state_comes_back_equal(state: Any) -> None:
    with tempfile.TemporaryDirectory() as place:
        assert_identical(stored(state, Path(place) / "store"), state)


@pytest.mark.long
@given(states(is_sound=False))
def test_a_state_comes_back_equal_or_is_refused(state: Any) -> None:
    with tempfile.TemporaryDirectory() as place, ckstore.init(Path(place) / "store") as store:
        message = ""
        try:
            store.ingest(state)
        except UsageError as error:
            message = str(error)
        if message:
            assert re.fullmatch(r"(?s)(The|An) .* at x/.*[^.]\.", message)
            assert not list(store.versions())
            assert not list((Path(place) / "store/packs").iterdir())
        else:
            assert_identical(store[1].state_dict(), state)


# Objects held at several places


def held_twice() -> list[Any]:
    parameter, array = torch.nn.Parameter(torch.ones(3)), np.arange(3.0)
    marked = torch.ones(2)
    marked.note = [1]  # type: ignore[attr-defined]
    return [
        [1], {"w": torch.ones(2)}, [{"w": torch.ones(2)}], {1, 2}, bytearray(b"a"), collections.defaultdict(list),
        collections.deque([torch.ones(1)]), argparse.Namespace(a=torch.ones(1)), torch.ones(3), torch.empty(0),
        parameter, array, np.zeros(2, [("a", "<i4")]), marked, (torch.ones(1), [2]),
        collections.OrderedDict({pathlib.Path("a"): torch.ones(1)}),
    ]  # fmt: skip


@pytest.mark.parametrize("one", held_twice(), ids=lambda one: type(one).__name__)
def test_an_object_held_twice_stays_one(tmp_path: Path, one: Any) -> None:
    state = {"a": one, "b": [{"c": one}], "w": torch.ones(1)}
    assert_identical(stored(state, tmp_path / "store"), state)
    if not isinstance(one, np.ndarray) or one.dtype.fields:
        assert_identical(loaded(state, tmp_path), state)


def test_an_object_held_twice_stays_one_in_files_and_saves(tmp_path: Path) -> None:
    shared = {"w": torch.ones(2), "p": torch.nn.Parameter(torch.ones(2))}
    state = {"a": shared, "b": (shared, shared["p"])}
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    with ckstore.init(tmp_path / "store") as store:
        for number, name in enumerate("ab"):
            store.ingest(tmp_path / f"{name}.pt", run=name, step=number)
            assert_identical(store[name].state_dict(), state)
        with store.saver(run="saved") as save:
            save.save(state, step=1)
        assert_identical(store["saved"].state_dict(), state)


def test_dropped_tensors_leave_the_others_shared(tmp_path: Path) -> None:
    shared, other = torch.ones(2), torch.zeros(300, 256)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            store.ingest({"a": shared, "b": {"c": shared}, "d": other + step}, run="run", step=step, hot=0)
        store.set_policy(Policy(retention=Retention(drop=("d",), whole_last=1)), "run")
        store.encode()
        store.retain("run")
        found = store[1].state_dict()
    assert list(found) == ["a", "b"]
    assert found["a"] is found["b"]["c"]


def test_containers_that_share_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TENSORS >= 1_000_000
    monkeypatch.setattr("ckstore.formats.torch.live_state.MAX_TENSORS", 1000)
    node: Any = [torch.ones(1)]
    for _ in range(50):
        node = [node, node]
    with pytest.raises(UsageError, match="more than 1,000 tensors, each place of a shared container counted"):
        describe_state_dict(node)


# Attributes


def test_attributes_of_tensors_and_parameters_come_back(tmp_path: Path) -> None:
    parameter, buffer = torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(3))
    parameter.tensor_model_parallel, parameter.partition_dim = True, 1  # type: ignore[attr-defined]
    parameter.main_grad = torch.zeros(2)  # type: ignore[attr-defined]
    state = {"p": parameter, "b": buffer, "list": [parameter]}
    found = stored(state, tmp_path / "store")
    assert found["p"].partition_dim == 1
    assert_identical(found, state)
    assert_identical(loaded(state, tmp_path), state)
    torch.save(state, tmp_path / "saved.pt")
    assert_identical(stored(tmp_path / "saved.pt", tmp_path / "of a file"), state)
    with ckstore.open(tmp_path / "store") as store:
        assert sorted(store[1]) == ["b", "list/[0]", "list/[0]/main_grad", "p", "p/main_grad"]
        store[1].checkout(tmp_path / "plain.pt", format="pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert [type(plain["p"]), type(plain["b"]), type(plain["list"][0])] == [torch.Tensor] * 3
    assert not vars(plain["p"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "partition",
            lambda: 1,
            r"An attribute of the tensor at a/p cannot be stored \(.* at a/p/partition.*\); delete it",
        ),
        ("numel", 3, "The tensor at a/p has an attribute numel, which hides that of its type"),
    ],
)
def test_attributes_that_cannot_be_stored_are_named(name: str, value: Any, message: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    setattr(parameter, name, value)
    with pytest.raises(UsageError, match=message):
        describe_state_dict({"a": {"p": parameter}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: collections.OrderedDict(a=1), "The dictionary at x has an attribute items"),
        (lambda: collections.Counter("ab"), "The collections.Counter at x has attributes"),
    ],
)
def test_attributes_that_do_not_come_back_are_named(make: Callable[[], Any], message: str) -> None:
    value = make()
    value.items = 3
    with pytest.raises(UsageError, match=message):
        describe_state_dict({"x": value})


def test_attributes_of_dictionaries_with_any_keys_come_back(tmp_path: Path) -> None:
    made = collections.OrderedDict({pathlib.Path("a"): 1})
    made.extra = [2]  # type: ignore[attr-defined]
    state = {"x": made, "w": torch.ones(1)}
    assert_identical(stored(state, tmp_path / "store"), state)
