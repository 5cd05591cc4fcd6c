"""Ingests that search the smallest tolerated version: the tolerance holds, and trials leave nothing."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.codecs.scheme import QUALITIES
from ckstore.codecs.schemes import lc
from ckstore.codecs.schemes.dynaquant import DynaQuantSettings
from ckstore.errors import UsageError
from ckstore.policy import Policy
from ckstore.repository import Repository
from ckstore.storage import root
from ckstore.writing.tuning import Search, fall_of, search_space
from tests.checkpoints import described, listing, packs_of, sha256, write_safetensors
from tests.coarse_checks import check_deviations, loaded

Evaluate = Callable[[Path], float]


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return weights that move less and less: the tolerated step becomes finer."""
    total = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    for number in range(1, step + 1):
        total = total + torch.randn(300, 256, generator=torch.Generator().manual_seed(number)) * 0.1 / number
    return {"w": total, "b": torch.full((9,), float(step))}


def saved(directory: Path, step: int) -> Path:
    torch.save(weights(step), directory / f"step{step}.pt")
    return directory / f"step{step}.pt"


class Model:
    """A loss of 1 at the original weights, which grows with the distance to them; and its calls."""

    def __init__(self, step: int, *, accuracy: bool = False) -> None:
        self.exact = weights(step)["w"]
        self.accuracy = accuracy
        self.said: list[float] = []
        self.names: list[str] = []

    def __call__(self, path: Path) -> float:
        found = torch.load(path, weights_only=True)["w"]
        off = float(torch.sqrt(torch.mean((found - self.exact) ** 2)) * 4)
        self.said.append(1 - off if self.accuracy else 1 + off)
        self.names.append(path.name)
        return self.said[-1]


# Stored versions


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["lattice", "lc", "dynaquant"])
@pytest.mark.parametrize("tolerance", [0.02, 0.2])
def test_stored_versions_are_within_the_tolerance(
    store: ckstore.Store, directory: Path, scheme: Any, tolerance: float
) -> None:
    for step in range(3):
        model, path = Model(step), saved(directory, step)
        before = store._catalog.last_number()
        row = store.ingest(
            path, run="r", policy=Policy("coarse", scheme=scheme), search=Search(model, tolerance)
        ).version
        evaluations = len(model.said) - 1
        assert model.said[0] == 1, "the original comes first"
        assert set(model.names) == {path.name}
        assert row.number == before + 1, "the number that was reserved at first"
        store[row.number].checkout(directory / "out.pt", force=True)
        degradation = Model(step)(directory / "out.pt") - 1
        assert degradation <= tolerance
        if row.fidelity == "exact":
            assert degradation == 0
            assert min(model.said[1:]) - 1 > tolerance
            continue
        said = store[row.number]._stored.document.coarse
        assert said is not None
        assert said.scheme == scheme
        assert said.parameters["evaluations"] == evaluations
        assert said.parameters["degradation"] == pytest.approx(degradation, abs=1e-12)
        check_deviations(store[row.number], loaded(path), loaded(directory / "out.pt"))
    assert store.verify().problems == []


def test_the_most_aggressive_quality_that_is_tolerated_is_found(directory: Path) -> None:
    """Against trying all of them, in stores of their own, because known objects take no bytes again."""
    path = saved(directory, 0)
    fits = {}
    with ckstore.init(directory / "all") as other:
        for quality in QUALITIES:
            row = other.ingest(path, run=f"q{quality}", policy=Policy("coarse", quality=quality)).version
            other[row.number].checkout(directory / "out.pt", force=True)
            fits[quality] = Model(0)(directory / "out.pt") - 1
    for tolerance in (0.05, 0.3, 1e9):
        with ckstore.init(directory / f"t{tolerance}") as store:
            row = store.ingest(path, run="r", search=Search(Model(0), tolerance)).version
            said = store[row.number]._stored.document.coarse
        best = max(quality for quality, degradation in fits.items() if degradation <= tolerance)
        assert said is not None
        assert fits[said.parameters["quality"]] == fits[best], "of two qualities half an octave apart with one lattice"
        assert said.parameters["evaluations"] <= 5


