"""Chooses the objects to store in full, so that the objects of forgotten versions below them can go."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import inf

#: The fate of an object; of two that take the same bytes, the first.
_KEEP, _GO, _FULL = range(3)


@dataclass(frozen=True, slots=True)
class Layer:
    """How an object is stored.

    Attributes
    ----------
    base
        Key of the object that it is stored against, or None.
    stored
        Its bytes.
    alone
        Its bytes in full; None if it cannot be stored in full.
    """

    base: int | None
    stored: int
    alone: int | None


def to_store_in_full(layers: Mapping[int, Layer], wanted: Container[int], price: float) -> set[int]:
    """Return the keys of the objects to store in full, so that the `wanted` ones take the fewest bytes.

    Another object goes if nothing that stays is stored against it. The choice is optimal for written bytes that count
    `price` times: a price above 1 leaves out objects that save little.
    """
    order = _bases_first(layers)
    # The fewest bytes of all that is stored against an object, directly or not, if it stays and if it goes.
    above_kept, above_gone = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    actions: dict[int, tuple[int, int]] = {}
    for key in reversed(order):
        layer = layers[key]
        full = inf if layer.alone is None or layer.base is None else price * layer.alone + above_kept[key]
        gone = inf if key in wanted else above_gone[key]
        without, if_lost = min((gone, _GO), (full, _FULL))
        least, action = min((layer.stored + above_kept[key], _KEEP), (without, if_lost))
        actions[key] = action, if_lost
        if layer.base is not None:
            above_kept[layer.base] += least
            above_gone[layer.base] += without
    chosen: set[int] = set()
    gone_keys: set[int | None] = set()
    for key in order:
        action = actions[key][layers[key].base in gone_keys]
        if action == _FULL:
            chosen.add(key)
        elif action == _GO:
            gone_keys.add(key)
    return chosen


def _bases_first(layers: Mapping[int, Layer]) -> list[int]:
    above: dict[int | None, list[int]] = {}
    for key, layer in layers.items():
        above.setdefault(layer.base, []).append(key)
    order = above.get(None, [])[:]
    for key in order:  # It grows.
        order += above.get(key, ())
    return order
