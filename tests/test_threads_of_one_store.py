"""Several threads use one `Store`: one's removals and failures do not touch another's work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.writing import describe, ingest


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(300, 300, generator=generator) for number in range(3)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    with ckstore.init(tmp_path / "store") as opened:
        opened.ingest(state(0), run="b", step=0)
        yield opened


def failing(store: ckstore.Store) -> None:
    def progress(_: int) -> None:
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        store.ingest(state(5), run="c", progress=progress)


def again(store: ckstore.Store) -> None:
    assert not store.ingest(state(0), run="b", step=0).is_new


def during(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, work: Callable[[], None]) -> None:
    """Have another thread work in the middle of an ingest, before the next call of one of its steps."""
    original = getattr(place, name)

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(place, name, original)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return original(*arguments)

    monkeypatch.setattr(place, name, interrupted)


MOMENTS = {
    "costs": (describe, "_summary"),
    "verify": (ingest, "check_restores"),
    "commit": (ingest, "_needs"),
}


@pytest.mark.parametrize("other", [failing, again])
@pytest.mark.parametrize("moment", MOMENTS)
def test_objects_that_another_ingest_forgets_stay_known(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, other: Callable[[ckstore.Store], None], moment: str
) -> None:
    during(monkeypatch, *MOMENTS[moment], lambda: other(store))
    first = store.ingest(state(1), run="a", step=0, verify=True).version
    store._repository.reader.cache.clear()
    for name, value in store[first.number].state_dict().items():
        assert torch.equal(value, state(1)[name])
    moved = {name: value + 1e-3 for name, value in state(1).items()}
    store.ingest(moved, run="a", step=1)
    store.encode()
    assert store["a@1"].stored_bytes < 0.9 * store["a@0"].stored_bytes
    assert store.verify().problems == []
