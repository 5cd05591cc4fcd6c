"""A versioned content store for model checkpoints: files come back byte for byte, tensors open lazily.

Core concepts
-------------
A **store** is a directory, or a prefix in a bucket. A **run** is a named line of **versions**; a version is one
ingested checkpoint: its files, tensors and metrics. Versions are exact (lossless) unless a **policy** makes them coarse
(lossy, with known errors). `Store.ingest` takes a file, a directory or a state dict. `Version.checkout` writes files,
`Version.state_dict` loads tensors, and ``version[path]`` is a tensor that is read when it is sliced.

A name of a version is its number, a tag, `latest` (ingested last), `run@step`, `run@latest` or the name of a run (the
highest step; without steps, ingested last), or at least the first four characters of its id.

Key types
---------
`Store` maps names to versions; `open` and `init` return it. `Version` maps tensor paths to `LazyTensor`. `Run` has the
versions of a run in order. `Saver` stores states from a process of its own. `Policy`, `Retention` and `Search` say how
versions are stored and kept. Every error is a `CkstoreError` with a stable kind and an exit code.

Threads may share all objects, and another process opens a pickled one again. Importing `ckstore` imports neither torch
nor Zarr nor the kernels; they are imported on first use.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if os.name == "nt":
    raise ImportError("ckstore runs on Linux and macOS; on Windows, use it in WSL.")

if TYPE_CHECKING:
    from ckstore.checking.verify import VerifyReport
    from ckstore.errors import (
        AccessError,
        CkstoreError,
        ClosedError,
        ConflictError,
        DiskFullError,
        FormatVersionError,
        InputError,
        IntegrityError,
        LockedError,
        NoStoreError,
        NotFoundError,
        PartialError,
        ReadOnlyError,
        UnreachableError,
        UsageError,
    )
    from ckstore.following.follow import Followed
    from ckstore.gc.collect import GcReport
    from ckstore.intake.intake import Ingested
    from ckstore.integrations.torch import GradientAccumulator
    from ckstore.objects.documents import Deviation
    from ckstore.policy import Policy, Retention
    from ckstore.reading.average import AverageReport
    from ckstore.reading.comparison import DiffReport, TensorChange, TensorForm
    from ckstore.reading.live_comparison import StateReport
    from ckstore.reading.salvage import SalvageReport
    from ckstore.reading.weight_patches import WeightPatch
    from ckstore.recovery.recover import RecoverReport, recover
    from ckstore.report.findings import Finding
    from ckstore.report.report import Report
    from ckstore.retention.forget import ForgetReport
    from ckstore.retention.retain import RetainReport
    from ckstore.run import Run
    from ckstore.saving.publisher import Publisher
    from ckstore.saving.saver import Saver
    from ckstore.scanning.steps import Planned
    from ckstore.storage.rows import VersionRow
    from ckstore.store import Store, follow, init, open
    from ckstore.table import Table
    from ckstore.tensor import LazyTensor
    from ckstore.transfer.transfer import TransferReport
    from ckstore.version import Version
    from ckstore.writing.encode import EncodeReport
    from ckstore.writing.ingest import IngestReport
    from ckstore.writing.rebase import RebaseReport
    from ckstore.writing.request import IngestOptions
    from ckstore.writing.thin import ThinReport
    from ckstore.writing.tuning import Search

__version__ = "0.1.0"

__all__ = [
    "AccessError",
    "AverageReport",
    "CkstoreError",
    "ClosedError",
    "ConflictError",
    "Deviation",
    "DiffReport",
    "DiskFullError",
    "EncodeReport",
    "Finding",
    "Followed",
    "ForgetReport",
    "FormatVersionError",
    "GcReport",
    "GradientAccumulator",
    "IngestOptions",
    "IngestReport",
    "Ingested",
    "InputError",
    "IntegrityError",
    "LazyTensor",
    "LockedError",
    "NoStoreError",
    "NotFoundError",
    "PartialError",
    "Planned",
    "Policy",
    "Publisher",
    "ReadOnlyError",
    "RebaseReport",
    "RecoverReport",
    "Report",
    "RetainReport",
    "Retention",
    "Run",
    "SalvageReport",
    "Saver",
    "Search",
    "StateReport",
    "Store",
    "Table",
    "TensorChange",
    "TensorForm",
    "ThinReport",
    "TransferReport",
    "UnreachableError",
    "UsageError",
    "VerifyReport",
    "Version",
    "VersionRow",
    "WeightPatch",
    "follow",
    "init",
    "open",
    "recover",
]

#: The modules of the names that are not errors. A name is imported on first use: the command line starts here, and an
#: interrupt before its first line would print a traceback.
_HOMES = {
    "AverageReport": "reading.average",
    "Deviation": "objects.documents",
    "DiffReport": "reading.comparison",
    "EncodeReport": "writing.encode",
    "Finding": "report.findings",
    "Followed": "following.follow",
    "ForgetReport": "retention.forget",
    "GcReport": "gc.collect",
    "GradientAccumulator": "integrations.torch",
    "IngestOptions": "writing.request",
    "IngestReport": "writing.ingest",
    "Ingested": "intake.intake",
    "LazyTensor": "tensor",
    "Planned": "scanning.steps",
    "Policy": "policy",
    "Publisher": "saving.publisher",
    "RebaseReport": "writing.rebase",
    "RecoverReport": "recovery.recover",
    "Report": "report.report",
    "RetainReport": "retention.retain",
    "Retention": "policy",
    "Run": "run",
    "SalvageReport": "reading.salvage",
    "Saver": "saving.saver",
    "Search": "writing.tuning",
    "StateReport": "reading.live_comparison",
    "Store": "store",
    "Table": "table",
    "TensorChange": "reading.comparison",
    "TensorForm": "reading.comparison",
    "ThinReport": "writing.thin",
    "TransferReport": "transfer.transfer",
    "VerifyReport": "checking.verify",
    "Version": "version",
    "VersionRow": "storage.rows",
    "WeightPatch": "reading.weight_patches",
    "follow": "store",
    "init": "store",
    "open": "store",
    "recover": "recovery.recover",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"ckstore.{_HOMES.get(name, 'errors')}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
