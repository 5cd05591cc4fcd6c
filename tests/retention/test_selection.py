"""Selection of versions for a verb: names, ranges, runs, and kept versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckstore
from ckstore.errors import NotFoundError, UsageError
from ckstore.policy import Policy, Retention
from ckstore.retention.retain import due
from ckstore.retention.selection import first_of_every, last_of, select_versions
from ckstore.storage.catalog import Catalog
from tests.checkpoints import scratch
from tests.storage.version_writer import write_version

#: (Run, step) of versions 1, 2, ...: two runs that grow in turns, one of them out of order, one with a dot in its name.
VERSIONS = [
    ("gpt", 100), ("bert", 0), ("gpt", 300), ("gpt", 200), ("bert", 10), ("gpt", 400), ("gpt", 500), ("a.b", 1),
    ("a.b", 2), ("loose", None), ("loose", 7), ("loose", None), ("gpt", -50),
]  # fmt: skip


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    path = tmp_path_factory.mktemp("selection") / "store"
    made = Catalog.create(path)
    for run, step in VERSIONS:
        write_version(made, path, run, step)
    made.set_tag("best", 3)
    made.set_tag("x.y", 4)
    return made


def numbers(catalog: Catalog, *specs: str | int, **options: object) -> list[int]:
    return [row.number for row in select_versions(catalog, specs or None, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["gpt@100"], [1]),
        ([2, "2", "bert@0"], [2]),
        (["best", "gpt@latest", "latest"], [3, 7, 13]),
        (["gpt@100..gpt@300"], [1, 3, 4]),
        (["gpt@200..gpt@200"], [4]),
        (["gpt@-50..gpt@100"], [1, 13]),
        (["x.y..best"], [3, 4]),
        (["gpt@200..best"], [3, 4]),
        (["1..best"], [1, 3, 4]),
        ([" 1 .. 4 "], [1, 3, 4]),
        (["3..6"], [3, 4, 6]),
        (["3..6", "gpt@500", "bert"], [3, 4, 5, 6, 7]),
        (["a.b"], [9]),
        (["a.b@1..a.b@2"], [8, 9]),
        (["x.y"], [4]),
        (["10..12"], [10, 11, 12]),
    ],
)
def test_names_and_ranges(catalog: Catalog, specs: list[str | int], expected: list[int]) -> None:
    assert numbers(catalog, *specs) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 3, 4, 6, 7, 13]),
        # In the order of steps the run is 13, 1, 4, 3, 6, 7.
        ({"keep_last": 2}, [1, 3, 4, 13]),
        ({"keep_last": 10}, []),
        ({"keep_every": 200}, [3, 7]),
        ({"keep_every": 1}, []),
        ({"keep_every": 250, "keep_last": 1}, [4, 6]),
        ({"keep_tagged": True}, [1, 6, 7, 13]),
        ({"keep_tagged": True, "keep_every": 300}, [6, 7]),
    ],
)
def test_a_run_except_kept_versions(catalog: Catalog, options: dict[str, object], expected: list[int]) -> None:
    assert numbers(catalog, run="gpt", **options) == expected


def test_kept_versions_are_counted_in_each_run(catalog: Catalog) -> None:
    assert numbers(catalog, "gpt@100..gpt@400", "bert@0..bert@10", keep_last=1) == [1, 2, 3, 4]
    assert numbers(catalog, "gpt@100..gpt@400", "bert@0..bert@10", keep_every=200) == [3, 5]


def test_versions_without_a_step_go_by_number(catalog: Catalog) -> None:
    assert numbers(catalog, run="loose", keep_last=1) == [10]  # Version 11 has the highest step.
    assert numbers(catalog, run="loose", keep_every=2) == []
    assert numbers(catalog, run="loose", keep_every=5) == [12]
    assert numbers(catalog, run="loose", keep_every=20) == [12]  # Numbers and steps are no periods of one another.


@pytest.mark.parametrize(
    ("specs", "options", "error", "said"),
    [
        (["gpt"], {"run": "gpt"}, UsageError, "not both"),
        ([], {"run": "nobody"}, NotFoundError, "Unknown run nobody"),
        (["nobody"], {}, NotFoundError, "Unknown version nobody"),
        (["gpt@100..gtp@901"], {}, NotFoundError, "Unknown version gtp@901"),
        (["98..99"], {}, NotFoundError, "Unknown version 98"),
        (["gpt@100..99"], {}, NotFoundError, "Unknown version 99"),
        (["gpt@100.."], {}, UsageError, "gpt@100.. has no two ends"),
        ([".."], {}, UsageError, "has no two ends"),
        (["..5"], {}, UsageError, "has no two ends"),
        (["gpt@300..gpt@100"], {}, UsageError, "runs backwards"),
        (["4..1"], {}, UsageError, "runs backwards"),
        (["gpt@100..bert@10"], {}, UsageError, "begins in run gpt and ends in run bert"),
        (["1..5"], {}, UsageError, "begins in run gpt and ends in run bert"),
        (["loose@7..12"], {}, UsageError, r"Version 12 has no step.*11\.\.12"),
        (["gpt@latest"], {"keep_last": 0}, UsageError, "`keep_last` 0 keeps nothing"),
        (["gpt@latest"], {"keep_every": -1}, UsageError, "`keep_every` -1 keeps nothing"),
    ],
)
def test_invalid_selections_are_refused(
    catalog: Catalog, specs: list[str], options: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        numbers(catalog, *specs, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.long
@given(
    steps=st.lists(st.integers(-20, 20), unique=True, min_size=1, max_size=12),
    keep_every=st.none() | st.integers(1, 5),
    keep_last=st.none() | st.integers(1, 5),
    data=st.data(),
)
def test_a_range_has_the_versions_between_its_ends(
    steps: list[int], keep_every: int | None, keep_last: int | None, data: st.DataObject
) -> None:
    """Whatever the order in which the versions came."""
    low, high = sorted([data.draw(st.sampled_from(steps)), data.draw(st.sampled_from(steps))])
    within = sorted(step for step in steps if low <= step <= high)
    kept = set() if keep_last is None else set(within[-keep_last:])
    if keep_every is not None:
        kept |= {
            min(step for step in within if step // keep_every == part) for part in {s // keep_every for s in within}
        }
    with scratch() as path:
        catalog = Catalog.create(path / "store")
        for step in steps:
            write_version(catalog, path / "store", "r", step)
        rows = select_versions(catalog, [f"r@{low}..r@{high}"], None, keep_every, keep_last)
        catalog.close()
    assert {row.step for row in rows} == set(within) - kept
    assert [row.number for row in rows] == sorted(row.number for row in rows)


def test_a_name_by_itself_is_not_its_characters(store: ckstore.Store) -> None:
    for step in range(12):
        store.ingest({"w": [step]}, run="a", step=step, allow_empty=True)
    assert [row.number for row in store.forget("12").versions] == [12]
    assert [row.number for row in store.forget("2..3", dry_run=True).versions] == [2, 3]
    assert store.thin("11", dry_run=True).skipped == [11]
    assert len(store._catalog.versions()) == 11


def test_a_range_between_forgotten_numbers_is_in_one_run(tmp_path: Path) -> None:
    catalog = Catalog.create(tmp_path / "store")
    for run in ("a", "a", "b", "a"):
        write_version(catalog, tmp_path / "store", run, None)
    catalog.forget_versions([1, 4])
    with pytest.raises(UsageError, match="has versions of the runs a, b"):
        numbers(catalog, "1..4")
    catalog.forget_versions([3])
    assert numbers(catalog, "1..4") == [2]


def test_versions_of_periods(catalog: Catalog) -> None:
    """The first version of each day, the last of them, and the versions of some hours before the last ingest."""
    times = ["2026-07-01T10:00:00", "2026-07-01T23:59:59", "2026-07-02T00:00:00", "2026-07-04T05:00:00"]
    first = catalog.version(1)
    rows = [replace(first, number=number, step=number, created=f"{time}+00:00") for number, time in enumerate(times, 1)]
    assert first_of_every(rows, "1d") == {1, 3, 4}
    assert first_of_every(rows, "1d:2") == {3, 4}
    assert first_of_every(rows, "1d:1,1h:2") == {3, 4}
    assert first_of_every(rows, "2,1d:1") == {1, 2, 4}
    assert last_of(rows, "53h") == {3, 4}
    assert last_of(rows, "54h") == {2, 3, 4}
    assert last_of(rows, 1) == {4}
    assert [row.number for row in due(rows, Retention(keep_last="1d", keep_every="1d:2")).forgotten] == [1, 2]
    kept = Policy(retention=Retention(keep_last="1d", keep_every="1d:2"))
    assert Policy.from_text(kept.to_text()) == kept


@pytest.mark.parametrize("odd", ["2031-01-01T00:00:00", "1970-01-01T00:00:00"])
def test_a_wrong_clock_forgets_no_later_version(catalog: Catalog, odd: str) -> None:
    """The period ends with the last ingest, whatever the clocks of other machines said."""
    times = ["2026-06-01T10:00:00", odd, "2026-07-02T00:00:00", "2026-07-02T05:00:00"]
    first = catalog.version(1)
    rows = [replace(first, number=number, step=number, created=f"{time}+00:00") for number, time in enumerate(times, 1)]
    assert last_of(rows, "1d") == {3, 4} | ({2} if odd > "2026" else set())
    rows[3] = replace(rows[3], created=f"{odd}+00:00")
    assert 4 in last_of(rows, "1d")
    rows = [replace(row, step=9 - row.number) for row in rows[:3]]
    assert {1, 3} <= last_of(sorted(rows, key=lambda row: row.step or 0), "1h")


@pytest.mark.parametrize("said", [{"keep_last": "soon"}, {"keep_last": 1, "keep_every": "1d:0"}, {"keep_last": "0"}])
def test_periods_that_keep_nothing(said: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Retention(**said)


def test_a_version_without_a_step_costs_no_higher_one(catalog: Catalog) -> None:
    """The name of a run means its highest step, so that `keep_last` spares that."""
    steps = [1000, 2000, None, 10, 20]
    first = catalog.version(1)
    rows = [replace(first, number=number, step=step) for number, step in enumerate(steps, 1)]
    assert last_of(rows, 2) == {1, 2, 4, 5}
    assert [row.number for row in due(rows, Retention(keep_last=1)).forgotten] == [1, 3, 4]
    rows[1] = replace(rows[1], superseded=True)
    assert 2 not in last_of([rows[1], rows[0], *rows[2:]], 1)
