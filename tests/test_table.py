"""Tables of versions: conditions, order and columns."""

from __future__ import annotations

import pytest

from ckstore import Table, UsageError

TABLE = Table([
    {"version": 1, "run": "gpt", "step": 10, "tags": [], "metrics": {"loss": 3.0}},
    {"version": 2, "run": "gpt", "step": None, "tags": ["best", "last"], "metrics": {"loss": 1.0, "note": "good"}},
    {"version": 3, "run": "b=c", "step": 9, "tags": ["old"], "metrics": {}},
])  # fmt: skip


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], [1, 2, 3]),
        (["loss<2"], [2]),
        (["loss<=3", "loss>=3.0"], [1]),
        (["run=gpt", "step>9"], [1]),
        (["run=b=c"], [3]),
        (["run!=gpt"], [3]),
        (["tags=best"], [2]),
        (["tags!=best"], [1, 3]),
        (["step!=10"], [2, 3]),
        (["note=good"], [2]),
    ],
)
def test_conditions(conditions: list[str], expected: list[int]) -> None:
    assert TABLE.where(*conditions).values("version") == expected


def test_order_and_columns() -> None:
    assert TABLE.sorted_by("step").values("version") == [3, 1, 2]
    assert TABLE.sorted_by("-loss").values("version") == [1, 2, 3]
    assert TABLE.columns("version", "loss") == [{"version": 1, "loss": 3.0}, {"version": 2, "loss": 1.0},
                                                {"version": 3, "loss": None}]  # fmt: skip


@pytest.mark.parametrize("condition", ["loss", "los<2", "=3", ""])
def test_invalid_conditions_are_refused(condition: str) -> None:
    with pytest.raises(UsageError):
        TABLE.where(condition)


def test_tables_print_as_tables() -> None:
    table = Table([{"step": 1, "loss": 2.5}, {"step": 1000, "loss": None}])
    assert str(table).splitlines() == ["step  loss", "1     2.5", "1000"]
    assert repr(table) == "[{'step': 1, 'loss': 2.5}, {'step': 1000, 'loss': None}]"
    assert str(Table()) == "no rows"
    assert str(Table({"step": step} for step in range(70))).endswith("\n10 more rows")
