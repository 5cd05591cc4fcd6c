"""Mutated stores and files end in a correct result or a sentence, in bounds; `tools/fuzz` runs longer."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckstore
from ckstore.errors import CkstoreError
from ckstore.objects.documents import ManifestDocument
from ckstore.objects.layouts import LayoutDocument
from ckstore.storage.manifest import decode_manifest
from tests.checkpoints import scratch
from tests.crafted import CraftedStore, sealed
from tests.fuzzing import KINDS, Fuzzer, Watched, make_store, mutated
from tests.layout_columns import columns, packed

pytestmark = pytest.mark.local

#: Cases that once found something.
FOUND: list[tuple[str, int]] = [("payloads", 4), ("catalogs", 2), ("catalogs", 1033), ("catalogs", 1510)]


@pytest.mark.long
def test_mutations_of_everything() -> None:
    """For some seconds; another process, so that none ends this one."""
    seconds, first = float(os.environ.get("CKSTORE_FUZZ_SECONDS", "5")), int(os.environ.get("CKSTORE_FUZZ", "0"))
    missing = list(KINDS)
    while missing:  # A busy machine takes longer to reach every kind.
        watched = Watched(seconds, first, missing)
        print(watched)
        assert not watched.faults
        missing = [kind for kind in missing if kind not in {found for found, _ in watched.outcomes}]


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    with scratch() as directory:
        yield Fuzzer(directory)


@pytest.mark.parametrize(("kind", "seed"), FOUND)
def test_former_findings(fuzzer: Fuzzer, kind: str, seed: int) -> None:
    fuzzer.run(kind, seed)


@pytest.fixture(scope="module")
def documents() -> Iterator[dict[str, list[Any]]]:
    """Manifests and layouts of a store."""
    with scratch() as directory:
        crafted = CraftedStore(make_store(directory))
        with ckstore.open(crafted.path, "r") as store:
            layouts = [columns(store[row.number]._stored.layout.data) for row in store._catalog.versions()]
        yield {"manifests": [crafted.read(pack)[0] for pack in crafted.packs()], "layouts": layouts}


@settings(max_examples=400)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_manifests_are_read_or_refused(documents: dict[str, list[Any]], drawn: random.Random, changes: int) -> None:
    document = copy.deepcopy(drawn.choice(documents["manifests"]))
    for _ in range(changes):
        document = mutated(document, drawn)
    try:
        found, _ = decode_manifest(
            sealed(json.dumps({"document": document, "blobs": []}).encode(), b""), ManifestDocument
        )
        for record in found.records:
            record.placed("p")
        found.described()
    except CkstoreError as error:
        str(error).encode()  # It can be printed.


@settings(max_examples=400)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_layouts_are_read_or_refused(documents: dict[str, list[Any]], drawn: random.Random, changes: int) -> None:
    document = copy.deepcopy(drawn.choice(documents["layouts"]))
    for _ in range(changes):
        document = mutated(document, drawn)
    try:
        found = LayoutDocument.decode(packed(document))
        found.wrong_part(gaps=drawn.random() < 0.5)
        for rows in (
            found.units,
            *(part for file in found.files for part in (file.extents, file.tensors, file.checked)),
        ):
            assert len([*rows]) == len(rows)  # Whatever is decoded can be made.
    except CkstoreError as error:
        str(error).encode()  # It can be printed.
