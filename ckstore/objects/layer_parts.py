"""The bytes of a layer in its pack, from its record in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckstore.objects.identity import array_name
from ckstore.objects.records import declared


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a layer: the record's field with its place, the name of its array, offset and length in the pack."""

    field: str
    array: str
    offset: int
    length: int


def layer_parts(record: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a layer."""
    name = array_name(record["id"])
    parts = [Part("at", name, *record["at"])]
    if (aside := declared(record, "aside")) is not None:
        offset, *lengths = aside
        parts.append(Part("aside", f"{name}.aside", offset, sum(lengths)))
    return parts
