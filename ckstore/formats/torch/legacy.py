"""Streams of `torch.save` before 1.6: five pickles, then the storages one after another.

Source: `torch/serialization.py`, `_legacy_save` and `_legacy_load`.
"""

from __future__ import annotations

from typing import Any

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import FileLayout, Format, Source
from ckstore.formats.torch.objects import TorchPersistent, reduce
from ckstore.formats.torch.pickle_reader import MAX_PICKLE_BYTES, TruncatedError, read_pickle
from ckstore.formats.torch.storages import StorageData
from ckstore.formats.torch.tree_reader import TreeReader
from ckstore.formats.torch.zip import assemble

_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = _MAGIC.to_bytes(10, "little")
_PROTOCOL = 1001

_FIRST_BYTES = 1 << 18


def _starts_like(head: bytes) -> bool:
    """Return whether a file begins with the pickle of torch's magic number."""
    return head[:1] == b"\x80" and _MAGIC_BYTES in head[:24]


def _parse(source: Source) -> FileLayout | None:
    """Return the layout of a legacy stream; None for another protocol or a big-endian one.

    Raises `InputError` if the stream is cut off or damaged.
    """
    stream = _Stream(source)
    if stream.read() != _MAGIC or stream.read() != _PROTOCOL:
        return None
    system = stream.read()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        return None
    persistent = TorchPersistent()
    node = stream.read(persistent)
    reader = TreeReader()
    tree = reader.read(node)
    keys = stream.read()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise InputError("the list of storages is damaged")
    storages: list[StorageData] = []
    position = stream.position
    for key in keys:
        storage = persistent.storages.get(key)
        if storage is None:
            raise InputError(f"the file lists storage {key!r}, which its pickle does not mention")
        if position + 8 > source.size:
            raise InputError(f"the file ends before storage {key!r}")
        count = int.from_bytes(source.pread(position, 8), "little", signed=True)
        if count != storage.count:
            raise InputError(f"storage {key!r} has another size than in the pickle")
        start, nbytes = position + 8, count * ITEM_SIZES[storage.dtype]
        position = start + nbytes
        if position > source.size:
            raise InputError(f"the file ends within storage {key!r}")
        storages.append(StorageData(key, None if storage.untyped else storage.dtype, start, nbytes))
    layout = assemble("torch-legacy", source.size, storages, reader.views, tree, reader.shared)
    layout.add_bytes(("__trailer__",), position, source.size)
    return layout


class _Stream:
    """Consecutive pickles of a file, whose first bytes are read: four times as many until they fit."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._length = min(_FIRST_BYTES, source.size)
        self._data = source.pread(0, self._length)
        self.position = 0

    def read(self, persistent: TorchPersistent | None = None) -> Any:
        """Return the value of the next pickle; with `persistent` it is one of torch's objects."""
        options: dict[str, Any] = {} if persistent is None else {"reduce": reduce, "persistent": persistent}
        while True:
            if persistent is not None:
                persistent.storages.clear()  # Of an attempt with fewer bytes.
            try:
                value, self.position = read_pickle(self._data, self.position, **options)
                return value
            except TruncatedError:
                if self._length >= min(self._source.size, MAX_PICKLE_BYTES):
                    raise
                self._length = min(4 * self._length, self._source.size, MAX_PICKLE_BYTES)
                self._data = self._source.pread(0, self._length)


FORMAT = Format("torch-legacy", _starts_like, _parse)
