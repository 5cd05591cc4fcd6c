"""Follows tensors whose names differ between versions, so that versions are compared under the names of one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckstore.formats.paths import listed, text_to_path
from ckstore.formats.renames import Named, matches

if TYPE_CHECKING:
    from ckstore.formats.layout import Path
    from ckstore.reading.stored_version import StoredVersion

#: Words of a suffix by which a tensor is recognised: one, such as `weight`, is too few to tell users.
_LEAST = 2

Forms = Mapping[str, tuple["Path", str, tuple[int, ...]]]


def renames_of(before: Forms, after: Forms) -> dict[str, str]:
    """Return the later name by the earlier one of tensors that were renamed, by typed paths and forms."""
    gone = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    if not gone or not new:
        return {}
    left = [Named("", *before[name]) for name in gone]
    right = [Named("", *after[name]) for name in new]
    return {gone[number]: new[other] for number, other in sorted(matches(left, right, _LEAST).items())}


def renames(before: StoredVersion, after: StoredVersion) -> dict[str, str]:
    """Return the later path by the earlier one of tensors that were renamed between two versions."""
    if before.numbers.keys() == after.numbers.keys():
        return {}
    return renames_of(_forms(before), _forms(after))


def _forms(version: StoredVersion) -> Forms:
    return {path: (text_to_path(path), *form) for path, form in version.forms().items()}


def under_last_names(versions: Sequence[StoredVersion]) -> list[StoredVersion]:
    """Return versions with the names that their tensors have in the last one."""
    found = list(versions[-1:])
    for version in reversed(versions[:-1]):
        names = renames(version, found[-1])
        found.append(version.under(names) if names else version)
    return found[::-1]


def renamed_text(names: Mapping[str, str]) -> str:
    """Return a sentence on renamed tensors.

    Examples
    --------
    >>> renamed_text({"module.a.weight": "a.weight", "module.b.weight": "b.weight"})
    '2 tensors renamed: module.* → *'
    """
    kinds = Counter(map(_kind, names.items()))
    shown = listed([f"{before}* → {after}*" for (before, after), _ in kinds.most_common()])
    return f"{len(names):,} tensor{'s' * (len(names) > 1)} renamed: {shown}"


def _kind(names: tuple[str, str]) -> tuple[str, str]:
    """Return the different beginnings of two names, up to whole words."""
    before, after = names
    length = next((at for at, (one, other) in enumerate(zip(before[::-1], after[::-1], strict=False)) if one != other),
                  min(len(before), len(after)))  # fmt: skip
    heads = [name[: len(name) - length] for name in names]
    if any(head and head[-1] not in "./" for head in heads):  # The common end begins within a word.
        end = before[len(before) - length :]
        length -= min((at + 1 for at, letter in enumerate(end) if letter in "./"), default=length)
    return before[: len(before) - length], after[: len(after) - length]
