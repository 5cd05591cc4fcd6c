"""A report on runs, in three formats."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
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
        from ckstore.report.page import page

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
        from ckstore.report.markdown import markdown

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
