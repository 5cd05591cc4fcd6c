"""Contents of reports on runs that never were, for tests of the page."""

from __future__ import annotations

from typing import Any

import numpy as np

MEASURES = [
    ("change", "relative change", "log", "weights"),
    ("ratio", "update-to-weight ratio", "log", "weights"),
    ("rms", "root mean square", "log", "weights"),
    ("distance", "distance from the start", "log", "weights"),
    ("unchanged", "unchanged elements", "linear", "weights"),
    ("nonfinite", "NaN or infinite", "linear", "weights"),
    ("rank", "effective rank", "linear", "weights"),
    ("spectral", "spectral norm", "linear", "weights"),
    ("v_low", "second moments, 1 %", "log", "optimiser"),
    ("v_high", "second moments, 99 %", "log", "optimiser"),
    ("m_over_sqrt_v", "|m| / sqrt(v)", "log", "optimiser"),
    ("deviation", "error of coarse values", "log", "storage"),
    ("bits", "bits an element", "linear", "storage"),
]

#: Measures that only some tensors have.
CHOSEN = ("rank", "spectral")
MOMENTS = ("v_low", "v_high", "m_over_sqrt_v")

BINS = 48


def contents(names: tuple[str, ...] = ("gpt",), tensors: int = 24, versions: int = 12) -> dict[str, Any]:
    """Return contents as a report has them: weights, and moments of a third of the tensors each."""
    runs = [_run(name, tensors, versions, seed) for seed, name in enumerate(names)]
    numbers = [
        {"version": row["number"] + 1000 * place, "run": run["name"],
         "parent": row["parent"] and row["parent"] + 1000 * place}
        for place, run in enumerate(runs)
        for row in run["versions"]
    ]  # fmt: skip
    for place in range(1, len(runs)):  # Later runs are forks of the first.
        for entry in numbers[place * versions : place * versions + 1]:
            entry["parent"] = min(place * 3, versions)
    return {
        "title": ", ".join(names), "created": "2026-11-25T11:30:00Z", "ckstore": "0.1.0", "store": "runs",
        "metric": "val_loss" if versions else None,
        "measures": [
            {"key": key, "label": label, "about": f"About {label}.", "scale": scale, "group": group}
            for key, label, scale, group in MEASURES
        ],
        "runs": runs,
        "freeable": 300_000,
        "lineage": numbers,
    }  # fmt: skip


def _run(name: str, tensors: int, versions: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    steps = [100 * (place + 1) for place in range(versions)]
    listed = [_tensor(place) for place in range(tensors)]
    decay = np.linspace(0, -3, versions)
    values = {}
    for key, _, scale, _ in MEASURES:
        found = random.normal(0, 0.25, (tensors, versions)) + random.normal(0, 0.6, (tensors, 1)) + decay
        found = np.exp(found) * 1e-2 if scale == "log" else 1 / (1 + np.exp(found))
        if key in CHOSEN:
            found[6:] = np.nan
        if key in MOMENTS:
            found[[tensor["role"] != "second moment" for tensor in listed]] = np.nan
        if key in ("change", "ratio", "unchanged"):
            found[:, :1] = np.nan
        values[key] = found.astype("<f4")
    loss = 2 * np.exp(-np.arange(versions) / 5) + 0.4 + random.normal(0, 0.02, versions)
    if versions > 4:
        loss[4] = 400.0
    return {
        "name": name,
        "versions": [
            {
                "number": place + 1, "step": step, "created": "2026-11-25T11:00:00Z", "bytes": 4_000_000,
                "stored": 4_000_000 if place % 8 == 0 else 1_200_000 - 20_000 * place, "cost": 1 + 0.3 * (place % 8),
                "kind": "delta" if place % 8 else "base", "fidelity": "exact", "tags": ["best"] if place == 2 else [],
                "metrics": {"val_loss": float(loss[place]), "accuracy": 1 - 0.4 ** (place / 4), "note": "NaN"},
                "parent": place or None,
            }
            for place, step in enumerate(steps)
        ],
        "tensors": listed,
        "values": values,
        "histograms": [_histogram(place, versions, random) for place in range(min(6, tensors))],
        "findings": [],
        "sizes": {"files": 4_000_000 * versions, "stored": 1_500_000 * versions},
    }  # fmt: skip


def _tensor(place: int) -> dict[str, Any]:
    role = ("weight", "first moment", "second moment")[place % 3]
    part = ("attention.query_key_value.weight", "attention.dense.weight", "mlp.up.weight", "mlp.down.bias")[
        place // 3 % 4
    ]
    path = f"{'model' if role == 'weight' else 'optimizer/state'}/transformer.h.{place // 12}.{part}"
    path += {"weight": "", "first moment": "/exp_avg", "second moment": "/exp_avg_sq"}[role]
    sampled = 0.25 if place == 3 else None
    return {
        "path": path,
        "dtype": "float32",
        "shape": [768, 256],
        "elements": 768 * 256,
        "sampled": sampled,
        "role": role,
    }


def _histogram(tensor: int, versions: int, random: np.random.Generator) -> dict[str, Any]:
    edges = np.linspace(-6, 6, BINS + 1)
    counts = [
        np.histogram(random.normal(0.05 * place, 1 + place / 20, 3000), edges)[0].tolist() for place in range(versions)
    ]
    return {"tensor": tensor, "edges": edges.tolist(), "counts": counts}


def finding(text: str, severity: str = "warning", tensor: int | None = None) -> dict[str, Any]:
    """Return a finding."""
    return {"kind": "frozen", "severity": severity, "text": text, "tensor": tensor, "first": 0, "last": 1}
