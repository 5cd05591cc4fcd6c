"""Tables: lists of records that notebooks show and pandas reads."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any

from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.storage.rows import VersionRow

#: Rows that a notebook shows.
_SHOWN = 60

_CONDITION = re.compile(r"([^<>=!]+)(<=|>=|!=|=|<|>)(.*)")
_SIGNS = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Table(list[dict[str, Any]]):
    """A list of records with the same keys; metrics of versions count as keys.

    Examples
    --------
    >>> table = Table([{"step": 1, "metrics": {"loss": 2.5}}, {"step": 2, "metrics": {"loss": 1.5}}])
    >>> table.where("loss<2").values("step")
    [2]
    >>> table.sorted_by("loss").values("step")
    [2, 1]
    """

    def where(self, *conditions: str) -> Table:
        """Return the records that meet all conditions, such as `val_loss<2.5`, `run=gpt` or `tags=best`.

        Operators are =, !=, <, <=, > and >=. Numbers compare as numbers, other values as text; a list is compared by
        its items. A record without a value meets only !=.

        Raises
        ------
        UsageError
            A condition has another form, or no record has the key.

        Examples
        --------
        >>> store.log().where("val_loss<3", "run=gpt").values("step")
        [200, 300]
        """
        kept = list(self)
        for condition in conditions:
            found = _CONDITION.fullmatch(condition)
            if found is None:
                raise UsageError(f"{condition!r} is not a condition such as val_loss<2.5 or run=gpt.")
            name, sign, wanted = found.groups()
            values = {id(record): value for record, value in zip(self, self.values(name), strict=True)}
            kept = [record for record in kept if _meets(values[id(record)], sign, wanted)]
        return Table(kept)

    def sorted_by(self, name: str) -> Table:
        """Return the records by ascending value of a key, or descending with `-` before it; the others come last.

        Examples
        --------
        >>> store.log().sorted_by("-val_loss").values("step")
        [100, 300, 200]
        """
        values = self.values(name.removeprefix("-"))
        known = [(value, record) for value, record in zip(values, self, strict=True) if value is not None]
        numeric = all(isinstance(value, int | float) for value, _ in known)
        known.sort(key=lambda item: item[0] if numeric else str(item[0]), reverse=name.startswith("-"))
        return Table([record for _, record in known] + [r for v, r in zip(values, self, strict=True) if v is None])

    def columns(self, *names: str) -> Table:
        """Return records of these keys alone.

        Examples
        --------
        >>> store.log().columns("step", "val_loss")[0]
        {'step': 100, 'val_loss': 3.1}
        """
        columns = [self.values(name) for name in names]
        return Table(dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))

    def values(self, name: str) -> list[Any]:
        """Return the value of a key or metric in each record, None where there is none.

        Examples
        --------
        >>> store.log().values("val_loss")
        [3.1, 2.7, 2.8]
        """
        if self and not any(name in record or name in record.get("metrics", {}) for record in self):
            metrics = dict.fromkeys(metric for record in self for metric in record.get("metrics", {}))
            raise UsageError(f"No column or metric is called {name}; there are {', '.join([*self[0], *metrics])}.")
        return [record[name] if name in record else record.get("metrics", {}).get(name) for record in self]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a column for each key and each metric; needs pandas.

        Examples
        --------
        >>> store.log().to_pandas()["val_loss"].to_list()
        [3.1, 2.7, 2.8]
        """
        import pandas as pd

        records = [{**record, **record.get("metrics", {})} for record in self]
        return pd.DataFrame(records).drop(columns="metrics", errors="ignore")

    def _repr_html_(self) -> str:
        names = list(self[0]) if self else []
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(_text(record[name]))}</td>" for name in names) + "</tr>"
            for record in self[:_SHOWN]
        )
        left = f"<p>{len(self) - _SHOWN} more rows</p>" if len(self) > _SHOWN else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{left}"


def version_record(row: VersionRow, tags: Sequence[str]) -> dict[str, Any]:
    """Return a version as the record that `Store.log` and ``--json`` give."""
    return {
        "version": row.number,
        "id": row.uid,
        "run": row.run,
        "step": row.step,
        "parent": row.parent,
        "base": row.base,
        "depth": row.depth,
        "bytes": row.original_bytes,
        "stored": row.stored_bytes,
        "ratio": row.original_bytes / row.stored_bytes if row.stored_bytes else None,
        "cost": row.cost,
        "fidelity": row.fidelity,
        "hot": row.hot,
        "superseded": row.superseded,
        "dropped": list(row.dropped),
        "elements": row.elements,
        "tensors": row.tensors,
        "files": row.files,
        "tags": list(tags),
        "metrics": dict(row.metrics),
        "source": row.source,
        "created": row.created,
    }


def _meets(value: Any, sign: str, wanted: str) -> bool:
    if isinstance(value, list | tuple):
        return any(_meets(item, "=", wanted) for item in value) != (sign == "!=")
    if value is None:
        return sign == "!="
    pair: tuple[Any, Any] = (str(value), wanted)
    if isinstance(value, int | float):
        with suppress(ValueError):
            pair = (value, float(wanted))
    return bool(_SIGNS[sign](*pair))


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
