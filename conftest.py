"""Fixtures of the examples in docstrings: `store` holds a run with three versions."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import ckstore

#: Modules that only their hosts can import.
collect_ignore = [] if find_spec("vllm") else ["ckstore/integrations/vllm.py"]


def example_store(directory: Path) -> ckstore.Store:
    """Return a new store with a small model at three steps, in the run `gpt`; step 200 is tagged `best`."""
    store = ckstore.open(directory, create=True)
    weight = np.random.default_rng(0).standard_normal((256, 128), np.float32)
    for number, loss in enumerate([3.1, 2.7, 2.8], start=1):
        state = {"model": {"weight": weight * np.float32(1 + number / 1000), "bias": np.zeros(128, np.float32)}}
        store.ingest(state, run="gpt", step=100 * number, metrics={"val_loss": loss})
    store.encode()
    store.tag("gpt@200", "best")
    return store


@pytest.fixture(autouse=True)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give an example that names `store` a store of its own, and a directory to write to."""
    test = getattr(request.node, "dtest", None)
    if test is None or not any("store" in item.source for item in test.examples):
        yield
        return
    directory = tmp_path_factory.mktemp("example")
    with pytest.MonkeyPatch.context() as patch, example_store(directory / "store") as store:
        patch.chdir(directory)
        patch.setenv("CKSTORE_CACHE", str(directory / "cache"))
        test.globs.update(store=store, np=np, ckstore=ckstore, Path=Path)
        yield
