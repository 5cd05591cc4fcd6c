"""Reads versions as `torch.load` reads files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.version import Version

#: Formats that `torch.load` reads.
_TORCH_FILES = ("torch-zip", "torch-legacy")


def read(version: Version, *, map_location: Any, weights_only: bool) -> Any:
    """Load a version like `torch.load`; see `ckstore.integrations.torch.load`."""
    is_torch = not version._stored.document.is_directory and version._stored.layout.files[0].kind in _TORCH_FILES
    if map_location is None or str(map_location) == "cpu":
        state = version.state_dict()
        if not is_torch or not _holds_unknown(state):
            return state
    elif not is_torch:
        raise UsageError(f"{version.name} is not a torch file; load it without `map_location`, then move its tensors.")
    return _read_by_torch(version, map_location, weights_only=weights_only)


def _read_by_torch(version: Version, map_location: Any, *, weights_only: bool) -> Any:
    """Return the state that torch loads from the version's file."""
    import torch

    with TemporaryDirectory(prefix="ckstore-") as place:
        file = Path(place, "state.pt")
        # A file with dropped tensors cannot be restored; its remaining contents are written as a new file if possible.
        is_left = version.dropped and not _holds_unknown(version.state_dict())
        version.checkout(file, format="pt" if is_left else None)
        return torch.load(file, map_location=map_location or "cpu", weights_only=weights_only)


def _holds_unknown(state: Any) -> bool:
    """Return whether a state contains an object that could not be rebuilt."""
    from ckstore.formats.layout import Unknown

    left, seen = [state], set()
    while left:
        node = left.pop()
        if isinstance(node, Unknown):
            return True
        if isinstance(node, dict | list | tuple | set | frozenset) and id(node) not in seen:
            seen.add(id(node))
            left.extend([*node, *node.values()] if isinstance(node, dict) else node)
    return False
