"""`ckstore ingest`: store checkpoints as versions of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.executors import executor_of, executor_option
from ckstore.cli.options import STEP_SOURCES, ingest_options, options_of
from ckstore.cli.outcomes import outcome_object, print_outcome, print_summary, warnings_printed
from ckstore.cli.output import counted, json_option, name_of, print_json, print_line, print_table
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import TagName, exit_for_failures, open_store, option, tags_of, verb, version_of, with_options
from ckstore.errors import InputError, UsageError

if TYPE_CHECKING:
    from ckstore.intake.intake import Ingested
    from ckstore.scanning.steps import Planned, StepSource
    from ckstore.store import Store
    from ckstore.writing.request import IngestOptions


@verb(
    ("ckstore ingest runs/gpt/step*.pt --run gpt", "store a series of files, by step"),
    ("ckstore ingest old/*.pth.tar --run old --step-from name --dry-run", "preview the steps"),
    ("ckstore ingest OLD --recursive --dry-run", "preview the runs and steps in a folder"),
    ("ckstore ingest OLD --recursive --executor processes=8", "store the runs of a folder in parallel"),
    ("ckstore ingest checkpoint-500 --run lora", "store a Hugging Face directory as one version"),
    ("ckstore ingest last.pt --run gpt --step 400 --tag best --metric loss=2.31", "set step, tag and metric"),
    ("ckstore ingest fork.pt --run gpt-b --parent gpt@400", "fork a run from another run's version"),
    ("ckstore ingest old/*.pt --run old --delete-source", "move files into the store"),
    (
        "ckstore ingest run/*.pt --run gpt --fidelity coarse",
        "lossy: a tenth of the bytes or less",
    ),
    (
        "ckstore ingest run/*.pt --max-degradation 0.5% --eval 'python eval.py {}'",
        "as coarse as an evaluation allows",
    ),
    exit_codes=[3, 12, 13],
)
@click.argument("paths", metavar="PATH...", nargs=-1, type=click.Path(path_type=Path, readable=False))
@ingest_options
@option(
    "--step-from",
    "Source of steps: numbers in names, values in files, or the order of names after the run's highest step.  "
    "[default: contents if they differ, else names]",
    type=click.Choice(STEP_SOURCES),
)
@option("--recursive", "Scan a folder; group checkpoints into runs and steps.")
@option("--dry-run", "Print the step of each PATH; store nothing.")
@option("--tag NAME", "Tag the version; of several, the last.", type=TagName())
@option("--delete-source", "Delete each input once its version is compared with it, if the policy keeps that whole.")
@executor_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    paths: tuple[Path, ...],
    step_from: StepSource | None,
    recursive: bool,
    dry_run: bool,
    tag: str | None,
    delete_source: bool,
    executor: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Store checkpoints as versions of a run.

    Each PATH, a file or a directory, becomes one version. Files of torch, safetensors, NumPy, Keras, flax and llama.cpp
    are stored tensor by tensor, any other file as opaque bytes. Several PATHs are stored in order of step (see
    --step-from), PATHs without a step last, by name. If one fails, the others are still stored.

    Numbers such as val_loss in a checkpoint, or val_loss=2.5 in its name, become metrics of its version; --metric adds
    others.
    """
    options = options_of(given)
    _check(paths, options, step_from, tag, executor, recursive=recursive)
    if dry_run:
        with open_store(ctx) as store:
            planned = (
                _folder_plan(store, paths, force=options.force)
                if recursive
                else store.plan(paths, run=options.run, step_from=step_from, force=options.force)
            )
        _show_plan(planned, as_json=as_json)
        refused = [InputError(item.note) for item in planned if item.refused]
        count = sum(bool(item.run) or item.refused for item in planned)
        exit_for_failures(ctx, refused, count, "inputs", "planned")
        return
    from ckstore.intake.intake import bytes_of
    from ckstore.scanning.steps import Planned

    outcomes: list[Ingested] = []

    def each(item: Ingested) -> None:
        outcomes.append(item)
        if not as_json and (item.version is not None or not recursive):
            print_outcome(item)

    with warnings_printed(), open_store(ctx, "a") as store:
        if options.parent not in (None, "auto"):
            version_of(store, str(options.parent))
        inputs = _folder_plan(store, paths, force=options.force) if recursive else paths
        planned = [item if isinstance(item, Planned) else Planned(item, run="*") for item in inputs]
        name = paths[0].name if len(paths) == 1 else f"{len(planned)} inputs"
        try:
            with (
                progress_bar(name, bytes_of(planned, options), shown=not as_json) as progress,
                executor_of(executor) as workers,
            ):
                store.ingest_many(
                    inputs, options, step_from=step_from, tag=tag, delete_source=delete_source, executor=workers,
                    progress=progress, each=each,
                )  # fmt: skip
        finally:
            if as_json:
                tags = tags_of(store)
                ordered = sorted(outcomes, key=lambda item: item.version is None)
                print_json([outcome_object(item, tags) for item in ordered])
            else:
                _print_rest(planned, outcomes, recursive=recursive)
    exit_for_failures(ctx, [item.error for item in outcomes if item.error], len(outcomes), "inputs", "stored")


