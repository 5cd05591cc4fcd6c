"""`ckstore stats`: totals, and a ledger of every byte of the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import click

from ckstore.cli.output import (
    json_option,
    print_facts,
    print_held,
    print_json,
    print_kept,
    print_line,
    print_table,
    size_text,
)
from ckstore.cli.verb import open_store, option, verb
from ckstore.errors import CkstoreError

_LEDGER = "ledger"
#: Totals that are counts instead of bytes.
_COUNTS = frozenset({"versions", "runs", "tags", "packs", "objects", "tensors", "elements"})


@verb(
    ("ckstore stats", "print counts, bytes and ratio"),
    ("ckstore stats --ledger", "account for every byte"),
)
@option("--ledger", "List the bytes of all files of the store by cause.", name="with_ledger")
@json_option
@click.pass_context
def command(ctx: click.Context, with_ledger: bool, as_json: bool) -> None:
    """Print totals of the store."""
    with open_store(ctx) as store:
        stats = store.stats(ledger=with_ledger)
        totals = store._catalog.totals()
        garbage = None
        if not as_json and totals.bytes - totals.stored_bytes > stats["stored_bytes"] / 100:
            with suppress(CkstoreError):  # Damage prevents a `gc`.
                garbage = store.gc(dry_run=True)
    if as_json:
        print_json([stats])
        return
    facts = {name: value for name, value in stats.items() if name != _LEDGER}
    print_facts((name.replace("_", " "), _text(name, value)) for name, value in _flat(facts))
    if garbage is not None:
        print_held(stats["stored_bytes"], garbage.bytes, garbage.held)
        print_kept(garbage.kept, garbage.until)
    if with_ledger:
        ledger: Mapping[str, int] = stats[_LEDGER]
        total = sum(ledger.values())
        lines = [*ledger.items(), ("total", total)]
        print_line()
        print_table(
            ["cause", "size", "bytes", "share"],
            [(cause, size_text(size), f"{size:,}", _share(size, total)) for cause, size in lines if size],
            right=(1, 2, 3),
        )


def _share(size: int, total: int) -> str:
    return f"{100 * size / total:.1f} %" if total else "-"


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name == "ratio":
        return f"{value:.2f}x"
    return f"{value:,}" if name in _COUNTS else size_text(value)
