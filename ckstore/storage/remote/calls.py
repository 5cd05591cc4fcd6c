"""The changes in a record of the log: calls of the catalog's methods as JSON, and back through a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ckstore.errors import FormatVersionError
from ckstore.storage.names import Name, Title
from ckstore.storage.pack import PackEntry, PackInfo, PackName
from ckstore.storage.rows import check_row, plain_row, row_of
from ckstore.storage.schema import Natural, Plain, Positive, Size, Text, Time, Whole, check, fields
from ckstore.storage.slots import Slots

_Keys = list[Natural]
_Pack = tuple[PackName, Whole]
#: For each pack its name, the keys, and their slots.
_Places = list[tuple[PackName, _Keys, list[Whole]]]


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


def _shallow(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__dataclass_fields__]


#: A kind of argument: its type, its conversion to JSON, and the inverse.
Kind = tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]
_ROW: Kind = (list[Any], plain_row, row_of)
_PACK_LIST: Kind = (
    list[_Pack], lambda packs: list(map(_shallow, packs)), lambda packs: [PackInfo(*pack) for pack in packs]
)  # fmt: skip
_ONE_PACK: Kind = (_Pack, _shallow, lambda pack: PackInfo(*pack))
_PLACEMENTS: Kind = (_Places, _plain_places, _places)
_ONE_ENTRY: Kind = (tuple[Whole, Whole], _shallow, lambda entry: PackEntry(*entry))
_PACK_NAMES: Kind = (list[PackName], sorted, _as_is)
_KEY_LIST: Kind = (_Keys, sorted, _as_is)
_USES: Kind = (list[tuple[PackName, Slots]], lambda uses: [list(use) for use in sorted(uses.items())], dict)
_BANDS: Kind = (list[Whole], sorted, _as_is)
_NUMBERS: Kind = (list[Positive], list, _as_is)


def _plainly(kind: Any) -> Kind:
    return (kind, _as_is, _as_is)


#: The arguments of every method of `Catalog` whose changes are shared.
CALLS: Mapping[str, Mapping[str, Kind]] = {
    "set_policy": {"run": _plainly(Title), "text": _plainly(Text | None)},
    "rename_run": {"run": _plainly(Name), "name": _plainly(Name)},
    "commit_version": {
        "row": _ROW, "packs": _PACK_LIST, "objects": _PLACEMENTS, "raw": _PLACEMENTS,
        "references": _PACK_NAMES, "uses": _USES, "bases": _PACK_NAMES, "replace": _plainly(bool),
        "requires": _KEY_LIST, "bands": _BANDS,
    },
    "replace_version": {"row": _ROW, "references": _PACK_NAMES, "uses": _USES},
    "use_packs": {"number": _plainly(Positive), "uses": _USES},
    "add_packs": {"packs": _PACK_LIST, "bases": _PACK_NAMES},
    "move_objects": {"placements": _PLACEMENTS},
    "remove_objects": {"keys": _KEY_LIST},
    "remove_packs": {"names": _PACK_NAMES},
    "free_packs": {"names": _PACK_NAMES, "objects": _KEY_LIST, "needed": _KEY_LIST},
    "replace_pack": {"former": _plainly(PackName), "pack": _ONE_PACK, "manifest": _ONE_ENTRY},
    "note_collected": {"when": _plainly(Time)},
    "note_gone": {"names": _PACK_NAMES},
    "update_version": {
        "number": _plainly(Positive), "depth": _plainly(Whole),
        "cost": _plainly(Size), "base": _plainly(bool), "stored_bytes": _plainly(Whole),
        "metrics": _plainly(Plain),
    },
    "mark_versions": {"superseded": _NUMBERS, "present": _NUMBERS},
    "forget_versions": {"numbers": _NUMBERS},
    "restore_version": {
        "row": _ROW, "references": _PACK_NAMES, "uses": _USES, "requires": _KEY_LIST, "children": _NUMBERS,
    },
    "remove_empty_runs": {},
    "set_tag": {"name": _plainly(Name), "number": _plainly(Positive)},
    "delete_tag": {"name": _plainly(Name)},
}  # fmt: skip


def plain_call(name: str, arguments: Mapping[str, Any]) -> list[Any]:
    """Return a call as JSON, without arguments that are None by default."""
    kinds = CALLS[name]
    given = {key: kinds[key][1](value) for key, value in arguments.items() if value is not None or name == "set_policy"}
    return [name, given]


_TYPES = {name: fields({}, {key: kind[0] for key, kind in kinds.items()}) for name, kinds in CALLS.items()}


def check_calls(calls: Any) -> None:
    """Raise `ValueError` unless a value is a list of calls, `FormatVersionError` for an unknown call or argument."""
    check(calls, list[tuple[str, dict[str, Any]]])
    for name, arguments in calls:
        if name not in CALLS:
            raise FormatVersionError(f"The log has the unknown call {name!r:.200}; install a later ckstore.")
        check(arguments, _TYPES[name])
        if unknown := sorted(arguments.keys() - CALLS[name].keys()):
            raise FormatVersionError(f"A call of {name} has {unknown[0]!r:.200}; install a later ckstore.")
        if "row" in arguments:
            check_row(arguments["row"])


def call_again(catalog: Any, name: str, arguments: Mapping[str, Any]) -> None:
    """Repeat a call from a record."""
    kinds = CALLS[name]
    getattr(catalog, name)(**{key: kinds[key][2](value) for key, value in arguments.items()})
