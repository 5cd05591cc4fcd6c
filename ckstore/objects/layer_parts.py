"""Which bytes of a pack a layer takes, by its record as a manifest has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckstore.objects.identity import array_name


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a layer: the field of the record that says where, the name of its array, and its bytes in the pack."""

    field: str
    array: str
    offset: int
    length: int


def layer_parts(record: Mapping[str, Any]) -> list[Part]:
    """Everything that the record of a manifest places in its pack."""
    name = array_name(record["id"])
    if record["layer"] == "exact":
        return [Part("at", name, record["at"], sum(record["lengths"]))]
    parts = [Part("at", name, *record["at"])]
    if "aside" in record:
        offset, *lengths = record["aside"]
        parts.append(Part("aside", f"{name}.aside", offset, sum(lengths)))
    return parts
