"""The contents of a report: the one form that the page, Markdown and scripts read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import numpy as np

from ckstore.errors import CkstoreError, NotFoundError
from ckstore.gc.collect import expected
from ckstore.report.findings import Finding
from ckstore.report.measures import MEASURES, QUANTILES, edges
from ckstore.report.statistics import RunStatistics
from ckstore.repository import Repository
from ckstore.runtime.provenance import RESERVED, own_metrics


def contents(
    repository: Repository, runs: Mapping[str, tuple[RunStatistics, Sequence[Finding]]], metric: str | None
) -> dict[str, Any]:
    """Return the contents of a report.

    Parameters
    ----------
    runs
        Statistics and findings by the name of the run.
    metric
        The metric to show first; by default the first one with numbers.

    Raises
    ------
    NotFoundError
        No version has numbers under the name of the metric.
    """
    measured = [measure for measure in MEASURES.values() if any(_has(run, measure.key) for run, _ in runs.values())]
    return {
        "title": ", ".join(runs) or "no runs",
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "ckstore": metadata.version("ckstore"),
        "store": repository.address.place,
        "metric": _metric((run for run, _ in runs.values()), metric),
        "measures": [
            {"key": measure.key, "label": measure.label, "about": measure.about, "scale": measure.scale,
             "group": measure.group}
            for measure in measured
        ],
        "freeable": _freeable(repository),
        "runs": [
            _run(repository, name, run, found, [measure.key for measure in measured])
            for name, (run, found) in runs.items()
        ],
        "lineage": [
            {"version": row.number, "run": row.run, "parent": row.parent} for row in repository.catalog.versions()
        ],
    }  # fmt: skip


def _has(run: RunStatistics, key: str) -> bool:
    return not np.isnan(run.values[key]).all() if run.values[key].size else False


def _metric(runs: Iterable[RunStatistics], chosen: str | None) -> str | None:
    names = dict.fromkeys(
        name
        for run in runs
        for version in run.versions
        for name, value in version.row.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
    if chosen is not None and chosen not in names:
        raise NotFoundError(f"No version has numbers under {chosen}; there are {', '.join(names) or 'no metrics'}.")
    return chosen or next(iter(names), None)


def _run(
    repository: Repository, name: str, run: RunStatistics, found: Sequence[Finding], keys: Sequence[str]
) -> dict[str, Any]:
    tags: dict[int, list[str]] = {}
    for tag, number in repository.catalog.tags().items():
        tags.setdefault(number, []).append(tag)
    rows = [version.row for version in run.versions]
    return {
        "name": name,
        "versions": [
            {
                "number": row.number, "step": row.step, "created": row.created, "bytes": row.original_bytes,
                "stored": row.stored_bytes, "cost": row.cost,
                "kind": "hot" if row.hot else "base" if row.base else "delta", "fidelity": row.fidelity,
                "tags": tags.get(row.number, []), "metrics": _plain(row.metrics), "parent": row.parent,
                **{name: _origin(row.metrics.get(name)) for name in RESERVED},
            }
            for row in rows
        ],
        "tensors": [
            {"path": tensor.path, "dtype": tensor.dtype, "shape": list(tensor.shape), "elements": tensor.elements,
             "sampled": tensor.sampled, "role": tensor.role}
            for tensor in run.tensors
        ],
        "values": {key: run.values[key] for key in keys},
        "histograms": [
            {"tensor": number, "edges": edges(float(run.values["rms"][number, run.tensors[number].first])).tolist(),
             # A cache, which is untrusted, may hold any numbers.
             "counts": np.clip(np.nan_to_num(counts, posinf=0, neginf=0), 0, QUANTILES).astype(int).tolist()}
            for number, counts in run.histograms.items()
        ],
        "findings": [asdict(finding) for finding in found],
        "sizes": {
            "files": sum(row.original_bytes for row in rows),
            "stored": sum(row.stored_bytes for row in rows),
        },
    }  # fmt: skip


def _origin(values: Any) -> Any:
    """Return the origin or the configuration of a version as JSON; a store may hold any value."""
    return json.loads(json.dumps(values if isinstance(values, dict) else {}), parse_constant=str)


def _plain(metrics: Mapping[str, Any]) -> Any:
    """Return metrics with NaN and infinities, which JSON lacks, as text."""
    return json.loads(json.dumps(own_metrics(metrics)), parse_constant=str)


def _freeable(repository: Repository) -> int:
    """Return the bytes of the whole store that a `gc` would free; 0 where damage prevents one."""
    with suppress(CkstoreError):
        return expected(repository).bytes
    return 0
