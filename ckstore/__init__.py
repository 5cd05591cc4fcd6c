"""A content store for model checkpoints: byte-identical files out, lazy arrays in between."""

from ckstore.errors import (
    CkstoreError,
    ConflictError,
    FormatVersionError,
    InputError,
    IntegrityError,
    LockedError,
    NoStoreError,
    NotFoundError,
    PartialError,
    UsageError,
)
from ckstore.integrations.torch import GradientAccumulator
from ckstore.operations.warm_up import warm_up
from ckstore.store import Store, init, open

__version__ = "0.1.0"

__all__ = [
    "CkstoreError",
    "ConflictError",
    "FormatVersionError",
    "GradientAccumulator",
    "InputError",
    "IntegrityError",
    "LockedError",
    "NoStoreError",
    "NotFoundError",
    "PartialError",
    "Store",
    "UsageError",
    "init",
    "open",
    "warm_up",
]
