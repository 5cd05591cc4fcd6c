"""The bench of schemes: each part on short runs, and the sides on which its figures are better."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools import models, runs
from tools.bench import speed_figures
from tools.fidelity import baselines, coarse, evaluation, excp, page, papers, schemes, whole
from tools.fidelity.archives import Stored
from tools.fidelity.evaluation import evenly, held_out_prose
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, digest, load

pytestmark = pytest.mark.local


class Short(Bench):
    """Of each run the first versions."""

    def run(self, name: str) -> list[Path]:
        return super().run(name)[:2]


@pytest.mark.long
@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize(
    ("part", "said"), [("cnn", "| ExCP, all | "), ("coarse", "| GPT, weights and both moments | 1.5 |")]
)
def test_a_part(part: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (schemes, "Bench", Short),
        (schemes, "DOCUMENT", tmp_path / "schemes.md"),
        (schemes, "BENCHMARKS", tmp_path / "benchmarks.md"),
        (baselines, "LEVELS", (256, 16)),
        (coarse, "CHOSEN", [("gpt", "all", 1.5), ("gpt", "dropped", 1.5), ("finetune", "weights", 1.5)]),
        (coarse, "_STEPS", 2),
        (coarse, "_WINDOWS", 8),
        (evaluation, "_BATCH", 4),
    ):
        monkeypatch.setattr(module, name, value)
    schemes.main(["--tier", "tiny", "--work", str(tmp_path), "--write", "--only", part])
    written = "benchmarks.md" if part == "coarse" else "schemes.md"
    assert said in (tmp_path / written).read_text()
    rows = Found(tmp_path / "fidelity" / "tiny" / "found", machine="", again=False, report=lambda line: None).rows(part)
    searched = [row for row in rows if row.get("scheme") == str(whole.SEARCHED)]
    assert all(max(row["lost"]) <= whole.TOLERANCE for row in searched)
    assert bool(searched) == (part == "cnn")


def test_sizes_of_baselines() -> None:
    """Four symbols of 1, 1, 2 and 4: lengths 3, 3, 2, 1; a table of 5 bits and a distance's gamma code each."""
    symbols = np.array([0, 1, 2, 2, 3, 3, 3, 3])
    assert baselines.huffman_bits(symbols) == 3 + 3 + 4 + 4 + 4 * (5 + 1)
    assert baselines.huffman_bits(symbols[:0]) == 0
    values = np.random.default_rng(0).standard_normal(30_000).astype(np.float32)
    for quantise, bits in baselines.BASELINES.values():
        few, many = (quantise({"w": values}, levels) for levels in (8, 64))
        errors = [float(np.square(one["w"].values - values).mean()) for one in (few, many)]
        assert 0.2 > errors[0] > 4 * errors[1]
        assert values.size < bits(few, {}) < bits(many, {}) < 7 * values.size


def test_excp_restores_what_it_kept() -> None:
    def state(seed: int) -> State:
        random = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(40, 30, generator=random) for _ in range(2))
        entry = {"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": 1e-8 * second.square()}
        weight = torch.ones(40, 30) + 0.01 * torch.randn(40, 30, generator=random)
        return {"model": {"w": weight}, "optimizer": {"state": {0: entry}, "param_groups": [{"lr": 0.1}]}, "step": seed}

    old, new = state(0), state(1)
    whole = excp.decompress(excp.compress(old, None), None)
    assert torch.equal(whole["model"]["w"], old["model"]["w"])
    data = excp.compress(new, whole["model"])
    back = excp.decompress(data, whole["model"])
    assert (back["step"], back["optimizer"]["param_groups"]) == (1, new["optimizer"]["param_groups"])
    moved = (new["model"]["w"] - old["model"]["w"]).abs()
    kept = excp.weight_mask(moved, new["optimizer"]["state"][0]["exp_avg_sq"])
    assert torch.equal(back["model"]["w"][~kept], old["model"]["w"][~kept])
    assert (back["model"]["w"] - new["model"]["w"])[kept].abs().mean() < 0.2 * moved[kept].mean()
    assert len(data) < 3 * 4800 / 4


def test_ratios() -> None:
    stored = Stored(original=4000, added=[500, 10, 400, 20], bases=[True, False, True, False], total=930)
    assert stored.ratio == pytest.approx(4000 / 930)
    assert stored.delta_ratio == pytest.approx(1000 / 15)
    stored.bases = [True] * 4
    assert stored.delta_ratio == pytest.approx(1000 / 210)
    assert [evenly(*each) for each in ((25, 3), (6, 2), (2, 3))] == [[8, 16, 24], [2, 5], [0, 1]]


@pytest.mark.usefixtures("short_runs")
def test_held_out_prose_was_not_trained_on() -> None:
    settings, text = runs.text_settings("finetune", "tiny"), models.prose()
    length = settings.context + 1
    batches = torch.Generator().manual_seed(4)
    windows = held_out_prose(settings, batches.get_state(), 50)
    seen = torch.zeros(len(text), dtype=torch.bool)
    for _ in range(settings.steps):
        seen[torch.randint(len(text) - length, (settings.batch, 1), generator=batches) + torch.arange(length)] = True
    assert seen.any()
    unseen = bytes(text.where(~seen, torch.tensor(0, dtype=torch.uint8)).numpy())
    assert windows.shape == (50, length)
    assert all(bytes(window.to(torch.uint8).numpy()) in unseen for window in windows)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Train on one thread, as short runs and the bench do: sums may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("short_runs", "one_thread")
