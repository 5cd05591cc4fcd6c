"""Coarse versions from end to end: their loss, their reproducible restores, and exact versions next to them."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.codecs.lattice import floats
from ckstore.errors import IntegrityError
from ckstore.objects.identity import array_name
from ckstore.objects.records import Rounded
from ckstore.policy import SCHEMES, Policy
from ckstore.recovery.recover import recover
from ckstore.storage.root import CATALOG

from .checkpoints import draw, flip, lose_catalog, restored_elsewhere, sha256, write_safetensors
from .coarse_checks import check_deviations, loaded, same_bits, stored, values_of
from .crafted import plainly, read_record
from .format_reader import Reader


def state(step: int) -> dict[str, Any]:
    """Return a run's state at a step: one weight moves, one is constant, with moments, small tensors and a counter."""
    weight = draw(300, 256) + sum(draw(300, 256, seed=number, scale=1e-2) for number in range(1, step + 1))
    second = draw(300, 1, seed=5) * 3 + draw(1, 256, seed=6) * 3 + draw(300, 256, seed=7) * 2 - 30
    second = torch.exp2(second + draw(300, 256, seed=70 + step) / 10)
    still = {"frozen": draw(320, 256, seed=99), "norm": torch.ones(9)}
    return {
        "model": {"weight": weight, "bias": draw(256, seed=step), **still},
        "optimizer": {0: {"exp_avg": draw(300, 256, seed=80 + step, scale=1e-4), "exp_avg_sq": second}},
        "step": step,
        "seen": torch.tensor(step * 8),
        "counts": 1000 * torch.arange(3000) ** 2 + step,
    }  # fmt: skip


