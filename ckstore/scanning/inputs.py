"""Opens a caller's input: a file, a directory, or a state dict in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ckstore.errors import InputError, UsageError
from ckstore.formats.dcp import METADATA, name_tensors, read_metadata
from ckstore.formats.detect import parse
from ckstore.formats.directory import is_marked, is_of_series, refuse_several, require_checkpoint, scan, several_error
from ckstore.formats.facts import facts_of_tensors
from ckstore.formats.layout import FileLayout, Tensor, opaque
from ckstore.formats.shards import directory_of
from ckstore.formats.sources import FileSource, check_identity, file_identity
from ckstore.formats.torch.live_state import OnUnknown, StateDictSource
from ckstore.runtime.local_path import local_path
from ckstore.runtime.lru import Lru
from ckstore.scanning.completeness import fault_of, require_complete
from ckstore.scanning.scanned import ScannedFile, ScannedVersion
from ckstore.steps import named_step, natural, step_of_name, without_numbers

#: Name of the file of a state dict.
STATE_DICT = "state_dict.pt"
#: Facts that are a step, in order.
_STEPS = ("step", "epoch")
#: Words for parts of one checkpoint, before their numbers.
_PARTS = re.compile(
    r"(?<![a-z])(?:rank|shard|part|consolidated|rng|[dmpt]p|zero|fsdp|node|worker|device|gpu|layer|stage"
    r"|block|expert|encoder|decoder|actor|critic|lora|adapter|head|fold|member|ensemble|model)s?(?![a-z])|-of-",
    re.IGNORECASE,
)
#: Minimal share of common tensor names for two files to belong to one model.
_SAME = 0.5

#: Files that stay open. Directories may hold more files than a process may open.
_MOST_OPEN = 12


class InputFile:
    """One regular input file, reopened as often as needed, and verified to be the same file.

    `opened` has the open files by path, and drops the least recently used; a thread that reads one keeps it open.
    `size`, `mtime_ns` and `mode` are those at the first opening.
    """

    def __init__(self, path: Path, opened: Lru[str, FileSource]) -> None:
        self._path = os.fspath(path)
        self._opened = opened
        first = opened.put(self._path, FileSource(path))
        self.size, self.mtime_ns, self.mode = first.size, first.mtime_ns, first.mode
        self._identity = file_identity(self._path)
        first.check_unchanged()

    def pread(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise `InputError` if the file is shorter."""
        return self._file().pread(offset, length)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `offset` on; raise `InputError` if the file is shorter."""
        self._file().read_into(offset, target)

    def _file(self) -> FileSource:
        found = self._opened.get(self._path)
        if found is None:
            found = FileSource(self._path)
            found.check_unchanged()
            self.check_unchanged()
            found = self._opened.put(self._path, found)
        return found

    def check_unchanged(self) -> None:
        """Raise `InputError` if size or mtime changed since the first opening, or another file has the path."""
        check_identity(self._path, self._identity)

    def close(self) -> None:
        """Close the file; reading it opens it again."""
        self._opened.drop(self._path)


def open_source(
    source: str | os.PathLike[str] | Any,
    store: Path,
    *,
    force: bool,
    on_unknown: OnUnknown = "raise",
    allow_empty: bool = False,
) -> ScannedVersion:
    """Parse a checkpoint, without reading its tensors.

    `source` is the path of a file or directory, which does not contain the directory `store`, a state dict, or a
    version that is scanned already. With `force` damaged files are opaque bytes; for `on_unknown` see
    `describe_state_dict`.

    Raises
    ------
    InputError
        The path does not exist, is damaged, or holds the store; or a file holds no tensors, without `allow_empty`.
    UsageError
        The state dict holds no tensor, without `allow_empty`.
    """
    if isinstance(source, ScannedVersion):
        return source
    if not isinstance(source, str | os.PathLike):
        scanned = scan_state_dict(source, on_unknown)
        if not allow_empty:
            require_tensors(source, scanned.files[0].layout.tensors)
        _set_step(scanned)
        return scanned
    path = local_path(source)
    if path.is_dir() and store.resolve().is_relative_to(path.resolve()):
        raise InputError(f"{path} contains the store itself; name a directory that does not.")
    if not path.exists():
        raise InputError(f"{path} does not exist; name a checkpoint file or directory.")
    return open_path(path, force=force, is_one=force, any_kind=allow_empty, may_be_empty=allow_empty, blobs=True)


def require_tensors(state: Any, tensors: Sequence[Tensor]) -> None:
    """Raise `UsageError` if a state has no tensors: a function that forgets to return it gives None."""
    if not tensors:
        shown = repr(state) if isinstance(state, bool | int | float | None) else f"a {type(state).__name__} without one"
        raise UsageError(
            f"The state holds no tensor, it is {shown}; give the state dict, or `allow_empty` to store it as it is."
        )


def _require_tensors_in(path: Path, layout: FileLayout) -> None:
    """Raise `InputError` if a file holds no tensors, or none that can be read."""
    if not layout.tensors:
        why = next(iter(layout.bytes_for.values()), "")
        raise InputError(
            f"{path} holds no tensors{f' ({why})' if why else ''}; name a checkpoint, or store the file with `force`."
        )


def scan_state_dict(state_dict: Any, on_unknown: OnUnknown = "raise") -> ScannedVersion:
    """Describe a state dict as a version of one torch file; see `describe_state_dict`."""
    source = StateDictSource(state_dict, on_unknown)
    return ScannedVersion([ScannedFile(STATE_DICT, source, source.layout)])


def open_path(
    path: Path,
    *,
    force: bool = False,
    is_one: bool = False,
    any_kind: bool = False,
    may_be_empty: bool = False,
    blobs: bool = False,
) -> ScannedVersion:
    """Parse a file or directory; with `force`, damaged files are opaque bytes. For `blobs` see `scan`.

    Raise `InputError` for a directory of several checkpoints, unless it `is_one`, for a file without tensors, unless it
    may be of `any_kind`, and for a file without bytes or with a Git LFS pointer in its place, unless it `may_be_empty`.
    """
    if path.is_dir():
        scanned = _open_directory(path, force=force, is_one=is_one, blobs=blobs)
    else:
        scanned = _open_file(path, force=force, may_be_empty=may_be_empty)
        if not force and not may_be_empty and path.suffix != ".bin" and (fault := fault_of(scanned.files[0])):
            raise InputError(f"{path} {fault}; save or copy it again, or store it as it is with `force`.")
        if not force and not any_kind:
            _require_tensors_in(path, scanned.files[0].layout)
    scanned.name = str(path).encode("utf-8", "backslashreplace").decode()
    _set_step(scanned)
    return scanned


def step_inside(scanned: ScannedVersion) -> tuple[int | None, str]:
    """Return the step from the files of a version, None without one, and a number in its place that is no step."""
    facts = [_facts(file) for file in scanned.files]
    steps = {fact: next((one[fact] for one in facts if fact in one), None) for fact in _STEPS}
    unused = next((one["unused"] for one in facts if "unused" in one), "") if steps["step"] is None else ""
    return next((step for step in steps.values() if step is not None), None), unused


def _facts(file: ScannedFile) -> dict[str, Any]:
    facts = file.layout.facts
    return facts if "step" in facts else facts | facts_of_tensors(file.layout, file.source)


def _set_step(scanned: ScannedVersion) -> None:
    """Set the step of a version from its contents, else from its name; note a number that is no step."""
    scanned.step, inside = step_inside(scanned)
    unused = ""
    if scanned.step is None and scanned.name:
        named = step_of_name(Path(scanned.name).name or Path(scanned.name).resolve().name)
        scanned.step, unused = named.step, named.unused
    scanned.unused = unused_step(inside, unused if scanned.step is None else "")


def unused_step(inside: str, named: str) -> str:
    """Return the sentence on a number in the contents or the name that is no step; empty without one."""
    for place, number in (("contents", inside), ("name", named)):
        if number:
            return f"{number} in the {place} is not used: a step is a whole number from 0 on, of at most 64 bits."
    return ""


def _step_of(file: ScannedFile) -> Any:
    facts = _facts(file)
    return next((facts[fact] for fact in _STEPS if fact in facts), None)


def _open_file(path: Path, *, force: bool, may_be_empty: bool) -> ScannedVersion:
    """Parse one file that is a checkpoint by itself."""
    try:
        path.name.encode("utf-8")
    except UnicodeEncodeError:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        raise InputError(f"The name {shown} is not UTF-8; rename it, then ingest again.") from None
    source = InputFile(path, Lru(1))
    layout = _parse(source, path.name, force=force, lone=not may_be_empty)
    return ScannedVersion([ScannedFile(path.name, source, layout, source.mode, source.mtime_ns)])


def _open_directory(path: Path, *, force: bool, is_one: bool, blobs: bool) -> ScannedVersion:
    """Parse all files of a directory tree."""
    version = ScannedVersion([], is_directory=True)
    entries = scan(path, blobs=blobs)
    if not is_one:
        refuse_several(path, entries)
    opened = Lru[str, FileSource](_MOST_OPEN)
    damaged: list[InputError] = []
    for entry in entries:
        if entry.kind == "symlink":
            version.links.append((entry.path, entry.target or ""))
        elif entry.kind == "directory":
            version.directories.append((entry.path, entry.mode))
        else:
            source = InputFile(path / entry.path, opened)
            try:
                layout = _parse(source, entry.path, force=force, lone=False)
            except InputError as error:
                damaged.append(error)
                continue
            version.files.append(ScannedFile(entry.path, source, layout, source.mode, source.mtime_ns))
    if damaged:
        faults = ((file.path, fault_of(file)) for file in version.files)
        raise _error_of([*damaged, *(InputError(f"{path} {fault}") for path, fault in faults if fault)])
    if not force:
        require_complete(path, version)
    _name_shards(version, force=force)
    if not is_one:
        _refuse_series(path, version)
    if not any(file.layout.tensors for file in version.files) and not (force and version.files):
        require_checkpoint(path, entries)
    return version


def _error_of(damaged: Sequence[InputError]) -> InputError:
    """Return one error for the damaged files of a directory, which names all of them."""
    if len(damaged) == 1:
        return damaged[0]
    remedy = "`force` stores its bytes unchanged."
    faults = [str(error).removesuffix(remedy).rstrip("; .") for error in damaged]
    return InputError(f"{len(damaged)} files are damaged: {'; '.join(faults)}; `force` stores their bytes unchanged.")


def _refuse_series(path: Path, version: ScannedVersion) -> None:
    """Raise `InputError` if the names of a directory's files differ in a number as those of a run do.

    Parts of one checkpoint differ in tensors, have the same step, are named after ranks or modules, are accompanied by
    others, or are only two and say no step.
    """
    files = [file for file in version.files if "/" not in file.path]
    if is_marked(file.path for file in files) or named_step(path.resolve().name) is not None:
        return
    groups: dict[str, list[ScannedFile]] = {}
    for file in files:
        if tensor_names(file) and (is_of_series(file.path) or not _PARTS.search(file.path)):
            groups.setdefault(without_numbers(file.path), []).append(file)
    for group in groups.values():
        names = [tensor_names(file) for file in group]
        steps = {_step_of(file) for file in group}
        alone = len(group) > 2 and len(group) == sum(bool(tensor_names(file)) for file in version.files)
        named = len(group) > 1 and is_of_series(group[0].path)
        is_series = named or (alone if None in steps else len(steps) > 1)
        if is_series and all(are_alike(names[0], other) for other in names):
            raise several_error(path, sorted((file.path for file in group), key=natural))


def tensor_names(file: ScannedFile) -> frozenset[str]:
    """Return the paths of a file's tensors as text; none for opaque bytes."""
    return frozenset(str(tensor.path) for tensor in file.layout.tensors if file.layout.kind != "opaque")


