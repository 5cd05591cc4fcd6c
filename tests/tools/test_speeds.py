"""The speed benchmark on tiny checkpoints: every row runs, figures survive being kept, the document is stable.

Nothing here judges how long anything takes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tools.bench import peaks, remotes, reports, series, speed_figures, speed_frame, speeds
from tools.bench.keepers import KEEPERS, Keeper, Source
from tools.bench.speed_figures import COMPARED, Section, Spread, Timing, compared, digits
from tools.bench.speed_frame import Bench, Contender, race

pytestmark = pytest.mark.local


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_frame, "READY", 1 << 12)
    monkeypatch.setattr(speed_frame, "settle", lambda: None)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(series, "WIDTH", 64)
    monkeypatch.setattr(series, "WORDS", 1100)  # its embedding is an object of its own
    monkeypatch.setattr(peaks, "ROWS", 300)
    monkeypatch.setattr(peaks, "MEGABYTES", 1)
    monkeypatch.setattr(reports, "FIDELITIES", ("exact",))
    monkeypatch.setattr(remotes, "LATENCY", 0.001)
    monkeypatch.setattr(remotes, "_SECONDS", 0.2)
    # A process of a contender's own has torch to import.
    monkeypatch.setattr(speed_frame, "process", lambda name: ThreadPoolExecutor(1))
    return Bench(tmp_path, 1, 3, 1, report=lambda line: None)


def figures(section: Section) -> Iterator[list[float]]:
    """All figures of a section's tables: low, median and high where they are given, else one number."""
    for _, *rows in section.tables:
        for cell in (cell for row in rows for cell in row[1:]):
            found = re.fullmatch(r"(?:1/)?(-?[\d.,]+)(?: \(([\d.,]+)–([\d.,]+)\))?(?: (?:x|s|ms|%))?", cell)
            if found:
                median, *ends = (float(text.replace(",", "")) for text in found.groups() if text)
                yield [ends[0], median, ends[1]] if ends else [median]


@pytest.mark.long
@pytest.mark.parametrize("name", speeds.ROWS)
def test_every_row_runs_and_leaves_nothing(name: str, bench: Bench, tmp_path: Path) -> None:
    section = speeds.ROWS[name](bench)
    numbers = list(figures(section))
    assert numbers
    assert all(found == sorted(found) for found in numbers)
    assert all(found[0] >= 0 for found in numbers)
    for head, *rows in section.tables:
        assert rows
        assert all(len(row) == len(head) for row in rows)
    left = [path.name for path in tmp_path.iterdir()]
    assert [name for name in left if not re.match(r"series-|store-", name)] == []


def test_a_series_of_ones_own(bench: Bench, tmp_path: Path) -> None:
    for name in ("step9.pt", "step10.pt", "step11.pt", "step12.pt"):
        (tmp_path / name).write_bytes(b"")
    bench.chosen = series.in_directory(tmp_path)
    assert [path.name for path in bench.series()] == ["step9.pt", "step10.pt", "step11.pt"]
    with pytest.raises(ValueError, match="needs two checkpoints or more"):
        series.in_directory(tmp_path / "absent")


@pytest.mark.parametrize("keeper", KEEPERS, ids=lambda keeper: keeper.stores)
def test_others_are_lossless(keeper: Keeper, tmp_path: Path) -> None:
    """ZipNN gets floats from a file of any size: single bytes would be zstd, which leaves 92 % of such weights."""
    weights = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    data = save({"w": weights, "b": torch.ones(3).bfloat16()})
    source = Source(tmp_path / "source.safetensors")
    (tmp_path / "given.safetensors").write_bytes(data)
    source.take(tmp_path / "given.safetensors")
    keeper.store(source, tmp_path / "packed")
    back = keeper.restore(tmp_path / "packed", tmp_path / "out")
    if back is None:
        assert (tmp_path / "out").read_bytes() == data
    else:
        assert torch.equal(back["w"], weights)
        assert back.keys() == source.state.keys()
    if keeper.stores.startswith("ZipNN"):
        assert (tmp_path / "packed").stat().st_size < 0.87 * weights.nbytes


def test_contenders_take_turns() -> None:
    done: list[tuple[str, int]] = []
    contenders = [
        Contender(name, lambda number, name=name: done.append((name, number)), lambda number: None) for name in "AB"
    ]
    timings = race(contenders, [3, 4])
    assert done == [("A", 3), ("B", 3), ("A", 3), ("B", 3), ("A", 4), ("B", 4)]
    assert {name: len(found) for name, found in timings.items()} == {"A": 2, "B": 2}


