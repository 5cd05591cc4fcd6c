"""Detects the kind of a file by its content, never by its name, and parses it."""

from __future__ import annotations

from collections.abc import Callable

from ckstore.errors import InputError
from ckstore.formats.archive import parse_archive
from ckstore.formats.dcp import parse_dcp, starts_like_dcp_metadata
from ckstore.formats.facts import facts_of_trainer_state
from ckstore.formats.gguf import parse_gguf, starts_like_gguf
from ckstore.formats.hdf5 import parse_hdf5, starts_like_hdf5
from ckstore.formats.layout import Extent, FileLayout, Source
from ckstore.formats.msgpack import parse_msgpack, starts_like_msgpack
from ckstore.formats.npy import parse_npy, parse_npz, starts_like_npy, starts_like_npz
from ckstore.formats.safetensors import parse_safetensors, starts_like_safetensors
from ckstore.formats.torch.legacy import parse_torch_legacy, starts_like_legacy
from ckstore.formats.torch.zip import archive_holds_tensors, parse_torch_zip
from ckstore.formats.zip_directory import FIRST_RECORD, follows_others, starts_like_zip
from ckstore.storage.zip_records import LOCAL_MAGIC

#: Opaque files below this size in bytes are skeleton altogether.
OPAQUE_SKELETON_BYTES = 1 << 16
_MAX_MESSAGE = 240
_ORBAX = b"\x0c\xdb\x3a\x2a"
#: Reasons why files stay bytes, by offset and leading bytes.
_UNREAD = (
    (0, LOCAL_MAGIC, "a zip archive in which no stored file holds tensors"),
    (0, _ORBAX, "a database of Orbax, whose chunks are compressed: for tensors and deltas, store the "
     "state that Orbax restores as a file of flax, NumPy or safetensors"),
    (0, b"\x1f\x8b", "compressed with gzip: unpack it, the store compresses better"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it, the store compresses better"),
    (0, b"\xfd7zXZ\0", "compressed with xz: unpack it, the store compresses better"),
    (0, b"BZh", "compressed with bzip2: unpack it, the store compresses better"),
    (257, b"ustar", "a tar archive: unpack it"),
    (0, b"\x80\2", "a pickle that was not written by torch"),
    (0, b"\x80\3", "a pickle that was not written by torch"),
    (0, b"\x80\4", "a pickle that was not written by torch"),
    (0, b"\x80\5", "a pickle that was not written by torch"),
)  # fmt: skip
_SEVERAL = "consecutive archives, not all written by torch"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def _parse_archive(source: Source) -> FileLayout | None:
    return parse_archive(source, _parse_entry)


def _parse_entry(source: Source) -> FileLayout | None:
    """Return the layout of a file in an archive; None for kinds that a few bytes do not identify."""
    head = source.pread(0, min(source.size, FIRST_RECORD))
    for _, recognises, parser in _PARSERS:
        if parser not in (_parse_archive, parse_msgpack) and recognises(head):
            return parser(source)
    return None


_PARSERS: tuple[tuple[str, Callable[[bytes], bool], Callable[[Source], FileLayout | None]], ...] = (
    ("npy", starts_like_npy, parse_npy),
    ("gguf", starts_like_gguf, parse_gguf),
    ("hdf5", starts_like_hdf5, parse_hdf5),
    ("npz", starts_like_npz, parse_npz),
    ("torch zip", starts_like_zip, parse_torch_zip),
    ("zip", starts_like_zip, _parse_archive),
    ("legacy torch", starts_like_legacy, parse_torch_legacy),
    ("safetensors", starts_like_safetensors, parse_safetensors),
    ("MessagePack", starts_like_msgpack, parse_msgpack),
)


def parse(source: Source, name: str = "", *, lone: bool = False) -> FileLayout:
    """Parse a file of any kind.

    Parameters
    ----------
    source
        The file.
    name
        The name for errors; the step of a `trainer_state.json` is read.
    lone
        Whether the file is the whole checkpoint: then an empty file and a Git LFS pointer are refused.

    Returns
    -------
    FileLayout
        Of kind `opaque` for an unsupported kind; `bytes_for` has the reason if it is known.

    Raises
    ------
    InputError
        If the content is of a known kind, but cut off or damaged.
    """
    called = _printable(name) or "The file"
    head = source.pread(0, min(source.size, FIRST_RECORD))
    if lone and not head:
        raise InputError(f"{called} is empty; leave it out, or save it again.")
    if lone and is_pointer(source):
        raise InputError(f"{called} is a Git LFS pointer, not the checkpoint itself; run `git lfs pull` first.")
    several = starts_like_zip(head) and follows_others(source)
    parsers = (("distributed checkpoint", starts_like_zip, parse_dcp),) if several else _PARSERS
    for kind, recognises, parser in parsers:
        if recognises(head):
            try:
                layout = parser(source)
            except InputError as error:
                raise InputError(
                    f"{called} is not a sound {kind} file: {_presentable(error)}; `force` stores its bytes unchanged."
                ) from error
            if layout is not None:
                return layout
    layout = parse_opaque(source)
    if starts_like_dcp_metadata(head):
        layout.kind = "dcp-metadata"
        return layout
    why = _SEVERAL if several else next((why for place, magic, why in _UNREAD if head.startswith(magic, place)), "")
    if why:
        layout.bytes_for[""] = why
    layout.facts = facts_of_trainer_state(source, name)
    return layout


def parse_opaque(source: Source) -> FileLayout:
    """Return the layout of an opaque file: one extent of bytes, or all skeleton if it is small."""
    layout = FileLayout("opaque", source.size)
    if source.size >= OPAQUE_SKELETON_BYTES:
        layout.extents.append(Extent(0, "uint8", (source.size,), ("__bytes__",)))
    return layout


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
    """Return whether a file is a checkpoint: of a kind with tensors, by its head and content, or of Orbax."""
    head = source.pread(0, min(source.size, FIRST_RECORD))
    if starts_like_npy(head) or starts_like_npz(head) or starts_like_gguf(head) or starts_like_hdf5(head):
        return True
    if starts_like_zip(head):
        return follows_others(source) or archive_holds_tensors(source) or _holds_tensors(source, _parse_archive)
    if starts_like_legacy(head) or starts_like_safetensors(head) or head.startswith(_ORBAX):
        return True
    if starts_like_dcp_metadata(head):
        return True
    return starts_like_msgpack(head) and _holds_tensors(source, parse_msgpack)


def _holds_tensors(source: Source, parser: Callable[[Source], FileLayout | None]) -> bool:
    """Return whether a file has tensors, even a damaged file: parsing it reports the damage."""
    try:
        return parser(source) is not None
    except InputError:
        return True