def test_an_intolerable_choice_is_refined(store: ckstore.Store, directory: Path) -> None:
    chosen = []
    for step, tolerance in enumerate((0.5, 0.5, 0.05)):
        model = Model(step)
        row = store.ingest(saved(directory, step), run="r", search=Search(model, tolerance)).version
        said = store[row.number]._stored.document.coarse
        assert said is not None
        chosen.append((said.parameters["quality"], len(model.said) - 1))
    qualities = [quality for quality, _ in chosen]
    assert qualities[0] >= qualities[1] > qualities[2], "never more aggressive than before"
    assert chosen[1][1] <= 5


def test_the_tolerance_is_what_steps_of_training_are_worth(store: ckstore.Store, directory: Path) -> None:
    """The validation loss falls by 0.02 a step; the training loss, which says something else, does not count."""
    for step in range(3):
        logged = {"val_loss": 1.1 - 0.02 * step, "loss": 5.0 - step, "val_acc": 0.1 * step, "epoch": 1}
        search = Search(Model(step), max_rework=4.0)
        report = store.ingest(saved(directory, step), run="r", metrics=logged, search=search)
        assert (report.version.fidelity == "coarse") == (step > 0)
        assert ("no loss that falls" in report.note) == (step == 0)
        if step:
            said = store[report.version.number]._stored.document.coarse
            assert said is not None
            assert 0 < said.parameters["degradation"] <= 4 * 0.02
    with ckstore.init(directory / "other") as other:
        row = other.ingest(saved(directory, 2), run="r", search=Search(Model(2), 4 * 0.02)).version
        same = other[row.number]._stored.document.coarse
    assert same is not None
    assert said is not None
    assert same.parameters["quality"] == said.parameters["quality"]


@pytest.mark.parametrize(
    ("before", "fall"),
    [
        ([], None),
        ([(1, {"loss": 2.0})], None),
        ([(3, {"loss": 2.0}), (1, {"loss": 3.0})], 0.5),
        ([(3, {"loss": 3.0}), (1, {"loss": 2.0})], None),
        ([(3, {"loss": math.nan}), (2, {"loss": 2.0}), (1, {"loss": 2.5})], 0.5),
        ([(2, {"loss": 1.0, "eval_loss": 2.0}), (1, {"loss": 9.0, "eval_loss": 2.25})], 0.25),
        ([(2, {"loss": 1.0, "eval_loss": 2.0}), (1, {"loss": 9.0})], 8.0),
        ([(2, {"accuracy": 1.0}), (1, {"accuracy": 2.0})], None),
        ([(2, {"loss": "2"}), (1, {"loss": 3.0})], None),
        ([(2, {"loss": 1e308}), (1, {"loss": 1.7e308})], None),
        ([(2**62 + 1, {"loss": 1.0}), (2**62, {"loss": 2.0})], None),
    ],
)
def test_the_fall_of_a_loss(before: list[tuple[int, dict[str, Any]]], fall: float | None) -> None:
    assert fall_of(before) == (fall if fall is None else pytest.approx(fall))


def test_nothing_is_tolerated(store: ckstore.Store, directory: Path) -> None:
    path, model = saved(directory, 0), Model(0)
    report = store.ingest(path, run="r", search=Search(model, 0.0))
    assert report.is_new
    assert (report.version.fidelity, report.version.number) == ("exact", 1)
    store["r"].checkout(directory / "out.pt")
    assert sha256(directory / "out.pt") == sha256(path)
    assert store["r"]._stored.document.coarse is None
    assert len(model.said) <= 6
    model = Model(0)
    assert not store.ingest(path, run="r", step=0, search=Search(model, 0.0)).is_new or model.said


