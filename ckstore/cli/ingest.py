"""`ckstore ingest`: store checkpoints as versions of a run."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.executors import executor_of, executor_option
from ckstore.cli.options import policy_of, policy_options
from ckstore.cli.output import counted, json_option, print_json, print_line, print_table
from ckstore.cli.progress import progress_bar
from ckstore.cli.storing import AUTO, NOT_REMOVED, Done, Failed, amounts_text, line_of, store_input, store_plan, tend
from ckstore.cli.verb import RunName, TagName, VersionName, open_store, verb, version_of
from ckstore.errors import PartialError, UsageError
from ckstore.policy import Fidelity, Scheme
from ckstore.table import version_record

if TYPE_CHECKING:
    from ckstore.scanning.folder import Proposed
    from ckstore.scanning.steps import Planned, StepSource
    from ckstore.store import Store
    from ckstore.writing.request import IngestOptions


def _metrics(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not name or not separator:
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE", ctx, parameter)
        metrics[name] = _number(text)
    return metrics


def _number(text: str) -> int | float | str:
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        number = float(text)
        # JSON has no infinities and no NaN: they stay text.
        if abs(number) < float("inf"):
            return number
    return text


def _part(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return float(value[:-1]) / 100 if value.endswith("%") else float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number such as 0.005 or 0.5%", ctx, parameter) from None


@verb(
    ("ckstore ingest runs/gpt/step*.pt --run gpt", "store a series of files, by step"),
    ("ckstore ingest old/*.pth.tar --run old --step-from name --dry-run", "preview the steps"),
    ("ckstore ingest OLD --recursive --dry-run --plan plan.csv", "preview the runs and steps in a folder, as CSV"),
    ("ckstore ingest --plan plan.csv", "store the edited plan"),
    ("ckstore ingest --plan plan.csv --executor processes=8", "store several runs in parallel"),
    ("ckstore ingest checkpoint-500 --run lora", "store a Hugging Face directory as one version"),
    ("ckstore ingest last.pt --run gpt --step 400 --tag best --metric loss=2.31", "set step, tag and metric"),
    ("ckstore ingest fork.pt --run gpt-b --parent gpt@400", "fork a run from another run's version"),
    ("ckstore ingest old/*.pt --run old --verify --delete-source", "move files into the store"),
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
@click.argument("paths", metavar="PATH...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--run", metavar="NAME", type=RunName(), help="Run of the versions.  [default: main]")
@click.option(
    "--step",
    metavar="N",
    type=int,
    help="Step of the version, for a single PATH.  [default: the step in the file or its name]",
)
@click.option(
    "--step-from",
    type=click.Choice(["name", "content", "order"]),
    help="Source of steps: numbers in names, values in files, or the order of names after the run's highest step.  "
    "[default: contents if they differ, else names]",
)
@click.option(
    "--recursive",
    is_flag=True,
    help="Scan a folder; group checkpoints into runs and steps.",
)
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan of --recursive --dry-run as CSV, or store the plan in FILE.",
)
@click.option("--dry-run", is_flag=True, help="Print the step of each PATH; store nothing.")
@click.option(
    "--parent",
    metavar="VERSION",
    type=VersionName(),
    help="Parent of the first version, or `auto` for the nearest stored version.  [default: the run's last]",
)
@click.option("--tag", metavar="NAME", type=TagName(), help="Tag the version; of several, the last.")
@click.option(
    "--metric",
    "metrics",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_metrics,
    help="Add a metric, for a single PATH.",
)
@click.option("--replace", is_flag=True, help="Replace the version at the same run and step.")
@click.option("--verify", is_flag=True, help="Decode and compare each version before it becomes visible.")
@click.option("--delete-source", is_flag=True, help="Delete each PATH once it is stored and verified; needs --verify.")
@click.option("--force", is_flag=True, help="Store damaged files as opaque bytes instead of refusing them.")
@click.option(
    "--budget",
    metavar="X",
    type=click.FloatRange(min=1.0),
    help="Maximal restore cost, as a multiple of restoring a full copy; larger takes fewer bytes.  [default: 2]",
)
@policy_options
@click.option(
    "--max-degradation",
    metavar="X",
    callback=_part,
    help="Use the smallest lossy setting whose --eval is at most X worse.  [default: 5%]",
)
@click.option(
    "--eval",
    "evaluation",
    metavar="COMMAND",
    help="Command that prints a loss last; {} is the path of a checkpoint. It runs without a shell.",
)
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(min=1),
    help="Number of parallel evaluations.  [default: 1]",
)
@click.option("--maximise", is_flag=True, help="Higher --eval output is better, as for an accuracy.")
@executor_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    paths: tuple[Path, ...],
    run: str | None,
    step: int | None,
    step_from: StepSource | None,
    recursive: bool,
    plan_file: Path | None,
    dry_run: bool,
    parent: str | None,
    tag: str | None,
    metrics: dict[str, Any],
    replace: bool,
    verify: bool,
    delete_source: bool,
    force: bool,
    budget: float | None,
    fidelity: Fidelity | None,
    scheme: Scheme | None,
    quality: float | None,
    max_abs_error: float | None,
    max_rel_error: float | None,
    max_degradation: float | None,
    evaluation: str | None,
    maximise: bool,
    jobs: int | None,
    executor: str | None,
    as_json: bool,
) -> None:
    """Store checkpoints as versions of a run.

    Each PATH, a file or a directory, becomes one version. Files of torch, safetensors, NumPy, Keras, flax and llama.cpp
    are stored with their tensors, any other file as opaque bytes. Several PATHs are stored by step: the step in the
    contents if it differs among them, else the number that differs among the names. PATHs without a step come last, by
    name. If one fails, the others are still stored.
    """
    from ckstore.cli.evaluation import search_of
    from ckstore.scanning.steps import Planned
    from ckstore.writing.request import IngestOptions

    folder = recursive or plan_file is not None
    if not paths and (recursive or not folder):
        raise UsageError("Name the checkpoints to store, files or directories.")
    if folder and (step is not None or any((run, step_from, parent, tag, metrics))):
        raise UsageError(
            "A folder has runs and steps of its own: leave --run, --step, --parent, --tag and --metric out."
        )
    if plan_file is not None and bool(paths) != (recursive and dry_run):
        raise UsageError("--plan FILE stores the plan in the file; with a folder, --recursive --dry-run writes it.")
    if executor is not None and not folder:
        raise UsageError("--executor stores several runs in parallel: name them with --recursive or --plan.")
    if step is not None and len(paths) > 1:
        raise UsageError("--step is for a single PATH; let the files or their names tell their steps.")
    if step is not None and step_from is not None:
        raise UsageError("--step sets the step; leave --step-from out.")
    if metrics and len(paths) > 1:
        raise UsageError("--metric is for a single PATH; ingest each input with its own metrics.")
    if delete_source and not verify:
        raise UsageError("--delete-source needs --verify, which first proves that everything can be restored.")
    policy = policy_of(fidelity, scheme, quality, max_abs_error, max_rel_error)
    if evaluation is None and (max_degradation is not None or maximise or jobs is not None):
        raise UsageError("--max-degradation, --maximise and --jobs are for a search; give its evaluation with --eval.")
    if evaluation is not None and fidelity == "exact":
        raise UsageError("--eval searches for a coarse setting; leave --fidelity exact out.")
    is_coarse = evaluation is not None or (policy is not None and policy.is_coarse)
    if is_coarse and delete_source:
        raise UsageError(NOT_REMOVED)
    options = IngestOptions(
        run=run,
        metrics=metrics,
        replace=replace,
        verify=verify,
        force=force,
        budget=budget,
        policy=policy,
        search=None if evaluation is None else search_of(evaluation, max_degradation, maximise=maximise, jobs=jobs),
        # The latest of many files is seldom resumed from at once: encode it with the others.
        hot=0 if folder or len(paths) > 1 else None,
    )
    done: list[Done] = []
    failed: list[Failed] = []
    with open_store(ctx, "r" if dry_run else "a") as store:
        if folder:
            proposed = _proposed(paths, plan_file, recursive=recursive, force=force)
            if dry_run:
                _show_proposed(proposed, plan_file, as_json=as_json)
                return
            _store_folder(ctx, store, proposed, options, delete_source, executor, as_json=as_json)
            return
        if len(paths) == 1 and step_from is None and not dry_run:  # The ingest reads a single file's step itself.
            planned = [Planned(paths[0], step, None)]
        else:
            planned = _planned(store, paths, run, step, step_from, force=force)
        if dry_run:
            _print_plan(store, planned, run, as_json=as_json)
            return
        if delete_source and policy is None and store.policy(run).is_coarse:
            raise UsageError(f"{NOT_REMOVED} Add --fidelity exact: the policy is coarse.")
        if parent not in (None, AUTO):
            version_of(store, parent)
        if tag is not None:
            _check_tag(store, tag, run)
        try:
            for item in planned:
                after = parent if parent == AUTO or not done else None
                chosen = dataclasses.replace(options, parent=after, step=item.step)
                outcome = store_input(store, item.path, chosen, delete_source, shown=not as_json)
                if isinstance(outcome, Failed):
                    failed.append(outcome)
                    print_line(f"ckstore: {outcome.message}", err=True)
                    continue
                done.append(outcome)
                if not as_json:
                    print_line(line_of(outcome))
            if tag is not None and done:
                store.tag(done[-1].version.row.number, tag)
            tend(store, {item.version.row.run for item in done})
        finally:
            if as_json:
                print_json([*(_object(store, item) for item in done), *(_failure(item) for item in failed)])
            elif len(done) > 1:
                print_line(_summary(done))
    if failed:
        _finish(ctx, len(paths), failed)


def _planned(
    store: Store, paths: tuple[Path, ...], run: str | None, step: int | None, source: StepSource | None, *, force: bool
) -> list[Planned]:
    """Return the inputs in the order of their steps."""
    from ckstore.commit.naming import DEFAULT_RUN
    from ckstore.scanning.steps import Planned, plan_steps

    if step is not None:
        return [Planned(paths[0], step, None)]
    steps = _steps_there(store, run or DEFAULT_RUN) if source == "order" else {}
    return plan_steps(paths, source, first=max(steps, default=-1) + 1, force=force)


def _steps_there(store: Store, run: str) -> dict[int, int]:
    """Return the numbers of a run's versions by step; empty for a new run."""
    if all(row.name != run for row in store.catalog.runs()):
        return {}
    return {row.step: row.number for row in store.catalog.versions(run) if row.step is not None}


