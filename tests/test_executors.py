"""Bulk work by processes and by a dask cluster: pickling, `map`, and errors of workers that fail."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import pkgutil
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore import repository
from ckstore.errors import CkstoreError, NotFoundError, UsageError
from ckstore.runtime.threads import Executor, worker_count
from tests.asked_of_versions import end, itself, refuse, step_of, store_of, sum_of, threads_of


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def dask() -> Iterator[Executor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Warnings of the cluster's own code are not ours to mend.
        distributed = pytest.importorskip("distributed")
        cluster = distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None, host="127.0.0.1"
        )
        with cluster, distributed.Client(cluster) as client:
            yield client.get_executor()


@pytest.fixture(params=["processes", "dask"])
def executor(request: pytest.FixtureRequest) -> Executor:
    found: Executor = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def _filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("executors") / "store"
    rng = np.random.default_rng(0)
    names = ("a", "b", "c", "d")
    weights = {name: rng.standard_normal((300, 400)).astype(np.float32) for name in names}
    with ckstore.init(path) as store:
        for step in range(4):
            store.ingest({"model": weights, "step": step}, run="gpt", step=step)
            for name in names:
                weights[name] = weights[name] + rng.standard_normal((300, 400)).astype(np.float32) / 1000
    return path


@pytest.fixture
def filled(_filled: Path, tmp_path: Path) -> Path:
    """A store of four versions of its own."""
    return Path(shutil.copytree(_filled, tmp_path / "store"))


def test_versions_and_runs_pickle(filled: Path) -> None:
    with ckstore.open(filled) as store:
        version = store["gpt@2"]
        assert sum_of(pickle.loads(pickle.dumps(version))) == sum_of(version)
        tensor = pickle.loads(pickle.dumps(version["model/b"]))
        np.testing.assert_array_equal(tensor[:5], version["model/b"][:5])
        run = pickle.loads(pickle.dumps(store.run("gpt")[1:]))
        assert (run.name, run.steps) == ("gpt", [1, 2, 3])
        assert len({id(each._stored.repository) for each in run}) == 1
        text = pickle.dumps(version)
        store.forget(["gpt@2"])
        with pytest.raises(NotFoundError, match="Version 3 no longer exists in the store"):
            pickle.loads(text)


def test_stores_of_pickled_versions_are_closed_with_the_process(filled: Path) -> None:
    with ckstore.open(filled) as store:
        found = pickle.loads(pickle.dumps(store["gpt@2"]))._stored.repository
    assert found in repository._opened.values()
    repository._close_opened()
    assert not repository._opened
    with pytest.raises(Exception, match="closed"):
        found.catalog.versions()


def test_map_yields_the_same_order_with_an_executor(filled: Path, executor: Executor) -> None:
    with ckstore.open(filled, "r") as store:
        assert list(store.map(step_of, ["gpt@3", 1, "gpt@2"])) == [3, 0, 2]
        assert list(store.map(step_of, ["gpt@3", 1, "gpt@2"], executor=executor)) == [3, 0, 2]
        assert list(store.map(sum_of, run="gpt", executor=executor)) == list(map(sum_of, store.run("gpt")))
        assert [version.step for version in store.map(itself, executor=executor)] == [0, 1, 2, 3]


def test_a_worker_opens_a_store_once_and_codes_with_one_thread(filled: Path, executor: Executor) -> None:
    with ckstore.open(filled, "r") as store:
        places = list(store.map(store_of, [1, 2, 3, 4] * 5, executor=executor))
        assert len(set(places)) == len({process for process, _ in places})
        assert os.getpid() not in {process for process, _ in places}
        assert set(store.map(threads_of, executor=executor)) == {1}


def test_threads_of_this_process_are_left_as_many_as_they_are(filled: Path) -> None:
    before = worker_count()
    with ckstore.open(filled, "r") as store, ThreadPoolExecutor(2) as pool:
        assert set(store.map(threads_of, executor=pool)) == {before}


def test_errors_keep_their_type(filled: Path, executor: Executor) -> None:
    with ckstore.open(filled, "r") as store, pytest.raises(NotFoundError, match="has no tensor model/nothing"):
        list(store.map(refuse, executor=executor))


def test_unpicklable_functions_are_refused(filled: Path, processes: Executor) -> None:
    with ckstore.open(filled, "r") as store, pytest.raises(UsageError, match="top level of a module"):
        list(store.map(lambda version: version, executor=processes))


def test_workers_find_versions_stored_since(filled: Path, executor: Executor) -> None:
    with ckstore.open(filled) as store:
        list(store.map(step_of, executor=executor))
        store.ingest({"model": {"a": np.ones(5)}}, run="gpt", step=9)
        assert list(store.map(step_of, ["gpt"], executor=executor)) == [9]


def every_error() -> list[type[CkstoreError]]:
    for module in pkgutil.walk_packages(ckstore.__path__, "ckstore."):
        if not module.name.startswith("ckstore.integrations.") and not module.name.endswith("__main__"):
            with suppress(ImportError):  # Of torch.
                importlib.import_module(module.name)
    found: list[type[CkstoreError]] = [CkstoreError]
    for kind in found:
        found += [each for each in kind.__subclasses__() if each not in found]
    return [kind for kind in found if kind.__module__.startswith("ckstore.")]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_pickles(kind: type[CkstoreError]) -> None:
    error = pickle.loads(pickle.dumps(kind("The fault; the remedy.")))
    assert type(error) is kind
    assert (str(error), error.args) == ("The fault; the remedy.", ("The fault; the remedy.",))


@pytest.mark.long
def test_a_worker_of_a_cluster_that_ends_is_one_sentence(filled: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed = pytest.importorskip("distributed")
        import dask

        with (
            dask.config.set({"distributed.scheduler.allowed-failures": 0}),
            distributed.LocalCluster(
                n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
            ) as cluster,
            distributed.Client(cluster) as client,
            ckstore.open(filled, "r") as store,
            pytest.raises(CkstoreError, match=r"^A worker of the executor died[^.]*\.$"),
        ):
            list(store.map(end, executor=client.get_executor()))


@pytest.mark.long
def test_a_process_that_ends_is_one_sentence(filled: Path) -> None:
    with (
        ckstore.open(filled, "r") as store,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        pytest.raises(CkstoreError, match=r"^A worker of the executor died[^.]*\.$"),
    ):
        list(store.map(end, executor=pool))
