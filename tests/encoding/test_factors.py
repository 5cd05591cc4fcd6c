"""Factors of a fine-tune against its base: few bytes, equal values everywhere, and lattices where they do not apply."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.codecs.factors import MOST_DIRECTIONS, factor_lattice
from ckstore.codecs.schemes.factors import factors
from ckstore.errors import IntegrityError, UsageError
from ckstore.objects import units
from ckstore.objects.records import Factors
from ckstore.policy import Policy
from ckstore.runtime import threads
from tests.format_reader import Reader

FACTORS = Policy("coarse", "factors")


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def states(dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a base and its fine-tune: matrices change in three directions, a table in a few rows."""
    base = {"tall": draw(1100, 256, seed=1), "wide": draw(256, 1100, seed=2), "cube": draw(64, 32, 6, 6, seed=3)}
    base |= {"table": draw(700, 128, seed=4), "steps": torch.arange(70_000)}
    tuned = {
        name: value + 0.02 * (draw(len(value), 3, seed=7) @ draw(3, value[0].numel(), seed=8)).view(value.shape)
        for name, value in base.items() if value.is_floating_point()
    }  # fmt: skip
    tuned["table"] = base["table"].clone()
    tuned["table"][[3, 70, 600]] += draw(3, 128, seed=9, scale=0.1)
    tuned["steps"] = base["steps"] + 1
    return tuple({name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
                 for state in (base, tuned))  # type: ignore[return-value]  # fmt: skip


def records(store: ckstore.Store, name: str) -> dict[str, object]:
    """Return the records of a version's objects by path."""
    stored = store[name]._stored
    named = zip(stored.layout.units, stored.document.objects, strict=True)
    return {unit.key: store._repository.resolver.record(identity) for unit, identity in named}


@pytest.mark.local  # The second reader opens directories.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_fine_tune_takes_few_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    base, tuned = states(dtype)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(base, run="r", step=0, hot=0)
        row = store.ingest(tuned, run="r", step=1, hot=0, policy=FACTORS).version
        assert row.fidelity == "coarse"
        assert row.stored_bytes < sum(value.nbytes for value in tuned.values()) / 20
        found = records(store, "r@1")
        assert {name for name, record in found.items() if isinstance(record, Factors)} == {
            "tall",
            "wide",
            "cube",
            "table",
        }
        restored = store["r@1"].state_dict()
        for name, value in tuned.items():
            if value.is_floating_point():
                off, change = (
                    (restored[name].float() - value.float()).norm(),
                    (value.float() - base[name].float()).norm(),
                )
                assert off < 0.5 * change
        assert torch.equal(restored["steps"], tuned["steps"])
        assert torch.equal(
            torch.from_numpy(store["r@1"]["tall"][1024:1050, 3:9].astype("f4")),
            restored["tall"][1024:1050, 3:9].float(),
        )
        assert store.verify().problems == []
        store["r@1"].checkout(tmp_path / "out")
        [(_, data)] = Reader(tmp_path / "store").files(row.number)
        assert data == (tmp_path / "out").read_bytes()


def test_threads_store_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, tuned = states()
    found = []
    for most in (1, 2):
        monkeypatch.setattr(threads, "_most", most)
        with ckstore.init(tmp_path / f"{most}") as store:
            store.ingest(base, run="r", step=0, hot=0)
            store.ingest(tuned, run="r", step=1, hot=0, policy=FACTORS)
            found.append([record.id for record in records(store, "r@1").values()])  # type: ignore[attr-defined]
    assert found[0] == found[1]


def test_all_versions_of_a_run_are_stored_against_its_base(tmp_path: Path) -> None:
    base, tuned = states()
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(base, run="r", step=0, hot=0)
        for step in range(1, 4):
            half = {name: base[name] + (value - base[name]) * step / 3 if value.is_floating_point() else value
                    for name, value in tuned.items()}  # fmt: skip
            row = store.ingest(half, run="r", step=step, hot=0, policy=FACTORS).version
        first = records(store, "r@0")
        for name, record in records(store, "r@3").items():
            if isinstance(record, Factors):
                assert record.base == first[name].id  # type: ignore[attr-defined]
        assert row.depth == 1
        assert store.ingest(tuned, run="r", step=4, hot=0).version.depth == 1, "exact on the exact base"
        assert store.verify().problems == []


def test_without_an_encoded_base_there_are_lattices(tmp_path: Path) -> None:
    base, tuned = states()
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(base, run="first", step=0, hot=0, policy=FACTORS)
        store.ingest(base, run="hot", step=0, policy=FACTORS, hot=3)
        store.ingest(tuned, run="hot", step=1, policy=FACTORS, hot=3)
        other = {"tall": draw(900, 256), "steps": tuned["steps"]}
        store.ingest(base, run="other", step=0, hot=0)
        store.ingest(other, run="other", step=1, hot=0, policy=FACTORS)
        store.encode()
        for name in ("first@0", "hot@0", "other@1"):
            assert not any(isinstance(record, Factors) for record in records(store, name).values())
        assert store.verify().problems == []


def test_the_base_stays_for_its_fine_tune(tmp_path: Path) -> None:
    base, tuned = states()
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(base, run="r", step=0, hot=0)
        store.ingest(tuned, run="r", step=1, hot=0, policy=FACTORS)
        assert any(isinstance(record, Factors) for record in records(store, "r@1").values())
        before = store["r@1"].state_dict()["tall"]
        store.thin(["r@0"])
        store.gc(grace=0)
        assert torch.equal(store["r@1"].state_dict()["tall"], before)
        store.forget(["r@0"])
        store.gc(grace=0)
        assert torch.equal(store["r@1"].state_dict()["tall"], before)
        assert store.rebase(["r@1"]).beyond == [2]
        assert store.verify().problems == []


def test_small_and_unchanged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SMALL", 1 << 12)
    base = {"still": draw(80, 80), "still2": draw(80, 80, seed=1), "moved": draw(80, 80, seed=2)}
    base |= {f"small{number}": draw(40, 40, seed=number) for number in range(5)}
    tuned = {name: value + 0.01 * draw(*value.shape, seed=9) * (name[:5] != "still") for name, value in base.items()}
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"model": base}, run="r", step=0, hot=0)
        store.ingest({"model": tuned}, run="r", step=1, hot=0, policy=FACTORS)
        found = records(store, "r@1")
        assert all(isinstance(record, Factors) for record in found.values())
        restored = store["r@1"].state_dict()["model"]
        assert torch.equal(restored["still"], base["still"])
        assert all((restored[name] - value).square().mean() < 5e-5 for name, value in tuned.items())


