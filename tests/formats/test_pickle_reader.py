"""The pickle machine: every protocol and plain value as `pickle` reads it, everything else noted and never run."""

from __future__ import annotations

import contextlib
import decimal
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.errors import InputError
from ckstore.formats.layout import Unknown
from ckstore.formats.torch import pickle_reader as machine
from ckstore.formats.torch.objects import TorchPersistent, reduce
from ckstore.formats.torch.pickle_reader import Global, Object, TruncatedError, read_pickle
from ckstore.formats.torch.pickle_writer import write_pickle
from ckstore.formats.torch.tree_reader import MAX_DEPTH, TreeReader

#: Integers whose hashes nobody can make collide.
small = st.integers(-(2**61) + 2, 2**61 - 2)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.text(alphabet="\n'\"\\\x00é\ud800")
    | st.binary(),
    lambda children: (
        st.lists(children)
        | st.tuples(children, children)
        | st.dictionaries(st.text() | small | st.tuples(small, st.text()), children)
        | st.sets(small | st.text())
        | st.frozensets(small)
    ),
    max_leaves=20,
)


def tree_of(data: bytes) -> Any:
    node, stop = read_pickle(data, reduce=reduce)
    assert stop == len(data)
    return TreeReader().read(node)


@given(plain, st.integers(0, 5))
def test_plain_values(value: Any, protocol: int) -> None:
    tree = tree_of(pickle.dumps(value, protocol))
    assert repr(tree) == repr(value) or tree == value


@given(plain)
def test_writer(value: Any) -> None:
    data = write_pickle(value, lambda index: None)
    assert pickle.loads(data) == value
    assert tree_of(data) == value


@given(plain, st.integers(0, 5), st.data())
def test_truncations(value: Any, protocol: int, data: st.DataObject) -> None:
    stream = pickle.dumps(value, protocol)
    length = data.draw(st.integers(0, len(stream) - 1))
    with pytest.raises(TruncatedError):
        read_pickle(stream[:length])


@given(st.binary(max_size=200), st.integers(0, 5))
def test_any_bytes(noise: bytes, protocol: int) -> None:
    for stream in (noise, b"\x80" + bytes([protocol]) + noise + b"."):
        with contextlib.suppress(InputError):
            tree_of_anything(stream)


def tree_of_anything(stream: bytes) -> None:
    node, _ = read_pickle(stream, reduce=reduce)
    TreeReader().read(node)


