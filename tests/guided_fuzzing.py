"""Coverage-guided fuzzing of pickle streams, zip directories, safetensors headers and whole files.

    tools/fuzz-guided [TARGET] [SECONDS]

It needs atheris, which nothing else does: `pip install atheris` into the environment, if there is one for its Python.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TARGETS = ("pickle", "zip", "safetensors", "file")


def reader(target: str) -> Callable[[bytes], Any]:
    """Return the function that reads untrusted bytes; imported here, so that `main` has it instrumented."""
    from ckstore.formats.containers.safetensors import FORMAT
    from ckstore.formats.detect import parse
    from ckstore.formats.sources import CompositeSource
    from ckstore.formats.torch.pickle_reader import read_pickle
    from ckstore.formats.zip_directory import read_directory

    return {
        "pickle": read_pickle,
        "zip": lambda data: read_directory(CompositeSource(data, (), len(data))),
        "safetensors": lambda data: FORMAT.parse(CompositeSource(data, (), len(data))),
        "file": lambda data: parse(CompositeSource(data, (), len(data))),
    }[target]


def seeds(target: str) -> list[bytes]:
    """Return valid initial inputs of a target."""
    import torch
    from safetensors.numpy import save

    buffer, legacy, arrays = io.BytesIO(), io.BytesIO(), io.BytesIO()
    state = {"w": torch.ones(2, 3), "step": 3, "name": ["a", (1.5, None)]}
    torch.save(state, buffer)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    np.savez(arrays, a=np.ones((2, 3)), b=np.arange(3))
    with zipfile.ZipFile(buffer) as saved:
        pickle = next(saved.read(name) for name in saved.namelist() if name.endswith("data.pkl"))
    tensors = save({"a": np.ones((2, 3), np.float32), "b": np.arange(3)}, {"format": "pt"})
    return {
        # The persistent ids of torch are for its own reader.
        "pickle": [pickle.split(b"X\x07")[0], *(struct.pack("<BB", 0x80, 2) + rest for rest in (b"}.", b"]K\x01a."))],
        "zip": [buffer.getvalue(), arrays.getvalue()],
        "safetensors": [tensors],
        "file": [buffer.getvalue(), legacy.getvalue(), arrays.getvalue(), tensors],
    }[target]


def taken(read: Callable[[bytes], Any], data: bytes) -> bool:
    """Give a reader some bytes; whether it took them. Anything but `InputError` is a fault, and raised."""
    from ckstore.errors import InputError

    try:
        read(data)
    except InputError:
        return False
    return True


def main(target: str, corpus: str, seconds: str) -> None:
    """Fuzz a target for `seconds` or until it fails; interesting inputs stay in `corpus`."""
    import atheris

    with atheris.instrument_imports(include=["ckstore.formats"]):
        read = reader(target)
    directory = Path(corpus)
    directory.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(target)):
        (directory / f"seed-{number}").write_bytes(data)
    limits = [f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=2048", f"-artifact_prefix={corpus}/"]
    atheris.Setup([sys.argv[0], *limits, corpus], lambda data: taken(read, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
