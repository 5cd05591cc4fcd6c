"""Lightning: checkpoints of a Trainer or Fabric become versions; small pointer files take their place."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.formats.facts import facts_of_mapping
from ckstore.integrations.apart import runs_for, store_apart
from ckstore.integrations.lineage import Lineage
from ckstore.integrations.names import PREFIX, read_sound, version_name
from ckstore.integrations.torch import check_resumed, load, save
from ckstore.integrations.torch_reading import read
from ckstore.runtime.provenance import fitting, plain_config
from ckstore.store import Store

if TYPE_CHECKING:
    from ckstore.integrations.torch import GradientAccumulator
    from ckstore.version import Version
    from ckstore.writing.ingest import IngestReport
    from ckstore.writing.tuning import Search

#: Modules of `lightning` and `pytorch_lightning` with the base class of the Trainer's plug-ins.
_PARENTS = ("lightning.fabric", "lightning_fabric")

_TRAINERS = ("lightning.pytorch", "pytorch_lightning")

#: The run, below that of the training, of checkpoints without optimizer states.
WEIGHTS = "weights"
#: Largest size of a pointer; every checkpoint is larger.
_LONGEST = 1024


class StoreIO:
    """A `CheckpointIO` that stores checkpoints as versions of a run, and writes small pointer files in their place.

    `ModelCheckpoint` keeps, links and removes the pointers like checkpoints. Versions stay in the store when their
    pointers are removed. Resume from a pointer, or from a version with `ckpt_path="ckstore:lit@8"`. Checkpoints that
    Lightning wrote earlier can be read as before.

    Each path has a version of its own. Checkpoints of a Trainer without optimizer states are stored in the run
    `lit/weights`, and a second file of a step in a run after its name, such as `lit/last`.

    Parameters
    ----------
    store
        A writable store.
    run
        Name of the run. A resumed training continues the run from its version; later versions are kept as superseded
        ones. A training that was not resumed needs a new run.
    gradients
        Accumulator over ``{"state_dict": module}``. The module calls its `after_backward` in
        `on_before_optimizer_step`, and its `before_clearing` in `on_before_zero_grad`. Not within `AsyncCheckpointIO`,
        whose thread would read gradients that change.
    search, allow_empty
        As for `Store.ingest`.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        gradients: GradientAccumulator | None = None,
        search: Search | None = None,
        allow_empty: bool = False,
    ) -> None:
        # Both packages define the class; a Trainer of one does not accept the other's.
        for parent in [name for name in _PARENTS if sys.modules.get(name)] or _PARENTS:
            with suppress(ModuleNotFoundError):
                import_module(f"{parent}.plugins").CheckpointIO.register(StoreIO)
        self.store = store
        self.run = store._checked_run(run)
        self.gradients = gradients
        self.search = search
        self.allow_empty = allow_empty
        self._first: int | None = None
        self._saved: int | None = None
        self._lineage = Lineage()

    def __repr__(self) -> str:
        return f"<ckstore.integrations.lightning.StoreIO of {self.run}>"

    @property
    def latest(self) -> str | None:
        """Return the name of the run's latest version for `ckpt_path`; None if the run has no versions."""
        return None if self.store._catalog.latest(self.run) is None else f"{PREFIX}{self.run}@latest"

    def check_resumed(self) -> Any:
        """Return a callback for the Trainer: a resumed training is compared with its version when it starts.

        It warns where they differ; see `ckstore.integrations.torch.check_resumed`.
        """
        name = next((name for name in _TRAINERS if sys.modules.get(name)), _TRAINERS[0])
        parent: type = import_module(name).Callback

        def on_train_start(_: Any, trainer: Any, module: Any) -> None:
            if (row := self._lineage.position) is not None:
                check_resumed(self.store[row.number], {"state_dict": module, "optimizer_states": [*trainer.optimizers]})

        return type("ResumeCheck", (parent,), {"on_train_start": on_train_start})()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Store a checkpoint, and write a pointer once the version is durable.

        Hidden files, which Lightning uses temporarily, stay files.

        Raises
        ------
        ConflictError
            The run has versions of another training.
        UsageError
            The path is not local, or storage options are given.
        """
        if storage_options is not None:
            raise UsageError("Versions need no `storage_options`; leave them out.")
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
                f" `ckpt_path='{PREFIX}{self.run}@latest'`, or give `StoreIO` a new run."
            )
        held = self._held(place)

        def ingest(run: str, parent: int | None, replace: bool) -> IngestReport:
            if replace and held is not None:  # If this process is killed, the pointer names whichever exists.
                _point(place, held.id, f"{run}@{step}")
            return self.store.ingest(
                checkpoint, run=run, step=step, parent=parent, metrics=_scores(checkpoint, path), on_unknown="pickle",
                replace=replace, search=self.search, allow_empty=self.allow_empty,
                gradients=None if self.gradients is None else self.gradients.gradients(),
                config=_hyperparameters(checkpoint),
            )  # fmt: skip

        weights_only = "pytorch-lightning_version" in checkpoint and "optimizer_states" not in checkpoint
        runs = runs_for(f"{self.run}/{WEIGHTS}" if weights_only else self.run, place, step, facts.get("epoch"))
        # A Trainer resumes from any checkpoint with optimizer states: the run has the first one of each step.
        is_resumable = "optimizer_states" in checkpoint
        row = store_apart(
            self.store, runs, step, ingest, holds=lambda row: held is not None and row.uid == held.id,
            home="" if held is None or is_resumable else held.run, settled=not is_resumable, lineage=self._lineage,
        ).version  # fmt: skip
        self._note(row.step)
        self._saved = row.step
        _point(place, row.uid)
        self._add_scores(checkpoint)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        """Load the checkpoint of a pointer, of a name such as `ckstore:lit@8`, or of a file that Lightning wrote.

        If the latest version is damaged, a warning says so, and the newest sound one before it is loaded.

        Objects of your own classes need ``weights_only=False``, as without a store.

        Raises
        ------
        NotFoundError
            No such version exists.
        """
        spec = version_name(path)
        options: dict[str, Any] = {"map_location": map_location or "cpu", "weights_only": weights_only is not False}
        if spec is None:
            names = _pointed_to(_local(path))
            if not names:
                return load(path, self.store, **options)
            spec = self._present(names)
            if spec is None:
                raise NotFoundError(
                    f"Version {names[0]}, which {os.fspath(path)} names, is not in {self.store.place} any more;"
                    f" `ckstore log {self.run}` lists the versions, and `{PREFIX}RUN@STEP` names one."
                )
        version, state = read_sound(self.store, spec, partial(read, **options))
        self._lineage.note(self.store, version)
        if f"{version.run}/".startswith(f"{self.run}/"):
            self._note(version.step)
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a pointer, or a checkpoint that Lightning wrote; the version stays in the store."""
        place = _local(path)
        if place.is_dir():
            shutil.rmtree(place)
        else:
            with suppress(FileNotFoundError):
                place.unlink()

    def teardown(self) -> None:
        """End the training: until it is resumed, only steps from its last one on may be saved."""
        self._first = self._saved
        self._lineage = Lineage()

    def _add_scores(self, checkpoint: dict[str, Any]) -> None:
        """Add the scores of checkpoints without callbacks' states to their versions, from a later checkpoint's."""
        for path, name, score in _scored(checkpoint):
            version = self._held(Path(path))
            if version is not None and name not in version.metrics:
                self.store.set_metrics(version, {name: score})

    def _held(self, place: Path) -> Version | None:
        """Return the version that the pointer at a path names; a link is another path's pointer."""
        spec = None if place.is_symlink() else self._present(_pointed_to(place))
        return None if spec is None else self.store[spec]

    def _present(self, names: list[str]) -> str | None:
        """Return the first of the names in a pointer whose version exists."""
        return next((name for name in names if name in self.store), None)

    def _is_own(self, step: int | None) -> bool:
        """Return whether this training may save a step in the run."""
        if self._first is None:
            return all(self.store._catalog.latest(run) is None for run in (self.run, f"{self.run}/{WEIGHTS}"))
        return step is None or step >= self._first

    def _note(self, step: int | None) -> None:
        """Note a step of the training: versions from its first step on are its own."""
        found = 0 if step is None else step
        self._first = found if self._first is None else min(self._first, found)


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise UsageError(
            f"{os.fspath(path)} is not local, but pointers are local files; give ModelCheckpoint a local `dirpath`."
        )
    return Path(path)


