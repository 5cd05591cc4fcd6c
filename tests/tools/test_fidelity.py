"""The bench of schemes: its baselines against slow references, its metrics, and training after failures."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools import models, runs
from tools.fidelity import ablation, excp, failures, partial, schemes, states
from tools.fidelity.archives import EXACT, Setting, StoreArchive, Stored
from tools.fidelity.evaluation import Language, evenly, held_out_prose, held_out_sources, mean_loss
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import digest, load, parameters

pytestmark = pytest.mark.local


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny runs have one thread; several that wait for each other are slow where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def toy(seed: int, *, step: int = 1, shape: tuple[int, int] = (40, 30)) -> dict[str, Any]:
    """A state of one matrix and one vector as AdamW saves them."""
    random = torch.Generator().manual_seed(seed)
    model = {"w": torch.randn(shape, generator=random), "b": torch.randn(7, generator=random)}
    entries = {
        index: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.randn(value.shape, generator=random) * 1e-3,
            "exp_avg_sq": torch.rand(value.shape, generator=random) * 1e-6,
        }
        for index, value in enumerate(model.values())
    }
    optimizer = {"state": entries, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    return {"model": model, "optimizer": optimizer, "step": step, "rng": torch.arange(9, dtype=torch.uint8)}


def moved(state: dict[str, Any], seed: int, scale: float = 0.01) -> dict[str, Any]:
    """Another state whose weights differ by changes of that size."""
    other = toy(seed, step=state["step"] + 1, shape=tuple(state["model"]["w"].shape))
    random = torch.Generator().manual_seed(seed + 1)
    for name, value in state["model"].items():
        other["model"][name] = value + scale * torch.randn(value.shape, generator=random)
    return other


class TestExcp:
    def test_weight_mask(self) -> None:
        residual = torch.tensor([-8.0, 4.0, 1.0, -2.0, 0.5])
        # The median magnitude is 2; the factor is 5e-5 / sqrt(1e-8) = 0.5, and 2.5 where second moments are tiny.
        assert excp.weight_mask(residual, torch.full((5,), 1e-8)).tolist() == [True, True, False, True, False]
        assert excp.weight_mask(residual, torch.zeros(5)).tolist() == [True, False, False, False, False]
        assert excp.weight_mask(residual, None).tolist() == [True, False, False, False, False], "SGD has none"

    def test_moment_mask(self) -> None:
        first = torch.tensor([9.0, -9.0, 1.0, 1.0, 0.0])
        kept = torch.tensor([True, False, True, True, True])
        assert excp.moment_mask(first, kept).tolist() == [True, False, False, False, False]

    def test_centres_of_separate_clusters(self) -> None:
        random = np.random.default_rng(0)
        wanted = np.arange(-7, 8) * 10.0
        values = np.repeat(wanted, 40) + random.uniform(-1, 1, 600)
        found = excp.centres(values.astype(np.float32))
        means = values.reshape(15, 40).mean(1)
        np.testing.assert_allclose(found, means, atol=1e-5)

    def test_centres_are_better_than_a_uniform_grid(self) -> None:
        values = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)
        levels, labels = excp.quantise(values)
        error = np.square(values - levels[labels - 1]).mean()
        grid = np.linspace(values.min(), values.max(), 15)
        assert error < 0.6 * np.square(values[:, None] - grid).min(1).mean()
        # Lloyd and Max: the best quantiser of 15 levels for a normal source is off by 0.0131 of the variance.
        assert error < 0.0145

    @pytest.mark.parametrize(
        "values",
        [
            np.zeros(9),
            np.array([0.0, 3.0]),
            np.array([-1.0] * 5 + [0.0] * 4),
            np.arange(-7.0, 8.0),
            np.random.default_rng(2).standard_normal(1001) * (np.arange(1001) % 3 == 0),
            np.array([1e-38, -3e38, 1e-45, 3e38]),
        ],
        ids=["zeros", "one", "two values", "fifteen", "sparse", "extreme"],
    )
    def test_packed_values_are_the_nearest_centres(self, values: np.ndarray) -> None:
        values = values.astype(np.float32)
        data = excp.pack(values)
        found, used = excp.unpack(memoryview(data + b"rest"), len(values))
        assert used == len(data)
        levels, _ = excp.quantise(values)
        assert len(levels) <= 15
        assert (found[values == 0] == 0).all()
        for value, got in zip(values[values != 0].astype(np.float64), found[values != 0], strict=True):
            assert got in levels
            assert abs(value - got) <= np.abs(value - levels.astype(np.float64)).min() * (1 + 1e-6)

    def test_few_values_come_back(self) -> None:
        values = np.array([0, 1, 2, 3, -5] * 3, np.float32)
        assert (excp.unpack(memoryview(excp.pack(values)), 15)[0] == values).all()

    def test_states(self) -> None:
        first, second = toy(0), moved(toy(0), 1)
        whole = excp.decompress(excp.compress(first, None), None)
        assert torch.equal(whole["model"]["w"], first["model"]["w"])
        data = excp.compress(second, whole["model"])
        back = excp.decompress(data, whole["model"])
        assert back["step"] == 2
        assert torch.equal(back["rng"], second["rng"])
        assert back["optimizer"]["param_groups"] == second["optimizer"]["param_groups"]
        for before, new, got in zip(*map(parameters, (whole, second, back)), strict=True):
            residual = new.weight - before.weight
            kept = excp.weight_mask(residual, new.moments["exp_avg_sq"])
            assert torch.equal(got.weight[~kept], before.weight[~kept])
            assert (got.weight - new.weight)[kept].abs().mean() < 0.2 * residual[kept].abs().mean()
            present = excp.moment_mask(new.moments["exp_avg"], kept)
            for name in ("exp_avg", "exp_avg_sq"):
                assert ((got.moments[name] != 0) == present).all()

    def test_states_of_sgd_with_buffers(self, cnn_run: list[Path]) -> None:
        first, second = (load(path) for path in cnn_run[:2])
        whole = excp.decompress(excp.compress(first, None), None)
        back = excp.decompress(excp.compress(second, whole["model"]), whole["model"])
        assert list(back["model"]) == list(second["model"])
        for name, value in second["model"].items():
            if "running" in name or "num_batches" in name:
                assert torch.equal(back["model"][name], value)
        for before, new, got in zip(*map(parameters, (whole, second, back)), strict=True):
            kept = excp.weight_mask(new.weight - before.weight, None)
            assert torch.equal(got.weight[~kept], before.weight[~kept])
            present = excp.moment_mask(new.moments["momentum_buffer"], kept)
            assert ((got.moments["momentum_buffer"] != 0) == present).all()

    def test_residuals_are_taken_from_restored_weights(self) -> None:
        first, second = toy(0), moved(toy(0), 1)
        previous = excp.decompress(excp.compress(first, None), None)["model"]
        errors = []
        for _ in range(6):
            previous = excp.decompress(excp.compress(second, previous), previous)["model"]
            errors.append((previous["w"] - second["model"]["w"]).abs().mean().item())
        assert errors[-1] < 0.2 * errors[0], "errors of earlier versions are made good"

    def test_archive(self, gpt_run: list[Path], tmp_path: Path) -> None:
        archive = excp.ExcpArchive(tmp_path)
        for path in gpt_run[:3]:
            archive.add(path)
        states_in_order = [digest(archive.restore(index)) for index in range(3)]
        assert [digest(archive.restore(index)) for index in (2, 0, 1)] == [states_in_order[i] for i in (2, 0, 1)]
        assert archive.nbytes() == sum(path.stat().st_size for path in tmp_path.iterdir())
        weights = sum(value.nbytes for value in load(gpt_run[0])["model"].values())
        assert len(lzma.decompress((tmp_path / "step00040.xz").read_bytes())) < 1.6 * 3 * weights / 8, "four bits each"
        later = sum((tmp_path / f"{path.stem}.xz").stat().st_size for path in gpt_run[1:3])
        assert later / 2 < gpt_run[0].stat().st_size / 8


class TestPartial:
    def test_scar_writes_the_rows_that_changed_most(self) -> None:
        old, new = toy(0), toy(0)
        new["model"]["w"][[3, 8]] += 5.0
        new["model"]["w"][5] += 1.0
        running = partial.RunningCheckpoint(old)
        written = running.scar(new, 2 * 30 / (40 * 30 + 7))
        assert written == 2 * 30 * 12
        expected = toy(0)["model"]["w"]
        expected[[3, 8]] += 5.0
        assert torch.equal(running.state["model"]["w"], expected)
        assert running.scar(new, 30 / (40 * 30 + 7)) == 30 * 12
        assert torch.equal(running.state["model"]["w"], new["model"]["w"]), "the third row comes next"

    def test_topn_writes_the_elements_that_changed_most(self) -> None:
        old, new = toy(0), moved(toy(0), 4)
        new["model"]["b"][2] += 9.0
        running = partial.RunningCheckpoint(old)
        share = 100 / (40 * 30 + 7)
        assert running.topn(new, share) == 100 * (12 + 4)
        assert running.state["model"]["b"][2] == new["model"]["b"][2]
        before = torch.cat([value.flatten() for value in toy(0)["model"].values()])
        wanted = torch.cat([value.flatten() for value in new["model"].values()])
        got = torch.cat([value.flatten() for value in running.state["model"].values()])
        written = got != before
        assert int(written.sum()) == 100
        assert torch.equal(got[written], wanted[written])
        assert (wanted - before)[written].abs().min() >= (wanted - before)[~written].abs().max()

    def test_buffers_are_written_whole(self, cnn_run: list[Path]) -> None:
        running = partial.RunningCheckpoint(load(cnn_run[0]))
        second = load(cnn_run[1])
        running.scar(second, 0.1)
        assert set(running.state["model"]) == set(second["model"])
        assert torch.equal(
            running.state["model"]["layers.0.norm1.running_mean"], second["model"]["layers.0.norm1.running_mean"]
        )

    @pytest.mark.parametrize("save", [partial.RunningCheckpoint.scar, partial.RunningCheckpoint.topn])
    def test_all_of_it_in_the_end(self, save: Any) -> None:
        running = partial.RunningCheckpoint(toy(0))
        new = moved(toy(0), 7)
        for _ in range(12):
            save(running, new, 0.1)
        assert digest(running.state["model"]) == digest(new["model"])
        assert running.state["step"] == new["step"]
        state, wanted = (s["optimizer"]["state"] for s in (running.state, new))
        assert all(torch.equal(state[i]["step"], wanted[i]["step"]) for i in wanted)

    def test_moments_go_with_their_parameters(self) -> None:
        new = moved(toy(0), 7)
        running = partial.RunningCheckpoint(toy(0))
        running.topn(new, 0.3)
        old, wanted, got = (parameters(s)[0] for s in (toy(0), new, running.state))
        written = got.weight != old.weight
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(got.moments[name], torch.where(written, wanted.moments[name], old.moments[name]))

    @pytest.mark.parametrize("places", [False, True])
    def test_share_of_bytes(self, places: bool) -> None:
        state = toy(0, shape=(100, 10))
        save = partial.RunningCheckpoint.topn if places else partial.RunningCheckpoint.scar
        share = partial.share_of(3000, state, places=places)
        written = save(partial.RunningCheckpoint(state), moved(toy(0, shape=(100, 10)), 3), share)
        assert 3000 - 10 * 16 <= written <= 3000
        assert partial.share_of(1e9, state, places=places) == 1


class TestMetrics:
    def test_evenly(self) -> None:
        assert evenly(25, 3) == [8, 16, 24]
        assert evenly(6, 2) == [2, 5]
        assert evenly(2, 3) == [0, 1]
        assert evenly(1, 3) == [0]

    def test_ratios(self) -> None:
        stored = Stored(original=4000, added=[500, 10, 400, 20], bases=[True, False, True, False], total=930)
        assert stored.ratio == pytest.approx(4000 / 930)
        assert stored.delta_ratio == pytest.approx(1000 / 15)
        stored.bases = [True] * 4
        assert stored.delta_ratio == pytest.approx(1000 / 210)

    def test_digest(self) -> None:
        state = toy(0)
        seen = {digest(state)}
        for change in (
            lambda s: s["model"].update(w=s["model"]["w"].reshape(30, 40)),
            lambda s: s["model"].update(w=s["model"]["w"].double()),
            lambda s: s["model"].update(v=s["model"].pop("b")),
            lambda s: s["model"]["b"].mul_(-1.0),
            lambda s: s["optimizer"]["state"][0]["exp_avg"].view(-1)[5:6].add_(1e-9),
            lambda s: s["optimizer"]["param_groups"][0].update(lr=0.2),
            lambda s: s.update(step=3),
        ):
            other = toy(0)
            change(other)
            seen.add(digest(other))
        assert len(seen) == 8
        assert digest(toy(0)) == digest(state)
        assert digest({"x": torch.zeros(2).bfloat16()}) != digest({"x": torch.zeros(2).half()})

    def test_a_state_is_judged_once(self, gpt_run: list[Path]) -> None:
        settings = runs.text_settings("gpt", "tiny")
        language = Language(settings, torch.cat(models.sources()), held_out_sources(settings, 8))
        weights, others = (load(path)["model"] for path in gpt_run[:2])
        losses = [language.loss(each) for each in (weights, dict(weights), others)]
        assert losses[0] == losses[1] != losses[2]
        language.held_out = language.held_out[:4]
        assert language.loss(weights) == losses[0]

    def test_bytes_by_kind(self, gpt_run: list[Path], tmp_path: Path) -> None:
        archive = StoreArchive(tmp_path / "store", Setting("lc", 1.5))
        for path in gpt_run[:2]:
            archive.add(path)
        kinds = archive.kinds()
        nbytes = sum(value.nbytes for path in gpt_run[:2] for value in load(path)["model"].values())
        for kind in ("weights", "first moments", "second moments"):
            original, stored = kinds[kind]
            assert original == nbytes
            assert stored < original / 5
        assert 0.9 < sum(stored for _, stored in kinds.values()) / archive.nbytes() < 1.05
        archive.remove()

    def test_weights_only(self, gpt_run: list[Path], tmp_path: Path) -> None:
        written = states.weights_only(gpt_run[:2], tmp_path / "w")
        before = [path.stat().st_mtime_ns for path in written]
        state = load(written[1])
        assert list(state) == ["model", "step"]
        assert digest(state["model"]) == digest(load(gpt_run[1])["model"])
        assert [p.stat().st_mtime_ns for p in states.weights_only(gpt_run[:2], tmp_path / "w")] == before
        assert sorted(path.name for path in (tmp_path / "w").iterdir()) == [path.name for path in gpt_run[:2]]


class TestLanguage:
    @pytest.fixture
    def language(self) -> Language:
        settings = runs.text_settings("gpt", "tiny")
        return Language(settings, torch.cat(models.sources()), held_out_sources(settings, 8))

    def test_loss(self, language: Language, gpt_run: list[Path]) -> None:
        weights = load(gpt_run[-1])["model"]
        model = language.settings.model()
        model.load_state_dict(weights)
        tokens = language.held_out
        logits = model(tokens[:, :-1]).log_softmax(-1)
        wanted = -logits.gather(-1, tokens[:, 1:, None]).mean().item()
        assert language.loss(weights) == pytest.approx(wanted, rel=1e-5)
        assert wanted < language.loss(load(gpt_run[0])["model"])

    def test_held_out_text_is_in_no_source(self, language: Language) -> None:
        texts = b"\0".join(bytes(text.numpy()) for text in models.sources())
        found = sum(bytes(window.to(torch.uint8).numpy()) in texts for window in language.held_out)
        assert found <= 1, "a licence's lines may occur in two modules"

    def test_exact_state_goes_on_as_it_did(self, gpt_run: list[Path], language: Language) -> None:
        """From a checkpoint, with its own batches, training comes to the next checkpoint bit for bit."""
        state, after = load(gpt_run[2]), load(gpt_run[3])
        before = digest(state)
        batches = torch.Generator()
        batches.set_state(state["rng"])
        model, optimizer, going = language.go_on(state, state["step"], batches)
        losses = [going() for _ in range(after["step"] - state["step"])]
        assert losses[-1] == after["loss"]
        assert digest(model.state_dict()) == digest(after["model"])
        assert digest(optimizer.state_dict()) == digest(after["optimizer"])
        assert digest(state) == before, "the state that was restored is not trained"

    def test_resumed(self, language: Language, gpt_run: list[Path]) -> None:
        state = load(gpt_run[2])
        losses = [language.resumed(state, state["step"], seed=seed, steps=3) for seed in (0, 0, 1)]
        assert losses[0] == losses[1] != losses[2]
        broken = state | {"model": {name: value * 0.5 for name, value in state["model"].items()}}
        assert language.resumed(broken, state["step"], seed=0, steps=3) > losses[0]

    def test_rework(self, language: Language, gpt_run: list[Path]) -> None:
        early, late = load(gpt_run[3]), load(gpt_run[4])
        step = late["step"]
        assert language.rework(late, step, late["model"], seed=0, most=4) == 0
        count = language.rework(early, step, late["model"], seed=0, most=60)
        assert 1 < count < 60
        assert language.rework(early, step, late["model"], seed=0, most=1) == 1

    def test_held_out_prose(self) -> None:
        settings = runs.text_settings("finetune", "tiny")
        batches = torch.Generator().manual_seed(4)
        windows = held_out_prose(settings, batches.get_state(), 50)
        assert windows.shape == (50, settings.context + 1)
        text = models.prose()
        seen = torch.zeros(len(text), dtype=torch.bool)
        for _ in range(settings.steps):
            starts = torch.randint(len(text) - settings.context - 1, (settings.batch, 1), generator=batches)
            seen[starts + torch.arange(settings.context + 1)] = True
        whole = bytes(text.numpy())
        for window in windows:
            start = whole.find(bytes(window.to(torch.uint8).numpy()))
            places = []
            while start >= 0:
                places.append(start)
                start = whole.find(bytes(window.to(torch.uint8).numpy()), start + 1)
            assert any(not seen[place : place + len(window)].any() for place in places)

    def test_broken_weights(self, language: Language, gpt_run: list[Path]) -> None:
        weights = load(gpt_run[-1])["model"]
        broken = weights | {"lm_head.weight": torch.full_like(weights["lm_head.weight"], torch.nan)}
        assert language.loss(broken) == float("inf")

    def test_mean_loss_of_any_number_of_windows(self, language: Language) -> None:
        model = language.settings.model()
        windows = torch.randint(256, (37, 65), generator=torch.Generator().manual_seed(0))
        assert mean_loss(model, windows) == pytest.approx(
            sum(mean_loss(model, window[None]) for window in windows) / 37, rel=1e-5
        )


@pytest.fixture
def tiny(trained_runs: Path, gpt_run: list[Path], tmp_path: Path) -> Bench:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(trained_runs)
    return Bench("tiny", tmp_path, lambda line: None)


def test_ablation_counts_every_weight(tiny: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "_CHOSEN", [("gpt", ablation.DynaQuantSettings())])
    found = Found(tiny.kept, machine="", again=False, report=lambda line: None)
    ablation.measure(tiny, found)
    (row,) = found.rows("ablation")
    huffman, run_lengths, rearranged = (bits / row["elements"] for bits in row["bits"][-1])
    assert 0.05 < run_lengths < huffman < 4
    assert 0.05 < rearranged < huffman


def test_failures_do_nothing_to_exact_versions(tiny: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "SETTINGS", replace(failures.SETTINGS, width=64, steps=8, every=2))
    paths = failures.trained(tmp_path, 0)
    row = failures.row(tiny, lambda seed: paths, EXACT, "all", 3, 0)
    assert len(row["failures"]) == 3
    assert row["rise"] == 0
    assert len(row["added"]) == max(row["failures"]) // 2
    assert failures.row(tiny, lambda seed: paths, EXACT, "all", 3, 1)["failures"] != row["failures"]


def test_a_restore_takes_parts() -> None:
    exact, restored = ({"model": n, "optimizer": n, "step": n} for n in (1, 2))
    assert failures.PARTS["weights"](exact, restored) == {"model": 2, "optimizer": 1, "step": 1}
    assert failures.PARTS["moments"](exact, restored) == {"model": 1, "optimizer": 2, "step": 2}


@pytest.mark.parametrize("arguments", [["--only", "gtp"], ["--tier", "huge"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        schemes.main(arguments)
    assert stopped.value.code == 2
    assert arguments[1] in capsys.readouterr().err
