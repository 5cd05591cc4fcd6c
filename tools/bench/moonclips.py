"""moonclip: the versions of a run in a directory, saved and resumed as its README says."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Moonclip:
    """The manager of a directory that keeps all of some versions."""

    def __init__(self, directory: Path, versions: int) -> None:
        from moonclip import CheckpointManager

        self._directory = directory
        self._manager: Any = CheckpointManager(str(directory), max_full_snapshots=versions)

    @staticmethod
    def takes(state: Any) -> bool:
        """Return whether it is installed, and a state has the parts that it saves."""
        return find_spec("moonclip") is not None and isinstance(state, dict) and {"model", "optimizer"} <= state.keys()

    def save(self, state: dict[str, Any], step: int) -> None:
        """Save a version, and wait until it is written."""
        others = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
        self._manager.save(
            step=step, model=_Holder(state["model"]), optimizer=_Holder(state["optimizer"]), extra=others
        )
        self._manager.flush()

    def resume(self, model: dict[str, Any], optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return model and optimizer of the last version, into ones with these states."""
        holders = _Holder(model), _Holder(optimizer)
        self._manager.resume(model=holders[0], optimizer=holders[1])
        return holders[0].loaded, holders[1].loaded

    @property
    def nbytes(self) -> int:
        """Bytes of the directory."""
        return sum(file.stat().st_size for file in self._directory.rglob("*") if file.is_file())


class _Holder:
    """An object with a state, as moonclip takes models and optimizers."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any], **_: Any) -> None:
        self.loaded = state
