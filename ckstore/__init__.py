"""A content store for model checkpoints: byte-identical files out, lazy arrays in between."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        UnreachableError,
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
    "UnreachableError",
    "UsageError",
    "init",
    "open",
    "warm_up",
]

#: Where names are that are not errors. They are imported when they are used: the command line begins here, and who
#: interrupts it before it has read a line of ours would see where Python was.
_HOMES = {
    "GradientAccumulator": "ckstore.integrations.torch",
    "Store": "ckstore.store",
    "init": "ckstore.store",
    "open": "ckstore.store",
    "warm_up": "ckstore.operations.warm_up",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_HOMES.get(name, "ckstore.errors")), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
