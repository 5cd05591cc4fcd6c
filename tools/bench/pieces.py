"""A version cut into pieces for peers: tensor data by name and dtype, and everything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckstore.formats.detect import parse
from ckstore.formats.sources import FileSource
from tools.bench.series import Series

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

#: Tensors of fewer bytes are compressed together, one piece per dtype: peers have an overhead for every piece.
SMALL = 65536


@dataclass(frozen=True)
class Piece:
    """Bytes that are compressed together.

    Attributes
    ----------
    dtype
        Of the elements.
    members
        Key of each tensor in it and its bytes, in order. A key is the same in every version of a series.
    data
        The bytes, uint8.
    """

    dtype: str
    members: tuple[tuple[str, int], ...]
    data: Bytes


def tensors(series: Series, index: int) -> list[Piece]:
    """Return the tensor data of a version as pieces, and the rest of its files as the last piece, of dtype `opaque`."""
    large: list[Piece] = []
    small: dict[str, list[tuple[str, Bytes]]] = {}
    rest: list[Bytes] = []
    for role, path in series.files(index).items():
        content = _read(path)
        layout = parse(FileSource(path))
        position = 0
        for extent in layout.extents:
            rest.append(content[position : extent.start])
            position = extent.stop
            data = content[extent.start : extent.stop]
            key = f"{role}:{extent.path!r}"
            if extent.nbytes >= SMALL:
                large.append(Piece(extent.dtype, ((key, extent.nbytes),), data))
            else:
                small.setdefault(extent.dtype, []).append((key, data))
        rest.append(content[position:])
    bundles = [
        Piece(dtype, tuple((key, len(data)) for key, data in members), np.concatenate([data for _, data in members]))
        for dtype, members in small.items()
    ]
    left = np.concatenate(rest)
    return [*large, *bundles, Piece("opaque", (("", len(left)),), left)]


def whole(series: Series, index: int) -> list[Piece]:
    """Return the files of a version, a piece each, of dtype `opaque`."""
    contents = {role: _read(path) for role, path in series.files(index).items()}
    return [Piece("opaque", ((role, len(content)),), content) for role, content in contents.items()]


def _read(path: Path) -> Bytes:
    return np.frombuffer(path.read_bytes(), np.uint8)
