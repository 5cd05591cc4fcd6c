"""transformers: what a Trainer saves goes into a store, and comes back as the directory that it resumes from."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckstore.errors import ConflictError, UsageError

if TYPE_CHECKING:
    from ckstore.store import Store


class StoreCallback:
    """A `TrainerCallback`: each checkpoint directory becomes a version of a run once it is complete.

    What the Trainer has logged since the save before, such as `loss` and `eval_loss`, are the version's metrics. The
    process of rank 0 stores, when all have written their files.

    Parameters
    ----------
    store
        The store, open to be written to.
    run
        Name of the run. A training goes on in it from the step that it was resumed from: versions at later steps are
        replaced when these steps are saved again. One that begins, or was resumed from elsewhere, needs a run of its
        own.
    remove
        Remove each directory once its version is durable and was found to come back. With `load_best_model_at_end` the
        best one stays. By default directories are the Trainer's: its `save_total_limit` says how many stay, and those
        that it removes are in the store.
    """

    def __init__(self, store: Store, run: str, *, remove: bool = False) -> None:
        self.store = store
        self.run = run
        self.remove = remove
        self._last = 0
        self._stored: list[Path] = []

    def __repr__(self) -> str:
        return f"<ckstore.integrations.transformers.StoreCallback of {self.run}>"

    def __getattr__(self, event: str) -> Any:
        """Nothing is done at other events of a `TrainerCallback`."""
        if event.startswith("on_"):
            return _do_nothing
        raise AttributeError(f"{type(self).__name__} has no attribute {event}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take note where the training begins.

        Raises
        ------
        ConflictError
            The run has versions, and none at the step that was resumed from.
        """
        self._last = state.global_step
        catalog = self.store.catalog
        is_other = catalog.latest(self.run) is not None and catalog.at_step(self.run, self._last) is None
        if state.is_world_process_zero and is_other:
            raise ConflictError(
                f"Run {self.run} has versions of another training; resume it with `resume_path`, or give"
                " `StoreCallback` another run."
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Store the directory that was saved.

        Raises
        ------
        CkstoreError or OSError
            It could not be stored; it is as the Trainer left it.
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
        # What is at this step already follows the version that the training was resumed from.
        self.store.ingest(
            directory, run=self.run, step=state.global_step, metrics=metrics, replace=True, verify=self.remove
        )  # fmt: skip
        self._last = state.global_step
        if self.remove:
            best = state.best_model_checkpoint if args.load_best_model_at_end else None
            self._stored.append(directory)
            for stored in self._stored:
                if best is None or not stored.is_dir() or not os.path.samefile(stored, best):
                    shutil.rmtree(stored, ignore_errors=True)


def resume_path(store: Store, name: str, output_dir: str | os.PathLike[str]) -> str | None:
    """Write the directory of a version where the Trainer had it, for `resume_from_checkpoint`.

    All ranks call it; rank 0 writes.

    Parameters
    ----------
    store
        The store.
    name
        The version, such as `hf@latest` or `hf@500`.
    output_dir
        The Trainer's; `checkpoint-STEP` in it is made, or made again where it is there.

    Returns
    -------
    str or None
        The directory's path; None where `RUN@latest` names a run that has no version yet, and training begins.

    Raises
    ------
    NotFoundError
        There is no such version.
    UsageError
        There are several ranks, which `TrainingArguments` have not brought together yet.
    """
    run, _, step = name.rpartition("@")
    if step == "latest" and store.catalog.latest(run) is None:
        return None
    version = store[name]
    directory = Path(output_dir, f"checkpoint-{version.row.step}")
    distributed = _distributed()
    if distributed is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "The ranks do not know one another yet; call `resume_path` once there are `TrainingArguments`."
        )
    if distributed is None or distributed.get_rank() == 0:
        directory.parent.mkdir(parents=True, exist_ok=True)
        version.checkout(directory, force=True)
    _wait_for_all()
    return str(directory)


def _do_nothing(*_: Any, **__: Any) -> None:
    """An event that is of no concern."""


def _distributed() -> Any:
    """The module of torch for several ranks; None where there is one."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def _wait_for_all() -> None:
    """Wait until every rank has come here."""
    distributed = _distributed()
    if distributed is not None:
        distributed.barrier()
