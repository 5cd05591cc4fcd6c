"""Sizes of series of checkpoints in ckstore and with its peers, under the same bound on restoring them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.bench import ours as ours_of
from tools.bench import series as all_series
from tools.bench.chains import PeerSeries, Sizes
from tools.bench.ours import Ours
from tools.bench.peers import PEERS
from tools.bench.series import Series


@dataclass(frozen=True)
class Row:
    """One series: ckstore, and every peer by name."""

    series: str
    versions: int
    original: int
    ours: Ours | None
    peers: dict[str, Sizes]

    def best(self, size: Callable[[Sizes], int]) -> tuple[str, int]:
        """Return the peer that is smallest by `size`, and its bytes."""
        name = min(self.peers, key=lambda peer: size(self.peers[peer]))
        return name, size(self.peers[name])


def measure(series: Series, work: Path, limit: float | None) -> Row:
    """Measure a series; `limit` bounds the peers' chains instead of ckstore's own factor, and leaves ckstore out."""
    ours = ours_of.measure(series, work) if limit is None else None
    bound = max(1.0, ours.factor) if ours is not None else limit or 1.0
    peers = {peer.name: PeerSeries(peer, series, work / "restored").sizes(bound) for peer in PEERS}
    (work / "restored").unlink(missing_ok=True)
    return Row(series.name, len(series.versions), series.nbytes, ours, peers)


def markdown(rows: list[Row]) -> str:
    """Return the tables: ckstore against the best peers, every peer, ckstore by cause, ckstore against the entropy."""
    parts = [_table(["series", "versions", "original", *(peer.name for peer in PEERS)], map(_peer_cells, rows))]
    parts.append("Peers: pairs / chains (a full version every N versions). Pairs have no bound on restoring.")
    mine = [(row, row.ours) for row in rows if row.ours is not None]
    if mine:
        head = [
            "series",
            "original",
            "ckstore",
            "deepest",
            "factor",
            "predicted",
            "best chain",
            "against it",
            "best pair",
            "against it",
        ]
        head += ["later versions", "best later pair", "against it", "later versions, no bound", "against it"]
        causes = list(dict.fromkeys(cause for _, ours in mine for cause in ours.ledger))
        by_cause = ([row.series, *(f"{ours.ledger.get(cause, 0):,}" for cause in causes)] for row, ours in mine)
        parts = [
            _table(head, (_our_cells(row, ours) for row, ours in mine)),
            "Factor: time to restore the deepest version over that of a full one, measured and predicted; measured, it "
            "bounds the chains. No bound: ckstore with an unlimited restore budget, as the pairs have.",
            *parts,
            _table(["series", *causes], by_cause),
        ]
        bounds = (
            [row.series, f"{o.coded:,}", f"{o.entropy:,}", f"{o.coded / max(1, o.entropy) - 1:+.2%}"] for row, o in mine
        )
        parts.append(_table(["series", "coded", "order-0 entropy", "above it"], bounds))
    return "\n\n".join(parts)


def _our_cells(row: Row, ours: Ours) -> list[str]:
    chain, pair, later = row.best(lambda s: s.chains), row.best(lambda s: s.pairs), row.best(lambda s: s.later)
    cells = [row.series, f"{row.original:,}", _bytes(ours.total, row.original), str(ours.depth)]
    cells += [f"{ours.factor:.2f}", f"{ours.predicted:.2f}"]
    for (name, size), own in ((chain, ours.total), (pair, ours.total)):
        cells += [f"{name} {_bytes(size, row.original)}", f"{own / size - 1:+.1%}"]
    cells += [f"{ours.later:,}", f"{later[0]} {later[1]:,}", f"{ours.later / max(1, later[1]) - 1:+.1%}"]
    return [*cells, f"{ours.unbounded_later:,}", f"{ours.unbounded_later / max(1, later[1]) - 1:+.1%}"]


def _peer_cells(row: Row) -> list[str]:
    cells = [row.series, str(row.versions), f"{row.original:,}"]
    for sizes in row.peers.values():
        chains = f" / {_bytes(sizes.chains, row.original)} ({sizes.period})" if sizes.chains != sizes.pairs else ""
        cells.append(_bytes(sizes.pairs, row.original) + chains)
    return cells


def _bytes(nbytes: int, original: int) -> str:
    return f"{nbytes:,} {original / nbytes:.2f}x"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables for the series named on the command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/size", description=__doc__)
    names = [*all_series.TRAINED, *all_series.PUBLIC]
    parser.add_argument("--series", action="append", default=[], choices=names, help="repeatable (default: all)")
    parser.add_argument("--data", type=Path, help="public checkpoints (default: $CKSTORE_TEST_DATA or ../shared/data)")
    parser.add_argument("--work", type=Path, default=all_series.REPOSITORY / ".cache", help="keeps the trained runs")
    parser.add_argument("--tier", default="small", choices=["tiny", "small"], help="size of the trained runs")
    parser.add_argument("--peers-within", type=float, metavar="FACTOR", help="peers only, chains within this factor")
    parser.add_argument("--json", action="store_true", help="print a list of objects, one a series")
    chosen = parser.parse_args(arguments)

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    chosen.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for series in all_series.find(chosen.series, chosen.data, chosen.work, tier=chosen.tier, report=report):
        report(f"{series.name}: {len(series.versions)} versions, {series.nbytes:,} bytes")
        rows.append(measure(series, chosen.work, chosen.peers_within))
    print(json.dumps([asdict(row) for row in rows], indent=1) if chosen.json else markdown(rows))


if __name__ == "__main__":
    main()