def _print_plan(store: Store, planned: list[Planned], run: str | None, *, as_json: bool) -> None:
    from ckstore.commit.naming import DEFAULT_RUN

    name = run or DEFAULT_RUN
    there = _steps_there(store, name)
    taken: dict[int, Path] = {}
    rows = []
    for item in planned:
        note = ""
        if item.step is not None and item.step in there:
            note = f"version {there[item.step]} is there"
        elif item.step is not None and item.step in taken:
            note = f"as {taken[item.step].name}"
        if item.step is not None:
            taken.setdefault(item.step, item.path)
        rows.append((str(item.path), name, item.step, item.source, note))
    if as_json:
        print_json([dict(zip(("source", "run", "step", "step_from", "note"), row, strict=True)) for row in rows])
    else:
        shown = [(path, f"{name}@{'-' if at is None else at}", by or "", note) for path, _, at, by, note in rows]
        print_table(("INPUT", "VERSION", "STEP FROM", "NOTE"), shown)


def _check_tag(store: Store, tag: str, run: str | None) -> None:
    from ckstore.commit.naming import DEFAULT_RUN, check_tag_is_no_run

    check_tag_is_no_run(store.catalog, tag, run or DEFAULT_RUN)


def _proposed(paths: tuple[Path, ...], plan_file: Path | None, *, recursive: bool, force: bool) -> list[Proposed]:
    from ckstore.cli.folder_plan import read_plan
    from ckstore.scanning.folder import propose

    if not recursive:
        assert plan_file is not None, "one of both is given"
        return read_plan(plan_file)
    return propose(paths, force=force)


