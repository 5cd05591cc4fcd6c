"""The speed benchmark on tiny checkpoints: every row runs, figures survive being kept, the document is stable.

Nothing here judges how long anything takes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ckstore.objects.reader import ObjectReader
from tools.bench import restores, roofline, speed_bench, speed_clock, speed_process, speed_report, speed_stages, speeds
from tools.bench.speed_bench import TIERS, Bench, Settings, file_system
from tools.bench.speed_clock import Contender, kernel_speeds, race
from tools.bench.speed_contenders import warm_up
from tools.bench.speed_figures import Goal, Line, Plot, Section, Spread, Timing, digits

#: Rows whose figures are differences of timings, which noise may turn negative.
DIFFERENCES = ("growth",)

#: Rows that are measured on every file system.
EVERYWHERE = ("ingest", "live", "state_dict", "checkout", "coarse", "store_peers", "restore_peers", "stages")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(restores, "WIDTH", 64)
    monkeypatch.setattr(restores, "WORDS", 1100)  # its embedding is an object of its own
    monkeypatch.setattr(speed_bench, "SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr(speed_clock, "settle", lambda: None)
    monkeypatch.setattr(speed_process, "CACHE", "NO_CACHE")  # compiling everything takes too long
    settings = Settings(
        megabytes=1,
        versions=3,
        repeat=1,
        depth_megabytes=1,
        depth_versions=3,
        sizes=(1,),
        growth_versions=(2, 3),
        growth_tensors=(2, 4),
        growth_objects=(1, 2),
    )
    made = Bench(settings, tmp_path, lambda line: None)
    yield made
    made.close()


@pytest.mark.parametrize("name", speeds.ROWS)
def test_every_row_runs_and_leaves_nothing(name: str, bench: Bench, tmp_path: Path) -> None:
    section = speeds.ROWS[name](bench)
    assert section.key == name
    assert section.lines or section.tables
    for line in section.lines:
        numbers = [line.figure.low, line.figure.median, line.figure.high]
        assert all(map(math.isfinite, numbers))
        assert numbers == sorted(numbers)
        if name not in DIFFERENCES:
            assert numbers[0] > 0 or "so" in line.what
        for rate in (line.rate, line.against_rate):
            assert rate is None or (rate.speed.low > 0 and rate.processor >= 0)
    for plot in section.plots:
        assert all(y > 0 for points in plot.curves.values() for _, y in points)
    for head, *rows in section.tables:
        assert rows
        assert all(len(row) == len(head) for row in rows)
    assert Section.from_json(json.loads(json.dumps(section.to_json()))) == section
    if name in EVERYWHERE:
        assert section.notes[0] == "Not measured on tmpfs: this machine has none that is shared by all processes."
    left = [path.name for path in tmp_path.iterdir()]
    assert [name for name in left if not re.match(r"series-|store-", name)] == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir() or file_system(Path("/dev/shm")) != "tmpfs", reason="no tmpfs")
def test_memory_is_a_place_where_it_is_a_file_system(tmp_path: Path) -> None:
    bench = Bench(Settings(megabytes=1, versions=1), tmp_path, lambda line: None)
    disk, memory = bench.places
    assert (disk.directory, memory.kind, bench.notes) == (tmp_path, "tmpfs", [])
    bench.close()
    assert not memory.directory.exists()
    vast = Bench(Settings(megabytes=10**9, versions=1), tmp_path, lambda line: None)
    assert [place.name for place in vast.places] == ["disk"]
    assert re.fullmatch(
        r"Not measured on tmpfs: 12000000\.0 GB are needed there, and [\d.]+ GB are free\.", vast.notes[0]
    )


def test_contenders_take_turns() -> None:
    done: list[tuple[str, int]] = []
    contenders = [
        Contender(name, lambda number, name=name: done.append((name, number)), lambda number: None) for name in "AB"
    ]
    timings = race(contenders, [3, 4])
    assert done == [("A", 3), ("B", 3), ("A", 3), ("B", 3), ("A", 4), ("B", 4)]
    assert {name: len(found) for name, found in timings.items()} == {"A": 2, "B": 2}


def test_a_process_of_its_own_stays_until_it_is_ended() -> None:
    contender = Contender("A", str, apart="test")
    before = speed_clock.process("test").submit(os.getpid).result()
    timing = race([contender], [3], warm=False)["A"][0]
    assert timing.seconds > 0
    assert speed_clock.process("test").submit(os.getpid).result() == before != os.getpid()
    with pytest.raises(TypeError, match="not supported"):
        race([Contender("A", partial(max, ""), apart="test")], [3])
    speed_clock.end_processes()
    assert speed_clock.process("test").submit(os.getpid).result() != before
    speed_clock.end_processes()


def test_what_comes_before_is_not_timed() -> None:
    held: list[int] = []
    contender = Contender("A", lambda number: held.clear(), lambda number: held.append(number))
    race([contender], [1, 2], warm=False)
    assert held == []


def test_processor_time_of_children_counts() -> None:
    import subprocess
    import sys

    spin = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    contender = Contender("A", lambda number: subprocess.run([sys.executable, "-c", spin], check=True))
    assert race([contender], [0], warm=False)["A"][0].processor > 0.2


def test_kernel_speeds_count_all_calls() -> None:
    calls = []
    found = kernel_speeds({"A": lambda: calls.append(0)}, 1.0, 3)["A"]
    assert 0 < found.low <= found.median <= found.high
    assert len(calls) > 5


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"), (1.0, "1.00"), (0.12345, "0.123"), (9.999, "10.0"), (99.96, "100"), (1234.5, "1,230"),
        (-0.98765, "-0.988"), (0.000123456, "0.000123"), (999999.0, "1,000,000"),
    ],
)  # fmt: skip
def test_three_digits(number: float, text: str) -> None:
    assert digits(number) == text


def test_warming_up_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    warm_up(bench.series(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["series-1-3"]


def test_spread_and_goal() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert str(Spread.of([2.0])) == "2.00"
    assert (Goal(">=", 2.0).reached(2.0), Goal("<", 2.0).reached(2.0)) == (True, False)
    mine, theirs = [Timing(1.0, 1.0), Timing(2.0, 3.0)], [Timing(3.0, 1.0), Timing(2.0, 1.0)]
    line = Line.compared("A", mine, "B", theirs, 10**9, goal=Goal(">=", 2.0))
    assert line.figure == Spread(1.5, 2.0, 2.5)  # round by round, not median over median
    assert line.reached is True
    assert line.rate is not None
    assert line.rate.processor == 2.0


def test_every_stage_exists() -> None:
    for stage in speed_stages.STAGES:
        for function in stage.functions:
            speed_stages.place(function)


def test_a_stage_that_is_gone_is_named() -> None:
    gone = speed_stages.Stage("lost", ("ckstore.objects.reader:ObjectReader.no_such_method",))
    kept = speed_stages.Stage("kept", ("ckstore.objects.reader:ObjectReader.exact",))
    before = ObjectReader.exact
    named = pytest.raises(LookupError, match=r"ckstore\.objects:ObjectReader\.no_such_method")
    with named, speed_stages.stage_clock([kept, gone]):
        pass
    assert ObjectReader.exact is before


def test_a_stage_takes_its_own_time() -> None:
    clock = speed_stages.StageClock()

    def spin(seconds: float) -> None:
        import time

        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    inner = clock.wrapped(spin, speed_stages.Stage("inner", ()))

    def outside() -> None:
        spin(0.05)
        inner(0.1)

    clock.wrapped(outside, speed_stages.Stage("outer", ()))()
    assert clock.seconds["inner"] >= 0.1
    assert 0.05 <= clock.seconds["outer"] < 0.1
    clock.wrapped(outside, speed_stages.Stage("all", (), whole=True))()
    assert clock.seconds["all"] >= 0.15
    assert clock.seconds["inner"] < 0.2


def test_a_generator_takes_the_time_between_its_items() -> None:
    clock = speed_stages.StageClock()
    spin = clock.wrapped(lambda: sum(range(100_000)), speed_stages.Stage("inner", ()))

    def count(last: int) -> Iterator[int]:
        for number in range(last):
            spin()
            yield number

    wrapped = clock.wrapped(count, speed_stages.Stage("outer", ()))
    items = wrapped(3)
    assert next(items) == 0
    before = dict(clock.seconds)
    sum(range(1_000_000))
    assert clock.seconds == before
    assert list(items) == [1, 2]
    assert 0 <= clock.seconds["outer"] < clock.seconds["inner"]


def test_bounds_follow_from_their_parts() -> None:
    bound = roofline.Bound({"a": 1.0, "b": 2.0}, 1.0, 0.5)
    assert bound.seconds(2) == 1.5
    assert bound.seconds(8) == 1.0
    assert roofline.Bound({"a": 1.0}, 0.0, 3.0).seconds(2) == 3.0


def sections() -> dict[str, Section]:
    mine, theirs = [Timing(1.0, 1.5), Timing(1.1, 1.6)], [Timing(2.0, 1.0), Timing(2.1, 1.1)]
    ingest = Section(
        "ingest",
        "Ingest of a file",
        "What is compared.",
        [Line.compared("ingest", mine, "torch.save, fsync", theirs, 10**9, goal=Goal(">=", 3.0), place="disk")],
        notes=["Not measured on tmpfs."],
        measured="2025-01-02",
        options="--tier full",
        machine=["processor: a, 2 cores"],
    )
    size = Section(
        "size",
        "Over the size",
        "Sizes.",
        plots=[Plot("size", "Speed", "MB", "GB/s", {"ingest": [(64.0, 1.0), (250.0, 1.5)]})],
        tables=[[["MB", "ingest"], ["64", "1.00"]]],
        machine=["processor: b, 4 cores"],
    )
    return {"ingest": ingest, "size": size}


def test_document(tmp_path: Path) -> None:
    target = tmp_path / "benchmarks.md"
    (tmp_path / "benchmarks-old.svg").write_text("")
    speeds.publish(sections(), ["processor: a, 2 cores"], "tools/bench/speed --write", target)
    text = target.read_text()
    assert "| Ingest of a file: ingest | disk | 1.95 (1.93 to 1.98) x | ≥ 3 x | **no** |" in text
    assert "Not measured on tmpfs." in text
    assert "Measured on 2025-01-02 with `--tier full`." in text
    assert "![Speed](benchmarks-size.svg)" in text
    assert text.count("On another machine: processor: b, 4 cores.") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "benchmarks-size.svg",
        "benchmarks.json",
        "benchmarks.md",
    ]
    drawn = (tmp_path / "benchmarks-size.svg").read_bytes()
    assert b"<svg" in drawn
    speeds.publish(sections(), ["processor: a, 2 cores"], "tools/bench/speed --write", target)
    assert target.read_text() == text
    assert (tmp_path / "benchmarks-size.svg").read_bytes() == drawn


def test_the_machine_has_no_name_and_no_path() -> None:
    import platform

    facts = " ".join(speed_report.machine([("disk", "ext4"), ("tmpfs", "tmpfs")]))
    assert "disk: ext4, tmpfs" in facts
    assert platform.node() not in facts
    assert str(Path(__file__).parent) not in facts
    assert file_system(Path("/proc")) == "proc"


def test_rows_that_are_not_measured_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        speeds, "ROWS", {name: lambda bench, name=name: sections()[name] for name in ("ingest", "size")}
    )
    monkeypatch.setattr(speeds, "DOCUMENT", tmp_path / "benchmarks.md")
    monkeypatch.setattr(speeds, "warm_up", lambda paths, directory: None)
    monkeypatch.setattr(Bench, "series", lambda bench, megabytes, versions: [])
    work = ["--work", str(tmp_path / "work"), "--tier", "tiny"]
    speeds.main([*work, "--only", "size", "--write"])
    speeds.main([*work, "--only", "ingest"])
    assert "## Ingest of a file" not in (tmp_path / "work" / "benchmarks.md").read_text()
    speeds.main([*work, "--only", "ingest", "--repeat", "1", "--write"])
    assert not (tmp_path / "benchmarks.md").exists()
    text = (tmp_path / "work" / "benchmarks.md").read_text()
    assert text.index("## Ingest of a file") < text.index("## Over the size")
    assert "--tier tiny --megabytes 30 --versions 3 --repeat 1" in text
    assert "only show that everything runs" in text
    assert str(tmp_path) not in text
    assert "## Ingest of a file" in capsys.readouterr().out
    results = tmp_path / "work" / "benchmarks.json"
    assert set(speeds.read(results)) == {"ingest", "size"}
    for broken in ('{"size": {"lines": []}}', "[]", '{"size'):
        results.write_text(broken)
        with pytest.raises(SystemExit, match="another version of this tool"):
            speeds.read(results)


def test_a_row_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speeds.main(["--only", "speed"])
    assert "there is no speed; choose from ingest, live" in capsys.readouterr().err


def test_tiers() -> None:
    full, tiny = TIERS["full"], TIERS["tiny"]
    assert 250 <= full.megabytes <= 1000
    assert full.growth_versions[-1] >= 1000
    assert full.growth_tensors[-1] >= 5000
    assert tiny.megabytes < full.megabytes
    assert replace(full, repeat=1).options.endswith("--repeat 1")
