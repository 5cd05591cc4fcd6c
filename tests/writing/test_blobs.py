"""Blobs of versions as deltas against those of earlier versions: small after a change that lasts, and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.errors import IntegrityError
from ckstore.objects import resolver
from ckstore.objects.documents import DEEPEST_BLOB, BlobRef, VersionDocument

pytestmark = pytest.mark.encoded

#: Steps at which the names in all headers of the files become longer.
STEPS = [10**digits + step for digits in range(5) for step in range(3)]


def write(directory: Path, step: int) -> Path:
    path = directory / f"checkpoint_{step}.pt"
    torch.save({str(layer): torch.full((8,), float(step)) for layer in range(20)}, path)
    return path


@pytest.fixture
def store(tmp_path: Path) -> ckstore.Store:
    made = ckstore.init(tmp_path / "store")
    for step in STEPS:
        made.ingest(write(tmp_path, step), run="r", step=step)
    return made


def skeleton(store: ckstore.Store, step: int) -> tuple[BlobRef, int]:
    """Return the place of a version's skeleton, and its stored bytes."""
    stored = store[f"r@{step}"]._stored
    ref = stored.document.files[0].skeleton
    return ref, len(store._repository.resolver.manifest(stored.row.pack).blobs[ref.name])


def test_a_change_that_lasts_is_stored_once(store: ckstore.Store) -> None:
    places = [skeleton(store, step)[0] for step in STEPS]
    assert max(len(place.chain) for place in places) == 1 + DEEPEST_BLOB
    sizes = [skeleton(store, step)[1] for step in STEPS]
    changed = [step for step, size in zip(STEPS, sizes, strict=True) if size > 2 * min(sizes)]
    # The first version, each change, and the versions after the change that may not go deeper.
    assert changed == [1, 10, 100, 1000, 10_000, 10_001, 10_002]
    assert store.verify().problems == []


def test_the_bases_of_blobs_survive(tmp_path: Path, store: ckstore.Store) -> None:
    """In a collection, in another store, and in a rebuilt catalog."""
    kept = STEPS[-5:]
    store.forget([f"r@{step}" for step in STEPS if step not in kept])
    store.gc(grace=0)
    other = ckstore.init(tmp_path / "other")
    store.push(other)
    (other.path / "catalog.sqlite").unlink()
    ckstore.recover(other.path)
    for each in (store, ckstore.open(other.path)):
        assert each.verify().problems == []
        for step in kept:
            out = tmp_path / "out.pt"
            each[f"r@{step}"].checkout(out, force=True)
            assert out.read_bytes() == (tmp_path / f"checkpoint_{step}.pt").read_bytes()


@pytest.mark.parametrize("depth", [DEEPEST_BLOB + 1, 300])
def test_a_blob_against_too_many_others_is_refused(store: ckstore.Store, depth: int) -> None:
    document: dict[str, Any] = json.loads(bytes(store[f"r@{STEPS[0]}"]._stored.document.encode()))
    for _ in range(depth):
        document["layout"] = {"name": "layout", "against": document["layout"]}
    with pytest.raises(IntegrityError, match="against"):
        VersionDocument.decode(json.dumps(document).encode())


def test_each_blob_is_expanded_once(tmp_path: Path, store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded: list[bytes] = []
    expand = resolver.expand_against

    def counted(blob: bytes, reference: bytes | None, expected: int | None = None) -> bytes:
        expanded.append(blob)
        return expand(blob, reference, expected)

    monkeypatch.setattr(resolver, "expand_against", counted)
    store._repository.resolver.forget()
    store.ingest(write(tmp_path, 20_000), run="r", step=20_000)
    assert len(expanded) == len(set(expanded)) >= len(skeleton(store, STEPS[-1])[0].chain)
