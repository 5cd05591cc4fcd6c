"""Facts of a checkpoint about itself: step and epoch, from its contents or from its name."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any

from ckstore.formats.layout import Source
from ckstore.formats.trees import numpy_number

_STEP_KEYS = ("global_step", "step", "iteration", "iter")
_MAX_STEP = 2**63 - 1
_MAX_JSON_BYTES = 1 << 26

_SHARD = re.compile(r"-\d+-of-\d+$")
_NAMED = tuple(
    re.compile(rf"(?<![a-z]){word}s?[-_=. ]*(\d+)", re.IGNORECASE)
    for word in ("step", "iter(?:ation)?", "checkpoint", "epoch")
)
_INTEGER = re.compile(r"\d+")
#: A decimal, such as a loss; more than one point makes a date or a version.
DECIMAL = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.])")


def facts_of_mapping(mapping: Any) -> dict[str, Any]:
    """Return `step` and `epoch` from the keys of a mapping, if their values are integers or decimal text."""
    facts: dict[str, Any] = {}
    if not isinstance(mapping, dict):
        return facts
    for key in _STEP_KEYS:
        step = _count(mapping.get(key))
        if step is not None:
            facts["step"] = step
            break
    epoch = _count(mapping.get("epoch"))
    if epoch is not None:
        facts["epoch"] = epoch
    return facts


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


def step_of(name: str) -> int | None:
    """Return the step in the name of a file or directory.

    The number after `step`, else after `iter`, `checkpoint` or `epoch`, else the last integer of the name without its
    endings and decimals. None without a number, and for shards (`-00001-of-00002`).

    Examples
    --------
    >>> step_of("epoch=70-step=4331.ckpt"), step_of("checkpoint-1500"), step_of("last.ckpt")
    (4331, 1500, None)
    >>> step_of("weights.03-1.26.h5")
    3
    """
    named = named_step(name)
    if named is not None:
        return named
    integers = _INTEGER.findall(DECIMAL.sub("", _stem(name)))
    return _count(integers[-1]) if integers else None


def named_step(name: str) -> int | None:
    """Return the number after `step`, `iter`, `checkpoint` or `epoch` in a name."""
    stem = _stem(name)
    for pattern in _NAMED:
        found = pattern.findall(stem)
        if found:
            return _count(found[-1])
    return None


def _stem(name: str) -> str:
    """Return a name without its endings and its number as a shard."""
    stem = PurePosixPath(name.rstrip("/")).name
    while True:
        cut = stem.rpartition(".")
        # An ending has a letter: `model.12` keeps its number.
        if not cut[0] or not cut[2][:1].isalpha() or len(cut[2]) > 12:
            break
        stem = cut[0]
    return _SHARD.sub("", stem)


def _count(value: Any) -> int | None:
    number = numpy_number(value)
    value = value if number is None else number
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and 0 <= value <= _MAX_STEP else None