def test_an_accuracy_is_the_better_the_higher_it_is(store: ckstore.Store, directory: Path) -> None:
    model = Model(0, accuracy=True)
    row = store.ingest(saved(directory, 0), run="up", search=Search(model, 0.1, maximise=True)).version
    said = store[row.number]._stored.document.coarse
    assert said is not None
    assert 0 < said.parameters["degradation"] <= 0.1
    # Taken for a loss, everything is an improvement.
    with ckstore.init(directory / "other") as other_store:
        row = other_store.ingest(saved(directory, 0), run="r", search=Search(Model(0, accuracy=True), 0.1)).version
        other = other_store[row.number]._stored.document.coarse
    assert other is not None
    assert other.parameters["quality"] == QUALITIES[-1] > said.parameters["quality"]
    assert other.parameters["degradation"] < 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_result_that_is_no_number_is_not_tolerated(store: ckstore.Store, directory: Path, value: float) -> None:
    """A trial may have such a result; for the original it is an error."""
    values = iter([1.0])
    row = store.ingest(saved(directory, 0), run="r", search=Search(lambda path: next(values, value), 1e9)).version
    assert row.fidelity == "exact"
    before = listing(store.place)
    with pytest.raises(UsageError, match="finite"):
        store.ingest(saved(directory, 1), run="r", search=Search(lambda path: value, 1e9))
    assert listing(store.place) == before
    assert store._catalog.reservations() == []


def test_a_reference_of_zero(store: ckstore.Store, directory: Path) -> None:
    """No difference is relative to 0: the tolerance is absolute."""
    model = Model(0)
    row = store.ingest(saved(directory, 0), run="r", search=Search(lambda path: model(path) - 1, 0.3)).version
    said = store[row.number]._stored.document.coarse
    assert said is not None
    assert 0 < said.parameters["degradation"] <= 0.3


# Trials


