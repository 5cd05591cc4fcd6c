"""A machine that reads pickle streams (protocols 0 to 5) into inert nodes: nothing is imported, nothing is executed.

Containers and plain values become themselves. Every class or function of a stream becomes a `Global`, and every object
that it would build an `Object` that records the class, its arguments and its state. Source of the opcodes:
`pickletools` of CPython.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from operator import is_, itemgetter, length_hint
from typing import Any, NoReturn

from ckstore.errors import InputError

#: Maximal opcodes of one stream: bounds time and memory (a stream of one-byte opcodes grows some sixty-fold in memory).
MAX_OPCODES = 20_000_000
#: The largest pickle that is read.
MAX_PICKLE_BYTES = 1 << 30
#: The longest integer in bytes that is read as one: its decimal form stays within CPython's limit of 4300 digits.
_MAX_INTEGER_BYTES = 1024
#: From here on integers can have crafted hash collisions; as keys they are compared by identity.
_HASH_MODULUS = 2**61 - 1
_MAX_KEY_PARTS = 64

#: Callables that copy a text or container.
_COPYING = ("_codecs.encode", "builtins.frozenset", "builtins.set", "collections.OrderedDict")
#: Elements that may be copied, in addition to some per byte: a shared container could be copied any number of times.
_FREE_COPIES = 1 << 20
_DICTIONARIES = (dict, OrderedDict, defaultdict)
_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}
_PYTHON_2_NAMES = {
    "builtins.long": "builtins.int",
    "builtins.unicode": "builtins.str",
    "builtins.xrange": "builtins.range",
}


#: Calls for tensors that are noted, at most: they take memory.
_MOST_FORMS = 1024

#: The code of the call for a plain tensor, after its function and a mark, as `pickle_writer` writes it, and torch does
#: not, for all but the first: a part before the key of the storage, its length, the key, and a part after it, of
#: numbers, truth values and values of the memo. An opcode that puts the tensor into the memo may follow.
_TENSOR = re.compile(
    rb"(\(([hj]M)([hj]M)X)(.)\0\0\0([0-9]+)(([hj]M)NtQN\(N{0,64}t\(N{0,64}t[\x88\x89]([hj]M)\(tRtR)([qr]M)?"
    .replace(b"[hj]M", b"h.|j....").replace(b"[qr]M", b"q.|r....").replace(b"N", b"(?:K.|M..|J....)"),
    re.DOTALL,
)  # fmt: skip


class TruncatedError(InputError):
    """The stream ends before its STOP."""


@dataclass(slots=True, eq=False)
class Global:
    """A class or function of the stream; never imported."""

    name: str


@dataclass(slots=True, eq=False)
class Object:
    """An object that the stream would build by a call: the callable's name, arguments, state and appended items."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Identity:
    """A dictionary key or set element that is not a small plain value; equal to nothing but itself."""

    value: Any


#: Interprets a call symbolically: (name, arguments) to a node.
Reduce = Callable[[str, Any], Any]
#: Interprets a persistent id.
Persistent = Callable[[Any], Any]


def no_persistent(identity: Any) -> NoReturn:
    """Refuse persistent ids, in streams without any."""
    raise InputError("the pickle refers to objects outside of itself")


def read_pickle(
    data: bytes,
    start: int = 0,
    *,
    reduce: Reduce = Object,
    persistent: Persistent = no_persistent,
) -> tuple[Any, int]:
    """Read the pickle at `start`; return its value and the offset after the STOP opcode.

    `reduce` is called for every call of the stream, with the name of the callable and the arguments; the default
    records them. `persistent` is called for every persistent id. If it has a method `again`, that is called with the
    result of a call and another key, and returns the result of a call that differs in the key of its persistent id
    alone; None if it cannot. Containers may be shared and may contain themselves. Raises `TruncatedError` if `data`
    ends before the STOP opcode, any other `InputError` if the stream is damaged.
    """
    machine = _Machine(data, start, reduce, persistent)
    try:
        return machine.run(), machine.position
    except InputError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
        if machine.position + 8 > len(data):
            raise TruncatedError(f"the pickle ends at byte {len(data)}, in the middle of a value") from error
        raise InputError(f"the pickle is damaged before byte {machine.position}") from error