def _show_proposed(proposed: list[Proposed], plan_file: Path | None, *, as_json: bool) -> None:
    from ckstore.cli.folder_plan import print_plan, write_plan

    if plan_file is not None:
        write_plan(plan_file, proposed)
    if as_json:
        print_json(
            [{"path": str(item.path), "run": item.run, "step": item.step, "note": item.note} for item in proposed]
        )
    else:
        print_plan(proposed)


def _store_folder(
    ctx: click.Context,
    store: Store,
    proposed: list[Proposed],
    options: IngestOptions,
    delete: bool,
    executor: str | None,
    *,
    as_json: bool,
) -> None:
    """Store the versions of a plan with one progress bar, and print the outcome for each file."""
    from ckstore.scanning.source import tree_size

    chosen = [item for item in proposed if item.run]
    _check_runs(store, {item.run for item in chosen}, options, delete)
    sizes = sum(tree_size(item.path) for item in chosen if item.path.exists())
    done: list[Done] = []
    failed: list[Failed] = []
    try:
        with (
            progress_bar("folder", (3 if options.verify else 2) * sizes, shown=not as_json) as bar,
            executor_of(executor) as workers,
        ):
            for outcome in store_plan(store, chosen, options, delete, bar, workers):
                if isinstance(outcome, Failed):
                    failed.append(outcome)
                else:
                    done.append(outcome)
                if not as_json:
                    said = line_of(outcome) if isinstance(outcome, Done) else f"{outcome.path} -> {outcome.message}"
                    print_line(said)
        store.catalog.refresh()
        tend(store, {item.version.row.run for item in done})
        if not as_json:
            for item in proposed:
                if not item.run:
                    print_line(f"{item.path} left out: {item.note}")
    finally:
        if as_json:
            print_json([*(_object(store, item) for item in done), *(_failure(item) for item in failed)])
        elif done:
            print_line(_summary(done))
    if failed:
        _finish(ctx, len(chosen), failed)