class Trap:
    """An object whose pickle would write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({self.path!r}, 'w').close()",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_run(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "trace"
    stream = pickle.dumps({"x": Trap(str(path))}, protocol)
    tree = tree_of(stream)
    assert tree == {"x": Unknown("builtins.exec", (f"open({str(path)!r}, 'w').close()",))}
    assert not path.exists()
    pickle.loads(stream)
    assert path.exists()


def test_objects_are_noted() -> None:
    tree = tree_of(pickle.dumps({"d": decimal.Decimal("1.5"), "o": OrderedDict(a=1), "c": dict, "p": Path("/x")}, 4))
    assert tree["d"] == Unknown("decimal.Decimal", ("1.5",))
    assert tree["o"] == {"a": 1}
    assert tree["c"] == Unknown("builtins.dict", None)
    assert tree["p"].name == "pathlib.PosixPath" or tree["p"].name.startswith("pathlib.")


def test_old_style_instances() -> None:
    assert tree_of(b"(iold\nClass\n(dS'a'\nI1\nsb.") == Unknown("old.Class", (), {"a": 1})
    assert tree_of(b"(cold\nClass\nI2\no}U\x01bK\x03sb.") == Unknown("old.Class", (2,), {"b": 3})
    assert tree_of(b"ccopy_reg\n_reconstructor\n(cm\nC\nc__builtin__\nobject\nNtR.") == Unknown("m.C")


def test_python_2_strings_and_lines() -> None:
    assert tree_of(b"(lp0\nS'a\\x41'\naI01\naI00\naL12L\naF1.5\naVx\\u00e9\naT\x02\0\0\0\xff\xfea.") == [
        "aA", True, False, 12, 1.5, "xé", b"\xff\xfe",
    ]  # fmt: skip


def deep(levels: int, opcode: bytes) -> bytes:
    return b"\x80\x02)" + opcode * levels + b"."


def doubled(levels: int, first: bytes) -> bytes:
    """A tuple of two of a tuple of two of …: short, and without sharing endlessly large."""
    return b"\x80\x02" + first + b"".join(b"q\x00h\x00\x86" for _ in range(levels)) + b"."


@pytest.mark.long
def test_deep_nesting() -> None:
    assert tree_of(deep(MAX_DEPTH - 1, b"\x85"))
    for levels in (MAX_DEPTH + 2, 1_000_000):
        with pytest.raises(InputError, match="deeper"):
            tree_of(deep(levels, b"\x85"))
    nested_lists = b"\x80\x02" + b"]" * 300 + b"a" * 299 + b"."
    with pytest.raises(InputError, match="deeper"):
        tree_of(nested_lists)


def test_shared_tuples_do_not_expand() -> None:
    tree = tree_of(doubled(100, b"K\x01"))
    while isinstance(tree, tuple):
        assert tree[0] is tree[1]
        tree = tree[0]
    assert tree == 1


def test_keys_that_would_hash_for_ever() -> None:
    for key in (doubled(64, b"K\x01")[2:-1], b")" + b"\x85" * 500_000):
        tree, _ = read_pickle(b"\x80\x02}" + key + b"K\x01s.")
        assert len(tree) == 1
    colliding = b"".join(pickle.dumps(index * (2**61 - 1), 2)[2:-1] + b"N" for index in range(1, 50_000))
    tree, _ = read_pickle(b"\x80\x02}(" + colliding + b"u.")
    assert len(tree) == 49_999


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x06N.",
        b"\x80\x02B\xff\xff\xff\xff.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02\x8b\xff\xff\xff\xff.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"L" + b"9" * 10_000 + b"L\n.",
        b"h\x05.",
        b"j\xff\xff\xff\xff.",
        b"q\x00.",
        b".",
        b"(.",
        b"0.",
        b"1.",
        b"}K\x01s.",
        b"}(K\x01u.",
        b"K\x01K\x02a.",
        b"K\x01(K\x02e.",
        b"K\x01(K\x02\x90.",
        b"K\x01K\x02K\x03s.",
        b"NR.",
        b"cos\nsystem\nK\x01R.",
        b"\x80\x02X\x01\0\0\0\xff.",
        b"Sabc\n.",
        b"Ix\n.",
        b"\x97.",
        b"\x98.",
        b"K\x01Q.",
        b"Px\n.",
        b"K\x01K\x02\x93.",
        b"\xfe.",
    ],
)
def test_damaged_streams(stream: bytes) -> None:
    with pytest.raises(InputError):
        read_pickle(stream)


@pytest.mark.parametrize("called", ["__builtin__\nset", "__builtin__\nfrozenset", "collections\nOrderedDict", "codecs"])
def test_a_shared_value_is_not_copied_without_end(monkeypatch: pytest.MonkeyPatch, called: str) -> None:
    monkeypatch.setattr(machine, "_FREE_COPIES", 1 << 14)
    many = 2000
    shared, call = pickle.dumps(list(range(many)), 2)[2:-1], f"c{called}\n".encode()
    if called == "codecs":
        shared, call = pickle.dumps("a" * many, 2)[2:-1], b"c_codecs\nencode\n"
    elif called.endswith("OrderedDict"):
        shared = pickle.dumps([(i, i) for i in range(many)], 2)[2:-1]
    args = b"h\xf0X\x06\0\0\0latin1\x86R" if called == "codecs" else b"h\xf0\x85R"
    stream = b"\x80\x02" + shared + b"q\xf00" + call + b"q\xf10](" + 100_000 * (b"h\xf1" + args) + b"e."
    with pytest.raises(InputError, match="too often"):
        read_pickle(stream, reduce=reduce)


def test_a_shared_state_is_not_copied_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_FREE_COPIES", 1 << 14)
    state = pickle.dumps({f"k{i}": i for i in range(2000)}, 2)[2:-1]
    stream = b"\x80\x02" + state + b"q\xf00](" + 10_000 * b"ccollections\nOrderedDict\n)Rh\xf0b" + b"e."
    with pytest.raises(InputError, match="too often"):
        read_pickle(stream, reduce=reduce)


def test_too_many_opcodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_OPCODES", 1000)
    with pytest.raises(InputError, match="more than 1,000 opcodes"):
        read_pickle(b"N0" * 1000 + b".")


#: Values that the memo has at first, or later in place of others.
VALUES = [
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"X\x07\0\0\0storage", b"ctorch\nFloatStorage\n", b"X\x03\0\0\0cpu",
    b"ccollections\nOrderedDict\n", b"ctorch\nHalfStorage\n", b"ctorch._utils\n_rebuild_tensor\n", b"]", b"K\x01",
]  # fmt: skip
slots = st.integers(0, len(VALUES) - 1).map(lambda number: bytes([number]))
integers = st.sampled_from(
    [b"K\x00", b"K\x01", b"K\x02", b"M\x04\0", b"J\x04\0\0\0", b"J\xff\xff\xff\xff", b"\x8a\x00"]
)
puts = st.sampled_from([b"", b"q\x20", b"r\x21\0\0\0", b"q\x02"])


@st.composite
def calls(draw: st.DrawFn) -> bytes:
    """The code of a call for a tensor, sound but for one part at most."""
    odd = draw(st.sampled_from([-1, -1, -1, -1, *range(10)]))
    slot = [draw(slots) if number == odd else bytes([number]) for number in range(5)]
    count, offset = draw(integers) if odd == 5 else b"K\x04", draw(integers) if odd == 6 else b"K\x00"
    shape, strides = draw(st.sampled_from([(b"K\x04", b"K\x01"), (b"K\x02" * 2, b"K\x02K\x01"), (b"", b"")]))
    shape, strides = draw(integers) if odd == 7 else shape, draw(integers) if odd == 8 else strides
    key = draw(st.sampled_from([b"x", b"", b"0" * 256])) if odd == 9 else draw(st.sampled_from([b"0", b"1", b"23"]))
    code = b"h%b((h%bh%bX" % tuple(slot[:3]) + struct.pack("<I", len(key)) + key + b"h" + slot[3] + count + b"tQ"
    grad = draw(st.sampled_from([b"\x89", b"\x89", b"\x88"]))
    return code + offset + b"(%bt(%bt%bh%b(tRtR" % (shape, strides, grad, slot[4]) + draw(puts)


others = (
    st.tuples(st.sampled_from(VALUES), slots).map(lambda one: one[0] + b"q" + one[1] + b"0")
    | st.sampled_from([b"h\x20", b"j\x21\0\0\0", b"N", b"K\x01a0", b"h\x07K\x01a0"])
)  # fmt: skip


def outcome(stream: bytes, persistent: Any, storages: dict[str, Any]) -> Any:
    """The tree of a pickle, its tensors, its storages, and which of its nodes are one; or the error."""
    reader = TreeReader()
    try:
        node, stop = read_pickle(stream, reduce=reduce, persistent=persistent)
        return repr(reader.read(node)), stop, reader.views, repr(reader.shared), repr(storages)
    except InputError as error:
        return type(error), str(error)


@settings(max_examples=400)
@given(st.lists(calls(), min_size=1, max_size=3), st.data())
def test_tensors_in_one_step(forms: list[bytes], data: st.DataObject) -> None:
    """A call like an earlier one has the result of its opcodes, also in damaged streams."""
    memo = b"".join(value + b"q" + bytes([number]) + b"0" for number, value in enumerate(VALUES))
    parts = data.draw(st.lists(st.sampled_from(forms) | calls() | st.sampled_from(forms) | others, min_size=2))
    stream = bytearray(b"\x80\x02" + memo + b"](" + b"".join(parts) + b"e.")
    for place in data.draw(st.just([]) | st.lists(st.integers(len(memo), len(stream) - 1), max_size=2)):
        stream[place] = data.draw(st.sampled_from([*b"(tQRqrhjKMJX", 0, 1, 4, 0x30, 0xFF]))
    if data.draw(st.integers(0, 9)) == 0:
        del stream[data.draw(st.integers(0, len(stream))) :]
    check_steps(bytes(stream))


def check_steps(stream: bytes) -> Any:
    """Return the result of a pickle, which is the same if each opcode is read by itself."""
    once, by_opcode = TorchPersistent(), TorchPersistent()
    found = outcome(stream, once, once.storages)
    assert found == outcome(stream, lambda identity: by_opcode(identity), by_opcode.storages)
    return found


SOUND = b"h\0((h\1h\2X\1\0\0\x001h\3K\4tQK\0(K\4t(K\1t\x89h\4(tRtR"


@pytest.mark.parametrize(
    ("changed", "into"),
    [
        (b"K\4t(", b"K\4t(q\x02"),
        (b"X\1", b"X\2"),
        (b"X\1", b"X\0"),
        (b"X\1", b"X\3"),
        (b"X\1\0\0\x001", b"X\4\0\0\x001234"),
        (b"1h", b"2h"),
        (b"h\2", b"h\5"),
        (b"h\2", b"j\2\0\0\0"),
        (b"h\0", b"h\6"),
        (b"h\0", b"h\7"),
        (b"h\0", b"h\4"),
        (b"h\0", b"0"),
        (b"h\0", b"("),
        (b"h\0", b"N"),
        (b"K\4tQ", b"K\5tQ"),
        (b"\x89", b"\x88"),
        (b"tRtR", b"tRtRq\x02"),
        (b"tRtR", b"tRtRr\2\0\0\0"),
        (b"tRtR", b"tRtRq\x20h\x20"),
        (b"tRtR", b"tRtRctorch\nHalfStorage\nq\x020"),
        (b"tRtR", b"tRtRX\3\0\0\0cpuq\x010"),
        (b"tRtR", b"tRtR0"),
    ],
)
def test_a_changed_tensor_among_equal_ones(monkeypatch: pytest.MonkeyPatch, changed: bytes, into: bytes) -> None:
    """It is read as by its opcodes, at any limit of opcodes."""
    memo = b"".join(value + b"q" + bytes([number]) + b"0" for number, value in enumerate(VALUES))
    parts = SOUND * 3, SOUND.replace(changed, into) * 2, SOUND * 3
    stream = b"\x80\x02" + memo + b"](" + b"".join(parts) + b"e."
    check_steps(stream)
    for most in range(30, 230):
        monkeypatch.setattr(machine, "MAX_OPCODES", most)
        check_steps(stream)


def test_equal_tensors_take_one_step() -> None:
    memo = b"".join(value + b"q" + bytes([number]) + b"0" for number, value in enumerate(VALUES))
    steps = []

    class Counting(TorchPersistent):
        def again(self, made: Any, key: str) -> Any:
            steps.append(key)
            return super().again(made, key)

    once = Counting()
    tree, *_ = outcome(b"\x80\x02" + memo + b"](" + SOUND * 3 + b"e.", once, once.storages)
    assert tree.count("TensorRef") == 3
    assert steps == ["1", "1"]


def test_a_large_memo_index_costs_nothing() -> None:
    assert read_pickle(b"K\x07r\xff\xff\xff\x7f0j\xff\xff\xff\x7f.") == (7, 14)


def test_long_integers_are_bounded() -> None:
    data = bytes(1025)
    node, _ = read_pickle(b"\x80\x02\x8b" + struct.pack("<i", len(data)) + data + b".")
    assert isinstance(node, Object)
    assert node.name == "builtins.int"
    assert read_pickle(pickle.dumps(2**8000, 2))[0] == 2**8000


def test_calls_of_results() -> None:
    node, _ = read_pickle(b"cm\nf\n)R)R.")
    assert node.name == "object.__call__"
    assert node.args[0].name == "m.f"
    (extension,) = read_pickle(b"\x82\x05\x85.")[0]
    assert isinstance(extension, Global)
