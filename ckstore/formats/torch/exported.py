"""Programs of `torch.export.save` (`.pt2`): an entry with the bytes of each weight, and JSON that describes them.

Source: https://github.com/pytorch/pytorch/blob/main/torch/export/pt2_archive/constants.py, its `_package.py`, and
`torch/_export/serde/schema.py` (TensorMeta, ScalarType, PayloadMeta).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from ckstore.errors import InputError
from ckstore.formats.facts import json_mapping
from ckstore.formats.layout import FileLayout, Source, Tensor, TensorRef
from ckstore.formats.sources import PartSource
from ckstore.formats.torch.storages import StorageData
from ckstore.formats.torch.zip import assemble
from ckstore.formats.zip_directory import ZipEntry

_CONFIG = re.compile(r"data/(weights|constants)/[^/]+_config\.json")
#: dtype of each `ScalarType`.
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
_STRIDED = 7


def weights_of(source: Source, entries: Sequence[ZipEntry], taken: Collection[str]) -> dict[str, FileLayout]:
    """Return the layouts of the entries of a program that are weights or constants, by the names of the entries.

    The name of a weight is its path. The JSON has a layout without tensors: it belongs to the skeleton. Weights whose
    names are among `taken`, or that are not described as plain tensors within their entry, are left out.
    """
    plain = {entry.name: entry for entry in entries if entry.plain}
    marker = next((name for name in plain if name.endswith("/archive_format")), "")
    prefix = marker.removesuffix("archive_format")
    if [_text(source, plain.get(f"{prefix}{name}")) for name in ("archive_format", "byteorder")] != [b"pt2", b"little"]:
        return {}
    found: dict[str, FileLayout] = {}
    views: dict[str, dict[str, Tensor]] = {}
    seen = set(taken)
    for name, entry in plain.items():
        if not name.startswith(prefix) or not _CONFIG.fullmatch(name.removeprefix(prefix)):
            continue
        config = json_mapping(PartSource(source, entry.start, entry.size)).get("config")
        found |= {name: FileLayout("weights", entry.size)} if config else {}
        for weight, described in config.items() if isinstance(config, dict) else ():
            try:
                data = f"{name.rpartition('/')[0]}/{described['path_name']}"
                tensor = _tensor(weight, described)
            except (KeyError, TypeError):
                continue
            if data in plain and data not in found and weight not in seen and not described.get("use_pickle"):
                seen.add(weight)
                views.setdefault(data, {})[weight] = tensor
    for name, tensors in views.items():
        storage = StorageData(name, None, 0, plain[name].size)
        tree = {weight: TensorRef(number) for number, weight in enumerate(tensors)}
        try:
            found[name] = assemble(
                "weights", storage.nbytes, [storage], [(name, one) for one in tensors.values()], tree
            )
        except InputError:
            continue
    return found


def _text(source: Source, entry: ZipEntry | None) -> bytes:
    return b"" if entry is None else source.pread(entry.start, min(entry.size, 8))


def _tensor(name: str, described: Any) -> Tensor:
    """Return a tensor as its JSON describes it; raise `KeyError` or `TypeError` if it does not."""
    meta = described["tensor_meta"]
    sizes, strides = ([_integer(one) for one in meta[part]] for part in ("sizes", "strides"))
    if meta["layout"] != _STRIDED:
        raise KeyError(name)
    return Tensor((name,), _DTYPES[meta["dtype"]], tuple(sizes), tuple(strides), -1, _integer(meta["storage_offset"]))


def _integer(described: Any) -> int:
    if type(described["as_int"]) is not int:
        raise TypeError("no number")
    return int(described["as_int"])
