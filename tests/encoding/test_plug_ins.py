"""Schemes of other distributions: found by their entry points; their versions are read without them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.codecs import schemes
from ckstore.codecs.codebook import CodebookLattice, codebook
from ckstore.codecs.scheme import Layer, Scheme
from ckstore.errors import CkstoreError, UsageError
from ckstore.policy import Policy
from ckstore.writing.tuning import Search

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-scheme.md"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    schemes.scheme_of.cache_clear()
    yield
    schemes.scheme_of.cache_clear()


def install(place: Path, monkeypatch: pytest.MonkeyPatch, value: str = "even_scheme:SCHEME") -> None:
    """Install a distribution with the page's module, and one entry point."""
    (place / "even_scheme.py").write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    info = place / "even_scheme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: even-scheme\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[ckstore.schemes]\neven = {value}\n")
    monkeypatch.syspath_prepend(place)
    invalidate_caches()


def state(step: int) -> dict[str, object]:
    values = np.random.default_rng(0).normal(size=(300, 256)) + 0.01 * step
    return {"w": values.astype("f4"), "step": step}


def test_a_distribution_adds_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "site"
    place.mkdir()
    install(place, monkeypatch)
    with ckstore.init(tmp_path / "store") as store:
        store.set_policy(Policy("coarse", "even", quality=2.0))
        for step in range(3):
            store.ingest(state(step), verify=True, hot=0)
        found = store.ingest(state(3), search=Search(lambda path: 1.0)).version
        assert found.fidelity == "coarse"
        said = store["main@3"].settings
        assert said is not None
        assert said["quality"] in (0.5, 1.0, 2.0, 4.0)
        assert said["evaluations"] > 1
        shown = [store[f"main@{step}"]["w"][:] for step in range(3)]
        assert all(np.unique(values).size in (16, 17) for values in shown)
    # As where the distribution is not installed.
    monkeypatch.undo()
    schemes.scheme_of.cache_clear()
    with ckstore.open(tmp_path / "store") as store:
        assert np.array_equal(store["main@2"]["w"][:], shown[2])
        assert (store["main@2"].settings or {})["scheme"] == "even"
        assert store.verify().problems == []
        with pytest.raises(CkstoreError, match="Unknown scheme even; choose one of lattice, lc, dynaquant"):
            store.ingest(state(4))
        store.ingest(state(4), policy="exact")


def test_numbers_of_levels_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    with ckstore.init(tmp_path / "store") as store:
        for step, quality in enumerate((0.125, 8.0, 0.25, 0.125)):
            store.ingest(state(step), policy=Policy("coarse", "even", quality), verify=True, max_restore_cost=9)
            assert np.unique(store[f"main@{step}"]["w"][:]).size > 3
        assert store.verify().problems == []
        records = [store._repository.resolver.record(store[n + 1]._stored.document.objects[0]) for n in range(4)]
        assert any(record.base is not None for record in records)


def test_a_scheme_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given changes since the decoded version before, and whole values first."""
    seen: list[bool] = []

    def levels(layer: Layer) -> object:
        seen.append(layer.is_whole)
        return codebook(np.linspace(layer.values.min(), layer.values.max(), 64), layer.dtype)

    made = Scheme("moves", levels, of_changes=True)  # type: ignore[arg-type]
    monkeypatch.setattr("ckstore.policy.scheme_of", lambda name: made)
    monkeypatch.setattr("ckstore.encoding.estimator.scheme_of", lambda name: made)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            store.ingest(state(step), policy=Policy("coarse", "moves"))
            assert np.abs(store[f"main@{step}"]["w"][:] - state(step)["w"]).max() < 0.1
    assert seen[0]
    assert not all(seen)


@pytest.mark.parametrize("found", [np.zeros(7, np.uint8), np.full(300 * 256, 200, np.uint8)])
def test_unsound_indices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: np.ndarray) -> None:
    made = Scheme(
        "odd", lambda layer: codebook(np.arange(3.0), layer.dtype), lambda lattice, layer: (found, np.empty(0, "u2"))
    )
    monkeypatch.setattr("ckstore.policy.scheme_of", lambda name: made)
    monkeypatch.setattr("ckstore.encoding.estimator.scheme_of", lambda name: made)
    with ckstore.init(tmp_path / "store") as store, pytest.raises(CkstoreError, match="scheme odd"):
        store.ingest(state(0), policy=Policy("coarse", "odd"))


@pytest.mark.parametrize(
    "made",
    [
        Scheme("odd", lambda layer: codebook(np.arange(3.0), "float16")),
        Scheme("odd", lambda layer: np.arange(3.0)),  # type: ignore[arg-type, return-value]
        Scheme("odd", lambda layer: codebook(np.arange(3.0), layer.dtype, protected=True), of_changes=True),
    ],
)
def test_unsound_codebooks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Scheme) -> None:
    """Kernels do not check the dtype; a version with protected changes could not be read."""
    monkeypatch.setattr("ckstore.policy.scheme_of", lambda name: made)
    monkeypatch.setattr("ckstore.encoding.estimator.scheme_of", lambda name: made)
    with ckstore.init(tmp_path / "store") as store, pytest.raises(CkstoreError, match="scheme odd"):
        store.ingest(state(0), policy=Policy("coarse", "odd"))


@pytest.mark.parametrize("kept", [np.full(9, 0x7FC0, "u2"), np.ones(9, "f4"), np.full(9, -3, "i2")])
def test_unsound_protected_elements_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: np.ndarray
) -> None:
    """A deviation does not bound NaN."""

    def assign(lattice: CodebookLattice, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
        indices = lattice.nearest(layer.values)
        indices[: kept.size] = lattice.levels - 1
        return indices, kept

    made = Scheme("odd", lambda layer: codebook(np.arange(3.0), layer.dtype, protected=True), assign)
    monkeypatch.setattr("ckstore.policy.scheme_of", lambda name: made)
    monkeypatch.setattr("ckstore.encoding.estimator.scheme_of", lambda name: made)
    with ckstore.init(tmp_path / "store") as store, pytest.raises(CkstoreError, match="scheme odd"):
        store.ingest(state(0), policy=Policy("coarse", "odd"))


def test_distributions_are_searched_only_for_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: pytest.fail("searched"))
    for name in ("lattice", "lc", "dynaquant"):
        Policy("coarse", name)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with pytest.raises(UsageError, match="Unknown scheme even; choose one of lattice, lc, dynaquant"):
        Policy("coarse", "even")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("even_scheme:NONE", "cannot be imported"),
        ("no_such_module:SCHEME", "cannot be imported"),
        ("even_scheme:levels", "is no `Scheme`"),
    ],
)
def test_a_broken_distribution_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, why: str
) -> None:
    install(tmp_path, monkeypatch, value)
    with pytest.raises(CkstoreError, match=f"The scheme even .*{why}"):
        Policy("coarse", "even")
