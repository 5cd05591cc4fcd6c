"""Compiles the kernels into one shared library, for all levels of processors; `hatch_build.py` runs it.

usage: python -m tools.compile_kernels [--sanitize] [LIBRARY]

The compiler is $CC, or else cc, gcc or clang, or else that of the package ziglang. --sanitize adds checks of addresses
and of undefined behaviour.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

KERNELS = Path(__file__).resolve().parents[1] / "ckstore" / "kernels"
#: Not `.so`, which Python takes for a module.
LIBRARY = KERNELS / "libkernels.so.1"

#: No contraction: all levels and compilers round alike. Four streams that are joined in vectors are decoded slowly.
_FLAGS = [
    *(
        "-std=c17",
        "-O3",
        "-fno-tree-slp-vectorize",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
    ),
    *("-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
]
_SANITIZE = [
    *("-O1", "-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
]

_AVX2 = ["-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mfma", "-mlzcnt", "-mmovbe", "-mpopcnt"]
_AVX512 = [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))]

#: Flags of the levels of processors, by architecture; others have the baseline only. Few processors lack AVX2: the
#: smaller code of their level keeps the wheel below 1.5 MB.
_LEVELS = {"x86_64": {"baseline": ["-Os"], "avx2": _AVX2, "avx512": _AVX512}}


def main() -> None:
    """Compile, unless the library is newer than all sources."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--sanitize"]
    library = Path(arguments[0]).absolute() if arguments else LIBRARY
    if library != LIBRARY or not _is_current():
        compile_kernels(library, _SANITIZE if "--sanitize" in sys.argv else [])


def compiler() -> list[str] | None:
    """Return the command of the compiler, None if there is none."""
    if command := shlex.split(os.environ.get("CC", "")):
        return command
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def compile_kernels(library: Path, more: list[str]) -> None:
    """Write the library; raise `SystemExit` if the compiler fails."""
    command = compiler() or [sys.executable, "-m", "ziglang", "cc"]
    with TemporaryDirectory() as directory:
        objects, processes = [], []
        levels = _LEVELS.get(platform.machine(), {"baseline": []})
        units = [("level.c", "baseline", []), *(("all.c", level, flags) for level, flags in levels.items())]
        for source, level, flags in units:
            objects.append(f"{directory}/{level}-{source}.o")
            arguments = [*_FLAGS, *flags, *more, f"-DLEVEL={level}", "-c", source, "-o", objects[-1]]
            # In the directory of the sources: no path of this machine becomes part of the library.
            processes.append(subprocess.Popen([*command, *arguments], cwd=KERNELS))
        codes = [process.wait() for process in processes]
        partial = Path(directory, library.name)
        # Apple's linker warns that it ignores this.
        stripped = [] if more or sys.platform == "darwin" else ["-s"]
        link = ["-shared", *more, *stripped, *objects, "-o", str(partial), "-lm"]
        if any(codes) or subprocess.run([*command, *link], cwd=KERNELS).returncode:
            raise SystemExit(f"The kernels could not be compiled by {shlex.join(command)}.")
        shutil.copy(partial, library.with_suffix(".partial"))
        library.with_suffix(".partial").replace(library)


def wheel_platform() -> str:
    """Return the platform that a wheel with the library is for, by the symbols of the C library that it needs."""
    name = re.sub(r"[-.]", "_", sysconfig.get_platform())
    versions = [int(version) for version in re.findall(rb"GLIBC_2\.(\d+)", LIBRARY.read_bytes())]
    return name.replace("linux", f"manylinux_2_{max(*versions, 17)}", 1) if versions else name


def _is_current() -> bool:
    sources = [*KERNELS.rglob("*.[ch]"), Path(__file__)]
    return LIBRARY.exists() and LIBRARY.stat().st_mtime > max(source.stat().st_mtime for source in sources)


if __name__ == "__main__":
    main()
