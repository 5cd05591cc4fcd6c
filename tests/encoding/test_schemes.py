"""Versions by the published schemes equal the results of the quantisers' pure functions, chained by hand."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.cli.program import run
from ckstore.codecs.codebook import as_float32, differences
from ckstore.codecs.schemes import dynaquant, lc
from ckstore.codecs.schemes.dynaquant import DynaQuantSettings, RankStatistics, Treatment
from ckstore.errors import IntegrityError
from ckstore.objects.records import Codebook, Record
from ckstore.objects.units import Unit
from ckstore.policy import QUALITY, Policy
from ckstore.recovery.recover import recover
from ckstore.version import Version
from tests.checkpoints import flip, lose_catalog, scratch, sha256
from tests.coarse_checks import check_deviations, loaded, same_bits, values_of

PUBLISHED = ["lc", "dynaquant"]


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as path:
        yield path


@pytest.fixture(scope="session")
def runs(
    gpt_run: list[Path], cnn_run: list[Path], bf16_run: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[Path]]]:
    """By scheme and run a store of four versions, and their files."""
    made = {}
    for scheme in PUBLISHED:
        for name, files in (("gpt", gpt_run), ("cnn", cnn_run), ("bf16", bf16_run)):
            path = tmp_path_factory.mktemp(f"{scheme}-{name}") / "store"
            with ckstore.init(path) as store:
                for file in files[:4]:
                    store.ingest(file, run=f"run-{name}", policy=Policy("coarse", scheme=scheme))
            made[f"{scheme}-{name}"] = path, files[:4]
    return made


@pytest.fixture(params=[f"{scheme}-{name}" for scheme in PUBLISHED for name in ("gpt", "cnn", "bf16")])
def stored_run(request: pytest.FixtureRequest, runs: dict[str, tuple[Path, list[Path]]]) -> tuple[Path, list[Path]]:
    return runs[request.param]


def loaded_from(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    return loaded(path)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint32 if tensor.element_size() == 4 else torch.uint16).numpy()


def codebooks(version: Version) -> dict[str, tuple[Record, Unit]]:
    """Return the record and the unit of every tensor with a codebook, by path."""
    found = {}
    for unit, identity in zip(version._stored.layout.units, version._stored.document.objects, strict=True):
        record = version._stored.repository.resolver.record(identity)
        if isinstance(record, Codebook):
            [member] = unit.members
            for path, (file, tensor) in version._stored.paths.items():
                if (file, tensor.extent) == (member.file, member.extent):
                    found[path] = record, unit
    return found


def second_moments(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of each weight the second moment, by the weight's path: AdamW numbers its state as the model does its weights."""
    weights = [path for path in tensors if path.startswith("model/")]
    found = {}
    for number, path in enumerate(weights):
        moment = tensors.get(f"optimizer/state/[{number}]/exp_avg_sq")
        if moment is not None and moment.shape == tensors[path].shape:
            found[path] = moment
    return found


# Restored values


class LcByHand:
    """The decoded states of one tensor's versions, as the rule has them."""

    def __init__(self) -> None:
        self.states: list[np.ndarray] = []
        self.records: list[Record] = []
        self.ways: list[str] = []

    def add(self, bits: np.ndarray, record: Record, dtype: str) -> np.ndarray:
        """The state that a version decodes to whose base is that of its record."""
        if record.base is None:
            way = "base"
            lattice, indices = lc_quantised(as_float32(bits, dtype), 8, dtype, lc.SPLIT)
            state = lattice.values(indices)
        else:
            previous = self.states[-1]
            change, indices = lc_quantised(differences(bits, previous, dtype), 3, dtype)
            assert change.levels <= 8
            state = change.add(previous, indices)
            way = "delta"
            if record.base != self.records[-1].id:
                way = "merged"
                places = [place for place, before in enumerate(self.records) if before.id == record.base]
                assert places, "a merged change leads on from a version of this run"
                start = self.states[places[-1]]
                merged, indices = lc_quantised(differences(state, start, dtype), 8, dtype, lc.SPLIT)
                state = merged.add(start, indices)
        self.states.append(state)
        self.records.append(record)
        self.ways.append(way)
        return state