def test_directions_are_found_and_limited() -> None:
    generator = np.random.default_rng(0)
    change = generator.normal(size=(300, 5)) @ generator.normal(size=(5, 400))
    lattice, numbers = factors(change, 0.1, "float32")
    assert lattice.rank == 5
    decoded = lattice.add(np.zeros(120_000, np.uint32), numbers, 0).view(np.float32).reshape(300, 400)
    assert np.abs(decoded - change).std() < 0.1
    assert factors(generator.normal(size=(400, 400)), 1e-3, "float32")[0].rank == MOST_DIRECTIONS
    assert factors(np.zeros((300, 400)), 0.1, "float32")[0].rank == 1


@pytest.mark.parametrize(
    ("weights", "left", "right"),
    [
        ([0.0], np.ones((3, 1)), np.ones((1, 4))), ([np.nan], np.ones((3, 1)), np.ones((1, 4))),
        ([1.0], np.ones((3, 2)), np.ones((2, 4))), ([1.0], np.full((3, 1), 2.0**20), np.full((1, 4), 2.0**20)),
        ([], np.ones((3, 0)), np.ones((0, 4))),
    ],
)  # fmt: skip
def test_other_factors_are_refused(weights: list[float], left: np.ndarray, right: np.ndarray) -> None:
    with pytest.raises(UsageError):
        factor_lattice("float32", np.array(weights), left, right)


def test_sums_beyond_32_bits_are_damage() -> None:
    lattice, numbers = factor_lattice("float32", np.ones(1), np.ones((3, 1)), np.ones((1, 4)))
    numbers[:] = 1 << 20
    with pytest.raises(IntegrityError, match="32 bits"):
        lattice.add(np.zeros(12, np.uint32), numbers, 0)


def test_tensors_of_large_moments_have_finer_steps(tmp_path: Path) -> None:
    weights = {"a": draw(300, 256), "b": draw(300, 256, seed=1)}
    change = 0.01 * draw(300, 256, seed=2)
    noise = draw(300, 256, seed=3)
    moments = {
        number: {"exp_avg": scale * noise, "exp_avg_sq": (scale * noise).square()}
        for number, scale in enumerate((1e-4, 1e-2))
    }
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"model": weights, "optimizer": {"state": moments}}, run="r", step=0, hot=0)
        tuned = {name: value + change for name, value in weights.items()}
        store.ingest({"model": tuned, "optimizer": {"state": moments}}, run="r", step=1, hot=0, policy=FACTORS)
        found = records(store, "r@1")
        assert found["model/b"].nbytes > 1.3 * found["model/a"].nbytes  # type: ignore[attr-defined]
        assert not any(isinstance(record, Factors) for name, record in found.items() if name.startswith("optimizer"))
