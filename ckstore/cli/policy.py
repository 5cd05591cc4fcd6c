"""`ckstore policy`: say how faithful the versions to come are to be, and what becomes of older ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ckstore.cli.options import policy_options
from ckstore.cli.output import counted, json_option, name_of, print_json, print_line, print_table, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import RunName, open_store, verb
from ckstore.errors import UsageError
from ckstore.policy import Fidelity, Policy, Retention, Scheme

if TYPE_CHECKING:
    from ckstore.operations.retain import RetainReport
    from ckstore.storage.rows import VersionRow
    from ckstore.store import Store


@verb(
    ("ckstore policy", "what is set for the store and for runs"),
    ("ckstore policy --fidelity coarse --quality 2", "all runs that have no policy of their own"),
    ("ckstore policy gpt --fidelity exact", "one run"),
    ("ckstore policy gpt --exact-last 3 --exact-every 1000 --keep-last 200", "what becomes of its older versions"),
    ("ckstore policy gpt --drop 'optimizer/*' --whole-last 3", "older versions lose their optimiser state"),
    ("ckstore policy gpt --keep-last 20 --dry-run", "what that would thin and forget now"),
    ("ckstore policy gpt --apply", "do now what is set; every ingest does so too"),
    ("ckstore policy --hot 0", "encode every version at once, the latest of a run too"),
    ("ckstore policy gpt --clear", "that run is as faithful as the store again"),
)
@click.argument("run", metavar="[RUN]", required=False, type=RunName())
@policy_options
@click.option(
    "--hot",
    metavar="N",
    type=click.IntRange(min=0),
    help="So many of a run's latest versions stay as they were written, at the speed of the disk.  [default: 1]",
)
@click.option(
    "--exact-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="So many of a run's latest versions stay exact; older ones become coarse.  [default: all stay as they are]",
)
@click.option(
    "--exact-every",
    metavar="STEPS",
    type=click.IntRange(min=1),
    help="Of the older ones, the first of every so many steps stays exact.",
)
@click.option(
    "--exact-best",
    metavar="METRIC:min|max",
    multiple=True,
    help="Of the older ones, the version with the least or largest value stays exact.",
)
@click.option(
    "--drop",
    metavar="GLOB",
    multiple=True,
    help="Older versions lose the tensors that match, for good.  [default: none]",
)
@click.option(
    "--whole-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="So many of a run's latest versions lose none.  [default: as many as stay exact]",
)
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="So many of a run's latest versions stay; older ones are forgotten.  [default: all stay]",
)
@click.option(
    "--keep-every",
    metavar="STEPS",
    type=click.IntRange(min=1),
    help="Of the older ones, the first of every so many steps stays.",
)
@click.option("--apply", is_flag=True, help="Drop, thin and forget now, and wait for it.")
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be dropped, thinned and forgotten now.")
@click.option("--clear", is_flag=True, help="Remove what was set.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str | None,
    fidelity: Fidelity | None,
    scheme: Scheme | None,
    quality: float | None,
    max_abs_error: float | None,
    max_rel_error: float | None,
    hot: int | None,
    exact_last: int | None,
    exact_every: int | None,
    exact_best: tuple[str, ...],
    drop: tuple[str, ...],
    whole_last: int | None,
    keep_last: int | None,
    keep_every: int | None,
    apply: bool,
    dry_run: bool,
    clear: bool,
    as_json: bool,
) -> None:
    """Show or set how faithful versions to come are, how many stay hot, and what becomes of older ones.

    What `ckstore ingest` says itself comes first, then what is set for RUN, then for the store; without any of them
    versions are exact, and all stay.

    Older versions become coarse as by `ckstore thin`, lose tensors, or are forgotten, after each ingest of their run,
    and garbage is collected where it is worth it. Versions that have a tag, that another run follows, or that are the
    best or the first of --exact-every stay as they are. --exact-last, --exact-every, --exact-best, --drop,
    --whole-last, --keep-last and --keep-every are set together: those that are not given are not set any more.

    --drop takes globs as in `ckstore ls`.
    """
    policy = Policy.asked(fidelity, scheme, quality, max_abs_error, max_rel_error)
    kept = (exact_last, exact_every, exact_best, keep_last, keep_every, drop, whole_last)
    said = any(kept)
    retention = Retention(*kept) if said else None
    sets = policy is not None or hot is not None or said
    if clear and (sets or apply or dry_run):
        raise UsageError("Give --clear by itself.")
    if dry_run:
        _foretell(ctx, run, retention, as_json)
        return
    if not (clear or sets or apply):
        _list(ctx, run, as_json)
        return
    with open_store(ctx, "a") as store:
        if clear or sets:
            before = store.policy(run)
            asked = replace(
                policy or before,
                hot=before.hot if hot is None else hot,
                retention=before.retention if retention is None else retention,
            )
            store.set_policy(None if clear else asked, run)
        if apply:
            _apply(store, run, as_json)
            return
        present = store.policy(run)
    of = "the store" if run is None else f"run {run}"
    if as_json:
        print_json([_object(run or "", present)])
    else:
        print_line(f"Versions to come of {of}: {present}. Older ones: {present.retention}.")


def _list(ctx: click.Context, run: str | None, as_json: bool) -> None:
    with open_store(ctx) as store:
        known = {name: Policy.from_text(text) for name, text in store.catalog.policies().items()}
        if run is not None:
            known = {run: store.policy(run)}
    if run is None:
        known.setdefault("", Policy())
    if as_json:
        print_json([_object(name, policy) for name, policy in sorted(known.items())])
        return
    print_table(
        ["run", "versions to come", "older ones"],
        [(name or "(all others)", str(policy), str(policy.retention)) for name, policy in sorted(known.items())],
    )


def _foretell(ctx: click.Context, run: str | None, retention: Retention | None, as_json: bool) -> None:
    from ckstore.operations.retain import expected

    with open_store(ctx) as store:
        if run is not None:
            store.versions(run)  # It says where there is no such run.
        report = expected(store.repository, run, retention)
    _print_report(report, as_json, dry_run=True)


def _apply(store: Store, run: str | None, as_json: bool) -> None:
    if run is not None:
        store.versions(run)  # It says where there is no such run.
    total = sum(row.original_bytes for row in store.retain(run, dry_run=True).thinned)
    with progress_bar("thin", total, shown=not as_json) as progress:
        report = store.retain(run, progress=progress)
    _print_report(report, as_json, dry_run=False)


def _print_report(report: RetainReport, as_json: bool, *, dry_run: bool) -> None:
    if as_json:
        said = {name: _names(getattr(report, name)) for name in ("forgotten", "thinned", "dropped")}
        print_json([{**said, "freed": report.freed, "dry_run": dry_run}])
        return
    for row in report.forgotten:
        print_line(f"{name_of(row)} (version {row.number})  forgotten")
    for row in report.dropped:
        print_line(f"{name_of(row)} (version {row.number})  without {', '.join(row.dropped)}")
    for row in report.thinned:
        print_line(f"{name_of(row)} (version {row.number})  coarse")
    if not (report.forgotten or report.dropped or report.thinned or report.freed):
        print_line("Nothing to do: every version is as its policy says.")
        return
    did = ("Would forget", "thin", "drop") if dry_run else ("Forgot", "thinned", "dropped")
    counts = f"{did[0]} {counted(len(report.forgotten), 'version')}, {did[1]} {len(report.thinned)}"
    if report.dropped:
        counts += f", {did[2]} tensors of {len(report.dropped)}"
    print_line(f"{counts}." if dry_run else f"{counts}; freed {size_text(report.freed)}.")


def _names(rows: list[VersionRow]) -> list[dict[str, object]]:
    return [{"version": row.number, "run": row.run, "step": row.step} for row in rows]


def _object(run: str, policy: Policy) -> dict[str, object]:
    said = {"scheme": policy.scheme, **policy.parameters()} if policy.is_coarse else {}
    kept = {"retention": policy.retention.to_json()} if policy.retention else {}
    return {"run": run or None, "fidelity": policy.fidelity, "hot": policy.kept_hot, **said, **kept}
