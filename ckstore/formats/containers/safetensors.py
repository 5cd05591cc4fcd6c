"""safetensors files: a JSON header, then the tensors one after another.

Source: https://github.com/huggingface/safetensors, README ("Format") and `safetensors/src/tensor.rs`.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.facts import facts_of_mapping
from ckstore.formats.layout import FileLayout, Format, Source

_MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 64

#: Two elements a byte, which torch counts as one, and safetensors as two.
FLOAT4 = "float4_e2m1fn_x2"
#: dtype of each safetensors dtype whose elements are whole bytes; and of F4, where the last axis is even.
DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": FLOAT4,
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}
#: Bits of each dtype with smaller elements: its other tensors are kept as bytes.
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def _starts_like(head: bytes) -> bool:
    """Return whether a file begins with a plausible header length and the beginning of a JSON object."""
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES


def _parse(source: Source) -> FileLayout:
    """Return the layout of a safetensors file; each name is one path segment.

    Raises `InputError` if the header is cut off or no JSON, or its offsets leave holes, overlap, or do not end with the
    file.
    """
    length = int.from_bytes(source.pread(0, 8), "little")
    if 8 + length > source.size:
        raise InputError("the file ends within its header")
    header = _read_header(source.pread(8, length))
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _is_text_mapping(metadata):
        raise InputError("the header's metadata is not a mapping of text to text")
    described = {name: _describe(name, value) for name, value in header.items()}
    layout = FileLayout("safetensors", source.size)
    base = 8 + length
    layout.tree = {
        name: layout.add((name,), dtype, shape, base + begin) for name, (dtype, shape, begin, _) in described.items()
    }
    position = 0
    for begin, end, name in sorted((begin, end, name) for name, (_, _, begin, end) in described.items()):
        if begin != position:
            raise InputError(f"the offsets of {name!r} leave a hole or overlap with another tensor")
        position = end
    if base + position != source.size:
        relation = "within" if base + position > source.size else "behind"
        raise InputError(f"the file ends {relation} the data that its header describes")
    if metadata is not None:
        layout.facts = {"metadata": metadata, **facts_of_mapping(metadata)}
    return layout


def _read_header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError("the header is not valid JSON") from error
    if not isinstance(header, dict):
        raise InputError("the header is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise InputError("the header holds a name twice")
    return mapping


def _is_text_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _describe(name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape and offsets of one tensor, checked against each other."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"the header describes {name!r} by other keys than dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > _MAX_RANK:
        raise InputError(f"the header gives {name!r} an impossible shape or offsets")
    if prod(max(size, 1) for size in shape) >> 63:
        raise InputError(f"the header gives {name!r} an implausible shape")
    begin, end = offsets
    if type(kind) is not str or (kind not in DTYPES and kind not in _PACKED_BITS):
        raise InputError(f"the header gives {name!r} an unknown dtype")
    bits = _PACKED_BITS.get(kind)
    if kind in DTYPES and bits and shape and shape[-1] % 2 == 0:
        dtype, size = DTYPES[kind], (*shape[:-1], shape[-1] // 2)
    elif bits is not None:
        total, rest = divmod(prod(shape) * bits, 8)
        dtype, size = "uint8", (total,)
        if rest:
            raise InputError(f"{name!r} does not end at a whole byte")
    else:
        dtype, size = DTYPES[kind], tuple(shape)
    if end - begin != prod(size) * ITEM_SIZES[dtype]:
        raise InputError(f"the offsets of {name!r} do not agree with its dtype and shape")
    return dtype, size, begin, end


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


FORMAT = Format("safetensors", _starts_like, _parse)