def are_alike(names: frozenset[str], others: frozenset[str]) -> bool:
    """Return whether the tensors of two inputs have the names of one model, for the most part."""
    return len(names & others) >= _SAME * len(names | others)


def _name_shards(version: ScannedVersion, *, force: bool) -> None:
    """Name the tensors of checkpoints of torch.distributed.checkpoint in the directory by their metadata."""
    for metadata in version.files:
        if metadata.layout.kind != "dcp-metadata" or PurePosixPath(metadata.path).name != METADATA:
            continue
        directory = directory_of(metadata.path)
        files = {one.path[len(directory) :]: one for one in version.files if directory_of(one.path) == directory}
        layouts = {name: one.layout for name, one in files.items()}
        try:
            items = read_metadata(metadata.source.pread(0, metadata.source.size))
            is_named = name_tensors(layouts, items, {name: one.source for name, one in files.items()})
        except InputError as error:
            if not force:
                raise InputError(
                    f"{metadata.path} does not describe a whole checkpoint: {error}; `force` stores the files as "
                    "they are."
                ) from error
            is_named = False
        if is_named:
            for name, one in files.items():
                one.layout = layouts[name]
        else:
            metadata.layout.kind = "opaque"


def _parse(source: InputFile, name: str, *, force: bool, lone: bool) -> FileLayout:
    try:
        return parse(source, name, lone=lone)
    except InputError:
        if not force or source.size == 0:
            raise
        return opaque(source)


def tree_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory, as far as they can be reached."""
    total = 0
    with suppress(OSError):
        for file in path.rglob("*") if path.is_dir() else [path]:
            with suppress(OSError):
                total += file.stat().st_size if file.is_file() and (file == path or not file.is_symlink()) else 0
    return total