def saved(directory: Path, step: int, **options: Any) -> Path:
    torch.save(state(step), directory / f"step{step}.pt", **options)
    return directory / f"step{step}.pt"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of four coarse versions of one run, the files next to it, and the first restores below `out`."""
    directory = tmp_path_factory.mktemp("coarse")
    (directory / "out").mkdir()
    with ckstore.init(directory / "store") as store:
        for step in range(4):
            number = store.ingest(saved(directory, step), run="r", policy="coarse").version.number
            store[number].checkout(directory / "out" / str(number))
    return directory


def restored(store: ckstore.Store, directory: Path) -> dict[str, str]:
    """Return the SHA-256 of all versions, by number."""
    found = {}
    for row in store._catalog.versions():
        store[row.number].checkout(directory / str(row.number), force=True)
        found[str(row.number)] = sha256(directory / str(row.number))
    return found


def first_time(written: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in (written / "out").iterdir()}


# Loss.


@pytest.mark.long
@pytest.mark.parametrize("run", ["gpt_run", "cnn_run", "frozen_run", "ema_run"])
def test_trained_runs_lose_as_much_as_reported(
    run: str, request: pytest.FixtureRequest, store: ckstore.Store, directory: Path
) -> None:
    files = request.getfixturevalue(run)
    for path in (files[1], files[-1]):
        row = store.ingest(path, run=run, policy="coarse").version
        assert row.fidelity == "coarse"
        store[row.number].checkout(directory / path.name)
        with zipfile.ZipFile(directory / path.name) as archive:
            assert archive.testzip() is None
        before, after = loaded(path), loaded(directory / path.name)
        check_deviations(store[row.number], before, after)
        lossy = store[row.number].deviations()
        assert lossy
        for name, tensor in before.items():
            is_moment = name.endswith(("exp_avg", "exp_avg_sq", "momentum_buffer"))
            is_named = re.split(r"[/.]", name)[-1] in ("weight", "bias")
            if not tensor.is_floating_point() or (tensor.ndim < 2 and not is_moment and not is_named):
                assert name not in lossy
            elif tensor.ndim < 2 and is_named and name in lossy:
                assert lossy[name].relative < 0.03
        assert row.stored_bytes < row.original_bytes / 3
        (directory / path.name).unlink()
    assert store.verify().problems == []


def test_weights_in_bfloat16_lose_as_much_as_reported(
    bf16_run: list[Path], store: ckstore.Store, directory: Path
) -> None:
    from safetensors.torch import load_file

    for path in bf16_run[:3]:
        row = store.ingest(path, run="r", policy="coarse").version
        store[row.number].checkout(directory / path.name)
        assert (directory / path.name).stat().st_size == path.stat().st_size
        check_deviations(store[row.number], load_file(path), load_file(directory / path.name))
        assert store[row.number].deviations()


def test_a_legacy_torch_file_comes_back_as_one(store: ckstore.Store, directory: Path) -> None:
    path = saved(directory, 1, _use_new_zipfile_serialization=False)
    version = store[store.ingest(path, policy="coarse").version.number]
    version.checkout(directory / "out.pt")
    assert not zipfile.is_zipfile(directory / "out.pt")
    check_deviations(version, loaded(path), loaded(directory / "out.pt"))


def test_files_without_coarse_values_in_a_directory_are_exact(store: ckstore.Store, directory: Path) -> None:
    source = directory / "model"
    source.mkdir()
    weight = draw(300, 256).numpy()
    write_safetensors(source / "model.safetensors", {"w": ("float32", (300, 256), weight)})
    write_safetensors(source / "small.safetensors", {"b": ("float32", (7,), weight[0, :7].copy())})
    (source / "config.json").write_text("{}")
    torch.save(torch.arange(7), source / "rng.pt")
    version = store[store.ingest(source, verify=True, policy="coarse").version.number]
    assert version.fidelity == "coarse"
    version.checkout(directory / "out")
    for name in ("small.safetensors", "config.json", "rng.pt"):
        assert sha256(directory / "out" / name) == sha256(source / name)
    assert sha256(directory / "out" / "model.safetensors") != sha256(source / "model.safetensors")
    assert version.sha256() == {path.name: sha256(path) for path in (directory / "out").iterdir()}
    assert version.deviations().keys() == {"model.safetensors/w"}
    # Nothing but the values of the weight differs.
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (source, directory / "out"))
    assert one[: -weight.nbytes] == other[: -weight.nbytes]


def test_a_restored_zip_differs_in_values_and_checksums_alone(written: Path) -> None:
    one, other = (np.frombuffer(path.read_bytes(), np.uint8) for path in (written / "step1.pt", written / "out" / "2"))
    assert one.size == other.size
    with ckstore.open(written / "store", "r") as store:
        [layout] = store["r@1"]._stored.layout.files
    allowed = np.zeros(one.size, bool)
    for extent in layout.extents:
        allowed[extent.start : extent.stop] = True
    for checked in layout.checked:
        for position in checked.positions:
            allowed[position : position + 4] = True
    assert not (one != other)[~allowed].any()
    assert (written / "out" / "2").stat().st_mtime_ns == (written / "step1.pt").stat().st_mtime_ns


# The same for ever.


def test_restoring_again_gives_the_same_bytes(written: Path, directory: Path) -> None:
    with ckstore.open(written / "store", "r", cache_bytes=0) as store:
        assert restored(store, directory) == first_time(written)
        assert restored(store, directory) == first_time(written)


@pytest.mark.long
def test_another_process_restores_the_same_bytes_though_it_flushes_subnormals(written: Path, directory: Path) -> None:
    assert restored_elsewhere(written / "store", directory, flush=True) == first_time(written)


def test_values_outlast_rebase_and_recover(written: Path, directory: Path) -> None:
    shutil.copytree(written / "store", directory / "copy")
    with ckstore.open(directory / "copy") as store:
        said = [store[row.number].deviations() for row in store._catalog.versions()]
        assert store.rebase().objects > 0
        assert all(row.depth == 0 for row in store._catalog.versions())
        assert store.verify().problems == []
        assert restored(store, directory) == first_time(written)
    lose_catalog(directory / "copy")
    assert recover(directory / "copy").problems == []
    with ckstore.open(directory / "copy") as store:
        assert [row.fidelity for row in store._catalog.versions()] == ["coarse"] * 4
        assert [store[row.number].deviations() for row in store._catalog.versions()] == said
        assert store.verify().problems == []
        assert restored(store, directory) == first_time(written)


def test_verify_finds_values_that_decode_differently(
    written: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later release decodes lattices otherwise: no checksum of the stored bytes can detect it."""
    from ckstore.codecs.lattice import LinearLattice

    decode = LinearLattice.values

    def otherwise(self: LinearLattice, integers: Any, start: int, out: Any = None) -> Any:
        bits = decode(self, integers, start, out)
        bits[0] ^= 1
        return bits

    with ckstore.open(written / "store", "r") as store:
        assert store.verify().problems == []
    monkeypatch.setattr(LinearLattice, "values", otherwise)
    with ckstore.open(written / "store", "r") as store:
        problems = store.verify(["r@1"]).problems
    assert problems
    assert all("differ from the first decode" in problem for problem in problems)


