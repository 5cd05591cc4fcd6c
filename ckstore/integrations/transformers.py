"""transformers: store the checkpoints of a Trainer, and restore the directory that it resumes from."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckstore.errors import ConflictError, UsageError
from ckstore.integrations.apart import runs_for, store_apart
from ckstore.integrations.lineage import Lineage, lineage_of
from ckstore.integrations.names import found, opened, read_sound
from ckstore.integrations.torch import check_files
from ckstore.runtime.provenance import fitting, plain_config

if TYPE_CHECKING:
    from ckstore.integrations.torch import GradientAccumulator
    from ckstore.storage.rows import VersionRow
    from ckstore.store import Store
    from ckstore.writing.ingest import IngestReport
    from ckstore.writing.tuning import Search


class StoreCallback:
    """A `TrainerCallback` that stores each checkpoint directory as a version of a run once it is complete.

    The values that the Trainer has logged since the previous save, such as `loss` and `eval_loss`, become the version's
    metrics. The process of rank 0 stores, after all ranks have written their files. Of two trainings at once, the
    second one to save a step stores it in a run after its output directory, such as `hf/other`.

    Parameters
    ----------
    store
        A writable store.
    run
        Name of the run. A resumed training continues the run from its step; later versions are kept as superseded ones.
        Any other training needs a new run.
    remove
        Remove each directory once its version is durable and has been verified. With `load_best_model_at_end`, the best
        one is kept. By default the Trainer manages its directories (`save_total_limit`); directories that it removes
        stay in the store.
    gradients
        Accumulator over ``{"model.safetensors": model}``; the callback calls it.
    search
        As for `Store.ingest`.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        remove: bool = False,
        gradients: GradientAccumulator | None = None,
        search: Search | None = None,
    ) -> None:
        self.store = store
        self.run = store._checked_run(run)
        self.remove = remove
        self.gradients = gradients
        self.search = search
        self._last = 0
        self._stored: list[Path] = []
        self._held: VersionRow | None = None
        self._lineage = Lineage()

    def __repr__(self) -> str:
        return f"<ckstore.integrations.transformers.StoreCallback of {self.run}>"

    def __getattr__(self, event: str) -> Any:
        """Ignore the other events of a `TrainerCallback`."""
        if event.startswith("on_"):
            return _do_nothing
        raise AttributeError(f"{type(self).__name__} has no attribute {event}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the step at which the training begins; of one process, warn if it was not resumed in full.

        Raises
        ------
        ConflictError
            The run has versions, but none at the step that was resumed from.
        """
        self._last = state.global_step
        self._lineage = Lineage()
        if not state.is_world_process_zero:
            return
        catalog = self.store._catalog
        is_other = catalog.latest(self.run) is not None
        # A directory that the Trainer kept itself is resumed without `resume_path`.
        row = lineage_of(self.store).position
        if row is None or row.step != self._last or (is_other and row.run != self.run):
            row = catalog.at_step(self.run, self._last)
        if row is not None and self._last:
            self._lineage.note(self.store, self.store[row.number])
            if _distributed() is None:  # Otherwise, ranks may have parts, which they would gather.
                parts = {"model.safetensors": "model", "optimizer.pt": "optimizer"}
                check_files(self.store[row.number], {file: given.get(name) for file, name in parts.items()})
        elif row is None and is_other:
            raise ConflictError(
                f"Run {self.run} has versions of another training; resume it with `resume_path`, or give"
                " `StoreCallback` a new run."
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the gradients of a step."""
        if self.gradients is not None:
            self.gradients.after_backward(state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the GPU wait for copies of gradients."""
        if self.gradients is not None:
            self.gradients.before_clearing()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Store the saved directory.

        Raises
        ------
        CkstoreError or OSError
            The directory could not be stored; it stays unchanged.
        """
        _wait_for_all()
        if not state.is_world_process_zero:
            return
        directory = Path(args.output_dir, f"checkpoint-{state.global_step}")
        metrics = {
            name: value
            for entry in state.log_history
            if entry["step"] > self._last
            for name, value in entry.items()
            if name != "step"
        }

        def ingest(run: str, parent: int | None, replace: bool) -> IngestReport:
            return self.store.ingest(
                directory, run=run, step=step, parent=parent, metrics=metrics, replace=replace, verify=self.remove,
                search=self.search, gradients=None if self.gradients is None else self.gradients.gradients(),
                config=fitting(plain_config(_changed(args))) if is_dataclass(args) else None,
            )  # fmt: skip

        step = state.global_step
        runs = runs_for(self.run, Path(args.output_dir, str(step)), step)
        held = self._held
        self._held = store_apart(
            self.store, runs, step, ingest, holds=lambda row: held is not None and row.uid == held.uid,
            home="" if held is None else held.run, lineage=self._lineage,
        ).version  # fmt: skip
        self._last = state.global_step
        if self.remove:
            best = state.best_model_checkpoint if args.load_best_model_at_end else None
            self._stored.append(directory)
            for stored in self._stored:
                if best is None or not stored.is_dir() or not os.path.samefile(stored, best):
                    shutil.rmtree(stored, ignore_errors=True)


def resume_path(store: Store | str | os.PathLike[str], name: str, output_dir: str | os.PathLike[str]) -> str | None:
    """Restore a version's checkpoint directory and return its path, for `resume_from_checkpoint`.

    All ranks call this; rank 0 writes. If the latest version is damaged, a warning says so, and the newest sound one
    before it is restored.

    Parameters
    ----------
    store
        The store, or its path or URL, such as ``hf://owner/name``.
    name
        The version, such as `hf@latest` or `hf@500`.
    output_dir
        The Trainer's output directory. `checkpoint-STEP` in it is written, or overwritten if it exists.

    Returns
    -------
    str or None
        The directory's path; None if `name` is `RUN@latest` and the run has no versions.

    Raises
    ------
    NotFoundError
        No such version exists.
    UsageError
        Several ranks run, but `torch.distributed` is not initialised yet: create `TrainingArguments` first.
    """
    distributed = _distributed()
    with opened(store) as usable:
        version = found(usable, name)
        if version is None:
            return None
        if distributed is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "torch.distributed is not initialised; create `TrainingArguments` before the call of `resume_path`."
            )
        if distributed is None or distributed.get_rank() == 0:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            version, _ = read_sound(
                usable, name, lambda sound: sound.checkout(_directory(output_dir, sound.step), force=True)
            )
            lineage_of(usable).note(usable, version)
        steps = [version.step]
    if distributed is not None:
        distributed.broadcast_object_list(steps)
    return str(_directory(output_dir, steps[0]))


def _directory(output_dir: str | os.PathLike[str], step: int | None) -> Path:
    return Path(output_dir, f"checkpoint-{step}")


def _changed(args: Any) -> dict[str, Any]:
    """Return the arguments that differ from their defaults."""
    values = {field.name: (getattr(args, field.name, None), field.default) for field in fields(args)}
    return {name: value for name, (value, default) in values.items() if repr(value) != repr(default)}


def _do_nothing(*_: Any, **__: Any) -> None:
    """Ignore an event."""


def _distributed() -> Any:
    """Return `torch.distributed` if several ranks run, else None."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def _wait_for_all() -> None:
    """Wait for all ranks."""
    distributed = _distributed()
    if distributed is not None:
        distributed.barrier()
