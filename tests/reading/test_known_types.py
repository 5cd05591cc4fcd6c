"""Types besides tensors: a version returns the same as `torch.load`, of a file and of a state dict in memory."""

from __future__ import annotations

import argparse
import collections
import copyreg
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import pathlib
import pickle
import random
import re
import types
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import InputError, UsageError
from ckstore.formats.detect import parse
from ckstore.formats.layout import Extent, Tensor, TensorRef, Unknown
from ckstore.formats.sources import CompositeSource
from ckstore.formats.torch.zip_writer import plan_torch

BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)


def drawn(generator: np.random.Generator) -> np.random.Generator:
    generator.integers(5, dtype=np.uint32)
    return generator


_OPTIONS = collections.OrderedDict(b=1, a=2)
_RECORDS = np.array([(1.5, 2)], [("x", "<f4"), ("y", ">i2", (1,))])

#: Values by the name of their type in the documentation.
KNOWN: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace(lr=0.1, layers=[1, 2]),
    "bytearray": bytearray(b"\x00\xff"),
    "collections.Counter": collections.Counter("abca"),
    "collections.OrderedDict": _OPTIONS,
    "collections.defaultdict": collections.defaultdict(list, {"a": [1], 3: []}),
    "collections.deque": collections.deque([1.5, "x"], maxlen=4),
    "complex": 1 + 2j,
    "datetime.date": dt.date(2024, 2, 29),
    "datetime.datetime": dt.datetime(2024, 2, 29, 1, 2, 3, 4, dt.timezone(dt.timedelta(hours=2), "here")),
    "datetime.time": dt.time(1, 2, 3),
    "datetime.timedelta": dt.timedelta(days=-1, microseconds=5),
    "datetime.timezone": dt.UTC,
    "decimal.Decimal": decimal.Decimal("-1.50"),
    "fractions.Fraction": fractions.Fraction(-3, 4),
    "frozenset": frozenset({1, "a"}),
    "numpy.dtype": [np.dtype(">f4"), np.dtype("M8[3ns]"), np.dtype("U5"), _RECORDS.dtype],
    "numpy.ndarray": [
        np.arange(6, dtype=np.float32).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([True, False]), np.array(3, np.int16), np.zeros((0, 2), np.uint8), np.arange(6)[::-2],
        np.array([1 + 2j], np.complex64), np.arange(3, dtype=np.uint64), np.array([np.nan, -0.0], np.float16),
    ],
    "numpy.ndarray of other dtypes": [
        np.array([1.5], ">f8"), np.array(["ab", "c"]), np.array([b"ab"]), _RECORDS,
        np.array(["2024-02-29"], "M8[D]"), np.array([3], "m8[us]"), np.array([1], np.longdouble),
    ],
    "numpy.random.Generator": [drawn(np.random.Generator(kind(5))) for kind in BIT_GENERATORS],
    "numpy.random.RandomState": [np.random.RandomState(2), np.random.RandomState(np.random.MT19937(3))],
    "numpy numbers": [
        np.float64(1.5), np.float32(0.1), np.int64(-3), np.uint8(7), np.bool_(True), np.complex128(1j),
        np.str_("ab"), np.bytes_(b"ab"), np.datetime64("2024-02-29"), np.timedelta64(3, "s"),
    ],
    "numpy.random.get_state()": np.random.RandomState(7).get_state(),
    "pathlib.Path": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("c:/d")],
    "random.getstate()": random.Random(7).getstate(),
    "range": range(1, 10, 3),
    "set": {1, 2.5, "a"},
    "slice": slice(1, None, 2),
    "torch.Size": torch.Size([2, 3]),
    "torch.__version__": torch.__version__,
    "torch.device": [torch.device("cpu"), torch.device("cuda", 1)],
    "torch.dtype": [torch.float16, torch.bool, torch.quint8],
    "torch.Generator": torch.Generator().manual_seed(3),
    "types.SimpleNamespace": types.SimpleNamespace(a=1, b=np.arange(2)),
    "torch.Tensor": [torch.ones(2).requires_grad_(), torch.tensor([1j]).conj(), torch.ones(2, 3).t()],
    "torch.nn.Parameter": torch.nn.Parameter(torch.ones(2)),
    "uuid.UUID": uuid.UUID(int=2**100 + 1),
    "a class": [int, dict, np.float32, collections.OrderedDict],
    "dictionaries with such keys": {pathlib.Path("a"): 1, np.int64(3): 2, torch.float16: 3, (1, np.float32(2)): 4},
    "sets of such elements": [{pathlib.Path("a")}, frozenset({np.int64(3)})],
}  # fmt: skip