@pytest.mark.parametrize("kind", ["linear", "rounded"])
def test_verify_finds_integers_that_contradict_their_id(
    written: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from ckstore.objects.reader import ObjectReader

    honest = ObjectReader.integers

    def flipped(self: ObjectReader, record: Any, chunk: int, **named: Any) -> Any:
        integers = honest(self, record, chunk, **named).copy()
        if record.kind == kind:
            integers[-1] ^= 1
        return integers

    monkeypatch.setattr(ObjectReader, "integers", flipped)
    with ckstore.open(written / "store", "r") as store:
        problems = store.verify(["r@0"]).problems
    assert problems
    assert all("differ from the stored ones" in problem for problem in problems)


def test_a_flipped_bit_in_a_coarse_pack_is_found(written: Path, directory: Path) -> None:
    shutil.copytree(written / "store", directory / "copy")
    with ckstore.open(directory / "copy", "r") as store:
        version = store["r@0"]
        record = store._repository.resolver.record(version._stored.document.objects[0])
    flip(directory / "copy", record.pack, lambda _: record.offset + 40)
    with ckstore.open(directory / "copy", "r") as store:
        assert store.verify().problems
        with pytest.raises(IntegrityError):
            store["r@0"].checkout(directory / "out.pt")
    assert not (directory / "out.pt").exists()


def test_ingest_verifies_the_decoded_values_of_a_coarse_version(
    store: ckstore.Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckstore.objects.identity import MemberHasher

    assert store.ingest(saved(directory, 0), run="r", verify=True, policy="coarse").is_new
    identity = MemberHasher.identity
    answers = iter(["0" * 40])
    monkeypatch.setattr(MemberHasher, "identity", lambda self: next(answers, None) or identity(self))
    with pytest.raises(IntegrityError):
        store.ingest(saved(directory, 1), run="r", verify=True, policy="coarse")
    assert [row.step for row in store._catalog.versions()] == [0]


# Exact versions next to coarse ones.


def test_an_exact_ingest_of_the_same_content_makes_a_version_exact(store: ckstore.Store, directory: Path) -> None:
    paths = [saved(directory, step) for step in range(3)]
    rows = [store.ingest(path, run="r", policy="coarse").version for path in paths]
    store.tag("r@1", "best")
    report = store.ingest(paths[1], run="r")
    assert report.is_new
    assert (report.version.fidelity, report.version.step) == ("exact", 1)
    assert report.version.parent == rows[0].number
    assert [(row.step, row.parent) for row in store._catalog.versions("r")] == [(0, None), (2, 1), (1, 1)]
    store["best"].checkout(directory / "out.pt")
    assert sha256(directory / "out.pt") == sha256(paths[1])
    assert store["best"].deviations() == {}
    assert [store[f"r@{step}"].fidelity for step in range(3)] == ["coarse", "exact", "coarse"]
    assert not store.ingest(paths[1], run="r").is_new
    # Its child was stored against the replaced version.
    assert store.verify().problems == []
    (store.path / CATALOG).unlink()
    store.close()
    assert recover(store.place).problems == []
    with ckstore.open(store.place) as again:
        assert [again[f"r@{step}"].fidelity for step in range(3)] == ["coarse", "exact", "coarse"]
        assert again["best"].step == 1
        assert again.verify().problems == []


@pytest.mark.encoded
def test_a_coarse_ingest_of_an_exact_versions_content(store: ckstore.Store, directory: Path) -> None:
    path = saved(directory, 0)
    row = store.ingest(path, run="r").version
    report = store.ingest(path, run="r", policy=Policy("coarse", quality=8.0))
    assert not report.is_new
    assert (report.version.number, report.version.fidelity) == (row.number, "exact")
    assert "has this content exactly and keeps it" in report.note
    # In another run it is coarse, although the store has the content exactly.
    other = store.ingest(path, run="s", policy="coarse")
    assert (other.version.fidelity, other.note) == ("coarse", f"Against {row.name}, by likeness.")


def test_exact_after_coarse_and_coarse_after_exact(store: ckstore.Store, directory: Path) -> None:
    paths = [saved(directory, step) for step in range(4)]
    for path, fidelity in zip(paths, ("coarse", "exact", "coarse", "exact"), strict=True):
        assert store.ingest(path, run="r", policy=fidelity).version.fidelity == fidelity
    for step, path in enumerate(paths):
        version = store[f"r@{step}"]
        version.checkout(directory / "out.pt", force=True)
        if version.fidelity == "exact":
            assert sha256(directory / "out.pt") == sha256(path)
        else:
            check_deviations(version, loaded(path), loaded(directory / "out.pt"))
    assert store.verify().problems == []
    store.rebase()
    assert store.verify().problems == []


def test_constant_weights_cost_nothing(store: ckstore.Store) -> None:
    """A frozen weight becomes coarse after an exact version; after a coarse one it soon keeps its lattice."""
    frozen = {"model": {f"w{index}": draw(300, 256, seed=index) for index in range(3)}}
    first = store.ingest(frozen | {"step": 0}, run="exact").version
    row = store.ingest(frozen | {"step": 1, "head": draw(300, 256, seed=9)}, run="exact", policy="coarse").version
    assert row.fidelity == "coarse"
    assert store[row.number].deviations().keys() == {"head", *(f"model/w{index}" for index in range(3))}
    assert row.stored_bytes < first.stored_bytes / 2
    still = {"model": {f"w{index}": draw(300, 256, seed=10 + index) for index in range(3)}}
    versions = [stored(store, still | {"count": torch.tensor(step)}, run="coarse", step=step) for step in range(5)]
    assert all(version.fidelity == "coarse" for version in versions)
    assert versions[-1].stored_bytes < 5000 < versions[0].stored_bytes / 10


@pytest.mark.parametrize("scale", [0.0, 500.0], ids=["mask", "sums"])
def test_large_buffers_do_not_coarsen_weights(store: ckstore.Store, scale: float) -> None:
    """A mask is larger than weights by orders of magnitude; sums, as of a codebook, also change by more."""
    errors: dict[str, list[float]] = {"alone": [], "both": []}
    buffer = torch.full((64, 64), -1e9 if scale == 0 else 50.0).triu(1)
    weight = 0.02 * draw(300, 300)
    for step in range(4):
        weight = weight + 5e-4 * draw(300, 300, seed=10 + step)
        buffer = buffer + scale * draw(64, 64, seed=20 + step)
        for run, more in (("alone", {}), ("both", {"buffer": buffer})):
            version = stored(store, {"model": {"w": weight, **more}}, run=run, step=step)
            errors[run].append(version.deviations()["model/w"].rms)
    assert all(other <= 4.5 * own for own, other in zip(errors["alone"], errors["both"], strict=True))


@pytest.mark.parametrize("width", [64, 300], ids=["bundled", "alone"])
def test_large_embeddings_do_not_coarsen_a_first_version(store: ckstore.Store, width: int) -> None:
    """Torch's embeddings have a deviation of 1, ten times that of other layers, and most of the elements."""
    state = {"emb": draw(20 * width, width)} | {f"w{index}": 0.1 * draw(width, 256, seed=index) for index in range(3)}
    version = stored(store, state)
    errors = {name: float((version[name].torch() - value).std() / value.std()) for name, value in state.items()}
    assert max(errors.values()) < 0.1
    assert errors["emb"] > 0.03


def test_small_tensors_do_not_refine_large_ones(store: ckstore.Store) -> None:
    large = {f"w{index}": draw(500, 500, seed=index) for index in range(2)}
    small = {f"v{index}": 1e-3 * draw(200, 200, seed=index) for index in range(4)}
    alone, both = (stored(store, state, run=run) for run, state in (("alone", large), ("both", large | small)))
    assert both.deviations()["w0"].rms > 0.7 * alone.deviations()["w0"].rms


def test_the_same_values_after_themselves_keep_their_integers(store: ckstore.Store) -> None:
    version = stored(store, {"w": draw(300, 256)}, step=0)
    decoded = version["w"].torch()
    again = stored(store, {"w": decoded}, run="r")
    assert again["w"].torch().dtype == decoded.dtype
    said = again.deviations().get("w")
    assert said is None or said.rms <= version.deviations()["w"].rms * 1.01


def test_objects_that_a_coarse_version_holds_exactly_are_read_exactly(store: ckstore.Store) -> None:
    numbers = torch.arange(300 * 256).reshape(300, 256) ** 2
    store.ingest({"n": numbers}, run="r", step=0)
    version = stored(store, {"n": numbers, "v": draw(300, 256, seed=1)}, run="r", step=1)
    assert torch.equal(version["n"].torch(), numbers)
    assert version.deviations().keys() == {"v"}


# Views.


def test_zarr_views_hold_the_coarse_values(written: Path) -> None:
    with ckstore.open(written / "store", "r") as store:
        version = store["r@2"]
        after = loaded(written / "out" / str(version.number))
        for path in ("model/weight", "model/bias", "optimizer/[0]/exp_avg_sq"):
            assert np.array_equal(version.arrays[path][...], after[path].numpy())
        history = store.run("r").arrays["model/weight"]
        assert np.array_equal(history[2], after["model/weight"].numpy())
        assert np.array_equal(version["model/weight"][10:20, 3], after["model/weight"].numpy()[10:20, 3])


def test_exports_hold_the_coarse_values(written: Path, directory: Path) -> None:
    with ckstore.open(written / "store", "r") as store:
        store["r@1"].checkout(directory / "w.npz", format="npz", include=["model/*"])
        with np.load(directory / "w.npz") as arrays:
            assert np.array_equal(arrays["model/weight"], store["r@1"]["model/weight"].numpy())


# Documents that no ingest could have written.

ROUNDED: dict[str, Any] = {
    "id": "a" * 40, "kind": "rounded", "dtype": "float32", "count": 1000, "chunk": 300,
    "at": [100, 500], "alone": 400, "shift": 23, "level": 400, "width": 100,
    "rows": "PPPPOPQPPP", "cols": "Q" * 100,
}  # fmt: skip


def test_a_rounded_record_comes_back() -> None:
    record = read_record(ROUNDED)
    assert plainly(record) == ROUNDED
    assert (record.lattice.shift, record.lattice.level) == (23, 400)  # type: ignore[union-attr]
    assert record.lattice.rows.tolist() == [0, 0, 0, 0, -1, 0, 1, 0, 0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("reach", [0, 1, 12, 11, 45, 46, 32767])
def test_exponents_come_back_as_text_or_as_numbers(reach: int) -> None:
    rows = [reach, -reach, 0, 1, -1, 11, 12, 13, 0, 5]
    record = read_record(ROUNDED | {"rows": rows})
    text = plainly(Rounded.on(record.lattice, **record.common))["rows"]  # type: ignore[union-attr]
    assert isinstance(text, str) == (reach <= 45)
    assert read_record(ROUNDED | {"rows": text}).lattice.rows.tolist() == rows  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"},
        {"dtype": "int32"},
        {"dtype": ["float32"]},
        {"shift": 0},
        {"shift": 32},
        {"shift": -1},
        {"shift": 2.0},
        {"shift": True},
        {"shift": None},
        {"level": 1 << 15},
        {"level": "400"},
        {"width": 0},
        {"width": 99},
        {"rows": "PPP"},
        {"rows": "PPPP\\QPPPP"},
        {"rows": "PPPP PPPPP"},
        {"rows": "PPPPéPPPPP"},
        {"rows": "\x7f" * 10},
        {"rows": "!" * 10},
        {"rows": [0] * 9},
        {"rows": [0.5] * 10},
        {"rows": [40_000] * 10},
        {"rows": [10**30] * 10},
        {"rows": [[0]] * 10},
        {"rows": [None] * 10},
        {"rows": [True] * 10},
        {"rows": {"0": 1}},
        {"rows": 7},
        {"cols": [0] * 101},
        {"kind": ["rounded"]},
        {"at": None},
        {"at": [1]},
        {"alone": {}},
        {"count": None},
    ],
    ids=lambda changes: ",".join(f"{name}={str(said)[:14]!r}" for name, said in changes.items()),
)
def test_impossible_records_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        read_record(ROUNDED | changes)


def test_integers_of_any_size_decode_to_finite_numbers() -> None:
    record = read_record(ROUNDED | {"rows": [32767] * 10, "cols": [32767] * 100, "level": 32767, "shift": 31})
    integers = np.array([-(1 << 31), (1 << 31) - 1, 0] * 100, np.int32)
    bits = record.lattice.values(integers, 0)  # type: ignore[union-attr]
    assert np.isfinite(bits.view(np.float32)).all()


@pytest.mark.local
def test_a_reader_written_from_the_format_reads_coarse_versions(written: Path) -> None:
    reader = Reader(written / "store")
    kinds = {(record["kind"], "base" not in record) for _, record in reader.objects.values()}
    assert kinds >= {("rounded", True), ("full", True), ("delta", False), ("linear", True), ("linear", False)}
    for number in reader.versions:
        [(_, data)] = reader.files(number)
        assert data == (written / "out" / str(number)).read_bytes()


@pytest.mark.local
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_that_reader_reads_coarse_values_of_every_float(
    store: ckstore.Store, directory: Path, dtype: torch.dtype
) -> None:
    """Among them the least and the largest, and exponents by rows and columns."""
    for step in range(2):
        weight = draw(300, 256, seed=step) * torch.exp2(draw(300, 1, seed=7) * 6 + draw(1, 256, seed=8) * 6)
        weight = weight.clamp(-6e4, 6e4).to(dtype)
        weight[0, :2] = torch.tensor([torch.finfo(dtype).smallest_normal, -torch.finfo(dtype).tiny])
        mask = torch.triu(torch.full((300, 256), torch.finfo(dtype).min, dtype=dtype), 1)
        tree = {"w": weight, "exp_avg": weight * 1e-3, "exp_avg_sq": weight.abs() * 1e-3, "mask": mask}
        version = stored(store, tree | {"small": draw(9)}, step=step)
        version.checkout(directory / str(version.number))
    reader = Reader(store.path)
    assert any("cols" in record for _, record in reader.objects.values()) or dtype != torch.bfloat16
    for number in reader.versions:
        [(_, data)] = reader.files(number)
        assert data == (directory / str(number)).read_bytes()


@pytest.mark.local
def test_coarse_objects_are_plain_zarr_arrays(written: Path) -> None:
    import zarr

    with ckstore.open(written / "store", "r") as store:
        version, shown = store["r@0"], 0
        for number in version._stored.document.coarse_units:
            record = store._repository.resolver.record(version._stored.document.objects[number])
            archive = zarr.storage.ZipStore(written / "store" / "packs" / record.pack, mode="r")
            group = zarr.open_group(archive, mode="r")
            if array_name(record.id) not in group:  # It is small.
                archive.close()
                continue
            array = group[array_name(record.id)]
            assert array.attrs["ckstore"]["kind"] == record.kind
            assert record.base is None
            values = [store._repository.reader.values(record, chunk) for chunk in range(record.chunks)]
            assert np.array_equal(array[...], floats(np.concatenate(values), record.dtype))
            archive.close()
            shown += 1
        assert shown


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_nearest_version_may_be_coarse(store: ckstore.Store, scheme: str) -> None:
    options: dict[str, Any] = {"policy": Policy("coarse", scheme)}
    stored(store, {"w": draw(300, 256, seed=9)}, run="other", **options)
    near = stored(store, {"w": draw(300, 256)}, run="first", **options)
    fork = stored(store, {"w": draw(300, 256) + 1e-3}, run="fork", parent="auto", **options)
    assert fork.parent == near.number


def test_second_moments_in_float16_do_not_become_zero(store: ckstore.Store) -> None:
    second = ((3e-3 * draw(300, 256)) ** 2).half()
    state = {0: {"exp_avg": draw(300, 256, seed=1).half(), "exp_avg_sq": second}}
    version = stored(store, {"model": {"w": draw(300, 256, seed=2).half()}, "optimizer": {"state": state}})
    assert "model/w" in version.deviations()
    assert same_bits(version["optimizer/state/[0]/exp_avg_sq"].torch(), second)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_an_exact_tensor_stays_exact_next_to_a_weight_of_the_same_bytes(store: ckstore.Store, names: str) -> None:
    parts = draw(300, 256, 2)
    tree = dict(sorted({names[0]: parts, names[1]: torch.view_as_complex(parts.clone())}.items()))
    version = stored(store, tree)
    assert version.deviations() == {}
    assert version.fidelity == "exact"
    assert all(same_bits(tree[name], value) for name, value in values_of(version).items())


def test_the_sums_of_adagrad_do_not_set_the_step_of_the_weights(store: ckstore.Store) -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.nn.Parameter(torch.randn(3000, 64, generator=generator) * 0.05)
    optimizer = torch.optim.Adagrad([table], lr=0.01)
    for step in range(3):
        rows = torch.randint(3000, (300,), generator=generator)
        table.grad = torch.zeros_like(table)
        table.grad[rows] = torch.randn(300, 64, generator=generator)
        optimizer.step()
        tree = {"model": {"table": table.detach().clone()}, "optimizer": optimizer.state_dict()}
        version = stored(store, tree, run="r", step=step)
        assert version.deviations()["model/table"].relative < 0.2
