"""The figures of the published schemes: baselines against their descriptions, and the written document."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools.bench import speed_figures
from tools.fidelity import (
    baselines,
    coarse,
    failures,
    interrupted,
    levels,
    page,
    papers,
    rework,
    schemes,
    transfer,
    whole,
)
from tools.fidelity.baselines import LEVELS, BaselineArchive
from tools.fidelity.evaluation import confidence
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import load
from tools.training import ImageSettings

pytestmark = pytest.mark.local


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(30_000).astype(np.float32)


class TestBaselines:
    def test_evenly_spaced_levels(self) -> None:
        found = baselines.uniform(np.array([-2.0, -0.9, 0.2, 5.0], np.float32), -1, 1, 3)
        assert found.values.tolist() == [-1, -1, 0, 1]
        assert found.indices.tolist() == [0, 0, 1, 2]

    def test_layers_of_less_entropy_have_fewer_levels(self, values: np.ndarray) -> None:
        peaked = np.where(np.arange(values.size) % 100 == 0, 50 * values, values / 50).astype(np.float32)
        found = baselines.qd({"wide": values, "peaked": peaked}, 64)
        assert found["wide"].levels == 64
        assert found["peaked"].levels < 32
        assert np.abs(found["wide"].values - values).max() <= np.ptp(values) / 126 * 1.001

    def test_the_range_is_that_of_the_least_error(self, values: np.ndarray) -> None:
        """Of a normal source of four levels half of the range is best; outliers are clipped."""
        found = baselines.check_n_run({"w": values}, 4)["w"]
        assert found.values.max() < 0.6 * values.max()
        assert np.square(found.values - values).mean() < 0.13
        assert np.square(baselines.uniform(values, values.min(), values.max(), 4).values - values).mean() > 0.25

    def test_outliers_are_kept(self, values: np.ndarray) -> None:
        values[:3] = 40.0, -50.0, 60.0
        found = baselines.gobo({"w": values}, 8)["w"]
        assert found.values[:3].tolist() == [40.0, -50.0, 60.0]
        assert 3 <= found.outliers < 300
        rest = np.abs(values) < 2
        # Lloyd and Max: 0.0345 of the variance.
        assert np.square(found.values - values)[rest].mean() < 0.04
        assert len(np.unique(found.values[rest])) <= 8

    def test_plain_kmeans_finds_clusters(self) -> None:
        wanted = np.repeat(np.arange(6.0), 50)
        noisy = (wanted + np.random.default_rng(1).uniform(-0.1, 0.1, 300)).astype(np.float32)
        np.testing.assert_allclose(baselines.plain_kmeans(noisy, 6), np.arange(6), atol=0.05)

    @pytest.mark.parametrize("name", baselines.BASELINES)
    def test_an_archive_keeps_to_the_tolerance(self, name: str, gpt_run: list[Path]) -> None:
        """The fewest levels that are tolerated, never fewer than before; where none will do, weights as they are."""

        def degradation(path: Path, state: Any) -> float:
            exact = load(path)["model"]["h.0.up.weight"]
            return float((state["model"]["h.0.up.weight"] - exact).square().mean() / exact.square().mean())

        archive = BaselineArchive(name, degradation, 0.01)
        for path in gpt_run[:3]:
            archive.add(path)
        assert set(archive.chosen) <= set(LEVELS)
        assert archive.chosen == sorted(archive.chosen)
        originals = sum(value.nbytes for value in load(gpt_run[0])["model"].values())
        assert 2 * archive.nbytes() < 3 * originals
        for index, path in enumerate(gpt_run[:3]):
            state = archive.restore(index)
            assert 0 < degradation(path, state) <= 0.01
            assert torch.equal(state["model"]["norm.weight"], load(path)["model"]["norm.weight"])
        never = BaselineArchive(name, degradation, -1.0)
        never.add(gpt_run[0])
        assert never.chosen == [0]
        assert never.nbytes() == originals
        assert degradation(gpt_run[0], never.restore(0)) == 0


def test_rows_are_measured_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> dict[str, Any]:
        calls.append(1)
        return {"figure": len(calls)}

    for again in (False, False, True):
        found = Found(tmp_path, machine="a machine", again=again, report=lambda line: None)
        found.row("part", "a/b", measure)
    assert [row["figure"] for row in found.rows("part")] == [2]
    assert [row["name"] for row in found.rows("part")] == ["a/b"]
    assert found.rows("other") == []


def test_confidence() -> None:
    assert confidence([1.0, 1.0, 1.0]) == 0
    assert confidence([0.0, 1.0, 2.0]) == pytest.approx(4.30 / math.sqrt(3))
    assert confidence([1.0]) == math.inf


@pytest.mark.parametrize(
    ("counts", "scar", "said"),
    [
        ([0, 0], [9, 11], "no steps lost"),
        ([4, 1], [9, 11], "4.0x"),
        ([4, 1], [20, 20], "at least 8.0x"),
        ([4, 20], [20, 20], ""),
    ],
)
def test_how_much_faster_than_scar(counts: list[int], scar: list[int], said: str) -> None:
    """A count that ended at 20 is a lower bound."""
    assert page._faster({"counts": counts, "most": 20}, {"counts": scar, "most": 20}) == said


def test_targets() -> None:
    """A verdict is given where another scheme misses the target; none where training has reached a plateau."""

    def row(run: str, scheme: str, added: list[int], lost: list[float]) -> dict[str, Any]:
        return {
            "run": run, "part": "weights", "scheme": scheme, "original": 10_000 * len(added), "total": sum(added),
            "added": added, "lost": lost,
        }  # fmt: skip

    def verdicts(rows: dict[str, Any]) -> list[str]:
        return [line.strip("| ").split(" | ")[-1] for line in page.shown(rows).splitlines()[2:]]

    searched = str(whole.SEARCHED)
    gpt = [row("gpt", "lc 1.5", [1000], [0.004]), row("gpt", searched, [400], [0.04])]
    cnn = [row("cnn", searched, [200, 90], [0.04, 0.03]), row("cnn", "GOBO", [900, 900], [0.01, 0.01])]
    assert verdicts({"gpt": gpt[:1]}) == ["none"]
    assert verdicts({"gpt": [{**gpt[0], "part": "whole"}]}) == []
    assert verdicts({"gpt": gpt, "cnn": cnn}) == ["reached", "reached", "none"]
    cnn[0]["lost"] = [0.04, 0.06]
    text = page.shown({"gpt": gpt, "cnn": cnn})
    assert verdicts({"gpt": gpt, "cnn": cnn})[-1] == "not reached"
    assert "| [I]; ckstore |" in text
    assert "+6.00%, 69.0x, best version 111x" in text


def test_the_papers_figures_and_those_found() -> None:
    """Higher ratios and lower losses are better; no ratio without lost steps, no verdict where no scheme misses."""
    seed = {"scheme": "exact", "count": 0, "seed": 0, "accuracy": 0.8}
    searched = {**seed, "scheme": str(whole.SEARCHED)}
    rows: dict[str, list[dict[str, Any]]] = {
        "rework": [
            {"name": "SCAR, a tenth", "counts": [20, 10], "most": 20},
            {"name": "lc 1.5", "counts": [0, 0], "most": 20},
        ],
        "transfer": [
            {"scheme": "exact", "losses": [2.0]},
            {"scheme": str(whole.SEARCHED), "bytes": 565, "nbytes": 100, "losses": [2.02]},
        ],
        "interrupted": [
            seed, {**searched, "count": 10, "accuracy": 0.798}, {**searched, "count": 20, "accuracy": 0.784},
        ],
    }  # fmt: skip

    def found() -> dict[str, list[str]]:
        return {figure.subject: figure.cells()[2:5] for figure in papers.figures(rows)}

    assert found() == {
        "[LC] recovery compared with SCAR's, GPT": ["5.77x", "0.00 steps against 15.00 or more", "none"],
        "[I] lost by 10 failures, residual network": ["+0.50%", "+0.25%", "none"],
        "[I] lost by 20 failures, residual network": ["+1.10%", "+2.00%", "0.90 points more"],
        "[I] one-shot, GPT for BERT Large": ["11.3x", "5.65x", "50% less"],
    }
    rows["rework"][1]["counts"] = [1, 1]
    rows["interrupted"].append({**seed, "scheme": "GOBO", "count": 10, "accuracy": 0.7})
    assert found()["[LC] recovery compared with SCAR's, GPT"][1:] == ["15.0x", "reached"]
    assert found()["[I] lost by 10 failures, residual network"][1:] == ["+0.25%", "reached"]
    rows["interrupted"] += [{**seed, "seed": 1}, {**searched, "seed": 1, "count": 10, "accuracy": 0.7995}]
    assert found()["[I] lost by 10 failures, residual network"][1:] == ["+0.16% ± 1.19%", "open"]


def test_a_row_says_what_lc_checkpoint_codes() -> None:
    def row(scheme: str, part: str) -> dict[str, Any]:
        return {
            "run": "gpt", "part": part, "scheme": scheme, "original": 300, "total": 20, "added": [20], "lost": [0.004],
            "kinds": {"weights": [100, 10], "first moments": [100, 5], "second moments": [100, 1]},
        }  # fmt: skip

    rows = {"gpt": [row("lc 1.5", "whole"), row("lc 2.5", "weights")]}
    (figure,) = papers.figures(rows)
    assert figure.cells()[1:5] == ["[LC]; ckstore", "28.0x", "13.3x", "52% less"]
    assert "weights 10.0x, first moments 20.0x" in figure.differs


def test_peaks_of_runs_that_are_not_digits() -> None:
    """A peak is reached if other schemes miss it; the note names those of whole checkpoints and of two bits."""

    def row(scheme: str, part: str, least: int) -> dict[str, Any]:
        added = [150, least]
        return {"part": part, "scheme": scheme, "original": 20_000, "total": sum(added), "added": added, "lost": [0.12]}

    searched = str(whole.SEARCHED)
    rows = {"finetune": [row(searched, "weights", 80), row(searched, "whole", 99), row("lc 2.5", "weights", 50)]}
    (figure,) = papers.figures(rows)
    assert figure.cells()[2:5] == ["100.0x", "125.0x", "none"]
    assert "whole checkpoints 101x. LC's 2 bits 200x, but lose up to 12.0%" in figure.differs
    rows["finetune"].append(row("GOBO", "weights", 1000))
    (figure,) = papers.figures(rows)
    assert figure.cells()[:5] == [
        "[I] best version, fine-tune for GPT-2 Medium", "[I]; ckstore", "100.0x", "125.0x", "reached"
    ]  # fmt: skip


def test_rows_that_are_not_measured_again_stay(tmp_path: Path) -> None:
    target = tmp_path / "schemes.md"
    target.write_text("# Old\n\n## Levels\n\nAs it was.\n\n## Gone\n\nNo part.\n")
    bits = {
        "run": "gpt",
        "levels": 16,
        "bits": [[64, 32, 16]],
        "elements": 4,
        "day": "2026-11-22",
        "machine": "a machine",
    }
    page.write({"ablation": [bits]}, "tiny", target)
    text = target.read_text()
    assert text.startswith("# The published schemes, measured\n")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    fixed = ["## Whose levels and coder", "## Compared with the papers", "## Other systems"]
    assert headings == [*fixed, "## Savings of each coding step", "## Levels"]
    assert "As it was." in text
    assert "| GPT | 16 | whole run | 2.0x | 4.0x | 8.0x |" in text
    assert "with `tools/bench/schemes --tier tiny --only ablation` on a machine." in text


def test_rows_without_new_ones_stay_with_their_day(tmp_path: Path) -> None:
    def row(scheme: str, total: int, day: str) -> dict[str, Any]:
        return {
            "run": "gpt", "part": "weights", "scheme": scheme, "name": scheme, "original": 3000, "total": total,
            "added": [total] * 3, "lost": [0.0], "day": day, "machine": "a machine",
        }  # fmt: skip

    target = tmp_path / "schemes.md"
    page.write({"gpt": [row("lc 1.5", 100, "2026-11-22"), row("GOBO", 300, "2026-11-22")]}, "small", target)
    page.write({"gpt": [row("lc 1.5", 200, "2026-11-26")]}, "small", target)
    text = speed_figures.sections_of(target)["Whole runs: GPT"]
    assert text.index("| LC-Checkpoint | 15.0x |") < text.index("| GOBO | 10.0x |")
    measured = "with `tools/bench/schemes --tier small --only gpt` on a machine."
    assert f"Measured on 2026-11-26 {measured}" in text
    assert text.endswith("Older rows (GOBO): 2026-11-22 on a machine.")
    assert "| LC-Checkpoint, GPT | [LC]; ckstore | 0.5% | +0.00%, 15.0x," in target.read_text()


def test_rows_are_named_by_their_first_cells(tmp_path: Path) -> None:
    """Up to three; sections of several tables are written whole."""
    head = ["| a | b | c | d |", "| --- | --- | ---: | ---: |"]
    old = "\n".join([*head, "| x | y | 1 | 5 |", "| x | y | 2 | 6 |"])
    new = "\n".join([*head, "| x | y | 2 | 7 |"])
    assert page._merged(old, new).splitlines()[2:] == ["| x | y | 1 | 5 |", "| x | y | 2 | 7 |"]
    assert page._merged(f"{old}\n\n{old}", new) == new


class Short(Bench):
    """Of each run the first versions."""

    def run(self, name: str) -> list[Path]:
        return super().run(name)[:2]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("cnn", "| QD-compressor | "),
        ("interrupted", "| DynaQuant, searched | 1 |"),
        ("rework", "| SCAR, a tenth |"),
        ("ablation", "| residual network | 16 | last third |"),
        ("levels", "| GPT | k-means on the sketch |"),
        ("transfer", "| DynaQuant, searched |"),
        ("failures", "| LC-Checkpoint, moments alone | [LC]*; ckstore | 1 |"),
        ("coarse", "| GPT, weights and both moments | 1.5 |"),
    ],
)
def test_a_part(
    part: str, said: str, trained_runs: Path, gpt_run: list[Path], cnn_run: list[Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a few tiny versions."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(trained_runs)
    for module, name, value in (
        (schemes, "Bench", Short),
        (schemes, "DOCUMENT", tmp_path / "schemes.md"),
        (schemes, "BENCHMARKS", tmp_path / "benchmarks.md"),
        (coarse, "CHOSEN", [("gpt", "all", 1.5), ("finetune", "weights", 1.5)]),
        (coarse, "_STEPS", 2),
        (coarse, "_WINDOWS", 8),
        (failures, "SETTINGS", replace(failures.SETTINGS, width=128, steps=6, every=2)),
        (failures, "COUNTS", (1,)),
        (failures, "SEEDS", 1),
        (interrupted, "SETTINGS", ImageSettings((8, 32, 64), 1, epochs=2)),
        (interrupted, "COUNTS", (0, 1)),
        (interrupted, "SEEDS", 1),
        (rework, "_FIRST", 0),
        (rework, "_COMPARED", (1,)),
        (rework, "_SEEDS", 1),
        (rework, "_MOST", 2),
        (rework, "_WINDOWS", 8),
        (failures, "WINDOWS", 8),
        (transfer, "WINDOWS", 8),
        (levels, "_POINTS", {"gpt": 1}),
        (levels, "_LEVELS", (8, 192)),
        (transfer, "STEPS", 2),
        (transfer, "EVERY", 1),
        (whole, "WINDOWS", 8),
    ):
        monkeypatch.setattr(module, name, value)
    schemes.main(["--tier", "tiny", "--work", str(tmp_path), "--write", "--only", part])
    written = "benchmarks.md" if part == "coarse" else "schemes.md"
    assert said in (tmp_path / written).read_text()
    rows = Found(tmp_path / "fidelity" / "tiny" / "found", machine="", again=False, report=lambda line: None).rows(part)
    for row in rows:
        if row.get("scheme") == str(whole.SEARCHED) and "kinds" in row:
            assert max(row["lost"]) <= whole.TOLERANCE
        if row.get("scheme") == "exact" and part == "transfer":
            assert row["lost"] == 0