def assert_alike(found: Any, expected: Any) -> None:
    """Fail where types, values, dtypes or orders differ."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype
        assert found.dtype.byteorder == expected.dtype.byteorder
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
        if isinstance(expected, np.ndarray):
            assert (found.flags.c_contiguous, found.flags.f_contiguous) == (
                expected.flags.c_contiguous, expected.flags.f_contiguous,
            )  # fmt: skip
            assert found.flags.writeable
    elif isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
        assert getattr(found, "default_factory", None) is getattr(expected, "default_factory", None)
        for key, value in expected.items():
            assert_alike(found[key], value)
    elif type(expected) in (list, tuple, collections.deque):
        assert len(found) == len(expected)
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, argparse.Namespace | types.SimpleNamespace):
        assert_alike(vars(found), vars(expected))
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, torch.Generator):
        assert torch.equal(found.get_state(), expected.get_state())
    elif isinstance(expected, np.random.Generator):
        assert_alike(found.bit_generator.state, expected.bit_generator.state)
        assert found.bit_generator.seed_seq.state == expected.bit_generator.seed_seq.state
    elif isinstance(expected, np.random.RandomState):
        assert_alike(found.get_state(legacy=False), expected.get_state(legacy=False))
    else:
        assert found == expected


def state_dict_of(source: Any, store: Path, **options: Any) -> Any:
    with ckstore.init(store) as opened:
        opened.ingest(source)
        return opened[1].state_dict(**options)


@pytest.mark.long
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", KNOWN)
def test_files(tmp_path: Path, name: str, protocol: int) -> None:
    torch.save({"x": KNOWN[name], "w": torch.ones(3)}, tmp_path / "a.pt", pickle_protocol=protocol)
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    assert_alike(state_dict_of(tmp_path / "a.pt", tmp_path / "store"), loaded)


@pytest.mark.long
@pytest.mark.parametrize("name", KNOWN)
def test_state_dicts_in_memory(tmp_path: Path, name: str) -> None:
    value = {"x": KNOWN[name], "w": torch.ones(3)}
    torch.save(value, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    found = state_dict_of(value, tmp_path / "store")
    assert_alike(found, loaded)
    with ckstore.open(tmp_path / "store") as store:
        store[1].checkout(tmp_path / "b.pt")
        store.ingest(tmp_path / "b.pt", run="again")
        assert_alike(store["again"].state_dict(), loaded)
    unmarked = torch.load(tmp_path / "b.pt", weights_only=False)
    if name not in (
        "numpy.ndarray",
        "numpy.ndarray of other dtypes",
        "numpy.random.get_state()",
        "types.SimpleNamespace",
    ):
        assert_alike(unmarked, loaded)


def test_a_directory_lacks_no_file_that_loads_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    torch.save({"last_epoch": 3, "lr": [0.1]}, folder / "scheduler.pt")
    torch.save({"python": random.Random(1).getstate()}, folder / "rng_state.pth", _use_new_zipfile_serialization=False)
    (folder / "notes.txt").write_text("nothing")
    found = state_dict_of(folder, tmp_path / "store")
    assert sorted(found) == ["model.pt", "rng_state.pth", "scheduler.pt"]
    for name in ("rng_state.pth", "scheduler.pt"):
        assert_alike(found[name], torch.load(folder / name, weights_only=False))


@dataclasses.dataclass
class Config:
    lr: float
    path: pathlib.Path


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    lr: float


class Phase(enum.Enum):
    WARM = 1


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class Tree(dict):  # type: ignore[type-arg]
    pass


class Guarded:
    def __init__(self, value: int) -> None:
        raise AssertionError("state is set, nothing is called")


class Called:
    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Called, (self.value,)


def guarded() -> Guarded:
    made = Guarded.__new__(Guarded)
    vars(made).update(value=3)
    return made


ALLOWED = [Config, Frozen, Phase, Flags, Point, Tree]


def test_allowed_classes(tmp_path: Path) -> None:
    value = {
        "config": Config(0.1, pathlib.Path("a")), "frozen": Frozen(0.2), "phase": Phase.WARM, "flags": Flags.A,
        "point": Point(1, torch.ones(2)), "tree": Tree(a=Phase.WARM), "class": Config, "keys": {Phase.WARM: 1},
        "factory": collections.defaultdict(Tree, a=Tree()),
    }  # fmt: skip
    torch.save(value, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "a.pt")
        unknown = store[1].state_dict()
        found = store[1].state_dict(allow=ALLOWED)
    assert unknown["config"] == Unknown(f"{__name__}.Config", (), {"lr": 0.1, "path": pathlib.Path("a")})
    assert unknown["class"] == Unknown(f"{__name__}.Config", None)
    assert type(found.pop("point")) is Point
    del loaded["point"]
    assert_alike(found, loaded)


def test_an_enumeration_hashes_no_nested_parts(tmp_path: Path) -> None:
    torch.save({"x": Call(Phase, (nested(),)), "w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"No \S+\.Phase can be made from the version"):
        state_dict_of(tmp_path / "a.pt", tmp_path / "store", allow=[Phase])


def test_an_allowed_class_is_not_initialised(tmp_path: Path) -> None:
    torch.save({"x": guarded(), "w": torch.ones(1)}, tmp_path / "a.pt")
    found = state_dict_of(tmp_path / "a.pt", tmp_path / "store", allow=[Guarded])
    assert type(found["x"]) is Guarded
    assert found["x"].value == 3


def test_values_that_an_allowed_class_rejects_are_named(tmp_path: Path) -> None:
    torch.save({"x": Called(3), "w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"No \S+\.Called can be made from the version"):
        state_dict_of(tmp_path / "a.pt", tmp_path / "store", allow=[Called])
    with ckstore.open(tmp_path / "store") as store, pytest.raises(UsageError, match="`allow` takes a list of classes"):
        store[1].state_dict(allow=["Called"])  # type: ignore[list-item]


def test_the_attributes_of_an_ordered_dict_are_kept(tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    torch.save(state, tmp_path / "a.pt")
    found = state_dict_of(tmp_path / "a.pt", tmp_path / "store")
    assert type(found) is collections.OrderedDict
    assert_alike(found._metadata, state._metadata)


def test_other_objects_are_kept_as_the_bytes_of_their_pickles(tmp_path: Path) -> None:
    value = {"config": Config(0.1, pathlib.Path("a")), "w": torch.ones(3), "other": torch.nn.Identity()}
    with ckstore.init(tmp_path / "store") as store:
        with pytest.raises(UsageError, match=r"Config at config, .* on_unknown='pickle'"):
            store.ingest(value)
        assert not list(store._catalog.versions())
        with pytest.raises(UsageError, match="`on_unknown` is `raise` or `pickle`"):
            store.ingest(value, on_unknown="drop")  # type: ignore[arg-type]
        store.ingest(value, on_unknown="pickle")
        closed = store[1].state_dict()
        found = store[1].state_dict(allow=[Config])
        store[1].checkout(tmp_path / "a.pt")
    assert closed["config"].name == "pickle.loads"
    assert pickle.loads(closed["config"].args[0]) == value["config"]
    assert found["config"] == value["config"]
    assert found["other"].name == "pickle.loads"
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    assert loaded["config"] == value["config"]
    assert type(loaded["other"]) is torch.nn.Identity


@pytest.mark.parametrize(
    "array",
    [np.ma.masked_array([1.5, 2], [True, False]), np.array([{}, 1], dtype=object), np.ones((2, 2)).view(np.matrix)],
    ids=["masked", "objects", "matrix"],
)
def test_arrays_that_the_page_names_are_unknown_or_refused(tmp_path: Path, array: Any) -> None:
    state = {"x": array, "w": torch.ones(3)}
    torch.save(state, tmp_path / "a.pt")
    found = state_dict_of(tmp_path / "a.pt", tmp_path / "file")
    assert isinstance(found["x"], Unknown)
    assert torch.equal(found["w"], state["w"])
    with ckstore.init(tmp_path / "store") as store:
        with pytest.raises(UsageError, match="The array at x is a numpy"):
            store.ingest(state)
        store.ingest(state, on_unknown="pickle")
        store[1].checkout(tmp_path / "b.pt")
    for path in "a.pt", "b.pt":
        loaded = torch.load(tmp_path / path, weights_only=False)["x"]
        assert (type(loaded), loaded.dtype, loaded.tolist()) == (type(array), array.dtype, array.tolist())


def test_unpicklable_values_are_named(tmp_path: Path) -> None:
    with (
        ckstore.init(tmp_path / "store") as store,
        pytest.raises(UsageError, match=r"function at f.* cannot be pickled"),
    ):
        store.ingest({"f": lambda: 1}, on_unknown="pickle")


class Call:
    """Pickles as a call of anything with any arguments, state and items."""

    def __init__(self, *made: Any) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return self.made


_RECONSTRUCT = np.arange(1).__reduce__()[0]
_EMPTY = (np.ndarray, (0,), b"b")
_MADE = copyreg._reconstructor  # type: ignore[attr-defined]


def dtype(code: str, *state: Any) -> Call:
    return Call(np.dtype, (code, False, True), *([state] if state else []))


def nested() -> Any:
    """Return a tuple that takes as long to hash, or to flatten, as one of 2**40 parts."""
    made: Any = (1,)
    for _ in range(40):
        made = (made, made)
    return made


def seed(entropy: Any = 1, pool: Any = (), key: Any = ()) -> Call:
    return Call(*np.random.SeedSequence(1).__reduce__()[:2], (entropy, 0, pool, 4, key))


#: Values that no type writes: they stay as they are, and take neither time nor memory.
HOSTILE: dict[str, Any] = {
    "bytearray of a size": Call(bytearray, (10**12,)),
    "bytes of a size": Call(bytes, (10**12,)),
    "list of a range": Call(list, (range(10**12),)),
    "deque of a range": Call(collections.deque, (range(10**12),)),
    "counter of a range": Call(collections.Counter, (range(10**12),)),
    "fraction of an exponent": Call(fractions.Fraction, ("1e1000000000",)),
    "decimal of nonsense": Call(decimal.Decimal, ("x" * 100,)),
    "set of a range": Call(set, (range(10**12),)),
    "date of many": Call(dt.date, (10**30, 1, 1)),
    "device of nonsense": Call(torch.device, ("nowhere", 10**20)),
    "size of text": Call(torch.Size, (("a", None),)),
    "uuid of text": Call(_MADE, (uuid.UUID, object, None), {"int": "a"}),
    "namespace of numbers": Call(_MADE, (argparse.Namespace, object, None), {1: 2}),
    "a call of a class": Call(argparse.Namespace, (1, 2)),
    "an object dtype": dtype("O8", 3, "|", None, None, None, -1, -1, 63),
    "an array of objects": Call(_RECONSTRUCT, _EMPTY, (1, (1,), dtype("O8"), False, b"12345678")),
    "a huge shape": Call(_RECONSTRUCT, _EMPTY, (1, (10**12,), np.dtype("f4"), False, b"1234")),
    "a huge empty shape": Call(_RECONSTRUCT, _EMPTY, (1, (2**62, 0, 2**62), np.dtype("f4"), False, b"")),
    "items without bytes": Call(_RECONSTRUCT, _EMPTY, (1, (10**12,), dtype("V0"), False, b"")),
    "many axes": Call(_RECONSTRUCT, _EMPTY, (1, (1,) * 200, np.dtype("i1"), False, b"1")),
    "a negative shape": Call(_RECONSTRUCT, _EMPTY, (1, (-1, -4), np.dtype("i1"), False, b"1234")),
    "a huge subarray": dtype("V4", 3, "|", (np.dtype("f4"), (2**31, 2**31)), None, None, 4, 4, 0),
    "fields that are not there": dtype("V4", 3, "|", None, ("a",), {}, 4, 1, 16),
    "fields beyond the item": dtype("V4", 3, "|", None, ("a",), {"a": (np.dtype("f8"), 10**9)}, 4, 1, 16),
    "a unit of time": dtype("M8", 4, "<", None, None, None, -1, -1, 0, (None, (b"0" * 9, 1, 1, 1))),
    "an array of a subclass": Call(_RECONSTRUCT, (np.matrix, (0,), b"b"), (1, (1, 1), np.dtype("i1"), False, b"1")),
    "a scalar of too few bytes": Call(np.float32(1).__reduce__()[0], (np.dtype("f4"), b"1")),
    "keys that collide": {2**61 - 1 + k * (2**61 - 1): k for k in range(2_000)},
    "a seed of nested parts": seed(entropy=nested()),
    "a pool of nested parts": seed(pool=nested()),
    "a spawn key of nested parts": seed(key=nested()),
    "a generator named by nested parts": Call(
        np.random.PCG64(1).__reduce__()[0], (np.random.PCG64,), ({"bit_generator": nested(), "state": {}}, None)
    ),
    "a field named by nested parts": dtype("V8", 3, "|", None, (nested(),), {}, 8, 1, 0),
    "safety of nested parts": Call(_MADE, (uuid.UUID, object, None), {"int": 1, "is_safe": nested()}),
    "a shape of huge numbers": Call(_RECONSTRUCT, _EMPTY, (1, (2**8000,) * 20_000, np.dtype("i1"), False, b"1")),
    "a member of a class": Call(getattr, (Config, "__init__")),
    "a member named by nested parts": Call(getattr, (Phase, nested())),
    "a tensor of an array": Call(
        torch._tensor._rebuild_from_type_v2,
        (torch.nested._internal.nested_tensor._rebuild_njt, np.zeros(3), ({},), {}),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_values_that_no_type_writes_stay_unknown(tmp_path: Path, name: str) -> None:
    with open(tmp_path / "a.pt", "wb") as file:
        torch.save({"x": HOSTILE[name], "w": torch.ones(1)}, file)
    found = state_dict_of(tmp_path / "a.pt", tmp_path / "store", allow=[Config, Phase])
    assert isinstance(found["x"], Unknown)


def test_shared_parts_are_not_copied_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckstore.reading.known_types._FREE_BYTES", 1 << 20)
    for number, part in enumerate(("a" * 100_000, [0] * 10_000)):
        kind: Any = pathlib.PurePosixPath if isinstance(part, str) else collections.deque
        torch.save({"x": [Call(kind, (part,)) for _ in range(100)], "w": torch.ones(1)}, tmp_path / "a.pt")
        with pytest.raises(InputError, match="more memory than it has bytes"):
            state_dict_of(tmp_path / "a.pt", tmp_path / f"store{number}")


def test_pickles_within_pickles_stay_closed(tmp_path: Path) -> None:
    inner = pickle.dumps([Call(pickle.loads, (pickle.dumps(Config(0.1, pathlib.Path("a")), 2),))], 2)
    torch.save({"x": Call(pickle.loads, (inner,)), "w": torch.ones(1)}, tmp_path / "a.pt")
    found = state_dict_of(tmp_path / "a.pt", tmp_path / "store", allow=[Config])
    assert found["x"][0].name == "pickle.loads"


@pytest.mark.parametrize(
    ("dtype", "marks", "kept"), [("bfloat16", ("array",), ()), ("complex64", ("conj", "array"), ("conj",))]
)
def test_an_array_mark_that_cannot_hold_is_ignored(dtype: str, marks: tuple[str, ...], kept: tuple[str, ...]) -> None:
    extents = [Extent(0, dtype, (2,), ("a",))]
    plan = plan_torch({"a": TensorRef(0)}, [Tensor(("a",), dtype, (2,), (1,), 0, 0, marks)], extents)
    places = [(one.start, one.nbytes) for one in plan.layout.extents]
    assert parse(CompositeSource(plan.skeleton, places, plan.layout.size)).tensors[0].marks == kept


def test_the_documentation_lists_the_types() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/types.md").read_text()
    listed = re.findall(r"^\* `([^`]+)`", page, re.MULTILINE)
    assert sorted(listed) == sorted(KNOWN)


def test_positions_outside_of_a_random_state_stay_unknown(tmp_path: Path) -> None:
    def changed(kind: Any, **values: Any) -> Call:
        function, args, (state, sequence) = kind(5).__reduce__()
        inner = {name: value for name, value in values.items() if name in state["state"]}
        return Call(function, args, (state | values | {"state": state["state"] | inner}, sequence))

    short = np.zeros(3, np.uint64)
    twister, philox, small = np.random.MT19937, np.random.Philox, np.random.SFC64
    lies = [
        changed(twister, pos=625), changed(twister, pos=-1), changed(twister, pos=2.0), changed(twister, key=short),
        changed(philox, buffer_pos=5), changed(philox, buffer_pos=-1), changed(philox, buffer=short),
        changed(philox, counter=short), changed(philox, key=short), changed(small, state=short),
        changed(np.random.PCG64, bit_generator="MT19937"),
    ]  # fmt: skip
    function, args, state = np.random.SeedSequence(5).__reduce__()
    lies += [Call(function, args, (*state[:3], 2**40, ())), Call(function, args, (6, *state[1:]))]
    for left, following in ((624, 624), (2, 624), (1, 625), (1, 2**64 - 1), (0, 0), (2**31, 0)):
        function, args, (*rest, head) = torch.Generator().__reduce__()
        head = head.numpy().copy()
        head[8:12], head[16:24] = (np.array([one], kind).view("u1") for one, kind in ((left, "u4"), (following, "u8")))
        lies.append(Call(function, args, (*rest, torch.from_numpy(head))))
    legacy = np.random.RandomState(2).__reduce__()
    lies.append(Call(legacy[0], legacy[1], legacy[2] | {"state": {**legacy[2]["state"], "pos": 10**6}}))
    torch.save({"x": lies, "w": torch.ones(1)}, tmp_path / "a.pt")
    found = state_dict_of(tmp_path / "a.pt", tmp_path / "store")["x"]
    assert [number for number, one in enumerate(found) if not isinstance(one, Unknown)] == []
