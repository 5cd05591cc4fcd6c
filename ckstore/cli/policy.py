"""`ckstore policy`: say how faithful the versions to come are to be."""

from __future__ import annotations

from dataclasses import replace

import click

from ckstore.cli.options import policy_options
from ckstore.cli.output import json_option, print_json, print_table
from ckstore.cli.verb import RunName, open_store, verb
from ckstore.errors import UsageError
from ckstore.policy import Fidelity, Policy, Scheme


@verb(
    ("ckstore policy", "what is set for the store and for runs"),
    ("ckstore policy --fidelity coarse --quality 2", "all runs that have no policy of their own"),
    ("ckstore policy --run gpt --fidelity exact", "one run"),
    ("ckstore policy --hot 0", "encode every version at once, the latest of a run too"),
    ("ckstore policy --run gpt --clear", "that run is as faithful as the store again"),
)
@click.option("--run", metavar="RUN", type=RunName(), help="Of this run.  [default: of the store]")
@policy_options
@click.option(
    "--hot",
    metavar="N",
    type=click.IntRange(min=0),
    help="So many of a run's latest versions stay as they were written, at the speed of the disk.  [default: 1]",
)
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
    clear: bool,
    as_json: bool,
) -> None:
    """Show or set how faithful versions to come are, and how many stay hot.

    What `ckstore ingest` says itself comes first, then what is set for the run, then for the store; without any of
    them versions are exact. Versions that are stored already stay as they are: see `ckstore thin`.
    """
    policy = Policy.asked(fidelity, scheme, quality, max_abs_error, max_rel_error)
    if clear and (policy is not None or hot is not None):
        raise UsageError("Give a policy, or --clear, not both.")
    if not clear and policy is None and hot is None:
        _list(ctx, run, as_json)
        return
    with open_store(ctx, "a") as store:
        if not clear:
            before = store.policy(run)
            policy = replace(policy or before, hot=before.hot if hot is None else hot)
        store.set_policy(policy, run)
        present = store.policy(run)
    of = "the store" if run is None else f"run {run}"
    if as_json:
        print_json([_object(run or "", present)])
    else:
        click.echo(f"Versions to come of {of}: {present}.")


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
        ["run", "versions to come"], [(name or "(all others)", str(policy)) for name, policy in sorted(known.items())]
    )


def _object(run: str, policy: Policy) -> dict[str, object]:
    said = {"scheme": policy.scheme, **policy.parameters()} if policy.is_coarse else {}
    return {"run": run or None, "fidelity": policy.fidelity, "hot": policy.kept_hot, **said}
