"""Finds metrics of checkpoints: numbers such as `val_loss` at the top level, in logs, states of callbacks and names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isnan
from pathlib import PurePosixPath
from typing import Any

from ckstore.formats.facts import json_mapping, number_of_tensor, plain
from ckstore.formats.layout import FileLayout, Source, TensorRef
from ckstore.formats.trees import tensor_of
from ckstore.scanning.scanned import ScannedVersion
from ckstore.steps import METRIC

_NAME = re.compile(rf"(?:^|[_/.-]){METRIC}$")
#: As Lightning names files.
_IN_NAMES = re.compile(r"(?<![A-Za-z0-9_/])([A-Za-z][A-Za-z0-9_/]*)=(-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)")
#: Keys whose mappings hold metrics alone.
_HOLDERS = ("metrics", "eval_metrics", "val_metrics", "logs")

#: Most metrics of a version, and characters of a name.
_MOST, _LONGEST = 64, 100


def metrics_inside(scanned: ScannedVersion) -> dict[str, tuple[int | float, str]]:
    """Return the metrics of a version: value and path of the file by name, from the first file that holds it.

    NaN is a value; infinities and huge numbers, which mostly mean that there is none yet, are not. Metrics in the
    input's own name count last, such as `val_acc=0.51` in `epoch=1-val_acc=0.51.ckpt`.
    """
    found: dict[str, tuple[int | float, str]] = {}
    for file in scanned.files:
        for name, value in _of_file(file.layout, file.source, file.path):
            if len(found) < _MOST:
                found.setdefault(name, (value, file.path))
    path = PurePosixPath(scanned.name).name
    named = dict(_IN_NAMES.findall(path)[:_MOST])
    for name, value in _numbers(named, FileLayout("opaque", 0), None, named=True):
        found.setdefault(name, (value, path))
    return found


def _of_file(layout: FileLayout, source: Source, path: str) -> Iterator[tuple[str, int | float]]:
    if PurePosixPath(path).name == "trainer_state.json":
        yield from _of_trainer_state(source)
    tree = layout.facts.get("metadata", layout.tree)
    if not isinstance(tree, Mapping):
        return
    for key, value in tree.items():
        if key in _HOLDERS and isinstance(value, Mapping):
            yield from _numbers(value, layout, source, named=False)
        elif key == "callbacks" and isinstance(value, Mapping):
            for state in value.values():
                # Lightning's ModelCheckpoint.
                if isinstance(state, Mapping) and isinstance(state.get("monitor"), str):
                    score = {state["monitor"]: state.get("current_score")}
                    yield from _numbers(score, layout, source, named=False)
    yield from _numbers(tree, layout, source, named=True)


def _of_trainer_state(source: Source) -> Iterator[tuple[str, int | float]]:
    """Yield the last values in the log of a Hugging Face Trainer."""
    history = json_mapping(source).get("log_history")
    for entry in reversed(history) if isinstance(history, list) else ():
        if isinstance(entry, dict):
            yield from _numbers(entry, FileLayout("opaque", source.size), source, named=True)


def _numbers(
    mapping: Mapping[Any, Any], layout: FileLayout, source: Source | None, *, named: bool
) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers in a mapping; with `named`, only those whose names are of metrics."""
    for key, value in mapping.items():
        may_be = type(value) is not TensorRef or layout.tensors[value.index].shape in ((), (1,))
        if may_be and isinstance(key, str) and 0 < len(key) <= _LONGEST and (not named or _NAME.search(key)):
            number = _number(value, layout, source)
            if number is not None:
                yield key, number


def _number(value: Any, layout: FileLayout, source: Source | None) -> int | float | None:
    reference = tensor_of(value)
    if reference is not None and source is not None:
        value = number_of_tensor(layout.tensors[reference.index], layout, source)
        value = float(f"{value:.7g}") if isinstance(value, float) else value
    elif isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    value = plain(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and (abs(value) < 1 << 53 or isnan(value)) else None
