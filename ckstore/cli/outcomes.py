"""The lines and objects with the outcomes of `ingest` and `watch`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckstore.cli.output import counted, name_of, print_line, ratio_text, size_text, speed_text
from ckstore.cli.verb import with_options
from ckstore.table import version_record

if TYPE_CHECKING:
    from ckstore.intake.intake import Ingested


@contextmanager
def warnings_printed() -> Iterator[None]:
    """Print the library's warnings, and the effects of policies, as lines on stderr."""
    logger, handler = logging.getLogger("ckstore"), logging.Handler()
    handler.emit = lambda record: print_line(f"ckstore: {record.getMessage()}", err=True)  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def print_outcome(item: Ingested) -> None:
    """Print the line of an outcome: a stored version on stdout, an error or a note on stderr."""
    if item.version is None:
        message = with_options(str(item.error)) if item.error else f"{item.path} is {with_options(item.note)}"
        print_line(f"ckstore: {message}", err=True)
        return
    name = f"{name_of(item.version)} -> version {item.version.number}"
    if item.is_new:
        print_line(f"{name}  {_amounts(item.version.original_bytes, item.version.stored_bytes, item.seconds)}")
    else:
        print_line(f"{name}  {size_text(item.version.original_bytes)}  unchanged")


def print_summary(items: Sequence[Ingested]) -> None:
    """Print the totals of several stored versions."""
    done = [(item.version, item) for item in items if item.version is not None]
    original = sum(row.original_bytes for row, _ in done)
    stored = sum(row.stored_bytes for row, item in done if item.is_new)
    same = sum(not item.is_new for _, item in done)
    unchanged = f" ({same} unchanged)" if same else ""
    amounts = _amounts(original, stored, sum(item.seconds for _, item in done))
    print_line(f"{counted(len(done), 'version')}{unchanged}  {amounts}")


def outcome_object(item: Ingested, tags: dict[int, list[str]]) -> dict[str, Any]:
    """Return an outcome for JSON; `tags` are the tags by number of version."""
    if item.version is None:
        error = item.error
        assert error is not None, "inputs are stored, or fail"
        message = with_options(str(error))
        return {"source": str(item.path), "error": message, "kind": error.kind, "exit_code": error.exit_code}
    return {
        **version_record(item.version, tags.get(item.version.number, [])),
        "source": str(item.path),
        "new": item.is_new,
        "seconds": round(item.seconds, 6),
        **({"note": item.note} if item.note else {}),
    }


def _amounts(original: int, stored: int, seconds: float) -> str:
    """Return original and stored bytes, their ratio, and the speed."""
    sizes = f"{size_text(original)} -> {size_text(stored)}  {ratio_text(original, stored)}"
    return f"{sizes}  {speed_text(original, seconds)}"
