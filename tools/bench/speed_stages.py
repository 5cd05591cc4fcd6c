"""Where the processor time of a verb goes: functions of ckstore that are wrapped, and take the time of their thread.

And what the same calls would take if all that they need were in the cache: what decodes and codes at best.
"""

from __future__ import annotations

import importlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any


@dataclass(frozen=True)
class Stage:
    """A part of the work.

    Attributes
    ----------
    name
        What tables call it.
    functions
        Each as `module:name`, the name where its callers look it up; a method with its class.
    whole
        Whether what stages do inside of it is its own time.
    """

    name: str
    functions: tuple[str, ...]
    whole: bool = False


#: All stages of all verbs, in the order of the data; each takes the time that it spends in no other one.
STAGES = (
    Stage("read files", ("ckstore.scanning.files:InputFile.pread", "ckstore.scanning.files:InputFile.read_into")),
    Stage("SHA-256", ("ckstore.objects.hashing:StreamSha256._hash",)),
    Stage("CRC-32", ("ckstore.formats.skeleton:Checks.update",)),
    Stage("BLAKE3 and cut", ("ckstore.scanning.scan:Reading.windows", "ckstore.scanning.scan:ScannedVersion.check")),
    Stage("estimate", ("ckstore.encoding.estimator:Estimator.estimate",), whole=True),
    Stage("read packs", ("ckstore.storage.pack_reader:PackReader.pread",
                         "ckstore.storage.pack_reader:PackReader.read_into")),
    Stage("decode streams", ("ckstore.objects.reader:decode_integers", "ckstore.objects.reader:add_integers")),
    Stage("predict, correct", ("ckstore.objects.reader:ObjectReader.integers",
                               "ckstore.objects.reader:ObjectReader.ordinals",
                               "ckstore.objects.reader:ObjectReader.exact",
                               "ckstore.objects.reader:ObjectReader.values")),
    Stage("quantise, predict, difference", ("ckstore.encoding.estimator:Estimator.encode",)),
    Stage("plan: histograms, tables", ("ckstore.codecs.integers:make_plan",)),
    Stage("write streams", ("ckstore.encoding.exact:encode_chunk", "ckstore.encoding.exact:encode_changes")),
    Stage("CRC-32 of chunks", ("ckstore.codecs.integers:crc32c", "ckstore.encoding.exact:crc32",
                       "ckstore.objects.reader:crc32")),
    Stage("packs: CRC-32, BLAKE3, write", ("ckstore.storage.zip_stream:ZipStream.add_stored",
                                           "ckstore.storage.zip_stream:ZipStream.add_deflated",
                                           "ckstore.storage.zip_stream:ZipStream.finish")),
    Stage("copy chunks", ("ckstore.version:Version.read_extent",)),
    Stage("write files", ("ckstore.reading.checkout:write_all",)),
    Stage("fsync, commit", ("ckstore.storage.writeback:Writeback.finish",
                            "ckstore.storage.catalog:Catalog.commit_version")),
)  # fmt: skip


@dataclass
class _Frame:
    """A stage that a thread is in: seconds of the stages inside of it, and whether these are its own."""

    whole: bool
    inside: float = 0.0


class _Frames(threading.local):
    """The stages that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


class StageClock:
    """Processor seconds by stage, of all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._threads = _Frames()
        self._lock = threading.Lock()

    def wrapped(self, function: Callable[..., Any], stage: Stage) -> Callable[..., Any]:
        """A function that does the same and whose time counts for a stage; a generator's from one item to the next."""
        if inspect.isgeneratorfunction(function):
            step = self.wrapped(next, stage)

            @wraps(function)
            def generate(*arguments: Any, **options: Any) -> Iterator[Any]:
                inner = function(*arguments, **options)
                try:
                    while True:
                        try:
                            item = step(inner)
                        except StopIteration as end:
                            return end.value
                        yield item
                finally:
                    inner.close()

            return generate

        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            frames = self._threads.frames
            if frames and frames[-1].whole:
                return function(*arguments, **options)
            frame = _Frame(stage.whole)
            frames.append(frame)
            begin = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                taken = time.thread_time() - begin
                frames.pop()
                if frames:
                    frames[-1].inside += taken
                with self._lock:
                    self.seconds[stage.name] = self.seconds.get(stage.name, 0.0) + taken - frame.inside

        return timed