def test_trials_leave_nothing(store: ckstore.Store, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack, no row, no number; also where they are seen while they are there."""
    store.ingest(saved(directory, 0), run="r")
    seen: list[tuple[int, int]] = []
    model = Model(1)

    def evaluate(path: Path) -> float:
        with Repository(root.place(store.place), "r") as repository:
            catalog = repository.catalog
            assert [row.number for row in catalog.versions()] == [1]
            assert len(catalog.reservations()) == 1
        seen.append((len(packs_of(store.place)), len(store._catalog.leases())))
        return model(path)

    row = store.ingest(saved(directory, 1), run="r", search=Search(evaluate, 0.1)).version
    assert row.number == 2
    assert {files for files, _ in seen} == {seen[0][0]}, "a trial has gone when it is evaluated"
    assert {leases for _, leases in seen} == {1}
    packs = {pack.name for pack in store._catalog.packs()}
    assert set(packs_of(store.place)) == packs
    assert store._catalog.reservations() == []
    assert store.gc(grace=0).files == 0
    assert store.ingest(saved(directory, 2), run="r").version.number == 3
    assert store.verify().problems == []


@pytest.mark.parametrize("call", [0, 1, 3])
def test_an_evaluation_that_fails(store: ckstore.Store, directory: Path, call: int) -> None:
    before = listing(store.place)
    model = Model(0)

    def evaluate(path: Path) -> float:
        if len(model.said) == call:
            raise ZeroDivisionError
        return model(path)

    with pytest.raises(ZeroDivisionError):
        store.ingest(saved(directory, 0), run="r", search=Search(evaluate, 0.1))
    assert listing(store.place) == before
    assert (store._catalog.versions(), store._catalog.reservations(), store._catalog.leases()) == ([], [], [])
    assert store.ingest(saved(directory, 0), run="r").is_new


def test_evaluated_files_equal_a_checkout(store: ckstore.Store, directory: Path) -> None:
    """A directory with its links and empty directories, original and trial alike."""
    tree = directory / "model"
    (tree / "sub").mkdir(parents=True)
    (tree / "empty").mkdir()
    write_safetensors(tree / "sub" / "model.safetensors", {"w": ("float32", (300, 256), weights(0)["w"].numpy())})
    (tree / "config.json").write_text("{}")
    (tree / "link").symlink_to("sub/model.safetensors")
    seen: list[dict[str, Any]] = []

    def evaluate(path: Path) -> float:
        assert (path / "link").stat().st_size == (tree / "link").stat().st_size
        seen.append(described(path))
        return 1.0

    row = store.ingest(tree, run="r", search=Search(evaluate, 0.1)).version
    assert row.fidelity == "coarse"
    assert [{name: entry[0] for name, entry in found.items()} for found in seen] == [
        {name: entry[0] for name, entry in described(tree).items()}
    ] * len(seen)
    digests = [found["sub/model.safetensors"][1] for found in seen]
    assert digests[0] == sha256(tree / "sub" / "model.safetensors")
    assert digests[0] not in digests[1:]


def test_a_state_dict_in_memory(store: ckstore.Store) -> None:
    model = Model(0)
    row = store.ingest(weights(0), run="r", search=Search(model, 0.1)).version
    assert row.fidelity == "coarse"
    assert model.said[0] == 1
    assert len(set(model.names)) == 1


def test_without_a_bound_a_twentieth_is_tolerated(store: ckstore.Store, directory: Path) -> None:
    row = store.ingest(saved(directory, 0), run="default", search=Search(Model(0))).version
    said = store[row.number]._stored.document.coarse
    with ckstore.init(directory / "other") as other:
        same = other.ingest(saved(directory, 0), run="default", search=Search(Model(0), 0.05)).version
        expected = other[same.number]._stored.document.coarse
    assert said is not None
    assert expected is not None
    assert said.parameters == expected.parameters
    assert 0 < said.parameters["degradation"] <= 0.05


def test_the_smallest_tolerated_version_is_stored(store: ckstore.Store, directory: Path) -> None:
    """With everything tolerated the most aggressive corner by either metric: by bytes, which the trials really took."""
    tree = {"model": {"w": weights(0)["w"]}, "step": 0}
    gradient = torch.randn(300, 256, generator=torch.Generator().manual_seed(9))
    # By sensitivity whole rows are pruned: far fewer bytes, so that no byte of a manifest decides.
    gradient[150:] = 0
    taken = {}
    for metric in ("magnitude", "sensitivity"):
        policy = Policy("coarse", "dynaquant", settings=DynaQuantSettings(4, 0.5, 0.0005, metric, 16))
        with ckstore.init(directory / metric) as other:
            other.set_policy(policy, "r")
            taken[metric] = other.ingest(tree, run="r", gradients={"model/w": gradient}).version.stored_bytes
    assert abs(taken["magnitude"] - taken["sensitivity"]) > 1000
    row = store.ingest(
        tree,
        run="r",
        gradients={"model/w": gradient},
        policy=Policy("coarse", scheme="dynaquant"),
        search=Search(lambda path: 1.0),
    ).version
    said = store[row.number]._stored.document.coarse
    assert said is not None
    assert said.parameters["metric"] == min(taken, key=taken.__getitem__)
    assert (said.parameters["levels"], said.parameters["prune"], said.parameters["embedding_levels"]) == (4, 0.5, 16)


def test_gradients_that_are_noise_do_not_hold_the_search(store: ckstore.Store) -> None:
    """Sensitivity prunes other elements in each version; after that, a change to magnitude costs more at once."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 256, generator=generator)
    shape = torch.randn(300, 256, generator=generator).exp()
    metrics, sizes = [], []
    for step in range(4):
        gradient = shape * (0.6 * torch.randn(300, 256, generator=generator)).exp()
        # Layers without any gradient make sensitivity the better one at first.
        gradient[200:] *= min(step, 1)
        row = store.ingest(
            {"model": {"w": weight}, "step": step},
            run="r",
            gradients={"model/w": gradient},
            policy=Policy("coarse", scheme="dynaquant"),
            search=Search(lambda path: 1.0),
        ).version
        coarse = store["r"]._stored.document.coarse
        assert coarse is not None
        metrics.append(coarse.parameters["metric"])
        sizes.append(row.stored_bytes)
        weight = weight + 0.01 * torch.randn(300, 256, generator=generator)
    assert metrics == ["sensitivity", "magnitude", "magnitude", "magnitude"]
    # Held by sensitivity, the last ones took 9,100 bytes each.
    assert max(sizes[2:]) < 5000


# Evaluations


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"max_degradation": -0.1}, "0 or more"),
        ({"max_rework": -1.0}, "`max_rework` must be 0 or more"),
        ({"max_rework": 2.0, "maximise": True}, "leave `maximise` out"),
        ({"max_degradation": math.nan}, "takes a number, not nan"),
        ({"max_degradation": math.inf}, "0 or more"),
        ({"jobs": 0}, "`jobs` must be 1 or more"),
    ],
)
def test_a_search_out_of_bounds_is_refused(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        Search(lambda path: 1.0, **options)


@pytest.mark.parametrize(
    ("policy", "hint"), [(Policy("coarse", max_abs_error=1e-3), "not both"), ("exact", "leave the exact policy out")]
)
def test_a_search_that_contradicts_the_policy_is_refused(
    store: ckstore.Store, directory: Path, policy: Any, hint: str
) -> None:
    with pytest.raises(UsageError, match=hint):
        store.ingest(saved(directory, 0), run="r", policy=policy, search=Search(lambda path: 1.0))
    assert len(store) == 0


def test_search_spaces() -> None:
    for scheme, qualities in (("lattice", QUALITIES), ("lc", lc.SCHEME.qualities)):
        cube = search_space(Policy("coarse", scheme))
        assert [policy.quality for policy in cube.settings.values()] == list(qualities)
        assert all(policy.scheme == scheme for policy in cube.settings.values())
    assert [lc.bits_of(quality) for quality in lc.SCHEME.qualities] == [4, 3, 2, 1]
    cube = search_space(Policy("coarse", "dynaquant"))
    assert len(cube.settings) == 432
    assert all(policy.settings is not None for policy in cube.settings.values())
    cube = search_space(Policy("coarse", "dynaquant"), known=False)
    assert len(cube.settings) == 216
    assert {policy.settings.metric for policy in cube.settings.values() if policy.settings} == {"magnitude"}


# Several evaluations at once


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["lattice", "dynaquant"])
def test_several_jobs_find_the_choice_of_one(directory: Path, scheme: Any) -> None:
    said = {}
    for jobs in (1, 3):
        with ckstore.init(directory / f"{jobs}") as store:
            chosen = []
            for step, tolerance in enumerate((0.3, 0.3, 0.05)):
                model = Model(step)
                row = store.ingest(
                    saved(directory, step),
                    run="r",
                    policy=Policy("coarse", scheme=scheme),
                    search=Search(model, tolerance, jobs=jobs),
                ).version
                coarse = store[row.number]._stored.document.coarse
                chosen.append(None if coarse is None else coarse.parameters)
                assert len(set(model.names)) == 1
            said[jobs] = chosen
            assert store._catalog.reservations() == []
            assert store.verify().problems == []
    assert said[1] == said[3]


def test_evaluations_run_at_once(store: ckstore.Store, directory: Path) -> None:
    model, together = Model(0), threading.Barrier(3, timeout=60)
    original = threading.Lock()
    original.acquire()

    def evaluate(path: Path) -> float:
        if not model.said:
            return model(path)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait()
            original.release()
            together.abort()
        return model(path)

    store.ingest(saved(directory, 0), run="r", search=Search(evaluate, 0.1, jobs=3))
    assert original.acquire(blocking=False), "three waited for one another"
    assert len(model.said) > 1


def test_an_unused_evaluation_ahead_may_fail(store: ckstore.Store, directory: Path) -> None:
    """Everything is tolerated: a gentler trial is started along with the first one, and its result is not used."""
    model = Model(0)
    gentle = threading.Event()

    def evaluate(path: Path) -> float:
        off = model(path) - 1
        if 0 < off < 0.1:
            gentle.set()
            raise ZeroDivisionError
        return 1.0

    store.ingest(saved(directory, 0), run="r", search=Search(evaluate, 0.1, jobs=13))
    said = store["r"]._stored.document.coarse
    assert said is not None
    assert said.parameters["quality"] == QUALITIES[-1]
    assert gentle.is_set()
