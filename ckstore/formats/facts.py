"""Facts of a checkpoint about itself: step and epoch in its contents."""

from __future__ import annotations

import json
import struct
from pathlib import PurePosixPath
from reprlib import repr as shown
from typing import Any

from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.layout import FileLayout, Source, Tensor, Unknown
from ckstore.formats.trees import NUMPY_CORES, numpy_number
from ckstore.steps import EPOCH_KEY, STEP_KEYS, is_number, step_of_value

_MAX_JSON_BYTES = 1 << 26
_FACTS = {"step": STEP_KEYS, "epoch": (EPOCH_KEY,)}
_ARRAYS = frozenset(f"{core}._reconstruct" for core in NUMPY_CORES)
#: `struct` formats of dtypes; bfloat16 is the upper half of float32.
_FORMATS = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip


def facts_of_mapping(mapping: Any) -> dict[str, Any]:
    """Return `step` and `epoch` from the keys of a mapping, if their values are steps from 0 on.

    Without a step, `unused` is the first number of these keys that is none, with its key.
    """
    facts: dict[str, Any] = {}
    if not isinstance(mapping, dict):
        return facts
    wrong = ""
    for fact, keys in _FACTS.items():
        for key in filter(mapping.__contains__, keys):
            value = plain(mapping[key])
            step = step_of_value(value)
            if step is not None and step >= 0:
                facts[fact] = step
                break
            wrong = wrong or (f"{key} {shown(value)}" if is_number(value) else "")
    if wrong and "step" not in facts:
        facts["unused"] = wrong
    return facts


def facts_of_tensors(layout: FileLayout, source: Source) -> dict[str, Any]:
    """Return the facts in a file's tensors: numbers without axes at the top level; see `facts_of_mapping`."""
    keys = {key for keys in _FACTS.values() for key in keys}
    found = {tensor.path[0]: tensor for tensor in layout.tensors if len(tensor.path) == 1 and tensor.path[0] in keys}
    return facts_of_mapping({key: number_of_tensor(tensor, layout, source) for key, tensor in found.items()})


def number_of_tensor(tensor: Tensor, layout: FileLayout, source: Source) -> int | float | None:
    """Return the number of a tensor of one element and at most one axis; None for any other."""
    is_whole = tensor.box is None or tensor.box.whole == tensor.shape
    if tensor.shape not in ((), (1,)) or tensor.extent < 0 or tensor.lazy or not is_whole:
        return None
    size = ITEM_SIZES[tensor.dtype]
    data = source.pread(layout.extents[tensor.extent].start + size * tensor.offset, size)
    form = "f" if tensor.dtype == "bfloat16" else _FORMATS.get(tensor.dtype)
    if form is None or len(data) != size:
        return None
    number: int | float = struct.unpack(f"<{form}", b"\0\0" + data if tensor.dtype == "bfloat16" else data)[0]
    return number


def plain(value: Any) -> Any:
    """Return the number of a NumPy scalar, or of an array without axes, as an unknown object; others unchanged."""
    if isinstance(value, Unknown) and value.name in _ARRAYS:
        match value.state:
            case (_, (), Unknown() as dtype, _, bytes(data)):
                value = Unknown(f"{NUMPY_CORES[0]}.scalar", (dtype, data))
    number = numpy_number(value)
    return value if number is None else number


def facts_of_trainer_state(source: Source, name: str) -> dict[str, Any]:
    """Return `step` of a Hugging Face `trainer_state.json`; nothing for any other file."""
    if PurePosixPath(name).name != "trainer_state.json":
        return {}
    return facts_of_mapping({"global_step": json_mapping(source).get("global_step")})


def json_mapping(source: Source) -> dict[str, Any]:
    """Return the mapping in a JSON file; an empty one for any other or a very large file."""
    try:
        found = json.loads(source.pread(0, source.size)) if source.size <= _MAX_JSON_BYTES else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
