"""The first version of a run finds its parent among all versions, by bands of its values."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.errors import IntegrityError
from ckstore.formats.torch.live_state import StateDictSource
from ckstore.objects.likeness import BANDS, bands_in, bands_of, text_of
from ckstore.reading.values import StoredValues
from ckstore.scanning.inputs import open_source
from ckstore.storage.catalog import Catalog
from ckstore.writing import ingest, parents
from tests.catalog_edits import edit

State = dict[str, torch.Tensor]


def drawn(seed: int, tensors: int = 3, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"{number}.weight": torch.randn(300, 300, generator=generator).to(dtype) for number in range(tensors)}


def tuned(state: State, seed: int, scale: float = 0.005) -> State:
    changes = drawn(1000 + seed, len(state))
    return {
        name: (value + scale * change).to(value.dtype)
        for (name, value), change in zip(state.items(), changes.values(), strict=True)
    }


def bands(place: Path, state: State) -> set[int]:
    with closing(open_source(state, place, force=False)) as scanned:
        return {*bands_of((file.source.pread, file.layout) for file in scanned.files)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bands_tell_what_is_alike(tmp_path: Path, dtype: torch.dtype) -> None:
    state = drawn(0, dtype=dtype)
    own = bands(tmp_path, state)
    assert len(own) == BANDS
    assert len(own & bands(tmp_path, {f"module.{name}": value for name, value in state.items()})) == BANDS
    assert not own & bands(tmp_path, drawn(1, dtype=dtype))
    assert not own & bands(tmp_path, {name: value.to(torch.float16) for name, value in state.items()})
    assert bands_in(text_of(own)) == sorted(own)
    if dtype != torch.float8_e4m3fn:
        assert len(own & bands(tmp_path, tuned(state, 0))) >= BANDS // 2


def test_small_and_empty_tensors_have_none(tmp_path: Path) -> None:
    assert not bands(tmp_path, {"small": torch.randn(65_535), "zero": torch.zeros(300, 300)})
    assert not bands(tmp_path, {"counts": torch.arange(90_000)})


@pytest.mark.parametrize("hot", [0, 9])
def test_a_fine_tune_is_stored_against_its_base(tmp_path: Path, hot: int) -> None:
    bases = [drawn(seed) for seed in range(3)]
    with ckstore.init(tmp_path / "store") as store:
        for seed, base in enumerate(bases):
            report = store.ingest(base, run=f"base{seed}", step=400, hot=hot)
            assert (report.version.parent, report.note) == (None, "")
        whole = store.encode() or sum(row.stored_bytes for row in store.versions())
        for seed, base in enumerate(bases):
            report = store.ingest(tuned(base, seed), run=f"tuned{seed}", step=0, hot=hot)
            assert report.note == f"Against base{seed}@400, by likeness."
            assert report.version.parent == store[f"base{seed}@400"].number
        store.encode()
        assert whole
        sizes = [row.stored_bytes for row in store.versions()]
        assert sum(sizes[3:]) < 0.85 * sum(sizes[:3])
        store.forget([f"base{seed}@400" for seed in range(3)])
        store.gc(grace=0)
        for seed, base in enumerate(bases):
            assert torch.equal(store[f"tuned{seed}"].state_dict()["0.weight"], tuned(base, seed)["0.weight"])
        assert not store.verify().damaged


@pytest.mark.parametrize("hot", [0, 9])
def test_tensors_of_a_merged_model_have_parents_of_their_own(tmp_path: Path, hot: int) -> None:
    one, other = drawn(0, 6), drawn(1, 6)
    merged = tuned({name: (one if number < 3 else other)[name] for number, name in enumerate(one)}, 0)
    with ckstore.init(tmp_path / "store") as store:
        for name, state in (("one", one), ("other", other), ("merged", merged)):
            store.ingest(state, run=name, step=0, hot=hot)
        store.encode()
        stored = store["merged"]._stored
        records = [store._repository.resolver.record(identity) for identity in stored.document.objects]
        bases = {record.base for record in records}
        for name in ("one", "other"):
            assert len(bases.intersection(store[name]._stored.document.objects)) == 3
        store.forget("one@0")
        store.forget("other@0")
        store.gc(grace=0)
        assert all(torch.equal(value, merged[name]) for name, value in store["merged"].state_dict().items())
        assert not store.verify().damaged


def test_models_of_three_bases_take_little_more_than_with_known_parents(tmp_path: Path) -> None:
    """Fine-tunes of bases, of other fine-tunes, and averages of two: the goal is 1.053, as of 63 over 59.8 MB."""
    models: list[State] = [drawn(seed, dtype=torch.bfloat16) for seed in range(3)]
    parents: list[int | None] = [None] * 3
    for number in range(3, 25):
        parent = number % 3 if number < 15 else number - 12
        models.append(tuned(models[parent], number, 0.005 if number < 20 else 0.02))
        if number >= 22:
            models[-1] = {name: (value + models[number - 6][name]) / 2 for name, value in models[-1].items()}
        parents.append(parent)
    sizes = []
    for place, known in (("known", True), ("found", False)):
        with ckstore.init(tmp_path / place) as store:
            for number, (model, parent) in enumerate(zip(models, parents, strict=True)):
                given = f"m{parent}@0" if known and parent is not None else None
                store.ingest(model, run=f"m{number}", step=0, parent=given, hot=0)
            sizes.append(sum(row.stored_bytes for row in store.versions()))
            if not known:
                assert all(store[f"m{number}@0"].parent is not None for number in range(3, 25))
    assert sizes[1] < 1.053 * sizes[0]
    print(f"\n{sizes[1]:,} bytes, {sizes[0]:,} with known parents")


def test_relatives_are_found_with_few_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = drawn(0, 6), drawn(1, 6)
    merged = tuned({name: (one if number < 3 else other)[name] for number, name in enumerate(one)}, 0)
    read: list[int] = []
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(one, run="one", step=0, hot=0)
        store.ingest(other, run="other", step=0, hot=0)
        for step in range(1, 9):  # The bias is no large tensor, and the bands stay.
            store.ingest({**other, "bias": torch.full((9,), step)}, run="other", step=step, hot=0)
        resolver = store._repository.resolver
        document = type(resolver).document

        def counted(self: object, row: ckstore.VersionRow) -> object:
            read.append(row.number)
            return document(self, row)  # type: ignore[arg-type]

        monkeypatch.setattr(type(resolver), "document", counted)
        parents.with_relatives(
            store._repository,
            StoredValues(store["one"]._stored),
            {},
            store["one@0"]._stored.row,
            bands(tmp_path, merged),
        )
    # The parent, and its last relative.
    assert {*read} == {1, 10}


def test_others_take_no_bytes_and_have_no_parent(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store, ckstore.init(tmp_path / "alone") as alone:
        store.ingest(drawn(0), run="a", step=0, hot=0)
        for place in (store, alone):
            report = place.ingest(drawn(1), run="b", step=0, hot=0)
            assert report.version.parent is None
        assert abs(store["b"].stored_bytes - alone["b"].stored_bytes) < 20


def test_later_versions_look_for_no_relatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands cost them a few short reads, and no values are decoded or compared for them."""
    read: list[tuple[int, int]] = []
    decoded: dict[bool, list[int]] = {True: [], False: []}
    pread = StateDictSource.pread
    for has_bands in (True, False):
        with ckstore.init(tmp_path / str(has_bands)) as store:
            if not has_bands:
                monkeypatch.setattr(ingest, "bands_of", lambda files: ())
            for step in range(3):
                store.ingest(tuned(drawn(0), step), run="a", step=step, hot=0)
                decoded[has_bands].append(store._repository.reader.decoded_chunks)
                monkeypatch.setattr(Catalog, "alike", None)  # Only the first version asks for it.
        monkeypatch.undo()
    assert decoded[True] == decoded[False] != [0, 0, 0]
    with closing(open_source(drawn(0), tmp_path, force=False)) as scanned:
        monkeypatch.setattr(StateDictSource, "pread", lambda self, *place: [read.append(place), pread(self, *place)][1])
        assert len(bands_of((file.source.pread, file.layout) for file in scanned.files)) == BANDS
    assert [size for _, size in read] == [24] * BANDS


