"""Draws the lineage of versions in columns of text, newest first, as git draws commits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def drawn(versions: Iterable[tuple[int, int | None]]) -> Iterator[tuple[int | None, str]]:
    """Yield rows of a graph: the number of a version, or None for a row of lines alone, and the text.

    Parameters
    ----------
    versions
        Number and parent of each version, newest first. A line ends at a version whose parent does not follow.

    Examples
    --------
    >>> for number, text in drawn([(4, 2), (3, 2), (2, 1), (1, None)]):
    ...     print(text, number or "")
    * 4
    | * 3
    |/
    * 2
    * 1
    """
    rows = list(versions)
    left = {number for number, _ in rows}
    lanes: list[int | None] = []
    ended = -1
    for number, parent in rows:
        left.discard(number)
        mine = [lane for lane, awaited in enumerate(lanes) if awaited == number]
        if not mine:  # A column that ended in the row above would look like a line to this version.
            free = [lane for lane, awaited in enumerate(lanes) if awaited is None and lane != ended]
            mine = [*free, len(lanes)][:1]
            lanes += [None] * (mine[0] + 1 - len(lanes))
        first = mine[0]
        for lane in mine[:0:-1]:
            yield None, _joined(lanes, first, lane)
            lanes[lane] = None
        text = ["*" if lane == first else " " if awaited is None else "|" for lane, awaited in enumerate(lanes)]
        yield number, " ".join(text).rstrip()
        lanes[first] = parent if parent in left else None
        ended = first if lanes[first] is None else -1


def _joined(lanes: list[int | None], first: int, lane: int) -> str:
    """Return a row in which a column's line moves to the first column of the same version."""
    text = [character for awaited in lanes for character in (" " if awaited is None else "|", " ")]
    text[2 * lane] = " "
    text[2 * lane - 1] = "/"
    for place in range(2 * first + 1, 2 * lane - 1):
        text[place] = "_" if text[place] == " " else text[place]
    return "".join(text).rstrip()
