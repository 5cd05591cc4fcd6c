"""Tables: lists of records that notebooks show and pandas reads."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ckstore.errors import UsageError
from ckstore.runtime.provenance import CONFIG, MADE, own_metrics
from ckstore.steps import seconds_of
from ckstore.storage.version_names import is_better_low

if TYPE_CHECKING:
    from ckstore.storage.rows import RunSummary, VersionRow

#: Rows that a notebook shows.
_SHOWN = 60

#: A condition and the `and` behind it: the key of `isnan`, or key, operator, and value in quotes or without.
_CONDITION = re.compile(
    r"\s*(?:isnan\(([^()]+)\)|([^<>=!]+)(<=|>=|!=|==?|<|>)\s*(?:\"([^\"]*)\"|'([^']*)'|(.*?)))(\s+and\s+|\s*$)",
    re.DOTALL,
)
#: Values that need quotes.
_NO_VALUE = re.compile(r"[<>=!'\"]|.*\s(?:and|or)(?:\s|$)", re.IGNORECASE | re.DOTALL)
#: Texts of numbers: in conditions, and in the catalog.
_TRUTHS = {"true": 1.0, "false": 0.0}
NO_FLOATS = ("NaN", "Infinity", "-Infinity")
#: Keys whose mappings hold further columns.
_GROUPS = ("metrics", "config", "made")
_MISSING = object()
_REVERSED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_SIGNS = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


#: Before the name of a metric: best values first.
BEST = "best:"


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
        its items. A record without a value meets only !=. `and` joins conditions, quotes may enclose text,
        `isnan(loss)` is `loss=NaN`, `config.lr` is a value inside `config` or `made`, and `age<2d` compares the time
        since the ingest (s, m, h, d, w).

        Raises
        ------
        UsageError
            A condition has another form, orders numbers and text, or no record has the key.

        Examples
        --------
        >>> store.log().where("val_loss<3", "run=gpt").values("step")
        [200, 300]
        """
        kept = list(self)
        for name, sign, wanted, number in [one for given in conditions for one in _parsed(given)]:
            if name == "age":
                name, sign, wanted = "created", _REVERSED[sign], _time_before(wanted)
            found = self.values(name)
            if sign[0] in "<>" and any(_number_of(value) is not None for value in found):
                if number is None:
                    raise UsageError(f"{name} has numbers, and {wanted!r} is none; give one, as in {name}{sign}2.5.")
                found = [None if _number_of(value) is None else value for value in found]
            values = {id(record): value for record, value in zip(self, found, strict=True)}
            kept = [record for record in kept if _meets(values[id(record)], sign, wanted, number)]
        return Table(kept)

    def sorted_by(self, name: str) -> Table:
        """Return the records by ascending value of a key, or descending with `-` before it; the others come last.

        `best:val_loss` means the best values first: the lowest of a loss or an error, the highest of other metrics. NaN
        comes after all numbers.

        Examples
        --------
        >>> store.log().sorted_by("-val_loss").values("step")
        [100, 300, 200]
        """
        if name.startswith(BEST):
            metric = name.removeprefix(BEST)
            name = metric if is_better_low(metric) else f"-{metric}"
        values = [(value, record) for value, record in zip(self.values(name.removeprefix("-")), self, strict=True)]
        known = [(value, record) for value, record in values if value is not None and not is_nan(value)]
        numeric = all(isinstance(value, int | float) for value, _ in known)
        known.sort(key=lambda item: item[0] if numeric else str(item[0]), reverse=name.startswith("-"))
        no_number = [record for value, record in values if value is not None and is_nan(value)]
        return Table([
            *(record for _, record in known), *no_number, *(record for value, record in values if value is None),
        ])  # fmt: skip

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
        found = [_value(record, name) for record in self]
        if self and all(value is _MISSING for value in found):
            inside = dict.fromkeys(
                other for record in self for group in _GROUPS for other in flat(record.get(group) or {}, group)
            )
            raise UsageError(f"No column or metric is called {name}; there are {', '.join([*self[0], *inside])}.")
        return [None if value is _MISSING else value for value in found]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a column for each key and each metric; needs pandas.

        Examples
        --------
        >>> store.log().to_pandas()["val_loss"].to_list()
        [3.1, 2.7, 2.8]
        """
        import pandas as pd

        inside = [{name: value for group in _GROUPS for name, value in flat(record.get(group) or {}, group).items()}
                  for record in self]  # fmt: skip
        records = [{**record, **more} for record, more in zip(self, inside, strict=True)]
        return pd.DataFrame(records).drop(columns=_GROUPS, errors="ignore")

    def __str__(self) -> str:
        """Return aligned columns, as `print` shows them."""
        names = list(self[0]) if self else []
        cells = [names, *([_text(record[name]) for name in names] for record in self[:_SHOWN])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
        lines = ["  ".join(row).rstrip() for row in padded]
        left = [f"{len(self) - _SHOWN} more rows"] if len(self) > _SHOWN else []
        return "\n".join([*lines, *left]) if self else "no rows"

    def _repr_html_(self) -> str:
        from html import escape

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
        "metrics": own_metrics(row.metrics),
        "config": row.metrics.get(CONFIG) or {},
        "made": row.metrics.get(MADE) or {},
        "source": row.source,
        "created": row.created,
    }


def run_records(runs: Iterable[RunSummary]) -> Table:
    """Return a record for each run: its number of versions, steps, last one, best metrics, bytes and parent."""
    found = Table()
    for run in runs:
        steps = {row.step for row in (run.lowest, run.highest) if row is not None and row.step is not None}
        best = {metric: ends["min" if is_better_low(metric) else "max"] for metric, ends in run.extremes.items()}
        found.append({
            "run": run.name,
            "versions": run.versions,
            "steps": "..".join(map(str, sorted(steps))) or None,
            "last": run.highest.number if run.highest.step is None else run.highest.name,
            "best": ", ".join(f"{name} {row.metrics[name]:.6g} at {row.step}" for name, row in best.items()) or None,
            "size": run.original_bytes,
            "stored": run.stored_bytes,
            "parent": run.first.parent,
            "tags": list(run.tags),
        })  # fmt: skip
    return found


def flat(values: Any, group: str) -> dict[str, Any]:
    """Return the values inside a mapping by path, such as `config.optimizer.lr`; metrics by their names.

    Examples
    --------
    >>> flat({"optimizer": {"lr": 0.1}, "seed": 1}, "config"), flat({"loss": 2.5}, "metrics")
    ({'config.optimizer.lr': 0.1, 'config.seed': 1}, {'loss': 2.5})
    """
    if not isinstance(values, dict):
        return {}
    if group == "metrics":
        return values
    found: dict[str, Any] = {}
    for name, value in values.items():
        inside = flat(value, f"{group}.{name}") if isinstance(value, dict) else {f"{group}.{name}": value}
        found.update(inside)
    return found


def _value(record: dict[str, Any], name: str) -> Any:
    """Return the value of a key, a metric, or a path inside `config` or `made`; `_MISSING` without one."""
    if name in record:
        return record[name]
    metrics = record.get("metrics") or {}
    if name in metrics:
        return metrics[name]
    group, dot, _ = name.partition(".")
    return flat(record.get(group), group).get(name, _MISSING) if dot and group in _GROUPS else _MISSING


def is_nan(value: Any) -> bool:
    """Return whether a metric is NaN, which the catalog keeps as text.

    Examples
    --------
    >>> is_nan("NaN"), is_nan(2.5), is_nan("none")
    (True, False, False)
    """
    return value == "NaN" or (isinstance(value, float) and value != value)


def _time_before(age: str) -> str:
    """Return the time of an age ago, as the catalog has it; raise `UsageError` for another text."""
    return (datetime.now(UTC) - timedelta(seconds=seconds_of(age))).isoformat()


def _parsed(conditions: str) -> Iterator[tuple[str, str, str, float | None]]:
    """Yield key, operator, value, and the number that it is, of each condition."""
    place, left = 0, True
    while left:
        found = _CONDITION.match(conditions, place)
        if found is None or _NO_VALUE.match(found[6] or ""):
            raise UsageError(
                f"{conditions[place:]!r} is not a condition such as val_loss<2.5 or run=gpt; `and` joins several, and a"
                " text with such words or signs needs quotes."
            )
        place, left = found.end(), found[7].strip() != ""
        wanted = "NaN" if found[1] else found[4] or found[5] or found[6] or ""
        number = _TRUTHS.get(wanted.lower())
        for kind in (float, int):
            with suppress(ValueError):
                number = kind(wanted)
        yield (found[1] or found[2]).strip(), (found[3] or "=").replace("==", "="), wanted, number


def _number_of(value: Any) -> float | None:
    """Return the number that a value is; None for text."""
    return value if isinstance(value, int | float) else float(value) if value in NO_FLOATS else None


def _meets(value: Any, sign: str, wanted: str, number: float | None) -> bool:
    if isinstance(value, list | tuple):
        return any(_meets(item, "=", wanted, number) for item in value) != (sign == "!=")
    if value is None:
        return sign == "!="
    own = _number_of(value)
    if own is None or number is None:
        return bool(_SIGNS[sign](str(value), wanted))
    return bool(_SIGNS[sign](own, number)) if own == own or number == number else sign[0] == "="


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
