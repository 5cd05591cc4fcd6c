"""`--executor` of the command line; what executors do is in `tests/test_executors.py`."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from .conftest import Ckstore


def counts(out: str) -> str:
    """What `verify` prints, without the seconds."""
    return re.sub(r"in [\d.]+ s", "", out)


def test_processes_verify(ckstore: Ckstore, filled: Path) -> None:
    assert counts(ckstore("verify", "--executor", "processes=2").out) == counts(ckstore("verify").out)
    pack = sorted(Path(".ckstore/packs").iterdir())[0]
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    plain = ckstore("verify", code=4)
    assert ckstore("verify", "--executor", "processes=2", code=4).err == plain.err


def test_a_cluster_verifies(ckstore: Ckstore, filled: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What the cluster's own code says is not ours to mend.
        distributed = pytest.importorskip("distributed")
        with distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None, host="127.0.0.1"
        ) as cluster:
            address = cluster.scheduler_address.removeprefix("tcp://")
            found = ckstore("verify", "--executor", f"dask={address}")
    assert counts(found.out) == counts(ckstore("verify").out)


@pytest.mark.parametrize("name", ["processes", "processes=0", "processes=many", "dask=there", "dask=:1", "threads=2"])
def test_what_names_no_executor_is_refused(ckstore: Ckstore, filled: Path, name: str) -> None:
    sentence = ckstore("verify", "--executor", name, code=2).sentence
    assert f"{name!r} is not of the form processes=N or dask=HOST:PORT" in sentence


def test_a_scheduler_that_is_not_there_is_one_sentence(
    ckstore: Ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("ckstore.cli.executors._PATIENCE", 0.5)
    assert (
        "No scheduler of dask answers at 127.0.0.1:9"
        in ckstore("verify", "--executor", "dask=127.0.0.1:9", code=2).sentence
    )