def test_an_exact_state_goes_on_as_it_did(tmp_path: Path) -> None:
    """From a checkpoint, with its own batches, training comes to the next checkpoint bit for bit."""
    bench = Bench("tiny", tmp_path, lambda line: None)
    language = whole.gpt_language(bench, 8)
    state, after = map(load, bench.run("gpt")[:2])
    before = digest(state)
    batches = torch.Generator()
    batches.set_state(state["rng"])
    model, optimizer, going = language.go_on(state, state["step"], batches)
    losses = [going() for _ in range(after["step"] - state["step"])]
    assert losses[-1] == after["loss"]
    assert digest([model.state_dict(), optimizer.state_dict()]) == digest([after["model"], after["optimizer"]])
    assert digest(state) == before, "the state that was restored is not trained"
    wrong = state | {"model": {name: value * 0.5 for name, value in state["model"].items()}}
    seeds = [language.resumed(state, 2, seed=seed, steps=1) for seed in (0, 0, 1)]
    assert language.resumed(wrong, 2, seed=0, steps=1) != seeds[0] == seeds[1] != seeds[2]


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
    assert verdicts({"gpt": gpt, "cnn": cnn}) == ["reached", "reached", "none"]
    cnn[0]["lost"] = [0.04, 0.06]
    assert verdicts({"gpt": gpt, "cnn": cnn})[-1] == "not reached"
    assert "+6.00%, 69.0x, best version 111x" in page.shown({"gpt": gpt, "cnn": cnn})


def test_the_papers_figures_and_those_found() -> None:
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
    assert figure.cells()[4] == "reached"
    kinds = {"weights": [100, 10], "first moments": [100, 5], "second moments": [100, 1]}
    (figure,) = papers.figures({"gpt": [row("lc 1.5", "whole", 20) | {"kinds": kinds}]})
    assert figure.cells()[1:5] == ["[LC]; ckstore", "28.0x", "13.3x", "52% less"]


def test_rows_without_new_ones_stay_with_their_day(tmp_path: Path) -> None:
    def row(scheme: str, total: int, day: str) -> dict[str, Any]:
        return {
            "run": "gpt", "part": "weights", "scheme": scheme, "name": scheme, "original": 3000, "total": total,
            "added": [total] * 3, "lost": [0.0], "rework": None, "day": day, "machine": "a machine",
        }  # fmt: skip

    target = tmp_path / "schemes.md"
    target.write_text("# Old\n\n## Whole runs: fine-tune\n\nAs it was.\n\n## Gone\n\nNo part.\n")
    page.write({"gpt": [row("lc 1.5", 100, "2026-11-22"), row("GOBO", 300, "2026-11-22")]}, "small", target)
    page.write({"gpt": [row("lc 1.5", 200, "2026-11-26")]}, "small", target)
    sections = speed_figures.sections_of(target)
    assert "Gone" not in sections
    assert sections["Whole runs: fine-tune"] == "As it was."
    text = sections["Whole runs: GPT"]
    assert text.index("| LC-Checkpoint | 15.0x |") < text.index("| GOBO | 10.0x |")
    assert "Measured on 2026-11-26 with `tools/bench/schemes --tier small --only gpt` on a machine." in text
    assert text.endswith("Older rows (GOBO): 2026-11-22 on a machine.")
    target.write_text(target.read_text().replace(" | rework |", " |").replace("|  |", "|").replace(" | ---: |", " |"))
    page.write({"gpt": [row("lc 1.5", 200, "2026-11-26")]}, "small", target)
    table = [line for line in speed_figures.sections_of(target)["Whole runs: GPT"].splitlines() if line[:1] == "|"]
    assert {line.count("|") for line in table} == {8}, "older rows without the last column have an empty cell"
    assert "| LC-Checkpoint, GPT | [LC]; ckstore | 0.5% | +0.00%, 15.0x," in target.read_text()


def test_only_named_rows_are_measured(tmp_path: Path) -> None:
    found = Found(tmp_path, machine="", again=False, report=lambda line: None, named=("whole, l", "excp"))
    for name in ("weights, lc", "whole, lc", "whole, excp"):
        found.row("gpt", name, dict)
    assert [row["name"] for row in found.rows("gpt")] == ["whole, excp", "whole, lc"]


@pytest.mark.parametrize("arguments", [["--only", "gtp"], ["--tier", "huge"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        schemes.main(arguments)
    assert stopped.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_rework() -> None:
    """The loss falls by 0.1 a step at the first two checkpoints, and by 0.05 between the last ones."""
    losses, steps = [4.0, 3.0, 2.0, 1.5], [10, 20, 30, 40]
    assert evaluation.rework({1: 0.2}, losses, steps) == pytest.approx(2)
    assert evaluation.rework({0: 0.1, 1: -0.1, 3: 0.2}, losses, steps) == pytest.approx(0.2 / 0.25)
    assert evaluation.rework({1: 0.2}, losses[::-1], steps) is None
