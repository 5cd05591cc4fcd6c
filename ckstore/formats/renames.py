"""Matches the tensors of two versions whose names moved: by the name without wrappers, then by suffix, dtype, shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ckstore.formats.layout import Path

#: Names that wrappers of models put before the names of tensors.
WRAPPERS = frozenset(
    {"_orig_mod", "module", "model", "base_model", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    | {"_forward_module", "ddp_module"}
)
#: Shifts of a list's numbers that are tried.
_SHIFTS = 64
#: Words of the longest common suffix: a stranger's names may have thousands.
LONGEST = 32


class Named(NamedTuple):
    """A tensor by name and form; `prefix` is that of its file in a directory.

    A state that an optimiser keeps by `number`, a path, has its parameter's name in `path`.
    """

    prefix: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    number: Path = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The parts of the path, without wrappers; names with dots have several."""
        words = [word for segment in self.path for word in str(segment).split(".")]
        return tuple(word for word in words[:-1] if word not in WRAPPERS) + tuple(words[-1:])


def matches(before: Sequence[Named], after: Sequence[Named], least: int = 1) -> dict[int, int]:
    """Return the number of the later tensor by that of the earlier one, for tensors that match.

    A tensor matches the one of its name, unless a list's numbers moved; then the one of its name without wrappers, in
    its file or in another; then the only one that has the longest suffix in common, at least `least` words of it, and
    dtype and shape; then the state of its number and form; then, if both versions have as many of one form whose names
    differ in numbers alone, the one at its place among them.
    """
    found = _moved_numbers(before, after)
    words = [[one.words for one in side] for side in (before, after)]

    def pair(key: Callable[[int, int], Hashable]) -> None:
        taken = set(found.values())
        left = _unique((key(0, number), number) for number in range(len(before)) if number not in found)
        right = _unique((key(1, number), number) for number in range(len(after)) if number not in taken)
        found.update((number, right[name]) for name, number in left.items() if name is not None and name in right)

    sides = before, after
    pair(lambda side, number: (sides[side][number].prefix, sides[side][number].path))
    pair(lambda side, number: (sides[side][number].prefix, words[side][number]))
    pair(lambda side, number: words[side][number])
    length = min(max(map(len, words[0]), default=0), LONGEST)

    def suffix(side: int, number: int) -> Hashable:
        form, name = sides[side][number][2:4], words[side][number]
        return (form, name[-length:]) if len(name) >= length else None

    def own(side: int, number: int) -> Hashable:
        one = sides[side][number]
        return (one.prefix, *one[2:]) if one.number else None

    while length >= least and len(found) < min(len(before), len(after)):
        pair(suffix)
        length -= 1
    pair(own)
    _in_order(before, after, words, found)
    return found


def _unique(items: Iterable[tuple[Hashable, int]]) -> dict[Hashable, int]:
    """Return the items whose key occurs once."""
    found: dict[Hashable, list[int]] = {}
    for key, number in items:
        found.setdefault(key, []).append(number)
    return {key: numbers[0] for key, numbers in found.items() if len(numbers) == 1}


def _in_order(
    before: Sequence[Named], after: Sequence[Named], words: Sequence[Sequence[tuple[str, ...]]], found: dict[int, int]
) -> None:
    """Match the rest, if it differs in numbers alone, in order, where both versions have as many."""
    taken = set(found.values())
    groups: tuple[dict[Hashable, list[int]], dict[Hashable, list[int]]] = {}, {}
    for side, (named, skipped) in enumerate(((before, found.keys()), (after, taken))):
        for number, one in enumerate(named):
            if number not in skipped:
                form: Hashable = one[2:4], tuple("" if word.isdigit() else word for word in words[side][number])
                groups[side].setdefault(form, []).append(number)
    for form, numbers in groups[0].items():
        others = groups[1].get(form, [])
        if len(numbers) == len(others):
            found.update(zip(numbers, others, strict=True))


def _moved_numbers(before: Sequence[Named], after: Sequence[Named]) -> dict[int, int]:
    """Match the items of lists that moved by a number, as an optimiser's do when parameters are added before others.

    Only forms tell: a list whose items fit at their own numbers did not move.
    """
    found: dict[int, int] = {}
    lists = [_lists(side) for side in (before, after)]
    for place, items in lists[0].items():
        others = lists[1].get(place)
        if others is None or all(_forms(items[at]) == _forms(others.get(at, {})) for at in items):
            continue
        first, last = min(items), max(items)
        room = range(min(others) - first, max(others) - last + 1)
        fitting = [
            shift
            for shift in room[:_SHIFTS]
            if all(_forms(items[at]) == _forms(others.get(at + shift, {})) for at in items)
        ]
        if len(fitting) == 1:
            for at, item in items.items():
                found.update((number, others[at + fitting[0]][rest][0]) for rest, (number, _) in item.items())
    return found


_Item = dict[Path, tuple[int, tuple[str, tuple[int, ...]]]]


def _lists(named: Sequence[Named]) -> dict[tuple[str, Path], dict[int, _Item]]:
    """Return the items of lists by place and number: number and form of each tensor, by the rest of its path."""
    found: dict[tuple[str, Path], dict[int, _Item]] = {}
    for number, one in enumerate(named):
        at = next((at for at, segment in enumerate(one.path) if isinstance(segment, int)), None)
        if at is not None:
            items = found.setdefault((one.prefix, one.path[:at]), {})
            items.setdefault(int(one.path[at]), {})[one.path[at + 1 :]] = number, one[2:4]
    return found


def _forms(item: Mapping[Path, tuple[int, tuple[str, tuple[int, ...]]]]) -> dict[Path, tuple[str, tuple[int, ...]]]:
    return {rest: form for rest, (_, form) in item.items()}
