"""The engine `ckstore` of xarray: versions, runs with their steps, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.integrations.xarray import CkstoreBackend

xarray = pytest.importorskip("xarray")


def test_versions_and_runs(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).random((40, 30), np.float32)
    place = str(tmp_path / "store")
    with ckstore.init(place) as store:
        for step in (10, 20):
            store.ingest({"model": {"w": weight * step}}, run="gpt", step=step)
        store.ingest({"model": {"w": weight}}, run="plain")
    one = xarray.open_dataset("ckstore://gpt@10", engine=CkstoreBackend, store=place, group="model")
    assert np.array_equal(one["w"], weight * 10)
    every = xarray.open_dataset("ckstore://gpt", engine=CkstoreBackend, store=place, group="model")
    assert np.array_equal(every["w"].sel(version=20), weight * 20)
    assert every["w"].shape == (2, 40, 30)
    tree = xarray.open_datatree("ckstore://gpt", engine=CkstoreBackend, store=place)
    assert np.array_equal(tree["model/w"].sel(version=20), weight * 20)
    tree = xarray.open_datatree("ckstore://gpt@10", engine=CkstoreBackend, store=place)
    assert np.array_equal(tree["model/w"], weight * 10)
    part = xarray.open_datatree("ckstore://gpt", engine=CkstoreBackend, store=place, group="model")
    assert np.array_equal(part["w"].sel(version=20), weight * 20)
    groups = xarray.open_groups("ckstore://gpt", engine=CkstoreBackend, store=place)
    assert list(groups) == ["/", "/model"]
    assert np.array_equal(groups["/model"]["w"].sel(version=20), weight * 20)
    plain = xarray.open_dataset("ckstore://plain", engine=CkstoreBackend, store=place, group="model")
    assert plain["w"].shape == (1, 40, 30)
    with pytest.raises(ckstore.NotFoundError, match="Unknown version none"):
        xarray.open_dataset("ckstore://none", engine=CkstoreBackend, store=place)
    with pytest.raises(ckstore.UsageError, match="not a URL"):
        xarray.open_dataset("gpt@10", engine=CkstoreBackend, store=place)
