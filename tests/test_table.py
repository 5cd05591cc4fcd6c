"""Tables of versions: conditions, order and columns."""

from __future__ import annotations

import pytest

from ckstore import Table, UsageError

TABLE = Table([
    {"version": 1, "run": "gpt", "step": 10, "tags": [], "metrics": {"loss": 3.0, "hot": True}},
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
        (["loss==1"], [2]),
        (["hot=true"], [1]),
        (["note='good' and loss<2"], [2]),
        (['run="b=c"'], [3]),
        (["note!='good and bad'"], [1, 2, 3]),
    ],
)
def test_conditions(conditions: list[str], expected: list[int]) -> None:
    assert TABLE.where(*conditions).values("version") == expected


def test_order_and_columns() -> None:
    assert TABLE.sorted_by("step").values("version") == [3, 1, 2]
    assert TABLE.sorted_by("-loss").values("version") == [1, 2, 3]
    assert TABLE.columns("version", "loss") == [{"version": 1, "loss": 3.0}, {"version": 2, "loss": 1.0},
                                                {"version": 3, "loss": None}]  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("loss", "not a condition"), ("los<2", "No column"), ("=3", "not a condition"), ("", "not a condition"),
        ("loss<2 or step>9", "needs quotes"), ("loss<2 AND step>9", "needs quotes"), ("loss<2 and", "needs quotes"),
        ("loss<2 and ", "not a condition"), ("loss===1", "needs quotes"), ("note='good", "needs quotes"),
        ("note='good' or loss<2", "needs quotes"), ("loss<2e", "loss has numbers, and '2e' is none"),
        ("loss>=good", "give one, as in loss>=2.5"), ("hot<yes", "is none"),
    ],
)  # fmt: skip
def test_invalid_conditions_are_refused(condition: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        TABLE.where(condition)


def test_infinities_are_numbers() -> None:
    losses = [1.5, "Infinity", "-Infinity", "NaN", "n/a", None]
    table = Table([{"loss": loss} for loss in losses])
    assert table.where("loss=inf").values("loss") == ["Infinity"]
    assert table.where("loss=nan").values("loss") == ["NaN"]
    assert table.where("loss>=-inf").values("loss") == [1.5, "Infinity", "-Infinity"]
    assert table.where("loss<Infinity").values("loss") == [1.5, "-Infinity"]
    assert table.where("loss!=NaN").values("loss") == [1.5, "Infinity", "-Infinity", "n/a", None]
    assert Table([{"created": "2026-11-30"}, {"created": "2025-01-01"}]).where("created>=2026").values("created") == [
        "2026-11-30"
    ]
    assert Table([{"step": 2**60 + 1}, {"step": 2**60}]).where(f"step={2**60 + 1}").values("step") == [2**60 + 1]


def test_tables_print_as_tables() -> None:
    table = Table([{"step": 1, "loss": 2.5}, {"step": 1000, "loss": None}])
    assert str(table).splitlines() == ["step  loss", "1     2.5", "1000"]
    assert repr(table) == "[{'step': 1, 'loss': 2.5}, {'step': 1000, 'loss': None}]"
    assert str(Table()) == "no rows"
    assert str(Table({"step": step} for step in range(70))).endswith("\n10 more rows")
