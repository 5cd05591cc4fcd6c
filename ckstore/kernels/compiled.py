"""The decorator of kernels that Python calls, and the directories of their machine code.

Wheels carry machine code for levels of processors (`hatch_build.py` makes it). Other code is compiled at first use, for
this processor, and kept for later processes in `NUMBA_CACHE_DIR`, by default in the user's cache.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

import llvmlite
import numba
from llvmlite.binding import parse_assembly, parse_bitcode
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from ckstore.runtime import compiling

Function = TypeVar("Function", bound=Callable[..., Any])

_KERNELS = Path(__file__).parent

SHIPPED = _KERNELS / "machine_code"
"""Directory of the code that wheels carry."""

_X86 = {
    "x86-64-v4": "+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl,+bmi2,+fma",
    "x86-64-v3": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe",
    "x86-64-v2": "+cx16,+popcnt,+sahf,+sse3,+sse4.1,+sse4.2,+ssse3",
}

#: Levels of processors that wheels carry code for, by architecture: LLVM's names and features, the highest first.
_LEVELS = {"x86_64": _X86, "aarch64": {"generic": ""}, "arm64": {"generic": ""}}


class Decorator(Protocol):
    """A decorator that compiles a function and, to the type checker, keeps its type."""

    def __call__(self, function: Function, /) -> Function:
        """Compile `function` at its first call."""
        ...


def kernel(function: Function) -> Function:
    """Make machine code of a function, loaded or compiled at its first call; it runs without the GIL.

    Only Python may call it: kept code has no bitcode that other compiled functions could be linked with.
    """
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy", "no_cfunc_wrapper": True}
    dispatcher = numba.njit(**options)(function)
    dispatcher._cache = MachineCode(function)
    dispatcher.get_call_template = _refuse
    return cast(Function, dispatcher)


def _refuse(*_: Any) -> NoReturn:
    raise TypeError("Compiled functions cannot call kernels; only Python can.")


class MachineCode(NullCache):  # type: ignore[misc]
    """Numba's cache of one kernel: a file for each combination of argument types, processor, and versions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__.removeprefix('ckstore.kernels.')}.{function.__qualname__}"

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the code of a signature, or None: numba then compiles."""
        compiling.start_runtime(target)
        processor = target.codegen().magic_tuple()
        shipped = [SHIPPED / self._file(signature, (processor[0], level, "")) for level in levels()]
        for path in (*shipped, _kept() / self._file(signature, processor)):
            with suppress(OSError):
                return CompileResult._rebuild(target, *pickle.loads(_read(path)))
        compiling.announce()
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep compiled code, unless the directory is read-only."""
        path = _kept() / self._file(signature, result.codegen.magic_tuple())
        partial = path.with_suffix(f".{secrets.token_hex(8)}")  # Containers with a common directory share process ids.
        code = dumps(_reduced(result))
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(sha256(code).digest() + code)
            partial.replace(path)

    def _file(self, signature: Any, processor: Any) -> str:
        key = repr((signature, processor, versions()))
        return f"{self._name}-{sha256(key.encode()).hexdigest()[:16]}.nbc"


def _reduced(result: Any) -> tuple[Any, ...]:
    """Return numba's parts of compiled code, without two that take time to load.

    Numba needs the names in the bitcode; other functions' environments serve exceptions with arguments.
    """
    (name, kind, (machine_code, bitcode)), *rest, _ = result._reduce()
    defined = [function.name for function in parse_bitcode(bitcode).functions if not function.is_declaration]
    names = parse_assembly("\n".join(f'@"{name}" = global i8 0' for name in defined)).as_bitcode()
    return (name, kind, (machine_code, names)), *rest, ()


@cache
def levels() -> list[str]:
    """Return the levels that this processor has, the highest first."""
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    known = _LEVELS.get(triple.partition("-")[0], {})
    has = {*features.split(","), ""}
    return [level for level, needed in known.items() if level == name or set(needed.split(",")) <= has]


def _read(path: Path) -> bytes:
    """Return kept code; raise `OSError` unless it is whole, and no other user can have written it."""
    with path.open("rb") as file:
        status, data = os.fstat(file.fileno()), file.read()
    is_own = path.parent == SHIPPED or (status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o002)
    if not is_own or sha256(data[32:]).digest() != data[:32]:
        raise OSError(f"{path} is damaged, or not this user's")
    return data[32:]


@cache
def _kept() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kept = Path(os.environ.get("NUMBA_CACHE_DIR") or f"{cache}/ckstore")
    # Without a home, "~" stays, and means a place in the working directory, where others may write.
    return kept if kept.is_absolute() else Path(os.devnull)


@cache
def versions() -> tuple[str, ...]:
    """Return the versions that code depends on, first of all kernels: they contain code of one another."""
    digest = sha256()
    for path in sorted(_KERNELS.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest(), sys.implementation.cache_tag, numba.__version__, llvmlite.__version__
