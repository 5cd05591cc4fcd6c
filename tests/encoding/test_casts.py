"""Roundings of float32 tensors in the same version take a checksum each, whatever becomes of the version."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.codecs.short_floats import narrowed
from ckstore.objects.stored_chunks import StoredChunks
from ckstore.writing.drop import drop
from tests.crafted import CraftedStore

Records = dict[str, dict[str, Any]]

SHAPES = {"weight": (300, 256), "other.weight": (256, 300), "bias": (500,)}
DTYPES = [torch.bfloat16, torch.float16]


def masters(seed: int, before: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return drawn if before is None else {name: before[name] + 1e-3 * value for name, value in drawn.items()}


def state(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    return {"model": {name: value.to(dtype) for name, value in weights.items()}, "optimizer": {"master": weights}}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    integers = torch.int16 if one.itemsize == 2 else torch.int32
    return one.dtype == other.dtype and torch.equal(one.view(integers), other.view(integers))


def kinds(version: ckstore.Version) -> dict[str, int]:
    stored = version._stored
    found: dict[str, int] = {}
    for identity in stored.document.objects:
        kind = stored.repository.resolver.record(identity).kind
        found[kind] = found.get(kind, 0) + 1
    return found


@pytest.mark.parametrize("hot", [0, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounded_model_takes_no_bytes_next_to_its_master(tmp_path: Path, dtype: torch.dtype, hot: int) -> None:
    first = masters(0)
    second = masters(1, first)
    for name, states in (
        ("both", [state(first, dtype), state(second, dtype)]),
        ("alone", [{"optimizer": {"master": first}}, {"optimizer": {"master": second}}]),
    ):
        with ckstore.init(tmp_path / name) as store:
            for step, item in enumerate(states):
                store.ingest(item, run="r", step=step, hot=hot)
            store.encode()
            for step, item in enumerate(states):
                assert same(store[f"r@{step}"].state_dict(), item)
            assert not store.verify().damaged
    both, alone = (
        [version.stored_bytes for version in ckstore.open(tmp_path / name).run("r")] for name in ("both", "alone")
    )
    assert all(more - less < 3000 for more, less in zip(both, alone, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_that_differ_from_the_rounding_are_patched(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = masters(0)
    weights["weight"][:2, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-42])
    item = state(weights, dtype)
    item["model"]["weight"][7, ::9] += 1
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(item, run="r", step=0, hot=0)
        assert kinds(store["r@0"])["cast"] == 3
        assert same(store["r@0"].state_dict(), item)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_torch(dtype: torch.dtype) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[values.to(dtype).isfinite()]
    name = str(dtype).removeprefix("torch.")
    rounded = narrowed(values.view(torch.int32).numpy().view("u4"), name)
    assert (rounded == values.to(dtype).view(torch.int16).numpy().view("u2")).all()


def test_a_model_without_its_master_is_no_cast(tmp_path: Path) -> None:
    weights, others = masters(0), masters(1)
    with ckstore.init(tmp_path / "store") as store:
        item = {"model": state(weights, torch.bfloat16)["model"], "optimizer": {"master": others}}
        store.ingest(item, run="r", step=0, hot=0)
        assert "cast" not in kinds(store["r@0"])


def test_casts_survive_all_that_happens_to_versions(tmp_path: Path) -> None:
    weights = masters(0)
    states = []
    with ckstore.init(tmp_path / "store") as store, ckstore.init(tmp_path / "copy") as copy:
        for step in range(5):
            weights = masters(step, weights) if step else weights
            states.append(state(weights, torch.bfloat16))
            store.ingest(states[-1], run="r", step=step, hot=0)

        def check(numbers: list[int], *, place: ckstore.Store = store) -> None:
            for number in numbers:
                assert same(place[f"r@{number}"].state_dict(), states[number])
            assert not place.verify().damaged

        assert all(kinds(version).get("cast") for version in store.run("r"))
        store.push(copy, ["r@3"])
        check([3], place=copy)
        store.rebase(["r@2"])
        check([0, 1, 2, 3, 4])
        drop(store._repository, [store["r@1"]._stored.row], ("optimizer/*",))
        store.gc(grace=0)
        assert same(store["r@1"].state_dict()["model"], states[1]["model"])
        check([0, 2, 3, 4])
        store.thin("r@3")
        store.gc(grace=0)
        check([0, 2, 4])
        store.forget("r@0")
        store.gc(grace=0)
        check([2, 4])
        store.ingest(states[0], run="r", step=9, hot=0)
        assert same(store["r@9"].state_dict(), states[0])


@pytest.mark.parametrize("payload", [None, bytes(4), bytes(3)])
def test_a_cast_that_does_not_hold_gives_no_values(
    tmp_path: Path, payload: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(state(masters(0), torch.bfloat16), run="r", step=0, hot=0)
    with ckstore.open(tmp_path / "store") as store:
        stored = type(store._repository.reader.stored)
        real = stored.payload

        def crafted(self: Any, record: Any, chunk: int) -> Any:
            return payload if record.kind == "cast" else real(self, record, chunk)

        monkeypatch.setattr(stored, "payload", crafted)
        with pytest.raises(ckstore.IntegrityError, match=r"no checksum|does not restore"):
            store["r@0"]["model/weight"][...]
        assert store["r@0"]["optimizer/master/weight"].shape == SHAPES["weight"]
        assert store.verify().damaged


def on(name: str, base: str, kind: str = "cast") -> Callable[[Records], Any]:
    """Give an object another base, that of a name or an id."""
    return lambda records: records[name].update(kind=kind, base=base if len(base) == 40 else records[base]["id"])


#: Records with bases in a circle, or that a cast cannot have.
CIRCLES: dict[str, Callable[[Records], Any]] = {
    "a cast of itself": on("model/weight", "model/weight"),
    "a cast of a cast": on("model/weight", "model/other.weight"),
    "a cast of another cut": on("model/weight", "master/longer"),
    "a cast of nothing": on("model/weight", "ab" * 20),
    "a master on its cast": on("master/weight", "model/weight", "delta"),
    "a master on itself": on("master/weight", "master/weight", "delta"),
    "masters on each other": lambda records: [
        on(f"master/{one}weight", f"master/{other}weight", "delta")(records)
        for one, other in (("", "other."), ("other.", ""))
    ],
}


@pytest.fixture(scope="module")
def crafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[CraftedStore, str, dict[str, str]]:
    """Return a store of one version with masters, its pack, and the ids of its large tensors."""
    place = tmp_path_factory.mktemp("crafted") / "store"
    with ckstore.init(place) as store:
        model, master = (state(masters(0), torch.bfloat16)[name] for name in ("model", "optimizer"))
        longer = {"longer": torch.randn(80_000)}
        stored = store.ingest({"model": model, "master": master["master"] | longer}, run="r", step=0, hot=0)
        version = store["r@0"]._stored
        ids = zip((unit.key for unit in version.layout.units), version.document.objects, strict=True)
        return CraftedStore(place), stored.version.pack, dict(ids)


@pytest.mark.parametrize("case", CIRCLES)
def test_bases_in_a_circle_are_refused_before_they_are_decoded(
    tmp_path: Path, crafted: tuple[CraftedStore, str, dict[str, str]], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(crafted[0].path, tmp_path / "store")

    def change(document: dict[str, Any]) -> None:
        records = {record["id"]: record for record in document["records"]}
        CIRCLES[case]({name: records[identity] for name, identity in crafted[2].items()})

    CraftedStore(tmp_path / "store").change(crafted[1], change)
    decoded: list[str] = []
    payload = StoredChunks.payload
    monkeypatch.setattr(StoredChunks, "payload", lambda *given: [decoded.append(given[1].id), payload(*given)][1])
    with ckstore.open(tmp_path / "store") as store:
        with pytest.raises(ckstore.IntegrityError, match=r"cut into other chunks|is a cycle|lost object"):
            store["r@0"]["model/weight"][...]
        assert not decoded
        store["r@0"]["master/longer"][...]
        assert decoded == [crafted[2]["master/longer"]]
        assert store.verify().damaged
