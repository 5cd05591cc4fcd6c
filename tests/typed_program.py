"""A program with types that uses every public name of `ckstore`: type checkers accept it, and it runs.

Checked by mypy with the library, and by pyright where the wheel is tested (`tools/test-installed`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import ckstore

Weights = dict[str, npt.NDArray[np.float32]]


def weights(step: int) -> Weights:
    """A state whose large tensor moves a little."""
    values = np.random.default_rng(0).standard_normal((300, 256), np.float32)
    return {"w": values * np.float32(1 + step / 1000), "b": np.zeros(4, np.float32)}


def write(store: ckstore.Store, directory: Path) -> None:
    """Everything that stores."""
    report = store.ingest(weights(0), run="net", step=0, metrics={"loss": 2.0})
    assert_type(report, ckstore.IngestReport)
    np.save(directory / "step1.npy", weights(1)["w"])
    planned: list[ckstore.Planned] = store.plan(directory / "step1.npy", run="array")
    done: list[ckstore.Ingested] = list(store.ingest_many(planned, options=ckstore.IngestOptions(verify=True)))
    assert [item.error for item in done] == [None]
    policy = ckstore.Policy(hot=1, retention=ckstore.Retention(keep_last=10))
    store.set_policy(policy, "net")
    for step in range(1, 4):
        store.ingest(weights(step), run="net", step=step)
    coarse = store.ingest(weights(4), run="net", step=4, policy="coarse")
    deviations: Mapping[str, ckstore.Deviation] = store[coarse.version.number].deviations()
    assert all(isinstance(found.max_abs, float) for found in deviations.values())
    assert_type(store.encode(), ckstore.EncodeReport)
    assert_type(store.rebase("net@3"), ckstore.RebaseReport)
    search = ckstore.Search(lambda path: float(path.stat().st_size), 0.01)
    store.ingest(weights(5), run="net", step=5, search=search)
    assert_type(store.thin(["net@1"]), ckstore.ThinReport)
    with store.saver(run="saved") as saver:
        assert_type(saver, ckstore.Saver)
        saver.save(weights(9), step=9)


def read(store: ckstore.Store) -> None:
    """Everything that reads."""
    version = store["net@3"]
    assert_type(version, ckstore.Version)
    tensor = version["w"]
    assert_type(tensor, ckstore.LazyTensor)
    rows = tensor[:10, 0]
    assert_type(rows, npt.NDArray[Any] | Any)
    assert rows.mean() == version.arrays["w"][:10, 0].mean()
    run: ckstore.Run = store.run("net")
    history = run.arrays["w"][:, 0, 0]
    assert history.shape == (len(run),)
    table: ckstore.Table = store.log()
    assert len(table) > len(run)
    difference: ckstore.DiffReport = store.diff("net@2", "net@3")
    change: ckstore.TensorChange = difference.changes[0]
    form: ckstore.TensorForm | None = change.after
    assert form is not None
    assert form.shape == (300, 256)
    state: ckstore.StateReport = version.compare(weights(3))
    assert state


def keep(store: ckstore.Store, other: ckstore.Store, directory: Path) -> None:
    """Everything that moves, proves and frees."""
    average: ckstore.AverageReport = store.average(["net@2", "net@3"], directory / "mean.npz")
    assert "w" in average.averaged
    assert_type(store.push(other, ["net@3"]), ckstore.TransferReport)
    verified: ckstore.VerifyReport = store.verify()
    assert not verified.problems
    report: ckstore.Report = store.report()
    findings: Sequence[ckstore.Finding] = report.findings["net"]
    assert all(finding.text for finding in findings)
    assert_type(store.forget(["net@0"]), ckstore.ForgetReport)
    assert_type(store.retain(), ckstore.RetainReport)
    assert_type(store.gc(), ckstore.GcReport)
    row: ckstore.VersionRow = store.ingest(weights(6), run="net", step=6).version
    assert row.step == 6
    store["net@3"].checkout(directory / "out")
    assert_type(store["net@3"].salvage(directory / "salvaged"), ckstore.SalvageReport)


def follow(store: ckstore.Store, directory: Path) -> None:
    """Everything that hands on new versions."""
    followed: list[ckstore.Followed] = list(ckstore.follow(store.path, "net@3", directory / "followed", once=True))
    assert [item.version.step for item in followed] == [3]


def patched(version: ckstore.Version) -> list[ckstore.WeightPatch]:
    """A method that needs torch."""
    return list(version.patches("net@2"))


def published(store: ckstore.Store, model: Path) -> ckstore.Publisher:
    """A method that needs a directory of Hugging Face."""
    return store.publish("policy", like=model)


def accumulator(model: Any) -> ckstore.GradientAccumulator:
    """A class that needs torch."""
    return ckstore.GradientAccumulator(model, every=10, window=2)


def errors() -> tuple[type[ckstore.CkstoreError], ...]:
    """Every kind of error."""
    return (
        ckstore.AccessError, ckstore.ClosedError, ckstore.ConflictError, ckstore.DiskFullError,
        ckstore.FormatVersionError, ckstore.InputError, ckstore.IntegrityError, ckstore.LockedError,
        ckstore.NoStoreError, ckstore.NotFoundError, ckstore.PartialError, ckstore.ReadOnlyError,
        ckstore.UnreachableError, ckstore.UsageError,
    )  # fmt: skip


def main(directory: Path) -> None:
    """Run everything in a new directory."""
    with ckstore.init(directory / "store") as store, ckstore.init(directory / "other") as other:
        write(store, directory)
        read(store)
        follow(store, directory)
        keep(store, other, directory)
    assert_type(ckstore.recover(directory / "store"), ckstore.RecoverReport)
    with ckstore.open(directory / "store", "r") as store:
        try:
            store["net@77"]
        except errors():
            pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
