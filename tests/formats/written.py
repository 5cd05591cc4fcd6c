"""Files of formats that other libraries write, made by hand where a test has to contradict the format."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import torch

from ckstore.varint import varint


def gguf_bytes(
    tensors: Sequence[tuple[str | bytes, Sequence[int], int, int]],
    alignment: int = 32,
    *,
    offsets: Sequence[int] = (),
    count: int | None = None,
    values: int = 2,
    key: bytes = b"",
) -> bytes:
    """A GGUF file of tensors (name, shape, type, bytes), whose header may say something else.

    `key` replaces the bytes after the counts.
    """
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) if count is None else count, values)
    header += key or (
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
        + _text("general.alignment") + struct.pack("<II", 4, alignment)
    )  # fmt: skip
    data = b""
    step = alignment or 32
    for number, (name, shape, kind, nbytes) in enumerate(tensors):
        offset = offsets[number] if offsets else len(data)
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        data += bytes(range(1, 33)) * (nbytes // 32) + bytes(nbytes % 32)
        data += bytes(-len(data) % step)
    return header + bytes(-len(header) % step) + data


def field(number: int, value: int | bytes) -> bytes:
    """Return a field of a protobuf message: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def initialiser(name: str, kind: int, shape: Sequence[int], data: bytes, place: int = 9) -> bytes:
    """Return the message of a tensor of ONNX; its data is in the field `place`."""
    return b"".join(field(1, size) for size in shape) + field(2, kind) + field(8, name.encode()) + field(place, data)


def onnx_bytes(initialisers: Sequence[bytes], before: bytes = b"") -> bytes:
    """Return a model of ONNX with a node, and `before` in its graph."""
    node = field(1, field(1, b"x") + field(1, b"w") + field(2, b"y") + field(4, b"MatMul"))
    graph = node + field(2, b"main") + before + b"".join(field(5, one) for one in initialisers)
    return field(1, 10) + field(2, b"tests") + field(7, graph) + field(8, field(2, 21))


def learner_bytes(policy: Any, optimizer: Any, steps: int = 3, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return the output of `save` of a Stable-Baselines 3 model."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("data", json.dumps({"gamma": 0.99, "num_timesteps": steps}))
        for name, value in (
            ("pytorch_variables.pth", {}), ("policy.pth", policy), ("policy.optimizer.pth", optimizer),
        ):  # fmt: skip
            with archive.open(name, "w", force_zip64=True) as entry:
                torch.save(value, entry)
        archive.writestr("_stable_baselines3_version", "2.7.0")
        archive.writestr("system_info.txt", "- OS: Linux")
    return out.getvalue()


def tar_bytes(files: dict[str, bytes], form: int = tarfile.GNU_FORMAT, mode: Any = "w") -> bytes:
    """Return a tar archive of files, such as a `.nemo`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=form) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def hdf5_bytes(tree: Any, **options: Any) -> bytes:
    """Return the output of `h5py` for nested dictionaries of arrays."""
    import h5py

    out = io.BytesIO()
    with h5py.File(out, "w", **options) as file:
        left = [(file, tree)]
        while left:
            group, members = left.pop()
            for name, value in members.items():
                if isinstance(value, dict):
                    left.append((group.create_group(name), value))
                else:
                    group[name] = value
    return out.getvalue()


def keras_bytes(weights: Any, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return the output of Keras' `Model.save` to a `.keras` file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.15.1"}))
        archive.writestr("config.json", json.dumps({"module": "keras", "class_name": "Sequential"}))
        archive.writestr("model.weights.h5", hdf5_bytes(weights))
    return out.getvalue()


def flax_bytes(tree: Any) -> bytes:
    """Return the output of `flax.serialization.msgpack_serialize`, except for arrays above 1 GiB."""

    def extension(value: Any) -> msgpack.ExtType:
        if isinstance(value, complex):
            return msgpack.ExtType(2, msgpack.packb((value.real, value.imag)))
        array = np.asarray(value)
        data = msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True)
        return msgpack.ExtType(1 if isinstance(value, np.ndarray) else 3, data)

    return bytes(msgpack.packb(tree, default=extension, strict_types=True))


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data
