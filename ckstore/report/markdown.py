"""A report as Markdown, for a pull request: findings, sizes, versions, and the tensors that moved most."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

#: Versions and tensors in the tables.
_VERSIONS = 12
_TENSORS = 10
#: Settings of a configuration in a sentence.
_SETTINGS = 8

#: The columns of the table of tensors.
_COLUMNS = ("change", "ratio", "rms", "distance")


def markdown(contents: dict[str, Any]) -> str:
    """Return the contents of a report as Markdown."""
    lines = [f"# {_text(contents['title'])}", ""]
    for run in contents["runs"]:
        lines += _run(run, contents["metric"])
    return "\n".join(lines).rstrip() + "\n"


def _run(run: dict[str, Any], metric: str | None) -> Iterator[str]:
    versions, sizes, values = run["versions"], run["sizes"], run["values"]
    yield f"## {_text(run['name'])}"
    yield ""
    yield (
        f"{len(versions)} versions of {len(run['tensors'])} tensors; {sizes['files'] / 1e6:.3g} MB stored in "
        f"{sizes['stored'] / 1e6:.3g} MB."
    )
    yield from _origin(versions[-1] if versions else {})
    yield ""
    yield from [f"* **{item['severity']}**: {_text(item['text'])}" for item in run["findings"]] or [
        "Nothing odd found."
    ]
    yield ""
    yield from _version_table(versions, run["tensors"], values, metric)
    yield from _tensor_table(run["tensors"], values)


def _origin(version: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence on the commit and the configuration of a version, if it has one."""
    made, config = version.get("made") or {}, version.get("config") or {}
    said = []
    if commit := made.get("commit"):
        said.append(f"commit {_text(str(commit)[:12])}{', with changes' if made.get('dirty') else ''}")
    if config:
        shown = [f"{name} {value}" for name, value in list(config.items())[:_SETTINGS]]
        said.append(_text(", ".join(shown)) + (", …" if len(config) > _SETTINGS else ""))
    if said:
        yield ""
        yield f"The last version was made by {'; '.join(said)}."


def _version_table(
    versions: Sequence[dict[str, Any]], tensors: Sequence[dict[str, Any]], values: dict[str, Any], metric: str | None
) -> Iterator[str]:
    weights = [number for number, tensor in enumerate(tensors) if tensor["role"] == "weight"]
    places = range(len(versions))
    if len(versions) > _VERSIONS:
        places = sorted({round(place) for place in np.linspace(0, len(versions) - 1, _VERSIONS)})  # type: ignore[assignment]
        yield f"{_VERSIONS} of {len(versions)} versions:"
        yield ""
    yield from _head(["version", "step", _text(metric or "metric"), "median change", "stored MB"])
    for place in places:
        version = versions[place]
        change = values["change"][weights, place] if "change" in values else np.array([])
        known = change[np.isfinite(change)]
        yield _row([
            version["number"], version["step"], version["metrics"].get(metric) if metric else None,
            np.median(known) if known.size else None, version["stored"] / 1e6,
        ])  # fmt: skip
    yield ""


def _tensor_table(tensors: Sequence[dict[str, Any]], values: dict[str, Any]) -> Iterator[str]:
    if "distance" not in values:
        return
    weights = [number for number, tensor in enumerate(tensors) if tensor["role"] == "weight"]
    latest = {key: values[key][:, -1] for key in _COLUMNS if key in values}
    far = np.nan_to_num(latest["distance"], nan=-1.0)
    weights.sort(key=lambda number: -far[number])
    yield f"Weights that moved farthest, at the last version ({min(_TENSORS, len(weights))} of {len(weights)}):"
    yield ""
    yield from _head(["tensor", *latest, "sampled"])
    for number in weights[:_TENSORS]:
        sampled = tensors[number]["sampled"]
        share = None if sampled is None else f"{sampled:.1%}"
        yield _row([tensors[number]["path"], *(column[number] for column in latest.values()), share])
    yield ""


def _head(names: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{' --- |' * len(names)}"


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else _text(str(value))


def _text(text: str) -> str:
    """Escape a name, which is untrusted, so that it stays text."""
    return re.sub(r"([\\`*_\[\]<>|#&~!])", r"\\\1", "".join(c if c.isprintable() else "?" for c in text))
