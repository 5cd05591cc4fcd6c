"""Lightning: what a Trainer or Fabric saves goes into a store, and pointers lie where its checkpoints would be."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ckstore.errors import ConflictError, UsageError
from ckstore.formats.facts import facts_of_mapping
from ckstore.integrations.names import PREFIX, version_name
from ckstore.integrations.torch import load, save
from ckstore.store import Store

#: Where the package `lightning`, and where `pytorch_lightning`, has the class that its Trainer asks plug-ins for.
_PARENTS = ("lightning.fabric", "lightning_fabric")

#: A pointer is shorter than this; every checkpoint is longer.
_LONGEST = 1024


class StoreIO:
    """A `CheckpointIO`: checkpoints become versions of a run, and Lightning sees files of a few bytes that name them.

    `ModelCheckpoint` keeps, links and removes these pointers as it does checkpoints. Versions stay in the store
    when their pointers are removed. Either name resumes: that of a pointer, or that of a version as
    `ckpt_path="ckstore:lit@8"`. Checkpoints that Lightning wrote before are read as they always were.

    Parameters
    ----------
    store
        The store, open to be written to.
    run
        Name of the run. A training goes on in it from the version that it was resumed from: versions at later steps
        are replaced when these steps are saved again. One that was not resumed needs a run of its own.
    """

    def __init__(self, store: Store, run: str) -> None:
        # Both packages have the class, and a Trainer of one knows nothing of the other's.
        for parent in [name for name in _PARENTS if sys.modules.get(name)] or _PARENTS:
            with suppress(ModuleNotFoundError):
                import_module(f"{parent}.plugins").CheckpointIO.register(StoreIO)
        self.store = store
        self.run = run
        self._first: int | None = None
        self._saved: int | None = None

    def __repr__(self) -> str:
        return f"<ckstore.integrations.lightning.StoreIO of {self.run}>"

    @property
    def latest(self) -> str | None:
        """The name of the run's latest version, for `ckpt_path`; None where the run has none, and training begins."""
        return None if self.store.catalog.latest(self.run) is None else f"{PREFIX}{self.run}@latest"

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Store a checkpoint, and write a pointer to it once it is durable.

        Hidden files, in which Lightning keeps what it needs for a moment, stay files.

        Raises
        ------
        ConflictError
            The run has versions of a training that this one was not resumed from.
        UsageError
            The path is no local one, or there are storage options.
        """
        if storage_options is not None:
            raise UsageError("A store takes no `storage_options`; leave them out.")
        place = _local(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.name.startswith("."):
            save(checkpoint, place)
            return
        facts = facts_of_mapping(checkpoint)
        step = facts.get("step", facts.get("epoch"))
        if not self._is_own(step):
            raise ConflictError(
                f"Run {self.run} has versions of another training; resume it with"
                f" `ckpt_path='{PREFIX}{self.run}@latest'`, or give `StoreIO` another run."
            )
        row = self.store.ingest(
            checkpoint, run=self.run, step=step, metrics=_scores(checkpoint, path), on_unknown="pickle",
            replace=step is not None,
        ).version  # fmt: skip
        self._note(row.step)
        self._saved = row.step
        beside = place.with_name(f".{place.name}.{os.getpid()}")
        beside.write_text(f"{PREFIX}{row.uid if row.step is None else f'{row.run}@{row.step}'}\n")
        beside.replace(place)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        """The checkpoint that a pointer, a name such as `ckstore:lit@8`, or a file of Lightning's own means.

        Objects of a user's own classes need ``weights_only=False``, as they do without a store.

        Raises
        ------
        NotFoundError
            There is no such version.
        """
        name = path if version_name(path) is not None else _pointed_to(_local(path)) or path
        spec = version_name(name)
        if spec is not None:
            row = self.store[spec].row
            if row.run == self.run:
                self._note(row.step)
        return load(name, self.store, map_location=map_location or "cpu", weights_only=weights_only is not False)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a pointer, or a checkpoint of Lightning's own; the version stays in the store."""
        place = _local(path)
        if place.is_dir():
            shutil.rmtree(place)
        else:
            with suppress(FileNotFoundError):
                place.unlink()

    def teardown(self) -> None:
        """The training has ended; what is saved now is what it ended with, until it is resumed."""
        self._first = self._saved

    def _is_own(self, step: int | None) -> bool:
        """Whether a step is this training's to save: what is there at it, if anything, may be replaced."""
        if self._first is None:
            return self.store.catalog.latest(self.run) is None
        return step is None or step >= self._first

    def _note(self, step: int | None) -> None:
        """Take note that the training has come to a step: versions from the first such on are its own."""
        found = 0 if step is None else step
        self._first = found if self._first is None else min(self._first, found)


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise UsageError(
            f"Pointers are local files, which {os.fspath(path)} is not; give ModelCheckpoint a local `dirpath`."
        )
    return Path(path)


def _pointed_to(place: Path) -> str | None:
    """The name in a pointer; None of any other file."""
    if not place.is_file() or place.stat().st_size > _LONGEST:
        return None
    text = place.read_text(errors="replace").strip()
    return text if version_name(text) is not None else None


def _scores(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, float]:
    """What `ModelCheckpoint` monitors, of the checkpoint that it saves at a path."""
    states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    return {
        str(state["monitor"]): float(state["best_k_models"][os.fspath(path)])
        for state in states
        if os.fspath(path) in state.get("best_k_models", ()) and state.get("monitor")
    }
