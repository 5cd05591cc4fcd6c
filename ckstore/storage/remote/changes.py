"""The changes in a record of the log: calls of the catalog's methods as JSON, and back through a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ckstore.storage.pack import PACK_NAME, PackEntry, PackInfo
from ckstore.storage.rows import KEY, VersionRow, version_schemas
from ckstore.storage.schema import (
    TIME,
    Schema,
    fields,
    flag,
    items,
    number,
    one_of,
    optional,
    plain_object,
    row,
    rows,
    text,
    whole,
)

_NUMBER, _SIZE, _KEYS = whole(1), whole(), items(KEY)
_VERSION = row(*version_schemas(flag, items(text()), plain_object))
_PACK = row(PACK_NAME, _SIZE, one_of("encoded", "raw"))
#: For each pack its name, the keys, and their slots.
_PLACES = rows(PACK_NAME, _KEYS, items(_SIZE))


def _version(values: Sequence[Any]) -> VersionRow:
    row = VersionRow(*values)
    return replace(row, dropped=tuple(row.dropped))


def _places(values: Sequence[Sequence[Any]]) -> list[tuple[int, str, int]]:
    return [(key, pack, slot) for pack, keys, slots in values for key, slot in zip(keys, slots, strict=True)]


def _plain_places(places: Iterable[tuple[int, str, int]]) -> list[list[Any]]:
    ordered = sorted(places, key=lambda place: (place[1], place[2]))
    return [
        [pack, [place[0] for place in group], [place[2] for place in group]]
        for pack, found in groupby(ordered, key=lambda place: place[1])
        for group in [list(found)]
    ]


def _as_is(value: Any) -> Any:
    return value


def _plain_row(value: Any) -> list[Any]:
    return [dict(item) if isinstance(item, Mapping) else item for item in _shallow(value)]


def _shallow(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__dataclass_fields__]


#: A kind of argument: its schema, its conversion to JSON, and the inverse.
Kind = tuple[Schema, Callable[[Any], Any], Callable[[Any], Any]]
_ROW: Kind = (_VERSION, _plain_row, _version)
_PACK_LIST: Kind = (
    items(_PACK), lambda packs: list(map(_shallow, packs)), lambda packs: [PackInfo(*pack) for pack in packs]
)  # fmt: skip
_ONE_PACK: Kind = (_PACK, _shallow, lambda pack: PackInfo(*pack))
_PLACEMENTS: Kind = (_PLACES, _plain_places, _places)
_ONE_ENTRY: Kind = (row(_SIZE, _SIZE), _shallow, lambda entry: PackEntry(*entry))
_PACK_NAMES: Kind = (items(PACK_NAME), sorted, _as_is)
_KEY_LIST: Kind = (_KEYS, sorted, _as_is)
_NUMBERS: Kind = (items(_NUMBER), list, _as_is)


def _plainly(schema: Schema) -> Kind:
    return (schema, _as_is, _as_is)


#: The arguments of every method of `Catalog` whose changes are shared.
CALLS: Mapping[str, Mapping[str, Kind]] = {
    "set_policy": {"run": _plainly(text()), "text": _plainly(optional(text()))},
    "commit_version": {
        "row": _ROW, "packs": _PACK_LIST, "objects": _PLACEMENTS, "raw": _PLACEMENTS,
        "references": _PACK_NAMES, "replace": _plainly(flag), "requires": _KEY_LIST,
    },
    "replace_version": {"row": _ROW, "references": _PACK_NAMES},
    "add_packs": {"packs": _PACK_LIST},
    "move_objects": {"placements": _PLACEMENTS},
    "remove_objects": {"keys": _KEY_LIST},
    "remove_packs": {"names": _PACK_NAMES},
    "free_packs": {"names": _PACK_NAMES, "objects": _KEY_LIST, "needed": _KEY_LIST},
    "replace_pack": {"former": _plainly(PACK_NAME), "pack": _ONE_PACK, "manifest": _ONE_ENTRY},
    "note_collected": {"when": _plainly(TIME)},
    "note_gone": {"names": _PACK_NAMES},
    "update_version": {
        "number": _plainly(_NUMBER), "depth": _plainly(_SIZE),
        "cost": _plainly(number(0)), "base": _plainly(flag), "stored_bytes": _plainly(_SIZE),
        "metrics": _plainly(plain_object),
    },
    "mark_versions": {"superseded": _NUMBERS, "present": _NUMBERS},
    "forget_versions": {"numbers": _NUMBERS},
    "remove_empty_runs": {},
    "set_tag": {"name": _plainly(text(1)), "number": _plainly(_NUMBER)},
    "delete_tag": {"name": _plainly(text(1))},
}  # fmt: skip


def plain_call(name: str, arguments: Mapping[str, Any]) -> list[Any]:
    """Return a call as JSON, without arguments that are None by default."""
    kinds = CALLS[name]
    given = {key: kinds[key][1](value) for key, value in arguments.items() if value is not None or name == "set_policy"}
    return [name, given]


def read_calls(column: Sequence[Any]) -> None:
    """Check a list of calls."""
    items(row(one_of(*CALLS), fields({})))(column)
    calls = [call for value in column for call in value]
    for name, kinds in CALLS.items():
        schemas = {key: kind[0] for key, kind in kinds.items()}
        given = [arguments for called, arguments in calls if called == name]
        fields({}, schemas)(given)
        for arguments in given:
            if not schemas.keys() >= arguments.keys():
                raise ValueError(f"{name} has no {sorted(arguments.keys() - schemas.keys())[0]}")


def call_again(catalog: Any, name: str, arguments: Mapping[str, Any]) -> None:
    """Repeat a call from a record."""
    kinds = CALLS[name]
    getattr(catalog, name)(**{key: kinds[key][2](value) for key, value in arguments.items()})
