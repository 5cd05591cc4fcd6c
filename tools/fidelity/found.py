"""Figures of `docs/schemes.md` as files: a row each, so that single rows can be measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Found:
    """Measured rows.

    Parameters
    ----------
    directory
        Created if absent; has a directory per part and a file per row.
    machine
        The description of the machine in each row.
    again
        Also measure existing rows again.
    report
        Called with a line on each measurement.
    named
        Measure only rows whose names contain one of these.
    """

    def __init__(
        self,
        directory: Path,
        *,
        machine: str,
        again: bool,
        report: Callable[[str], None],
        named: tuple[str, ...] = ("",),
    ) -> None:
        self.directory = directory
        self.machine = machine
        self.again = again
        self.report = report
        self.named = named

    def row(self, part: str, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a row and keep it, unless it exists or is not named."""
        if not any(text in name for text in self.named):
            return
        path = self.directory / part / f"{name.replace('/', '-')}.json"
        if self.again or not path.exists():
            self.report(f"{part}: {name}")
            row = {"name": name, "day": str(datetime.now(UTC).date()), "machine": self.machine} | measure()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".part").write_text(json.dumps(row))
            path.with_suffix(".part").rename(path)

    def rows(self, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part, by name."""
        return [json.loads(path.read_text()) for path in sorted((self.directory / part).glob("*.json"))]