def lc_quantised(changes: Any, bits: int, dtype: str, split: int = 0) -> tuple[Any, Any]:
    lattice = lc.bucket_codebook(changes, bits, dtype, split)
    return lattice, lc.assign(lattice, changes, split)


@pytest.mark.long
def test_lc_chained_by_hand(runs: dict[str, tuple[Path, list[Path]]]) -> None:
    """Each state is the decoded one before it and the quantised changes: errors do not add up."""
    for name in ("gpt", "cnn", "bf16"):
        path, files = runs[f"lc-{name}"]
        by_hand: dict[str, LcByHand] = defaultdict(LcByHand)
        with ckstore.open(path, "r") as store:
            for row, file in zip(store._catalog.versions(), files, strict=True):
                version, before = store[row.number], loaded_from(file)
                there = codebooks(version)
                assert there
                for tensor, (record, unit) in there.items():
                    expected = by_hand[tensor].add(bits_of(before[tensor]), record, unit.dtype)
                    assert np.array_equal(bits_of(version[tensor].torch()), expected), tensor
        assert any("delta" in tensor.ways for tensor in by_hand.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lc_errors_do_not_grow_over_a_run(dtype: torch.dtype, place: Path) -> None:
    """After any drift, a version is nearer to its original than the version before it is."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 300, generator=generator)
    drift = torch.randn(300, 300, generator=generator) * 0.03
    by_hand = LcByHand()
    before = weight.double()
    with ckstore.init(place / "store") as store:
        for step in range(20):
            weight += drift + torch.randn(300, 300, generator=generator) * 0.03
            tree = {"weight": weight.to(dtype)}
            row = store.ingest(tree, run="r", step=step, policy=Policy("coarse", scheme="lc")).version
            assert row.cost <= 2
            [(record, unit)] = codebooks(store[row.number]).values()
            found = store[row.number]["weight"].torch()
            exact = tree["weight"].double()
            moved, before = (exact - before).norm(), exact
            assert step == 0 or (found.double() - exact).norm() < moved, step
            assert np.array_equal(bits_of(found), by_hand.add(bits_of(tree["weight"]), record, unit.dtype))
    assert by_hand.ways[0] == "base"
    assert set(by_hand.ways[1:]) == {"delta", "merged"}


def ranked_by_hand(
    version: Version, before: dict[str, torch.Tensor]
) -> dict[str, tuple[str, np.ndarray, np.ndarray | None]]:
    """Return layer type, values and sensitivity of every tensor with a codebook."""
    moments = second_moments(before)
    found = {}
    for tensor, (_, unit) in codebooks(version).items():
        values = as_float32(bits_of(before[tensor]), unit.dtype)
        sensitivity = None
        if tensor in moments:
            sensitivity = np.sqrt(as_float32(bits_of(moments[tensor]), "float32")) * np.abs(values)
        if tensor.startswith("optimizer/"):
            kind = tensor
        elif before[tensor].dim() == 4:
            kind = "convolution"
        else:
            name = tensor.split("/")[-1]
            kind = "embedding" if "wte" in name else "attention" if "attn" in name else "linear"
        found[tensor] = kind, values, sensitivity
    return found


def test_dynaquant_chained_by_hand(runs: dict[str, tuple[Path, list[Path]]]) -> None:
    """Each state is quantised by itself, split where all layers of a type together have the shares."""
    for name in ("gpt", "cnn", "bf16"):
        path, files = runs[f"dynaquant-{name}"]
        ranked = deltas = 0
        kinds = set()
        with ckstore.open(path, "r") as store:
            for row, file in zip(store._catalog.versions(), files, strict=True):
                version = store[row.number]
                there = codebooks(version)
                by_hand = ranked_by_hand(version, loaded_from(file))
                together: dict[str, RankStatistics] = defaultdict(RankStatistics)
                for kind, values, sensitivity in by_hand.values():
                    together[kind].add(values, sensitivity)
                for tensor, (kind, values, sensitivity) in by_hand.items():
                    record, unit = there[tensor]
                    kinds.add(kind)
                    known = sensitivity is not None
                    ranked += known
                    settings = DynaQuantSettings(16, 0.1, 0.01, "sensitivity" if known else "magnitude", 32)
                    assert dynaquant.settings_of(QUALITY, known=known) == settings
                    levels = 32 if kind == "embedding" else 16
                    treatment = Treatment(together[kind].split(settings, known=known), levels, sensitivity)
                    lattice = dynaquant.level_codebook(values, treatment, unit.dtype)
                    indices, aside = dynaquant.assign(lattice, values, treatment)
                    numbers = lattice.numbers(indices, aside)
                    expected = lattice.values(numbers)
                    assert np.array_equal(bits_of(version[tensor].torch()), expected), tensor
                    found = np.concatenate(
                        [store._repository.reader.numbers(record, chunk) for chunk in range(record.chunks)]
                    )
                    assert np.array_equal(found, numbers)
                    deltas += record.base is not None
        assert deltas
        assert bool(ranked) == (name == "gpt")
        assert kinds & {"convolution", "linear"}, kinds


def test_embeddings_have_levels_of_their_own(place: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    names = ["embed_tokens.weight", "up.weight"]
    tree = {name: torch.randn(300, 256, generator=draw) for name in names}
    with ckstore.init(place / "store") as store:
        for quality, levels in ((1.0, (32, 32)), (2.0, (32, 16)), (5.0, (16, 6))):
            row = store.ingest(
                tree, run=f"q{quality}", policy=Policy("coarse", scheme="dynaquant", quality=quality)
            ).version
            there = codebooks(store[row.number])
            for name, count in zip(names, levels, strict=True):
                record, _ = there[name]
                assert isinstance(record, Codebook)
                found = np.unique(record.lattice.indices(store._repository.reader.numbers(record, 0)))
                assert count <= found.size <= count + 2, (quality, name)


def test_deviations_are_true(stored_run: tuple[Path, list[Path]], place: Path) -> None:
    path, files = stored_run
    with ckstore.open(path, "r") as store:
        assert store.verify().problems == []
        for row in store._catalog.versions()[2:3]:
            version = store[row.number]
            version.checkout(place / "out", force=True)
            before = loaded_from(files[row.number - 1])
            (place / "out").rename(place / f"out{files[0].suffix}")
            check_deviations(version, before, loaded_from(place / f"out{files[0].suffix}"))
            after = values_of(version)
            for tensor in codebooks(version):
                assert bool(torch.isfinite(after[tensor].float()).all())
            assert row.stored_bytes < row.original_bytes / 5
            assert store[row.number]._stored.document.coarse is not None


def restored(path: Path, place: Path) -> dict[int, str]:
    found = {}
    with ckstore.open(path, "r") as store:
        assert store.verify().problems == []
        for row in store._catalog.versions():
            store[row.number].checkout(place / "restored", force=True)
            found[row.number] = sha256(place / "restored")
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["lc-gpt", "dynaquant-gpt", "dynaquant-bf16", "lc-bf16"])
def test_values_outlast_all_that_is_done(runs: dict[str, tuple[Path, list[Path]]], place: Path, name: str) -> None:
    path = Path(shutil.copytree(runs[name][0], place / "store"))
    first = restored(path, place)
    additive = name.startswith("lc")
    with ckstore.open(path) as store:
        report = store.rebase()
        assert report.objects > 0
        for row in store._catalog.versions()[1:]:
            for record, _ in codebooks(store[row.number]).values():
                assert (record.base is None) != (additive and record.additive), "sums have no values of their own"
    assert restored(path, place) == first
    with ckstore.open(path) as store:
        store.forget([2])
        assert store.gc(grace=0).bytes > 0
        rows = store._catalog.versions()
    del first[2]
    assert restored(path, place) == first
    lose_catalog(path)
    assert recover(path).problems == []
    assert restored(path, place) == first
    with ckstore.open(path) as store:
        assert store._catalog.versions() == rows
        assert store.thin([1, 3, 4]).skipped == [1, 3, 4]


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_a_rebase_names_the_versions_that_it_cannot_bring_down(
    place: Path, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums of changes have no values of their own, which could be stored in full."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 600, generator=generator)
    with ckstore.init(place / "store") as store:
        for step in range(8):
            weight = weight + 1e-3 * torch.randn(weight.shape, generator=generator)
            store.ingest(
                {"w": weight}, run="gpt", step=step, max_restore_cost=9, hot=0, policy=Policy("coarse", scheme=scheme)
            )
        for budget in (1.2, None):
            for dry_run in (True, False, False):
                report = store.rebase(max_restore_cost=budget, dry_run=dry_run)
                high = [
                    row.number
                    for row in store._catalog.versions()
                    if (row.depth if budget is None else row.cost - 1.2) > 0
                ]
                assert report.beyond == (high if scheme == "lc" else [])
                assert dry_run or report.beyond == high
                assert bool(report.beyond) == (scheme == "lc")
    for budget in ("1.2", "1"):
        code = 3 if scheme == "lc" else 0
        assert run(["--store", str(place / "store"), "rebase", "--max-restore-cost", budget]) == code
        said = capsys.readouterr()
        assert ("every version costs at most that" in said.out) == (scheme != "lc")
        assert (f"still cost more than {budget} times a full copy" in said.err) == (scheme == "lc")
    assert run(["--store", str(place / "store"), "rebase", "--run", "gpt", "--json"]) == code
    assert json.loads(capsys.readouterr().out)[0]["beyond"] == report.beyond


@pytest.mark.parametrize("name", ["lc-cnn", "dynaquant-cnn", "dynaquant-bf16"])
def test_views_hold_the_restored_values(runs: dict[str, tuple[Path, list[Path]]], name: str) -> None:
    with ckstore.open(runs[name][0], "r") as store:
        run = store.run(f"run-{name.partition('-')[2]}")
        version = run.versions[-1]
        tensor = next(iter(codebooks(version)))
        whole = version.arrays[tensor][...]
        shown = version[tensor].torch()
        shown = shown.float() if shown.dtype == torch.bfloat16 else shown  # NumPy lacks the dtype.
        assert np.array_equal(whole.reshape(-1).view(f"u{whole.itemsize}"), bits_of(shown))
        assert np.array_equal(version.arrays[tensor][3:5], whole[3:5])
        assert np.array_equal(run.arrays[tensor][-1], whole)


# A first version, and other schemes before


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_one_shot(scheme: Any, gpt_run: list[Path], place: Path) -> None:
    """A version without parent is independent, and as good as the scheme."""
    with ckstore.init(place / "store") as store:
        row = store.ingest(gpt_run[-1], run="r", verify=True, policy=Policy("coarse", scheme=scheme)).version
        assert (row.depth, row.base) == (0, True)
        assert all(record.base is None for record, _ in codebooks(store[row.number]).values())
        off = store[row.number].deviations()
        assert {path for path in codebooks(store[row.number]) if path.startswith("model/")} <= off.keys()
        worst = max(off[path].relative for path in off if path.startswith("model/"))
        assert worst < (0.07 if scheme == "lc" else 0.15)
        # One way reads bits of every element; the other spends next to nothing on unchanged elements.
        again = store.ingest(gpt_run[-1], run="s", policy=Policy("coarse", scheme=scheme)).version
        assert again.stored_bytes < row.stored_bytes * 1.01


def test_another_scheme_starts_a_base(gpt_run: list[Path], place: Path) -> None:
    with ckstore.init(place / "store") as store:
        order: list[Any] = ["lattice", "lc", "dynaquant", "lattice", "lc"]
        for scheme, path in zip(order, gpt_run, strict=False):
            store.ingest(path, run="r", policy=Policy("coarse", scheme=scheme))
        for row, scheme in zip(store._catalog.versions(), order, strict=True):
            version = store[row.number]
            found = codebooks(version)
            assert bool(found) == (scheme != "lattice")
            assert all(record.base is None for record, _ in found.values())
            assert all(record.additive == (scheme == "lc") for record, _ in found.values())
            assert version._stored.document.coarse is not None
            assert version._stored.document.coarse.scheme == scheme
        exact = store.ingest(gpt_run[5], run="r", verify=True).version
        assert exact.fidelity == "exact"
        assert store.verify().problems == []


@pytest.mark.long
@pytest.mark.parametrize("scheme", PUBLISHED)
def test_a_quantised_version_after_an_exact_one(scheme: Any, gpt_run: list[Path], place: Path) -> None:
    with ckstore.init(place / "store") as store:
        store.ingest(gpt_run[0], run="r")
        row = store.ingest(gpt_run[1], run="r", policy=Policy("coarse", scheme=scheme)).version
        assert all(record.base is None for record, _ in codebooks(store[row.number]).values())
        row = store.ingest(gpt_run[2], run="r", policy=Policy("coarse", scheme=scheme)).version
        assert any(record.base is not None for record, _ in codebooks(store[row.number]).values())
        report = store.ingest(gpt_run[1], run="r")
        assert report.version.fidelity == "exact"
        assert store.verify().problems == []


@pytest.mark.long
@pytest.mark.parametrize("scheme", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_odd_values(scheme: Any, dtype: torch.dtype, place: Path) -> None:
    """NaN and infinities keep a tensor exact; zeros, subnormals and one value alone are quantised all the same."""
    draw = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    tensors = {
        "nan": draw.clone(), "infinite": draw.clone(), "zero": draw * 0, "one": torch.full((300, 300), 0.3),
        "tiny": draw * 1e-42, "wide": draw * torch.exp2(torch.arange(300) / 25), "cube": draw[:297].reshape(3, 99, 300),
    }  # fmt: skip
    tensors["nan"][0, 0] = float("nan")
    tensors["infinite"][7, 7] = float("inf")
    with ckstore.init(place / "store") as store:
        for step in range(3):
            tree = {name: (tensor * (1 + step / 64)).to(dtype) for name, tensor in tensors.items()}
            number = store.ingest(
                tree, run="r", step=step, verify=True, policy=Policy("coarse", scheme=scheme)
            ).version.number
            version = store[number]
            assert same_bits(version["nan"].torch(), tree["nan"])
            assert same_bits(version["infinite"].torch(), tree["infinite"])
            check_deviations(version, tree, values_of(version))
            assert {"one", "wide", "cube"} <= codebooks(version).keys()
        assert store.verify().problems == []


# Damage


def damaged(path: Path, record: Record, offset: int) -> None:
    flip(path, record.pack, lambda _: offset)


@pytest.mark.parametrize("part", ["checksum", "indices"])
def test_damage_is_found(runs: dict[str, tuple[Path, list[Path]]], place: Path, part: str) -> None:
    path = Path(shutil.copytree(runs["dynaquant-gpt"][0], place / "store"))
    with ckstore.open(path, "r") as store:
        tensor, (record, _) = next(iter(codebooks(store[2]).items()))
    assert record.lattice.protected
    places = {"checksum": record.offset + 3, "indices": record.offset + 50}
    damaged(path, record, places[part])
    with ckstore.open(path, "r") as store:
        problems = store.verify([2]).problems
        assert any(tensor.split("/")[-1] in problem or "model/" in problem for problem in problems), problems
        with pytest.raises(IntegrityError):
            store[2][tensor].numpy()
        with pytest.raises(IntegrityError):
            store[2].checkout(place / "out")
    assert not (place / "out").exists()


def test_a_run_goes_on_after_its_parent_was_damaged(
    runs: dict[str, tuple[Path, list[Path]]], cnn_run: list[Path], place: Path
) -> None:
    for scheme in PUBLISHED:
        path = Path(shutil.copytree(runs[f"{scheme}-cnn"][0], place / scheme))
        with ckstore.open(path, "r") as store:
            tensor, (record, _) = next(iter(codebooks(store[4]).items()))
        damaged(path, record, record.offset + 50)
        with ckstore.open(path) as store:
            row = store.ingest(cnn_run[4], run="run-cnn", policy=Policy("coarse", scheme=scheme)).version
            assert row.parent == 4
            found = codebooks(store[row.number])
            assert found[tensor][0].base is None
            check_deviations(store[row.number], loaded(cnn_run[4]), values_of(store[row.number]))