def _point(place: Path, *names: str) -> None:
    """Write a pointer: the id of its version and, while that is replaced, the name of the version in its place."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    temporary.write_text("".join(f"{PREFIX}{name}\n" for name in names))
    temporary.replace(place)


def _pointed_to(place: Path) -> list[str]:
    """Return the names in a pointer; none for any other file."""
    if not place.is_file() or place.stat().st_size > _LONGEST:
        return []
    names = [version_name(line) for line in place.read_text(errors="replace").splitlines()]
    return [name for name in names if name]


def _hyperparameters(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the modules as a configuration; None without any."""
    names = ("hyper_parameters", "datamodule_hyper_parameters")
    found = {
        name: value
        for key in names
        if isinstance(values := checkpoint.get(key), Mapping)
        for name, value in values.items()
    }
    return fitting(plain_config(found)) if found else None


def _scores(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, float]:
    """Return the score that `ModelCheckpoint` monitors, from the checkpoint that it saves at a path."""
    return {name: score for scored, name, score in _scored(checkpoint) if scored == os.fspath(path)}


def _scored(checkpoint: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield the path, the monitored name and the score of each checkpoint that a `ModelCheckpoint` ranks."""
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, dict) and state.get("monitor"):
            for path, score in state.get("best_k_models", {}).items():
                yield path, str(state["monitor"]), float(score)