@contextmanager
def stage_clock(stages: Sequence[Stage] = STAGES) -> Iterator[StageClock]:
    """Take the processor time of stages meanwhile.

    Raises
    ------
    LookupError
        ckstore has no function of a stage any more.
    """
    clock = StageClock()
    with replaced({function: partial(clock.wrapped, stage=stage) for stage in stages for function in stage.functions}):
        yield clock


#: What adds to the array that it is given, and must be given another one when it is repeated.
_ADDS = "ckstore.objects.reader:add_integers"

#: What decodes chunks, and what encodes them, as in `Stage`. Called again with the same, each does the same again.
DECODING = (
    "ckstore.objects.reader:decode_integers",
    _ADDS,
    "ckstore.objects.reader:ordinal_correct",
    "ckstore.objects.reader:ordinal_classes",
    "ckstore.objects.reader:scaled",
    "ckstore.objects.reader:crc32",
    "ckstore.codecs.lattice:LinearLattice.own",
    "ckstore.codecs.lattice:LinearLattice.chained",
    "ckstore.codecs.lattice:LinearLattice.project",
)
CODING = (
    "ckstore.encoding.exact:encode_chunk",
    "ckstore.encoding.exact:encode_changes",
    "ckstore.encoding.exact:ordinal_difference",
    "ckstore.encoding.exact:ordinal_classes",
    "ckstore.encoding.exact:scaled",
    "ckstore.encoding.exact:crc32",
    "ckstore.codecs.lattice:LinearLattice.quantise",
    "ckstore.codecs.lattice:LinearLattice.residuals",
)

#: Where these only weigh how to store an object.
_WEIGHING = "ckstore.encoding.estimator:Estimator.estimate"

#: How often a call is repeated.
_REPEATS = 3


@contextmanager
def repeated() -> Iterator[dict[str, float]]:
    """Repeat what decodes and codes meanwhile: processor seconds of both at best, of all threads.

    By "decode" and "encode"; the least of some repeats counts for a call, whose arrays are in the cache then.
    """
    seconds = {"decode": 0.0, "encode": 0.0}
    lock = threading.Lock()
    inside = threading.local()

    def timed(function: Callable[..., Any], group: str, adds: bool) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if getattr(inside, "weighing", False):
                return result
            if adds:
                arguments = (arguments[0], arguments[1].copy(), *arguments[2:])
            least = float("inf")
            for _ in range(_REPEATS):
                begin = time.thread_time()
                function(*arguments, **options)
                least = min(least, time.thread_time() - begin)
            with lock:
                seconds[group] += least
            return result

        return call

    def weighing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            inside.weighing = True
            try:
                return function(*arguments, **options)
            finally:
                inside.weighing = False

        return call

    wrappers = {name: partial(timed, group="decode", adds=name == _ADDS) for name in DECODING}
    wrappers |= {name: partial(timed, group="encode", adds=False) for name in CODING}
    with replaced({**wrappers, _WEIGHING: weighing}):
        yield seconds


@contextmanager
def replaced(wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> Iterator[None]:
    """Have functions, named as in `Stage`, stand wrapped meanwhile.

    Raises
    ------
    LookupError
        ckstore has no such function any more.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for function, wrap in wrappers.items():
            owner, name = place(function)
            found = inspect.getattr_static(owner, name)
            before.append((owner, name, found))
            setattr(owner, name, wrap(found))
        yield
    finally:
        for owner, name, found in reversed(before):
            setattr(owner, name, found)


def place(function: str) -> tuple[Any, str]:
    """The module or class that holds a function, and its name there.

    Raises
    ------
    LookupError
        There is no such function, or it is none that can be wrapped.
    """
    module, _, path = function.partition(":")
    *classes, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in classes:
            owner = getattr(owner, part)
        found = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"ckstore has no {function} any more; give its stage in {__name__} another one.") from error
    if not inspect.isfunction(found):
        raise LookupError(f"{function} is no plain function any more; give its stage in {__name__} another one.")
    return owner, name
