"""Tables: lists of records that notebooks show and pandas reads."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore.storage.rows import VersionRow

#: Rows that a notebook shows.
_SHOWN = 60


class Table(list[dict[str, Any]]):
    """A list of records that have the same keys."""

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a column per key; needs pandas."""
        import pandas as pd

        return pd.DataFrame(list(self))

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
        "dropped": list(row.dropped),
        "elements": row.elements,
        "tensors": row.tensors,
        "files": row.files,
        "tags": list(tags),
        "metrics": dict(row.metrics),
        "source": row.source,
        "created": row.created,
    }


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
