"""accelerate: save the state of an Accelerator into a store, and load it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckstore.integrations.lineage import ingest_next, lineage_of
from ckstore.integrations.names import found, read_sound
from ckstore.integrations.torch import check_files

if TYPE_CHECKING:
    from ckstore.store import Store
    from ckstore.writing.ingest import IngestReport
    from ckstore.writing.tuning import Search


def save_state(
    accelerator: Any,
    store: Store,
    *,
    run: str,
    step: int,
    metrics: Mapping[str, Any] | None = None,
    config: Any = None,
    replace: bool = False,
    search: Search | None = None,
    gradients: Mapping[str, Any] | None = None,
    **options: Any,
) -> IngestReport | None:
    """Store the output of `Accelerator.save_state` as a version; all ranks call this.

    After `load_state` of an earlier version of the run, later versions are kept as superseded ones.

    Parameters
    ----------
    accelerator
        The `accelerate.Accelerator`.
    store
        A writable store. accelerate writes a temporary directory next to it, on a file system that every rank shares;
        it is removed once the version is durable. With `automatic_checkpoint_naming`, accelerate chooses the directory
        and it stays.
    run, step
        Run and step of the version. accelerate's files contain no step.
    metrics, config, replace, search, gradients
        As for `Store.ingest`. Paths of gradients begin with the file's, as from
        ``GradientAccumulator({"model.safetensors": model}, ...)``.
    **options
        As for `Accelerator.save_state`.

    Returns
    -------
    IngestReport or None
        A report in the main process; None in the others.

    Raises
    ------
    ConflictError
        The run has another version at that step, and `replace` is not set.
    """
    run = store._checked_run(run)
    is_named = accelerator.project_configuration.automatic_checkpoint_naming
    # Reuses a name that a killed process has left.
    place = store.path.with_name(f"{store.path.name}.{quote(run, safe='')}.unfinished")
    if accelerator.is_main_process and not is_named:
        shutil.rmtree(place, ignore_errors=True)
    accelerator.wait_for_everyone()
    written = Path(accelerator.save_state(None if is_named else str(place), **options))
    accelerator.wait_for_everyone()
    report = None
    try:
        if accelerator.is_main_process:
            report = ingest_next(
                store, written, run=run, step=step, metrics=dict(metrics or {}), config=config, replace=replace,
                search=search,
                gradients=gradients,
            )  # fmt: skip
    finally:
        if accelerator.is_main_process and not is_named:
            shutil.rmtree(place, ignore_errors=True)
    accelerator.wait_for_everyone()
    return report


def load_state(accelerator: Any, store: Store, name: str, **options: Any) -> int | None:
    """Load a version as `Accelerator.load_state` loads a directory; all ranks call this.

    If the latest version is damaged, a warning says so, and the newest sound one before it is loaded. A single process
    compares models and optimisers with the version, and warns if they differ.

    Parameters
    ----------
    accelerator
        The `accelerate.Accelerator`, with the same objects prepared as when the state was saved.
    store
        The store. The main process of each machine writes a temporary directory below the machine's directory for
        temporary files, and removes it.
    name
        The version, such as `acc@latest` or `acc@500`.
    **options
        As for `Accelerator.load_state`.

    Returns
    -------
    int or None
        The version's step; None if `name` is `RUN@latest` and the run has no versions. Nothing is loaded then.

    Raises
    ------
    NotFoundError
        No such version exists.
    """
    from accelerate.utils import broadcast_object_list

    (token,) = broadcast_object_list([secrets.token_hex(8)])
    version = found(store, name)
    if version is None:
        return None
    machine = accelerator.process_index - accelerator.local_process_index
    place = Path(gettempdir(), f"ckstore-{token}-{machine}")
    try:
        if accelerator.is_local_main_process:
            version, _ = read_sound(store, name, lambda sound: sound.checkout(place))
        accelerator.wait_for_everyone()
        accelerator.load_state(os.fspath(place), **options)
        lineage_of(store).note(store, version)
        if accelerator.num_processes == 1:
            check_files(version, _parts(accelerator))
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_local_main_process:
            shutil.rmtree(place, ignore_errors=True)
    (step,) = broadcast_object_list([version.step])
    return step  # type: ignore[no-any-return]


def _parts(accelerator: Any) -> dict[str, Any]:
    """Return models and optimizers by their files."""
    found: dict[str, Any] = {}
    for number, model in enumerate(accelerator._models):
        found[f"model{f'_{number}' if number else ''}.safetensors"] = accelerator.unwrap_model(model)
    for number, optimizer in enumerate(accelerator._optimizers):
        found[f"optimizer{f'_{number}' if number else ''}.bin"] = optimizer.optimizer
    return found
