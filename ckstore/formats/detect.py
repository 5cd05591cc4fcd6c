"""Detects the format of a file by its content, never by its name, and parses it.

A format of another distribution is an entry point of the group `ckstore.formats`. Our own are listed here, so that
metadata of installed distributions is read only for a file that none of them claims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

from ckstore.errors import CkstoreError, InputError
from ckstore.formats import dcp
from ckstore.formats.archive import is_of_old_torch, parse_archive, parse_tar
from ckstore.formats.containers import gguf, hdf5, msgpack, npy, onnx, safetensors
from ckstore.formats.facts import facts_of_trainer_state
from ckstore.formats.layout import FileLayout, Format, Source, opaque
from ckstore.formats.tar_headers import starts_like_tar
from ckstore.formats.torch import legacy
from ckstore.formats.torch import zip as torch_zip
from ckstore.formats.trees import tensor_numbers
from ckstore.formats.zip_directory import FIRST_RECORD, first_name, starts_like_zip

_MAX_MESSAGE = 240
_ORBAX = b"\x0c\xdb\x3a\x2a"
_ZIP = "a zip archive in which no stored file holds tensors"
_TAR = "a tar archive in which no file holds tensors, or one of a form that is not read: unpack it"
_SCRIPT = "a program of TorchScript: for tensors and deltas, store its `state_dict()`"
_OLD_TAR = "a tar of torch before 0.1.10: load it, and save it again with a later torch"
#: Reasons why files stay bytes, by offset and leading bytes.
_UNREAD = (
    (0, b"PK\3\4", _ZIP),
    (0, _ORBAX, "a database of Orbax, whose chunks are compressed: for tensors and deltas, store the "
     "state that Orbax restores as a file of flax, NumPy or safetensors"),
    (0, b"\x1f\x8b", "compressed with gzip: unpack it, the store compresses better"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it, the store compresses better"),
    (0, b"\xfd7zXZ\0", "compressed with xz: unpack it, the store compresses better"),
    (0, b"BZh", "compressed with bzip2: unpack it, the store compresses better"),
    (257, b"ustar", _TAR),
    (0, b"\x80\2", "a pickle that was not written by torch"),
    (0, b"\x80\3", "a pickle that was not written by torch"),
    (0, b"\x80\4", "a pickle that was not written by torch"),
    (0, b"\x80\5", "a pickle that was not written by torch"),
)  # fmt: skip
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def _starts_like_npz(head: bytes) -> bool:
    return starts_like_zip(head) and first_name(head).endswith(".npy")


def _parse_npz(source: Source) -> FileLayout | None:
    return parse_archive(source, "npz", partial(_parse_entry, (npy.FORMAT,)))


def _parse_zip(source: Source) -> FileLayout | None:
    return parse_archive(source, "zip", partial(_parse_entry, _in_archives()))


def _parse_tar(source: Source) -> FileLayout | None:
    return parse_tar(source, partial(_parse_entry, _in_archives()))


def _in_archives() -> list[Format]:
    return [one for one in (*_OWN, *_others()) if one.in_archives]


def _parse_entry(formats: Sequence[Format], source: Source) -> FileLayout | None:
    """Return the layout of a file in an archive."""
    head = source.pread(0, min(source.size, FIRST_RECORD))
    layouts = (_parsed(one, source) for one in formats if one.starts_like(head))
    return next((layout for layout in layouts if layout is not None), None)


#: Our own formats. The first whose parser claims a file gets it.
_OWN = (
    npy.FORMAT,
    gguf.FORMAT,
    hdf5.FORMAT,
    Format("npz", _starts_like_npz, _parse_npz),
    dcp.FORMAT,
    torch_zip.FORMAT,
    Format("zip", starts_like_zip, _parse_zip, in_archives=False),
    Format("tar", starts_like_tar, _parse_tar, in_archives=False),
    legacy.FORMAT,
    dcp.METADATA_FORMAT,
    safetensors.FORMAT,
    msgpack.FORMAT,
    onnx.FORMAT,
)


@cache
def _others() -> tuple[Format, ...]:
    """Return the formats of other distributions, by name.

    Raises `CkstoreError` if one cannot be imported, is no `Format`, or has the name of another.
    """
    from importlib.metadata import entry_points

    found: dict[str, Format] = {}
    for entry in entry_points(group="ckstore.formats"):
        try:
            format_ = entry.load()
        except Exception as error:
            raise CkstoreError(f"The file format {entry.name} cannot be imported ({error}); uninstall it.") from error
        if not isinstance(format_, Format) or format_.name in {"opaque", *found, *(one.name for one in _OWN)}:
            raise CkstoreError(f"The file format {entry.name} ({entry.value}) is no `Format` with a name of its own.")
        found[format_.name] = format_
    return tuple(found[name] for name in sorted(found))


def _formats(head: bytes) -> Iterator[Format]:
    """Yield the formats that a file with these first bytes may be of."""
    yield from (one for one in _OWN if one.starts_like(head))
    yield from (one for one in _others() if one.starts_like(head))


def parse(source: Source, name: str = "", *, lone: bool = False) -> FileLayout:
    """Parse a file of any kind; one of an unsupported kind is `opaque`, with the reason in `bytes_for` if it is known.

    `name` is for errors, and tells a `trainer_state.json`, whose step is read. A `lone` file is the whole checkpoint:
    empty files and Git LFS pointers are refused. Raises `InputError` if the content is of a known kind, but cut off or
    damaged.
    """
    called = _printable(name) or "The file"
    head = source.pread(0, min(source.size, FIRST_RECORD))
    if lone and not head:
        raise InputError(f"{called} is empty; leave it out, or save it again.")
    if lone and is_pointer(source):
        raise InputError(f"{called} is a Git LFS pointer, not the checkpoint itself; run `git lfs pull` first.")
    for one in _formats(head):
        try:
            layout = _parsed(one, source)
        except InputError as error:
            raise InputError(
                f"{called} is not a sound {one.name} file: {_presentable(error)}; `force` stores its bytes unchanged."
            ) from error
        if layout is not None:
            return layout
    layout = opaque(source, why=_why(source, head))
    layout.facts = facts_of_trainer_state(source, name)
    return layout


def _why(source: Source, head: bytes) -> str:
    """Return the reason why a file stays bytes; empty if it is unknown."""
    why = next((why for place, magic, why in _UNREAD if head.startswith(magic, place)), "")
    if why == _ZIP and torch_zip.is_script(source):
        return _SCRIPT
    return _OLD_TAR if why == _TAR and is_of_old_torch(source) else why


def _parsed(one: Format, source: Source) -> FileLayout | None:
    """Return the layout of a file of a format, which is sound; None if it is of another format."""
    try:
        layout = one.parse(source)
        if layout is None:
            return None
        layout.sort()
        is_own = layout.size == source.size and layout.kind in (one.name, "opaque")
        fault = layout.fault() if is_own else "size and kind"
        is_named = one in _OWN or _names_each_once(layout)  # Ours do so by their rules.
    except InputError:
        raise
    except Exception as error:
        if one in _OWN:
            raise
        raise InputError(f"its parser failed ({type(error).__name__}: {error})") from error
    if fault:
        raise InputError(f"its {fault} overlap or lie outside of the file")
    if not is_named:
        raise InputError("its names or its tree do not have each tensor once")
    return layout


def _names_each_once(layout: FileLayout) -> bool:
    """Return whether tensors have distinct paths, and each is in the tree once."""
    are_distinct = len({tensor.path for tensor in layout.tensors}) == len(layout.tensors)
    return are_distinct and sorted(tensor_numbers(layout.tree)) == list(range(len(layout.tensors)))


def _presentable(error: InputError) -> str:
    """Return the message of an error that quotes the file: names in it may be long and contain anything."""
    message = _printable(str(error))
    return (
        message if len(message) <= _MAX_MESSAGE else f"{message[: _MAX_MESSAGE // 2]}...{message[-_MAX_MESSAGE // 2 :]}"
    )


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def is_pointer(source: Source) -> bool:
    """Return whether a file is a Git LFS pointer, a placeholder of a file that was not fetched."""
    return source.pread(0, min(source.size, 64)).startswith(_LFS_POINTER)


def holds_tensors(source: Source) -> bool:
    """Return whether a file is a checkpoint: of a kind with tensors, even a damaged file, or of Orbax."""
    try:
        layout = parse(source)
    except InputError:
        return True
    # A torch zip may hold anything.
    is_of_tensors = layout.kind not in ("opaque", "torch-zip") or source.pread(0, min(source.size, 4)) == _ORBAX
    return bool(layout.tensors) or is_of_tensors