def _check(
    paths: Sequence[Path],
    options: IngestOptions,
    step_from: StepSource | None,
    tag: str | None,
    executor: str | None,
    *,
    recursive: bool,
) -> None:
    """Raise `UsageError` for options that exclude each other."""
    if not paths:
        raise UsageError("Name the checkpoints to store, files or directories.")
    if recursive and (
        options.step is not None
        or any((options.run, step_from, options.parent, tag, options.metrics, options.gradients))
    ):
        raise UsageError(
            "A folder has runs and steps of its own: leave --run, --step, --parent, --tag, --metric, --gradients out."
        )
    if executor is not None and not recursive:
        raise UsageError("--executor stores the runs of a folder in parallel: give --recursive, or leave it out.")
    if options.step is not None and step_from is not None:
        raise UsageError("--step sets the step; leave --step-from out.")


def _print_rest(planned: Sequence[Planned], outcomes: Sequence[Ingested], *, recursive: bool) -> None:
    """Print the inputs that were left out, the totals, and last the failures of a folder."""
    for left in (item for item in planned if not item.run and not item.refused):
        print_line(f"{left.path} left out: {left.note}")
    stored = {str(item.path): item.version for item in outcomes}
    for named in (item for item in planned if item.tags):
        if (row := stored.get(str(named.path))) is not None:
            print_line(f"{name_of(row)} is tagged {', '.join(named.tags)}.")
    if sum(item.version is not None for item in outcomes) > 1 or (recursive and outcomes):
        print_summary(outcomes)
    for failed in (item for item in outcomes if recursive and item.version is None):
        print_outcome(failed)


def _folder_plan(store: Store, paths: tuple[Path, ...], *, force: bool) -> list[Planned]:
    """Return the plan of folders, with options in the notes."""
    return [replace(item, note=with_options(item.note)) for item in store.plan(paths, recursive=True, force=force)]


def _show_plan(planned: Sequence[Planned], *, as_json: bool) -> None:
    from ckstore.intake.intake import with_path

    if as_json:
        print_json([
            {"path": str(item.path), "run": item.run, "step": item.step, "step_from": item.step_from,
             "tags": list(item.tags), "note": item.note}
            for item in planned
        ])  # fmt: skip
        return
    rows = [
        (
            item.path,
            item.run and f"{item.run}@{'-' if item.step is None else item.step}",
            item.step_from or "",
            "refused" if item.refused else item.note or ", ".join(f"tag {name}" for name in item.tags),
        )
        for item in planned
    ]
    print_table(("INPUT", "VERSION", "STEP FROM", "NOTE"), rows)
    _print_totals(planned)
    for item in planned:
        if item.refused:
            print_line(f"ckstore: {with_path(item.path, with_options(item.note))}", err=True)


def _print_totals(planned: Sequence[Planned]) -> None:
    """Print the numbers of versions, runs and inputs that are left out."""
    stored = [item for item in planned if item.run and not item.refused]
    runs = {item.run for item in stored}
    left = sum(not item.run for item in planned)
    without = f", {counted(left, 'file')} left out" if left else ""
    print_line(f"{counted(len(stored), 'version')} of {counted(len(runs), 'run')}{without}")
