"""`ckstore policy`: show or set fidelity and retention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.options import Last, Periods, Size, policy_of, policy_options, search_of, search_options
from ckstore.cli.outcomes import warnings_printed
from ckstore.cli.output import counted, json_option, name_of, print_json, print_line, print_table, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import RunName, open_store, option, verb
from ckstore.errors import UsageError
from ckstore.policy import Policy, Retention

if TYPE_CHECKING:
    from ckstore.retention.retain import RetainReport
    from ckstore.storage.rows import VersionRow
    from ckstore.store import Store


@verb(
    ("ckstore policy", "show all policies"),
    ("ckstore policy --fidelity coarse --quality 2", "set the policy of runs without their own"),
    ("ckstore policy gpt --fidelity exact", "set the policy of a run"),
    ("ckstore policy gpt --max-rework 2 --eval 'python eval.py {}'", "find the quality on the last version of a run"),
    ("ckstore policy gpt --exact-last 3 --exact-every 1000 --keep-last 200", "thin and forget older versions"),
    ("ckstore policy gpt --drop 'optimizer/*' --whole-last 3", "drop the optimiser state of older versions"),
    ("ckstore policy gpt --keep-last 20 --dry-run", "preview a policy"),
    ("ckstore policy gpt --apply", "apply the policy now; every ingest does so too"),
    ("ckstore policy --max-bytes 50GB --dry-run", "preview a limit for the store: the versions that would go first"),
    ("ckstore policy --hot 0", "encode every version at ingest"),
    ("ckstore policy gpt --clear", "remove the policy of a run"),
)
@click.argument("run", metavar="[RUN]", required=False, type=RunName())
@policy_options
@search_options
@option("--hot N", "Keep the latest N versions unencoded.  [default: 1]", type=click.IntRange(min=0))
@option(
    "--exact-last N",
    "Keep the latest N versions exact; thin older ones.  [default: keep all]",
    type=click.IntRange(min=1),
)
@option(
    "--exact-every STEPS",
    "Also keep the first version of each STEPS steps exact; needs --exact-last or --whole-last.",
    type=click.IntRange(min=1),
)
@option("--exact-best METRIC:min|max", "Also keep the version with the lowest or highest METRIC exact.", multiple=True)
@option(
    "--drop GLOB",
    "Drop matching tensors of older versions, for good: other tensors stay exact, the original files cannot be"
    " restored. Needs --whole-last or --exact-last.",
    multiple=True,
)
@option(
    "--whole-last N",
    "Drop no tensors of the latest N versions.  [default: the N of --exact-last]",
    type=click.IntRange(min=1),
)
@option(
    "--keep-last N",
    "Keep the latest N versions, or the last 30d, say; forget older ones.  [default: keep all]",
    type=Last(),
)
@option(
    "--keep-every STEPS",
    "Also keep the first version of each STEPS steps, or of each 1d, say, or of the last 24 hours and 7 days:"
    " 1h:24,1d:7; needs --keep-last.",
    type=Periods(),
)
@option(
    "--max-bytes SIZE",
    "Of the store, without RUN: forget the oldest versions of all runs while it takes more than SIZE, such as 10GB.",
    type=Size(),
)
@option("--apply", "Apply the policy now.")
@option("--dry-run", "Change nothing; list the versions to drop from, thin and forget.")
@option("--clear", "Remove the policy.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: str | None,
    hot: int | None,
    apply: bool,
    dry_run: bool,
    clear: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Show or set fidelity and retention of a run, or of the store.

    A new version follows the options of its ingest, else the policy of its RUN, else the store's, else it is exact.
    Every ingest of the run applies its policy to older versions, even if it stores nothing new. `ckstore gc` runs by
    itself once a tenth of the bytes can be freed. The latest N are the versions with the N highest steps, and the N
    that were ingested last.

    Policies never change tagged versions, versions that another run continues, and the best. --keep-last forgets
    versions that --exact-every keeps exact, unless --keep-every keeps them. The retention options (--exact-*, --keep-*,
    --drop, --whole-last) are set together: setting some removes the others. --drop takes globs as in `ckstore ls`.
    """
    policy, search = policy_of(given), search_of(given)
    if search is not None and policy is None:
        policy = Policy("coarse")
    said = any(given.values())
    retention = Retention(**given) if said else None
    sets = policy is not None or hot is not None or said
    if clear and (sets or apply or dry_run):
        raise UsageError("--clear takes no other options.")
    if run is not None and given["max_bytes"] is not None:
        raise UsageError("--max-bytes limits the store; leave RUN out.")
    if dry_run:
        _preview(ctx, run, retention, as_json)
        return
    if not (clear or sets or apply):
        _list(ctx, run, as_json)
        return
    with warnings_printed(), open_store(ctx, "a") as store:
        if clear or sets:
            before = store.policy(run)
            asked = replace(
                policy or before,
                hot=before.hot if hot is None else hot,
                retention=before.retention if retention is None else retention,
            )
            store.set_policy(None if clear else asked, run, search=search)
        if apply:
            _apply(store, run, as_json)
            return
        present = store.policy(run)
    of = "the store" if run is None else f"run {run}"
    if as_json:
        print_json([_object(run or "", present)])
    else:
        print_line(f"New versions of {of}: {present}. Older versions: {present.retention}.")


def _list(ctx: click.Context, run: str | None, as_json: bool) -> None:
    with open_store(ctx) as store:
        known = store.policies() if run is None else {run: store.policy(run)}
    if run is None:
        known.setdefault("", Policy())
    if as_json:
        print_json([_object(name, policy) for name, policy in sorted(known.items())])
        return
    print_table(
        ["run", "new versions", "older versions"],
        [(name or "(all others)", str(policy), str(policy.retention)) for name, policy in sorted(known.items())],
    )


def _preview(ctx: click.Context, run: str | None, retention: Retention | None, as_json: bool) -> None:
    with open_store(ctx) as store:
        report = store.retain(run, retention=retention, dry_run=True)
    _print_report(report, as_json, dry_run=True)


def _apply(store: Store, run: str | None, as_json: bool) -> None:
    total = sum(row.original_bytes for row in store.retain(run, dry_run=True).thinned)
    with progress_bar("thin", total, shown=not as_json) as progress:
        report = store.retain(run, progress=progress)
    _print_report(report, as_json, dry_run=False)


def _print_report(report: RetainReport, as_json: bool, *, dry_run: bool) -> None:
    if as_json:
        said = {name: _names(getattr(report, name)) for name in ("forgotten", "thinned", "dropped", "tagged")}
        print_json([{**said, "freed": report.freed, "dry_run": dry_run}])
        return
    for row in report.forgotten:
        print_line(f"{name_of(row)} (version {row.number})  forgotten")
    for row in report.dropped:
        print_line(f"{name_of(row)} (version {row.number})  without {', '.join(row.dropped)}")
    for row in report.thinned:
        print_line(f"{name_of(row)} (version {row.number})  coarse")
    for row in report.tagged:
        print_line(f"{name_of(row)} (version {row.number})  stays: it is tagged")
    if not (report.forgotten or report.dropped or report.thinned or report.freed):
        print_line("Nothing to do: all versions comply with their policies.")
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