def test_preparation_is_not_timed() -> None:
    held: list[int] = []
    contender = Contender("A", lambda number: held.clear(), lambda number: held.append(number))
    race([contender], [1, 2], warm=False)
    assert held == []


def test_processor_time_of_children_counts() -> None:
    spin = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    contender = Contender("A", lambda number: subprocess.run([sys.executable, "-c", spin], check=True))
    assert race([contender], [0], warm=False)["A"][0].processor > 0.2


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"), (1.0, "1.00"), (0.12345, "0.123"), (9.999, "10.0"), (99.96, "100"), (1234.5, "1,230"),
        (-0.98765, "-0.988"), (0.000123456, "0.000123"), (999999.0, "1,000,000"),
    ],
)  # fmt: skip
def test_three_digits(number: float, text: str) -> None:
    assert digits(number) == text


def test_spread_and_ratio() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert str(Spread.of([2.0])) == "2.00"
    mine, theirs = [Timing(1.0, 1.0), Timing(2.0, 3.0)], [Timing(3.0, 1.0), Timing(2.0, 1.0)]
    line = dict(zip(COMPARED, compared("A", mine, theirs, 10**9, 4.0), strict=True))
    assert line["ratio"] == "2.00 (1.50–2.50)"  # round by round, not median over median
    assert line["CPU s/GB"] == "2.00"
    assert line["stored"] == "1/4.00"


def test_document(tmp_path: Path) -> None:
    target = tmp_path / "benchmarks.md"
    ingest = Section("Storing", "The comparison.", [[["operation", "where", "ratio"], ["ingest", "", "1.95 x"]]])
    speeds.publish("Storing", f"{ingest}\n\nMeasured.", target)
    text = target.read_text()
    assert text.startswith("# Benchmarks\n")
    assert text.endswith(
        "## Storing\n\nThe comparison.\n\n| operation | ratio |\n| --- | ---: |\n| ingest | 1.95 x |\n\nMeasured.\n"
    )
    speeds.publish("Storing: gpt", "Others.", target)
    speeds.publish("Storing", f"{ingest}\n\nMeasured.", target)
    assert target.read_text() == f"{text}\n## Storing: gpt\n\nOthers.\n"


def test_the_machine_has_no_name_and_no_path() -> None:
    import platform

    facts = speed_figures.machine(Path("/proc"))
    assert ", proc; " in facts
    assert platform.node() not in facts
    assert str(Path(__file__).parent) not in facts


def test_rows_that_are_not_measured_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"storing": Section("Storing", "In."), "row": Section("One row", "Out.")}
    monkeypatch.setattr(speeds, "ROWS", {name: lambda bench, name=name: made[name] for name in made})
    monkeypatch.setattr(speeds, "DOCUMENT", tmp_path / "benchmarks.md")
    monkeypatch.setattr(speeds.speed_rows, "warm_up", lambda paths, directory: None)
    monkeypatch.setattr(speeds.speed_figures, "file_system", lambda path: "ext4")
    monkeypatch.setattr(Bench, "synthetic", lambda bench, megabytes, versions: [])
    work = ["--work", str(tmp_path / "work")]
    speeds.main([*work, "--only", "storing", "--write"])
    speeds.main([*work, "--only", "row"])
    assert "## One row" not in (tmp_path / "benchmarks.md").read_text()
    speeds.main([*work, "--only", "row", "--repeat", "1", "--write"])
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.index("## Storing") < text.index("## One row")
    assert "`tools/bench/speed --only row --megabytes 300 --versions 9 --repeat 1`" in text
    assert str(tmp_path) not in text
    assert "## Storing" in capsys.readouterr().out
    monkeypatch.setattr(speeds.speed_figures, "file_system", lambda path: "tmpfs")
    speeds.main([*work, "--only", "row", "--write"])
    assert "## One row, tmpfs\n" in (tmp_path / "benchmarks.md").read_text()


def test_a_process_of_its_own_stays_until_it_is_ended() -> None:
    contender = Contender("A", str, apart="test")
    before = speed_frame.process("test").submit(os.getpid).result()
    timing = race([contender], [3], warm=False)["A"][0]
    assert timing.seconds > 0
    assert speed_frame.process("test").submit(os.getpid).result() == before != os.getpid()
    with pytest.raises(TypeError, match="not supported"):
        race([Contender("A", partial(max, ""), apart="test")], [3])
    speed_frame.end_processes()
    assert speed_frame._processes == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "speed"], "unknown name speed; choose from storing, restoring"),
        (["--versions", "1"], "--versions must be 2 or more"),
        (["--series", "nowhere"], "nowhere needs two checkpoints or more"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        speeds.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
