"""A report on runs, in three formats."""

from __future__ import annotations

import json
import os
import re
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from ckstore.errors import UsageError
from ckstore.reading.checkout import staged
from ckstore.reading.stored_version import StoredVersion
from ckstore.report.facts import contents
from ckstore.report.findings import Finding, findings
from ckstore.report.statistics import SAMPLE, statistics
from ckstore.repository import Repository

_SCRIPTS = ("uPlot.iife.min.js", "report.js")
_STYLES = ("uPlot.min.css", "report.css")

#: HTML ends a script at `</script` and changes how it reads one at `<!--`: JSON has another way to write these.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def page(contents: Mapping[str, Any]) -> str:
    """Return a report as one HTML document.

    Text of the store is in a block of JSON alone, from which the script writes it as text. The policy of the page
    forbids requests, scripts other than its own, and text as markup.

    Examples
    --------
    >>> document = page(store.report("gpt").contents)
    >>> document[:15], "://" in document.partition("<script>")[0]
    ('<!doctype html>', False)
    """
    data = json.dumps({**contents, "runs": [_compact(run) for run in contents["runs"]]}, allow_nan=False)
    styles, scripts = ([_asset(name) for name in names] for names in (_STYLES, _SCRIPTS))
    policy = "; ".join([
        "default-src 'none'", "base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'",
        f"style-src {_digests(*styles)}", f"script-src {_digests(*scripts)}",
    ])  # fmt: skip
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        "<title>ckstore report</title>",
        *(f"<style>{style}</style>" for style in styles),
        '</head>\n<body>\n<main id="report"><noscript>This report is drawn by a script.</noscript></main>',
        f'<script type="application/json" id="contents">{data.translate(_ESCAPES)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>\n</html>\n",
    ])  # fmt: skip


def _compact(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run with its measures as one text: deflated planes of bytes, all of the first byte, then the next.

    Numbers lose the last of their four bytes, rounded: five significant digits are more than the page shows.
    """
    values = np.concatenate([np.empty(0, np.float32), *(array.ravel() for array in run["values"].values())])
    rounded = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32)) + np.uint32(0x80)
    planes = rounded.astype("<u4").view(np.uint8).reshape(-1, 4).T[1:]
    packed = b64encode(zlib.compress(planes.tobytes(), 9)).decode()
    return {**run, "values": {"keys": list(run["values"]), "packed": packed}}


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digests(*texts: str) -> str:
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)


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


Format = Literal["html", "md", "json"]

_HEIGHT = 720


class Report:
    """A report on runs: findings, measures of tensors over versions, metrics and sizes. Made by `Store.report`.

    Attributes
    ----------
    findings
        The odd things in each run, by its name.
    contents
        All facts of the report as JSON-able values, except measures: arrays of float32, tensors x versions.

    Examples
    --------
    >>> report = store.report("gpt", metric="val_loss")
    >>> [finding.text for finding in report.findings["gpt"]]
    ['model/bias did not move from step 100 to step 300.']
    >>> [tensor["path"] for tensor in report.contents["runs"][0]["tensors"]]
    ['model/weight', 'model/bias']
    """

    def __init__(self, contents: dict[str, Any], findings: Mapping[str, Sequence[Finding]]) -> None:
        self.contents = contents
        self.findings = {name: list(found) for name, found in findings.items()}

    def __repr__(self) -> str:
        return f"<ckstore.Report {self.contents['title']}, {sum(map(len, self.findings.values()))} findings>"

    def to_html(self) -> str:
        """Return the report as one HTML document, which needs no other file.

        Examples
        --------
        >>> store.report("gpt").to_html()[:15].lower()
        '<!doctype html>'
        """
        return page(self.contents)

    def to_markdown(self) -> str:
        """Return a summary as Markdown, for a pull request.

        Examples
        --------
        >>> print(store.report("gpt").to_markdown()[:14])
        # gpt
        <BLANKLINE>
        ## gpt
        """
        return markdown(self.contents)

    def to_json(self) -> str:
        """Return the contents as JSON, with measures as lists: tensors of versions, null for no value.

        Examples
        --------
        >>> import json
        >>> [run] = json.loads(store.report("gpt").to_json())["runs"]
        >>> [round(value, 6) for value in run["values"]["change"][0][1:]]
        [0.000999, 0.000998]
        """
        runs = [run | {"values": {key: _listed(values) for key, values in run["values"].items()}}
                for run in self.contents["runs"]]  # fmt: skip
        return json.dumps(self.contents | {"runs": runs}, allow_nan=False)

    def save(self, path: str | os.PathLike[str], format: Format | None = None, *, force: bool = False) -> None:
        """Write the report to a file, by default in the format of its suffix: `.html`, `.md` or `.json`.

        Raises
        ------
        ConflictError
            The file exists without `force`.
        UsageError
            The format is unknown, or the directory does not exist.

        Examples
        --------
        >>> store.report("gpt").save("gpt.md")
        """
        makers = {"html": self.to_html, "md": self.to_markdown, "json": self.to_json}
        text = makers[format_of(path, format)]()
        with staged(Path(path), force=force) as made:
            made.write_text(text, encoding="utf-8", errors="backslashreplace")

    def _repr_html_(self) -> str:
        page = escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" style="border:0;width:100%;height:{_HEIGHT}px"></iframe>'


def format_of(path: str | os.PathLike[str], format: str | None = None) -> Format:
    """Return the format of a file: the given one, or that of its suffix; raise `UsageError` for an unknown one."""
    chosen = format or os.fspath(path).rpartition(".")[2].lower()
    for known in get_args(Format):
        if chosen == known:
            return cast("Format", known)
    raise UsageError(f"{chosen!r} is no format of a report; end the file's name with .html, .md or .json.")


def _listed(values: npt.NDArray[np.float32]) -> list[list[float | None]]:
    return [[float(f"{value:.7g}") if isfinite(value) else None for value in row] for row in values.tolist()]


def report(
    repository: Repository,
    runs: Mapping[str, Sequence[StoredVersion]],
    metric: str | None = None,
    globs: Sequence[str] = (),
    sample: int = SAMPLE,
) -> Report:
    """Return a report on runs, given as versions by name; see `Store.report`."""
    found = {name: statistics(versions, globs, sample=sample) for name, versions in runs.items()}
    odd = {name: findings(run) for name, run in found.items()}
    return Report(contents(repository, {name: (found[name], odd[name]) for name in found}, metric), odd)