def _check_runs(store: Store, runs: set[str], options: IngestOptions, delete: bool) -> None:
    """Raise `UsageError`, before anything is stored, for a run whose policy contradicts the options."""
    from ckstore.commit.naming import check_run, check_run_is_no_tag

    for run in sorted(runs):
        check_run(run)
        check_run_is_no_tag(store.catalog, run)
        if delete and options.policy is None and store.policy(run).is_coarse:
            raise UsageError(f"{NOT_REMOVED} Add --fidelity exact: the policy is coarse.")


def _finish(ctx: click.Context, count: int, failed: list[Failed]) -> None:
    if len(failed) < count:
        raise PartialError(f"{len(failed)} of {count} inputs could not be stored; the others were.")
    codes = {item.exit_code for item in failed}
    ctx.exit(codes.pop() if len(codes) == 1 else 1)


def _summary(done: list[Done]) -> str:
    fresh = [item for item in done if item.is_new]
    original = sum(item.version.row.original_bytes for item in done)
    stored = sum(item.version.row.stored_bytes for item in fresh)
    unchanged = f" ({len(done) - len(fresh)} unchanged)" if len(fresh) < len(done) else ""
    amounts = amounts_text(original, stored, sum(item.seconds for item in done))
    return f"{counted(len(done), 'version')}{unchanged}  {amounts}"


def _object(store: Store, item: Done) -> dict[str, Any]:
    number = item.version.row.number
    tags = [tag for tag, tagged in store.catalog.tags().items() if tagged == number]
    return {
        **version_record(item.version.row, tags),
        "source": str(item.path),
        "new": item.is_new,
        "seconds": round(item.seconds, 6),
    }


def _failure(item: Failed) -> dict[str, Any]:
    return {"source": str(item.path), "error": item.message, "kind": item.kind, "exit_code": item.exit_code}
