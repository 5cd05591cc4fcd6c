"""The tensors and the format of an export, and the names of tensors within a subtree."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeVar

from ckstore.errors import NotFoundError, UsageError
from ckstore.formats.layout import Path as TensorPath
from ckstore.formats.paths import listed, literal_segments, match_texts, path_to_text

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

Format = Literal["safetensors", "pt", "npz"]

#: Formats by the suffix of a target.
_ENDINGS: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".pt": "pt",
    ".pth": "pt",
    ".ckpt": "pt",
    ".bin": "pt",
    ".npz": "npz",
}
#: Kinds of files that are of a format already.
_KINDS: dict[Format, tuple[str, ...]] = {
    "safetensors": ("safetensors",),
    "pt": ("torch-zip", "torch-legacy"),
    "npz": ("npz",),
}
#: Kinds by the suffix of a target to which nothing is converted.
_UNWRITTEN = {
    ".gguf": "gguf", ".h5": "hdf5", ".hdf5": "hdf5", ".keras": "zip", ".msgpack": "msgpack", ".npy": "npy",
    ".onnx": "onnx", ".pt2": "zip",
}  # fmt: skip
_S = TypeVar("_S")


def format_for(
    version: StoredVersion,
    target: Path | None,
    format: Literal["original"] | Format | None = None,
    *,
    globs: bool = False,
    strip: bool = False,
) -> Literal["original"] | Format:
    """Return the format of a checkout: the given one, or that of the target's suffix.

    `globs` and `strip` tell whether globs, or names within a subtree, are given; globs choose files of a directory in
    its original form, otherwise tensors. Raise `UsageError` if tensors are chosen, and neither `format` nor `target`
    gives a format, or if the suffix is that of another format which is not written.
    """
    choose = "give `format` safetensors, pt or npz, or let the target's name end with one of these"
    if strip and format == "original":
        raise UsageError(f"`strip` changes the names of tensors; {choose}.")
    if format is not None and format != "original":
        return format
    if not strip and (version.document.is_directory or not globs):
        return "original" if format is not None or target is None else _format_of(version, target)
    if format is None and target is not None and target.suffix in _ENDINGS:
        return _ENDINGS[target.suffix]
    given = "`strip` changes the names of tensors" if strip else "`include` and `exclude` choose tensors of a file"
    raise UsageError(f"{given}; {choose}.")


def _format_of(version: StoredVersion, target: Path) -> Literal["original"] | Format:
    """Return the format that a target's suffix asks for; the original one if it has the same suffix, or no tensors."""
    document, files = version.document, version.layout.files
    suffix = target.suffix.lower()
    own = document.source if document.is_directory else document.files[0].path
    own_suffix = PurePosixPath(own).suffix.lower()
    # `Path.is_dir` raises errors for some paths, such as too long ones.
    if suffix == own_suffix or os.path.isdir(target) or not any(file.tensors for file in files):
        return "original"
    kind = "" if document.is_directory else files[0].kind
    if suffix in _UNWRITTEN and kind != _UNWRITTEN[suffix]:
        raise UsageError(
            f"{target} is named as a file of another format, which is not written; name one with the suffix"
            " .safetensors, .pt or .npz, or give `format` original."
        )
    form = _ENDINGS.get(suffix)
    return "original" if form is None or kind in _KINDS[form] else form


def chosen_tensors(version: StoredVersion, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Return the paths of the tensors that globs choose; raise `NotFoundError` if none matches.

    See `ckstore.formats.paths.match_texts`.
    """
    paths = list(version.paths)
    chosen = [paths[number] for number in match_texts(paths, include, exclude)]
    if not chosen:
        raise NotFoundError(f"No tensor of version {version.row.number} is chosen; see `ckstore ls` for their paths.")
    return chosen


def subtree_of(version: StoredVersion, chosen: Sequence[str], include: Sequence[str]) -> TensorPath:
    """Return the path, within its file, of the subtree of the chosen tensors.

    It is the common prefix of all globs, such as `model` in `model/h.*`, or else of the paths of all tensors. The files
    of a directory are not subtrees: shards may have one in common. Raise `UsageError` if the tensors lie in several
    subtrees.
    """
    inside = {version.paths[path][1].path for path in chosen}
    common = _common([path[:-1] for path in inside])
    files = {version.paths[path][0] for path in chosen}
    if include and len(files) == 1:
        named = _common([literal_segments(pattern) for pattern in include])
        path = version.contents.prefix(files.pop(), version.paths[chosen[0]][1])
        before = [path_to_text((segment,)) for segment in path]
        if list(named[: len(before)]) == before and len(named) > len(before):
            return common[: len(named) - len(before)]
    if not common and any(len(path) > 1 for path in inside):
        tops = sorted({path_to_text(path[:1]) for path in inside})
        file, tensor = version.paths[next(path for path in chosen if len(version.paths[path][1].path) > 1)]
        example = path_to_text((*version.contents.prefix(file, tensor), tensor.path[0]))
        raise UsageError(
            f"The chosen tensors lie in {len(tops)} subtrees ({listed(tops)}), and `strip` takes one: "
            f"choose it, as with `include` '{example}/*'."
        )
    return common


def _common(paths: Iterable[Sequence[_S]]) -> tuple[_S, ...]:
    """Return the common first segments of all paths."""
    common = []
    for segments in zip(*paths, strict=False):
        if any(segment != segments[0] for segment in segments):
            break
        common.append(segments[0])
    return tuple(common)


def stripped_names(version: StoredVersion, chosen: Sequence[str], subtree: TensorPath) -> list[str]:
    """Return the names of chosen tensors below a subtree: the rest of their paths, joined by dots as in torch.

    Raise `UsageError` if two tensors would get the same name.
    """
    found: dict[str, str] = {}
    for path in chosen:
        name = ".".join(map(str, version.paths[path][1].path[len(subtree) :]))
        other = found.setdefault(name, path)
        if other != path:
            raise UsageError(
                f"{other} and {path} would both be called {name}: choose one of them with `exclude`, "
                "or leave `strip` out."
            )
    return list(found)


def left_out_text(left_out: Sequence[str], total: int, noun: str) -> str:
    """Return a sentence on items that were left out.

    Examples
    --------
    >>> left_out_text(["a", "b", "c", "d"], 9, "tensor")
    'Left out 4 of 9 tensors: a, b, c, …'
    """
    return f"Left out {len(left_out)} of {total} {noun}{'s' if total > 1 else ''}: {listed(left_out)}"
