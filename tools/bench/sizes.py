"""Sizes of series of checkpoints in ckstore and with its peers, under the same bound on restoring them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tools import runs
from tools.bench import ours as ours_of
from tools.bench import series as all_series
from tools.bench.chains import PeerSeries, Sizes
from tools.bench.moonclips import Moonclip
from tools.bench.ours import Ours
from tools.bench.peers import PEERS
from tools.bench.series import Series, load
from tools.bench.speed_figures import table


@dataclass(frozen=True)
class Row:
    """One series: ckstore, every peer by name, and moonclip's bytes, None if it cannot keep the series."""

    series: str
    versions: int
    original: int
    ours: Ours
    peers: dict[str, Sizes]
    moonclip: int | None

    def best(self, size: Callable[[Sizes], int]) -> tuple[str, int]:
        """Return the peer that is smallest by `size`, and its bytes."""
        name = min(self.peers, key=lambda peer: size(self.peers[peer]))
        return name, size(self.peers[name])


def measure(series: Series, work: Path) -> Row:
    """Measure a series; ckstore's factor bounds the peers' chains."""
    ours = ours_of.measure(series, work)
    peers = {peer.name: PeerSeries(peer, series, work / "restored").sizes(max(1.0, ours.factor)) for peer in PEERS}
    (work / "restored").unlink(missing_ok=True)
    return Row(series.name, len(series.versions), series.nbytes, ours, peers, _moonclip(series, work))


def _moonclip(series: Series, work: Path) -> int | None:
    """Return the bytes of all versions in moonclip's directory."""
    first = series.versions[0]
    if not (first.is_file() and Moonclip.takes(load(first))):
        return None
    with TemporaryDirectory(dir=work) as directory:
        kept = Moonclip(Path(directory), len(series.versions))
        for step, path in enumerate(series.versions):
            state: dict[str, Any] = load(path)
            kept.save(state, step)
        model, _ = Moonclip(Path(directory), len(series.versions)).resume(state["model"], state["optimizer"])
        for name, tensor in state["model"].items():
            if not torch.equal(tensor, model[name]):
                raise AssertionError(f"moonclip does not restore {name} of {series.name}")
        return kept.nbytes


def markdown(rows: list[Row]) -> str:
    """Return the tables: ckstore against the best peers, its later versions, every peer, and ckstore by cause."""
    head = ["series", "original", "ckstore", "best other, chains", "best other, pairs", "factor"]
    later = ["series", "later versions", "best pair", "against it", "without a bound", "against it"]
    causes = list(dict.fromkeys(cause for row in rows for cause in row.ours.ledger))
    by_cause = ([row.series, *(f"{row.ours.ledger.get(cause, 0):,}" for cause in causes)] for row in rows)
    return "\n\n".join([
        table([*head, "above order-0 entropy"], map(_our_cells, rows)),
        "Factor: time to restore the deepest version over that of a full one, measured, which bounds the chains, and "
        "predicted. Pairs have no bound.",
        table(later, map(_later_cells, rows)),
        table(["series", "versions", "original", *(peer.name for peer in PEERS), "moonclip"], map(_peer_cells, rows)),
        "Peers: pairs / chains (a full version every N versions). moonclip: its directory of all versions.",
        table(["series", *causes], by_cause),
    ])  # fmt: skip


def _our_cells(row: Row) -> list[str]:
    ours = row.ours
    best = [row.best(lambda sizes: sizes.chains), row.best(lambda sizes: sizes.pairs)]
    return [
        row.series, f"{row.original:,}", _bytes(ours.total, row.original),
        *(f"{name} {_bytes(size, row.original)}" for name, size in best), f"{ours.factor:.2f} / {ours.predicted:.2f}",
        f"{ours.coded / max(1, ours.entropy) - 1:+.2%}",
    ]  # fmt: skip


def _later_cells(row: Row) -> list[str]:
    name, best = row.best(lambda sizes: sizes.later)
    own, free = row.ours.later, row.ours.unbounded_later
    against = [f"{size / max(1, best) - 1:+.1%}" for size in (own, free)]
    return [row.series, f"{own:,}", f"{name} {best:,}", against[0], f"{free:,}", against[1]]


def _peer_cells(row: Row) -> list[str]:
    cells = [row.series, str(row.versions), f"{row.original:,}"]
    for sizes in row.peers.values():
        chains = f" / {_bytes(sizes.chains, row.original)} ({sizes.period})" if sizes.chains != sizes.pairs else ""
        cells.append(_bytes(sizes.pairs, row.original) + chains)
    return [*cells, "" if row.moonclip is None else _bytes(row.moonclip, row.original)]


def _bytes(nbytes: int, original: int) -> str:
    return f"{nbytes:,} {original / nbytes:.2f}x"


def main(arguments: list[str] | None = None) -> None:
    """Print the tables for the series named on the command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/size", description=__doc__)
    names = [*runs.RUNS, *all_series.PUBLIC]
    parser.add_argument(
        "--series", action="append", default=[], choices=names, help="repeatable (default: published ones)"
    )
    parser.add_argument("--data", type=Path, help="public checkpoints (default: $CKSTORE_TEST_DATA or ../shared/data)")
    parser.add_argument("--work", type=Path, default=all_series.REPOSITORY / ".cache", help="keeps the trained runs")
    parser.add_argument("--tier", default="small", choices=["tiny", "small"], help="size of the trained runs")
    chosen = parser.parse_args(arguments)

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    chosen.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for series in all_series.find(chosen.series, chosen.data, chosen.work, tier=chosen.tier, report=report):
        report(f"{series.name}: {len(series.versions)} versions, {series.nbytes:,} bytes")
        rows.append(measure(series, chosen.work))
    print(markdown(rows))


if __name__ == "__main__":
    main()