def test_later_versions_and_named_parents_stay_as_they_were(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        first = store.ingest(drawn(0), run="a", step=0, hot=0).version
        other = store.ingest(drawn(1), run="b", step=0, hot=0).version
        assert store.ingest(tuned(drawn(0), 1), run="b", step=1, hot=0).version.parent == other.number
        assert store.ingest(tuned(drawn(0), 2), run="c", step=0, parent="b@0", hot=0).version.parent == other.number
        assert store.ingest(tuned(drawn(0), 3), run="d", step=0, hot=0).version.parent in (first.number, 3, 4)


def test_bands_survive_recovery_and_transfer_and_end_with_the_version(tmp_path: Path) -> None:
    base = drawn(0)
    with ckstore.init(tmp_path / "store") as store, ckstore.init(tmp_path / "copy") as copy:
        store.ingest(base, run="a", step=0)
        store.encode()
        store.push(copy, ["a@0"])
        assert copy.ingest(tuned(base, 0), run="b", step=0, hot=0).version.parent == 1
    assert ckstore.recover(tmp_path / "store").problems == []
    with ckstore.open(tmp_path / "store") as store:
        assert store.ingest(tuned(base, 0), run="b", step=0, hot=0).version.parent == 1
        store.forget("a@0")
        store.forget("b@0")
        store.ingest(drawn(1), run="c", step=0, hot=0)
        assert store.ingest(tuned(base, 1), run="d", step=0, hot=0).version.parent is None
        store.gc(grace=0)
        rows = store._catalog._connection.rows("SELECT DISTINCT version FROM likeness")
        assert {number for (number,) in rows} == {row.number for row in store.versions()}


def test_wrong_bands_cost_no_values(tmp_path: Path) -> None:
    base, other = drawn(0), {"x": torch.randn(400, 300)}
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(other, run="a", step=0, hot=0)
        store.ingest(drawn(5), run="b", step=0, hot=0)
        wanted = bands(tmp_path, base)
    for band in wanted:
        for number in (1, 2, 77):
            edit(tmp_path / "store" / "catalog.sqlite", f"INSERT INTO likeness VALUES ({band}, {number})")
    with ckstore.open(tmp_path / "store") as store:
        assert store.ingest(base, run="c", step=0, hot=0).version.parent is None
        assert torch.equal(store["c"].state_dict()["0.weight"], base["0.weight"])
    edit(tmp_path / "store" / "catalog.sqlite", "UPDATE likeness SET version = -1 WHERE version = 2")
    with ckstore.open(tmp_path / "store") as store:
        assert store.ingest(drawn(7), run="d", step=0, hot=0).version.parent is None


def test_a_damaged_version_is_no_parent(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        pack = store.ingest(drawn(0), run="a", step=0, hot=0).version.pack
    (tmp_path / "store" / "packs" / pack).write_bytes(b"damaged")
    with ckstore.open(tmp_path / "store") as store:
        assert store.ingest(tuned(drawn(0), 0), run="b", step=0, hot=0).version.parent is None


@pytest.mark.parametrize("text", ["0123456", "0123456g", "0" * 72, "ABCDEF01"])
def test_documents_with_other_bands_are_refused(tmp_path: Path, text: str) -> None:
    from ckstore.objects.documents import VersionDocument

    with ckstore.init(tmp_path / "store") as store:
        row = store.ingest(drawn(0), run="a", step=0, hot=0).version
        document = store._repository.resolver.document(row)
    assert len(document.bands) == BANDS
    data = bytes(document.encode())
    assert VersionDocument.decode(data) == document
    with pytest.raises(IntegrityError):
        VersionDocument.decode(data.replace(document.likeness.encode(), text.encode()))
