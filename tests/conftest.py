"""Shared by all tests: paths of real checkpoints, Hypothesis profiles, and small runs trained once a session."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from zlib import crc32

import hypothesis
import pytest

from ckstore import Store, init, policy
from ckstore.gc import kept
from tests import forked, places
from tests.checkpoints import scratch, series
from tests.object_store import object_store
from tools import runs

REPOSITORY = Path(__file__).resolve().parents[1]

#: Parts of the long tests: one runs with all others.
PARTS = 8
PART = pytest.StashKey[int | None]()

# Timing out is the business of pytest-timeout; examples are the same on every machine and in every process.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
# Origins differ from machine to machine; tests of them take this away.
os.environ.setdefault("CKSTORE_MADE", "0")
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


class _TorchIsMissing(MetaPathFinder):
    """Skips tests that need torch where it is not installed: the last finder is asked then."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torch" and _is_needed():
            pytest.skip("torch is not installed", allow_module_level=True)


def _is_needed() -> bool:
    """Return whether tests or tools import a module, or the function that calls of the library require torch with."""
    frame = sys._getframe(2)
    while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    own = any(path.is_relative_to(REPOSITORY / name) for name in ("tests", "tools"))
    return own or frame.f_code.co_name == "require_torch"


sys.meta_path.append(_TorchIsMissing())


def pytest_configure(config: pytest.Config) -> None:
    """Take SIGINT where a job in the background of a script ignores it: the programs of tests would inherit that.

    A worker of pytest-xdist shares the servers of `tests.forked` with the others.
    """
    if hasattr(config, "workerinput"):
        forked.share(config.workerinput["servers"])
        config.stash[PART] = config.workerinput["part"]
    else:
        config.stash[PART] = _part(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the servers of `tests.forked` are, and the part of the long tests."""
    node.workerinput |= {"servers": forked.share(), "part": node.config.stash[PART]}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze imported objects: the collector would walk over a million of them, at collection and in all tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Collect doctests of the library alone; shared test modules are imported on use."""
    found = yield
    return [collector for collector in found if type(collector) is pytest.Module]  # Examples are of a class below.


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the part of the long tests that runs."""
    part = config.stash[PART]
    return None if part is None else f"long tests: part {part + 1} of {PARTS}, picked by the commit"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other parts of the long tests, and on remote stores tests of local ones."""
    part, in_bucket = config.stash[PART], os.environ.get(places.VARIABLE) == "bucket"

    def is_left_out(item: pytest.Item) -> bool:
        other = part is not None and crc32(item.nodeid.encode()) % PARTS != part
        return bool((other and item.get_closest_marker("long")) or (in_bucket and item.get_closest_marker("local")))

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


def _part(config: pytest.Config) -> int | None:
    """Return the part of the long tests that runs with all others: the commit picks it, one of them every time."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or os.environ.get("CKSTORE_TEST_LONG") == "all":
        return None
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return int(found.stdout, 16) % PARTS if found.returncode == 0 else None


@pytest.fixture(scope="session", autouse=True)
def stores_in_a_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With `CKSTORE_TEST_PLACE=bucket`, make the stores of tests remote ones."""
    if os.environ.get(places.VARIABLE) != "bucket":
        yield
        return
    with object_store() as server, places.in_bucket(server, tmp_path_factory.mktemp("mirrors")):
        yield


def _as_marked(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    at_once = mock.patch.object(policy, "HOT", 0) if node.get_closest_marker("encoded") else nullcontext()
    with at_once, mock.patch.object(kept, "GRACE", 0.0) if node.get_closest_marker("prompt") else nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def few_versions_wait() -> Iterator[None]:
    """Let an ingest wait while more than one older version of its run is due, however busy the machine is."""
    with mock.patch("ckstore.retention.encoder._MOST", 1):
        yield


@pytest.fixture(scope="module", autouse=True)
def encoded_in_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a module marked `encoded`, encode versions at once, those of its fixtures too; likewise for `prompt`."""
    yield from _as_marked(request.node)


@pytest.fixture(autouse=True)
def encoded_in_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a test marked `encoded`, encode versions at once; in one marked `prompt`, forgotten versions are garbage."""
    yield from _as_marked(request.node)


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory on a file system in memory, where there is one: an fsync takes no time there."""
    with scratch() as path:
        yield path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of real checkpoints from public repositories; the test is skipped where there is none."""
    named = os.environ.get("CKSTORE_TEST_DATA")
    path = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real checkpoints at {path}: set CKSTORE_TEST_DATA to the directory that holds them")
    return path


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory that the runs are trained into: one for all processes of a test session."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"


@pytest.fixture(scope="session")
def gpt_run(trained_runs: Path) -> list[Path]:
    """Checkpoints of a tiny GPT with AdamW, oldest first."""
    return runs.train("gpt", trained_runs, tier="tiny")


@pytest.fixture(scope="session")
def cnn_run(trained_runs: Path) -> list[Path]:
    """Checkpoints of a tiny residual CNN with SGD momentum, oldest first."""
    return runs.train("cnn", trained_runs, tier="tiny")


@pytest.fixture(scope="session")
def bf16_run(trained_runs: Path) -> list[Path]:
    """A tiny GPT's weights in bfloat16 as safetensors files, oldest first."""
    return runs.train("bf16", trained_runs, tier="tiny")


@pytest.fixture(scope="session")
def frozen_run(trained_runs: Path) -> list[Path]:
    """Checkpoints of a fine-tune with a frozen backbone of more than 90 % of the weights, oldest first."""
    return runs.train("frozen", trained_runs, tier="tiny")


@pytest.fixture(scope="session")
def ema_run(trained_runs: Path) -> list[Path]:
    """Checkpoints of a tiny GPT with tied embeddings and an EMA copy of its weights, oldest first."""
    return runs.train("ema", trained_runs, tier="tiny")


@pytest.fixture
def paths(directory: Path) -> list[Path]:
    """Five small checkpoints of one run in `directory`."""
    return series(directory, 5)


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    """An empty store in `directory`."""
    with init(directory / "store") as opened:
        yield opened