def key_of(value: Any) -> Any:
    """Return the value itself if it is small, plain and hashes fast and fairly; else an `Identity` around it."""
    kind = type(value)
    if kind is str or kind is float or kind is bool or value is None or kind is bytes or kind is complex:
        return value
    if kind is int:
        return value if -_HASH_MODULUS < value < _HASH_MODULUS else Identity(value)
    if kind is tuple and _small(value):
        return value
    return Identity(value)


def _small(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple is shallow, short and plain: hashing recurses in C and visits shared parts again."""
    left = [(value, 0)]
    parts = 0
    while left:
        items, depth = left.pop()
        parts += len(items)
        if parts > _MAX_KEY_PARTS or depth > 8:
            return False
        for item in items:
            if type(item) is tuple:
                left.append((item, depth + 1))
            elif type(key_of(item)) is Identity:
                return False
    return True


class _Machine:
    """The stack, the marks and the memo; one method per opcode."""

    def __init__(self, data: bytes, start: int, reduce: Reduce, persistent: Persistent) -> None:
        self.data = data
        self.position = start
        self.reduce = reduce
        self.persistent = persistent
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.copied = 0
        self.steps = iter(range(MAX_OPCODES))
        self.again: Callable[[Any, str], Any] | None = getattr(persistent, "again", None)
        #: Of calls for tensors, by the name of the function and the code: how they take values of the memo, these, the
        #: number of opcodes, and the result. And the end, form, values and opcodes left of the next one.
        self.calls: dict[tuple[str, bytes, bytes], tuple[Any, tuple[Any, ...], int, Any]] = {}
        self.noted: tuple[int, Any, tuple[bytes, ...], int] = (-1, None, (), 0)

    def run(self) -> Any:
        data, table, end = self.data, _TABLE, len(self.data)
        for _ in self.steps:
            position = self.position
            if position >= end:
                raise TruncatedError(f"the pickle ends at byte {end}, before its STOP")
            self.position = position + 1
            opcode = data[position]
            if opcode == 46:
                return self.stack.pop()
            handler = table[opcode]
            if handler is None:
                raise InputError(f"the pickle is damaged: no opcode {opcode:#04x} at byte {position}")
            handler(self)
        raise InputError(f"the pickle holds more than {MAX_OPCODES:,} opcodes")

    # Reading

    def take(self, length: int) -> bytes:
        start = self.position
        stop = start + length
        if stop > len(self.data):
            raise TruncatedError(f"the pickle ends at byte {len(self.data)}, but a value claims to reach byte {stop}")
        self.position = stop
        return self.data[start:stop]

    def number(self, width: int) -> int:
        start = self.position
        if start + width > len(self.data):
            self.take(width)  # Raises.
        self.position = start + width
        return int.from_bytes(self.data[start : start + width], "little")

    def line(self) -> bytes:
        stop = self.data.find(b"\n", self.position)
        if stop < 0:
            raise TruncatedError("the pickle ends in the middle of a line")
        line = self.data[self.position : stop]
        self.position = stop + 1
        return line

    # The stack

    def items(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def mark(self) -> None:
        if self.again is not None and self.data.startswith(b"((", self.position - 1) and self.repeat(self.again):
            return
        self.outer.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.items()

    def pop_mark(self) -> None:
        self.items()

    def dup(self) -> None:
        self.stack.append(self.stack[-1])

    # Calls for tensors

    def repeat(self, again: Callable[[Any, str], Any]) -> bool:
        """Make the call that begins here, if it is like an earlier one but for the key; return whether it is."""
        found = _TENSOR.match(self.data, self.position)
        if found is None or found[4][0] != len(found[5]) or not self.stack or type(self.stack[-1]) is not Global:
            return False
        before, key, after, put = found.group(1, 5, 6, 9)
        form = self.stack[-1].name, before, after
        take, taken, opcodes, like = self.calls.get(form, (None, (), 0, None))
        if take is None or not all(map(is_, take(self.memo), taken)):
            self.noted = found.end(6), form, found.group(2, 3, 7, 8), length_hint(self.steps)
            return False
        opcodes += put is not None
        if length_hint(self.steps) < opcodes or (made := again(like, key.decode())) is None:
            return False
        next(islice(self.steps, opcodes, opcodes), None)
        self.stack[-1] = made
        if put is not None:
            self.memo[int.from_bytes(put[1:], "little")] = made
        self.position = found.end()
        return True

    def note(self, made: Any) -> None:
        """Note a call that was made by its opcodes, if the values that it took from the memo never change."""
        _, form, references, left = self.noted
        take = itemgetter(*[int.from_bytes(one[1:], "little") for one in references])
        taken = take(self.memo)
        if len(self.calls) < _MOST_FORMS and {str, Global}.issuperset(map(type, taken)):
            self.calls[form] = take, taken, left - length_hint(self.steps), made

    # The memo

    def put(self) -> None:
        self.memo[int(self.line())] = self.stack[-1]

    def binput(self) -> None:
        self.memo[self.data[self.position]] = self.stack[-1]
        self.position += 1

    def long_binput(self) -> None:
        self.memo[self.number(4)] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self) -> None:
        self.stack.append(self.memo[int(self.line())])

    def binget(self) -> None:
        value = self.memo[self.data[self.position]]
        self.position += 1
        self.stack.append(value)

    def long_binget(self) -> None:
        self.stack.append(self.memo[self.number(4)])

    # Plain values

    def proto(self) -> None:
        version = self.number(1)
        if version > 5:
            raise InputError(f"the pickle is of protocol {version}, which is unknown")

    def frame(self) -> None:
        self.take(8)

    def int_line(self) -> None:
        line = self.line()
        self.stack.append(line == b"01" if line in (b"00", b"01") else int(line))

    def long_line(self) -> None:
        self.stack.append(int(self.line().rstrip(b"L") or b"0"))

    def binint1(self) -> None:
        self.stack.append(self.data[self.position])
        self.position += 1

    def long1(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.number(1)), "little", signed=True))

    def long4(self) -> None:
        length = int.from_bytes(self.take(4), "little", signed=True)
        if length < 0:
            raise InputError("the pickle is damaged: an integer of negative length")
        data = self.take(length)
        if length > _MAX_INTEGER_BYTES:
            self.stack.append(Object("builtins.int", (data,)))
        else:
            self.stack.append(int.from_bytes(data, "little", signed=True))

    def float_line(self) -> None:
        self.stack.append(float(self.line()))

    def text(self, data: bytes) -> None:
        self.stack.append(data.decode("utf-8", "surrogatepass"))

    def unicode_line(self) -> None:
        self.stack.append(self.line().decode("raw-unicode-escape"))

    def python_2_string(self, data: bytes) -> None:
        """Push a Python 2 string: text if it decodes, as `torch.load` reads it, else bytes."""
        try:
            self.stack.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            self.stack.append(data)

    def string_line(self) -> None:
        line = self.line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise InputError("the pickle is damaged: a string without quotes")
        self.python_2_string(codecs.escape_decode(line[1:-1])[0])

    def byte_string(self, data: bytes) -> None:
        self.stack.append(data)

    def byte_array(self, data: bytes) -> None:
        self.stack.append(Object("builtins.bytearray", (data,)))

    # Containers

    def tuple_mark(self) -> None:
        items = self.items()
        self.stack.append(tuple(items))

    def tuple1(self) -> None:
        self.stack[-1] = (self.stack[-1],)

    def tuple2(self) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def tuple3(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def empty_list(self) -> None:
        self.stack.append([])

    def list_mark(self) -> None:
        items = self.items()
        self.stack.append(items)

    def empty_dict(self) -> None:
        self.stack.append({})

    def dict_mark(self) -> None:
        items = self.items()
        self.stack.append({})
        self.set_all(items)

    def empty_set(self) -> None:
        self.stack.append(set())

    def frozen_set(self) -> None:
        items = self.items()
        self.stack.append(frozenset(map(key_of, items)))

    def append(self) -> None:
        value = self.stack.pop()
        self.extend([value])

    def appends(self) -> None:
        self.extend(self.items())

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Object:
            target.items.extend(items)
        else:
            raise InputError("the pickle is damaged: it appends to a value that is not a list")

    def set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.set_all([key, value])

    def set_items(self) -> None:
        self.set_all(self.items())

    def set_all(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise InputError("the pickle is damaged: a key without a value")
        target = self.stack[-1]
        if type(target) in _DICTIONARIES:
            for index in range(0, len(items), 2):
                key = items[index]
                target[key if type(key) is str else key_of(key)] = items[index + 1]
        elif type(target) is Object:
            target.items.extend(zip(items[::2], items[1::2], strict=True))
        else:
            raise InputError("the pickle is damaged: it sets a key of a value that is not a dictionary")

    def add_items(self) -> None:
        items = self.items()
        target = self.stack[-1]
        if type(target) is set:
            target.update(map(key_of, items))
        elif type(target) is Object:
            target.items.extend(items)
        else:
            raise InputError("the pickle is damaged: it adds to a value that is not a set")

    # Classes and objects

    def name(self, module: str, qualname: str) -> Global:
        name = f"{_PYTHON_2_MODULES.get(module, module)}.{qualname}"
        return Global(_PYTHON_2_NAMES.get(name, name))

    def global_lines(self) -> None:
        module = self.line().decode("utf-8")
        self.stack.append(self.name(module, self.line().decode("utf-8")))

    def stack_global(self) -> None:
        qualname, module = self.stack.pop(), self.stack.pop()
        if type(qualname) is not str or type(module) is not str:
            raise InputError("the pickle is damaged: a class name that is not text")
        self.stack.append(self.name(module, qualname))

    def extension(self, code: bytes) -> None:
        self.stack.append(Global(f"copyreg.extension.{int.from_bytes(code, 'little')}"))

    def call(self, function: Any, args: Any) -> Any:
        if type(args) is not tuple:
            raise InputError("the pickle is damaged: call arguments that are not a tuple")
        if type(function) is Global:
            if function.name in _COPYING and args and isinstance(args[0], str | list | tuple | dict):
                self.copy(args[0])
            return self.reduce(function.name, args)
        # The callable is itself the result of a call, such as a functools.partial.
        return Object("object.__call__", (function, *args))

    def copy(self, container: str | list[Any] | tuple[Any, ...] | dict[Any, Any]) -> None:
        self.copied += len(container)
        if self.copied > _FREE_COPIES + 4 * self.position:
            raise InputError("the pickle copies a value too often")

    def reduce_call(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args)
        if self.position == self.noted[0]:
            self.note(self.stack[-1])

    def newobj_ex(self) -> None:
        keywords, args = self.stack.pop(), self.stack.pop()
        if keywords and type(args) is tuple:
            args = (*args, keywords)
        self.stack[-1] = self.call(self.stack[-1], args)

    def inst(self) -> None:
        module = self.line().decode("utf-8")
        name = self.name(module, self.line().decode("utf-8"))
        items = self.items()
        self.stack.append(self.call(name, tuple(items)))

    def obj(self) -> None:
        function, *args = self.items()
        self.stack.append(self.call(function, tuple(args)))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Object:
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict:
            # Such as the `_metadata` of a module's state dict; an attribute must not hide a method.
            self.copy(state)
            kept = {key: value for key, value in state.items() if type(key) is str and not hasattr(OrderedDict, key)}
            vars(target).update(kept)

    def persistent_line(self) -> None:
        self.stack.append(self.persistent(self.line().decode("ascii")))

    def persistent_id(self) -> None:
        self.stack.append(self.persistent(self.stack.pop()))

    def out_of_band(self) -> None:
        raise InputError("the pickle refers to buffers outside of itself")


_Handler = Callable[[_Machine], None]


def _value(value: Any) -> _Handler:
    """Return the handler of the opcode of a value."""
    return lambda machine: machine.stack.append(value)


def _number(form: str) -> _Handler:
    """Return the handler of an opcode that a number in the form of `struct` follows."""
    number = struct.Struct(form)

    def handle(machine: _Machine) -> None:
        machine.stack.append(number.unpack_from(machine.data, machine.position)[0])
        machine.position += number.size

    return handle


def _fixed(size: int, push: Callable[[_Machine, bytes], None]) -> _Handler:
    """Return the handler of an opcode that `size` bytes follow."""
    return lambda machine: push(machine, machine.take(size))


def _sized(width: int, push: Callable[[_Machine, bytes], None]) -> _Handler:
    """Return the handler of an opcode that bytes follow, after their number in `width` bytes."""

    def handle(machine: _Machine) -> None:
        begin = machine.position
        machine.position = start = begin + width
        stop = start + int.from_bytes(machine.data[begin:start], "little")
        if stop > len(machine.data):
            machine.take(stop - start)  # Raises.
        machine.position = stop
        push(machine, machine.data[start:stop])

    return handle


_OPCODES: dict[bytes, _Handler] = {
    b"(": _Machine.mark,
    b"0": _Machine.pop,
    b"1": _Machine.pop_mark,
    b"2": _Machine.dup,
    b"F": _Machine.float_line,
    b"I": _Machine.int_line,
    b"J": _number("<i"),
    b"K": _Machine.binint1,
    b"L": _Machine.long_line,
    b"M": _number("<H"),
    b"N": _value(None),
    b"P": _Machine.persistent_line,
    b"Q": _Machine.persistent_id,
    b"R": _Machine.reduce_call,
    b"S": _Machine.string_line,
    b"T": _sized(4, _Machine.python_2_string),
    b"U": _sized(1, _Machine.python_2_string),
    b"V": _Machine.unicode_line,
    b"X": _sized(4, _Machine.text),
    b"a": _Machine.append,
    b"b": _Machine.build,
    b"c": _Machine.global_lines,
    b"d": _Machine.dict_mark,
    b"}": _Machine.empty_dict,
    b"e": _Machine.appends,
    b"g": _Machine.get,
    b"h": _Machine.binget,
    b"i": _Machine.inst,
    b"j": _Machine.long_binget,
    b"l": _Machine.list_mark,
    b"]": _Machine.empty_list,
    b"o": _Machine.obj,
    b"p": _Machine.put,
    b"q": _Machine.binput,
    b"r": _Machine.long_binput,
    b"s": _Machine.set_item,
    b"t": _Machine.tuple_mark,
    b")": _value(()),
    b"u": _Machine.set_items,
    b"G": _number(">d"),
    b"\x80": _Machine.proto,
    b"\x81": _Machine.reduce_call,
    b"\x82": _fixed(1, _Machine.extension),
    b"\x83": _fixed(2, _Machine.extension),
    b"\x84": _fixed(4, _Machine.extension),
    b"\x85": _Machine.tuple1,
    b"\x86": _Machine.tuple2,
    b"\x87": _Machine.tuple3,
    b"\x88": _value(True),
    b"\x89": _value(False),
    b"\x8a": _Machine.long1,
    b"\x8b": _Machine.long4,
    b"B": _sized(4, _Machine.byte_string),
    b"C": _sized(1, _Machine.byte_string),
    b"\x8c": _sized(1, _Machine.text),
    b"\x8d": _sized(8, _Machine.text),
    b"\x8e": _sized(8, _Machine.byte_string),
    b"\x8f": _Machine.empty_set,
    b"\x90": _Machine.add_items,
    b"\x91": _Machine.frozen_set,
    b"\x92": _Machine.newobj_ex,
    b"\x93": _Machine.stack_global,
    b"\x94": _Machine.memoize,
    b"\x95": _Machine.frame,
    b"\x96": _sized(8, _Machine.byte_array),
    b"\x97": _Machine.out_of_band,
    b"\x98": _Machine.out_of_band,
}
_TABLE: list[_Handler | None] = [_OPCODES.get(bytes([code])) for code in range(256)]
