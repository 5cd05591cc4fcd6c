"""Checkout: a version's files byte for byte, or its tensors in another format."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import posixpath
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from blake3 import blake3

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import CkstoreError, ConflictError, IntegrityError, NotFoundError, UsageError
from ckstore.formats.layout import Checked
from ckstore.formats.paths import match_texts
from ckstore.formats.skeleton import Checks, pieces
from ckstore.formats.sources import PERMISSIONS
from ckstore.reading import unfinished
from ckstore.runtime.checksum import crc32
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.local_path import leads_out, local_path
from ckstore.runtime.threads import batches, in_order, worker_count
from ckstore.storage import durable
from ckstore.storage.writeback import Writeback

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

Progress = Callable[[int], None]

#: Bytes that a thread decodes at a time.
_GROUP = 2 << 20

#: A piece of a file, and consecutive ones.
Block = bytes | memoryview
Blocks = list[Block]

#: Pieces that one system call writes at most.
_AT_ONCE = 1024

#: A range of elements in an extent, or of bytes in the skeleton if the extent is negative.
_Stretch = tuple[int, int, int]


@collection_seldom()
def checkout(
    version: StoredVersion,
    target: Path,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write a version's file or directory tree to `target`; return the paths of files and links that were left out.

    Everything is written next to the target and renamed once it is complete and its BLAKE3 matches the original. Files
    with coarse values get matching checksums. With `force`, a directory replaces everything at `target`. Globs choose
    files of a directory; see `chosen_entries`. `progress` is called with numbers of written bytes.

    Raises
    ------
    ConflictError
        The target exists, and `force` is not set.
    IntegrityError
        A restored file differs from the original.
    NotFoundError
        No file matches, or the version has dropped tensors of one.
    """
    document = version.document
    version.prefetch()
    if document.is_directory:
        chosen = chosen_entries(version, include, exclude)
        version.contents.require_whole(number for number, entry in enumerate(document.files) if entry.path in chosen)
        nbytes = sum(entry.size for entry in document.files if entry.path in chosen)
        with staged(target, force=force, directory=True, nbytes=nbytes) as made:
            _write_tree(version, chosen, made, progress)
        entries = [entry.path for entry in document.files] + [path for path, _ in document.links]
        return [path for path in entries if path not in chosen]
    version.contents.require_whole([0])
    with staged(place_of_file(version, target), force=force, nbytes=document.files[0].size) as made:
        write_entry(version, 0, made, progress)
    return []


def place_of_file(version: StoredVersion, target: Path) -> Path:
    """Return the path at which the file of a version is written: in a directory under its own name."""
    # `Path.is_dir` raises errors for some paths, such as too long ones.
    return target / version.document.files[0].path if os.path.isdir(target) else target


def chosen_entries(version: StoredVersion, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    """Return the paths of the files, links and directories of a directory version that globs choose.

    Chosen files include their directories, chosen links their targets. Raise `NotFoundError` if no file or link is
    chosen. For the globs see `ckstore.formats.paths.match_texts`.
    """
    document = version.document
    links = dict(document.links)
    leaves = [*(entry.path for entry in document.files), *links]
    paths = [*leaves, *(path for path, _ in document.directories)]
    chosen = {paths[number] for number in match_texts(paths, include, exclude)}
    if (include or exclude) and chosen.isdisjoint(leaves):
        shown = ", ".join(leaves[:3]) + (", …" if len(leaves) > 3 else "")
        raise NotFoundError(
            f"No file of version {version.row.number} is chosen; it holds {shown}; to choose tensors, name a format."
        )
    left = [path for path in chosen if path in links]
    while left:
        path = left.pop()
        aim = posixpath.normpath(posixpath.join(posixpath.dirname(path), links[path]))
        # The path to a link's target may contain further links.
        through = {str(parent) for parent in PurePosixPath(aim).parents}.intersection(links)
        found = {other for other in paths if other == aim or other.startswith(f"{aim}/") or other in through} - chosen
        left += [other for other in found if other in links]
        chosen |= found
    above = {str(parent) for path in chosen for parent in PurePosixPath(path).parents}
    return chosen | above.intersection(paths)


@contextmanager
def staged(target: Path, *, force: bool, directory: bool = False, nbytes: int = 1) -> Iterator[Path]:
    """Yield a path next to `target`, which replaces the target after the block, or is removed on an error.

    A full disk is a `DiskFullError`; at least `nbytes` are written. Remains of killed processes next to `target` are
    removed.
    """
    local_path(target)
    try:
        check_place(target, force=force, directory=directory)
        unfinished.sweep(target.parent)
        place = unfinished.begin(target.parent)
    except CkstoreError:
        raise
    except OSError as error:
        why = error.strerror or os.strerror(error.errno or 0)
        unknown = UsageError(f"No file can be written at {target} ({why}); choose another path.")
        raise durable.unwritten(error, target, nbytes) or unknown from error
    with durable.write_explained(target, nbytes), place as (made, former):
        if directory:
            made.mkdir()
        yield made
        if directory and target.exists():
            target.rename(former)
            try:
                made.rename(target)
            except BaseException:
                former.rename(target)
                raise
            durable.remove(former)
        else:
            os.replace(made, target)
        durable.sync_directory(target.parent)


def check_place(target: Path, *, force: bool, directory: bool = False) -> None:
    """Raise the error of `staged` for a target that exists or whose directory does not, before work begins."""
    # The links of the system to open files, such as /dev/stdout, are as good as these.
    place = target.parent.resolve()
    is_system = target.is_symlink() and (place == Path("/dev") or place.is_relative_to("/proc"))
    if is_system or (target.exists() and not (target.is_file() or target.is_dir())):
        raise UsageError(
            f"{target} is a device or a pipe, not a file; name another path, or redirect `ckstore checkout -o -` to it."
        )
    if (target.exists() or target.is_symlink()) and not force:
        raise ConflictError(f"{target} exists; choose another path, or overwrite it with `force`.")
    if not directory and target.is_dir() and not target.is_symlink():
        raise ConflictError(f"{target} is a directory; name a file, or a directory that does not exist yet.")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a directory; create it first.")


def _write_tree(version: StoredVersion, chosen: set[str], root: Path, progress: Progress | None) -> None:
    try:
        write_entries(version, chosen, root, progress)
    except (FileExistsError, NotADirectoryError) as error:
        raise IntegrityError(
            f"The version has two entries at {error.filename}, or two that this file system does not distinguish; "
            "choose a target on another one, or run `ckstore verify`."
        ) from error


def write_entries(version: StoredVersion, chosen: set[str], root: Path, progress: Progress | None) -> None:
    """Write the chosen files, links and directories of a version below `root`."""
    document = version.document
    directories = [(path, mode) for path, mode in document.directories if path in chosen]
    links = [(path, link) for path, link in document.links if path in chosen]
    for path, _ in directories:
        inside(root, path).mkdir(parents=True, exist_ok=True)
    for number, entry in enumerate(document.files):
        if entry.path not in chosen:
            continue
        place = inside(root, entry.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_entry(version, number, place, progress)
    for path, link in links:
        place = inside(root, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(link)
    real_root = os.path.realpath(root)
    for path, link in links:
        if leads_out(path, link, os.fspath(root), real_root):
            raise IntegrityError(
                f"The manifest's link {path!r} points outside the version (to {link!r}); the output was removed."
            )
    for path, mode in reversed(directories):
        inside(root, path).chmod(mode & PERMISSIONS)


def inside(root: Path, path: str) -> Path:
    """Return the place of a stored relative path below `root`; refuse one that leads outside or through a link."""
    parts = PurePosixPath(path)
    place = root.joinpath(*parts.parts)
    outside = parts.is_absolute() or ".." in parts.parts or not parts.parts
    if outside or any(root.joinpath(*parts.parts[:depth]).is_symlink() for depth in range(1, len(parts.parts) + 1)):
        raise IntegrityError(f"The manifest's path {path!r} leads outside the version; the file was not written.")
    return place


def write_entry(version: StoredVersion, number: int, place: Path, progress: Progress | None = None) -> None:
    """Write a file of a version at a place where none is, durably, with its mode and time."""
    entry = version.document.files[number]
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with open(descriptor, "wb", buffering=0) as out:
        writeback = Writeback(out.fileno())
        try:
            blocks = (
                coarse_blocks(version, number, out) if version.is_changed(number) else checked_blocks(version, number)
            )
            with closing(blocks):
                for group in blocks:
                    nbytes = write_all(out, group)
                    writeback.wrote(nbytes)
                    if progress is not None:
                        progress(nbytes)
            writeback.finish()
        finally:
            writeback.cancel()
    if entry.mode is not None:
        place.chmod(entry.mode & PERMISSIONS)
    if entry.mtime_ns is not None:
        os.utime(place, ns=(entry.mtime_ns, entry.mtime_ns))


def checked_blocks(version: StoredVersion, number: int) -> Generator[Blocks, None, None]:
    """Yield the bytes of a file in order; raise `IntegrityError` at the end unless their BLAKE3 is the original's.

    A thread hashes them while the caller uses them.
    """
    entry = version.document.files[number]
    hasher = blake3()

    def update(blocks: Blocks) -> None:
        for block in blocks:
            hasher.update(block)

    with ThreadPoolExecutor(1, thread_name_prefix="ckstore-hash") as pool:
        for blocks in file_blocks(version, number):
            hashing = pool.submit(update, blocks)
            yield blocks
            hashing.result()
    if hasher.hexdigest() != entry.blake3:
        raise IntegrityError(
            f"{entry.path} of version {version.row.number} differs from the original; run `ckstore verify`."
        )


def restored_blocks(version: StoredVersion, number: int, *, compare_first: bool = False) -> Iterator[Blocks]:
    """Yield the bytes of a file in order, as a checkout writes them; see `checked_blocks`.

    With `compare_first`, the digest is compared before the first byte is yielded.
    """
    changed = version.is_changed(number)
    if not (changed or compare_first):
        yield from checked_blocks(version, number)
        return
    # Checksums of coarse values are known only after decoding all of the file.
    with durable.write_explained(Path(tempfile.gettempdir()), 1), tempfile.TemporaryFile(buffering=0) as spool:
        for blocks in coarse_blocks(version, number, spool) if changed else checked_blocks(version, number):
            write_all(spool, blocks)
        spool.seek(0)
        while block := spool.read(_GROUP):
            yield [block]


def sha256_of_files(version: StoredVersion) -> dict[str, str]:
    """Return the SHA-256 of each file by path; see `Version.sha256`."""
    version.prefetch()
    incomplete = {file for file, _ in version.contents.dropped}
    found = {}
    for number, entry in enumerate(version.document.files):
        if number in incomplete:
            continue
        hasher = hashlib.sha256()
        for blocks in restored_blocks(version, number):
            for block in blocks:
                hasher.update(block)
        found[entry.path] = hasher.hexdigest()
    return found


def write_file(
    version: StoredVersion,
    out: BinaryIO,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    compare_first: bool = False,
) -> None:
    """Write the bytes of one file to a stream, up to an error; see `Version.write`."""
    files = version.document.files
    chosen = {file.path for file in files}
    if version.document.is_directory:
        chosen = chosen_entries(version, include, exclude)
    elif include or exclude:
        raise UsageError("`include` and `exclude` choose tensors, which need a file to write to; name one.")
    numbers = [number for number, file in enumerate(files) if file.path in chosen]
    if len(numbers) != 1:
        raise UsageError(
            f"Version {version.row.number} is a directory; check it out as a whole, or choose a single file with "
            f"`include`: it matches {len(numbers)}."
        )
    for blocks in restored_blocks(version, numbers[0], compare_first=compare_first):
        for block in blocks:  # Some streams lack `writelines`.
            _write_block(out, memoryview(block).cast("B"))
    out.flush()


def _write_block(out: BinaryIO, block: memoryview) -> None:
    """Write a block whole: a raw stream, such as stdout of an unbuffered Python, may take a part of it."""
    while block:
        taken = out.write(block)
        if not isinstance(out, io.RawIOBase):
            return
        if not taken:
            raise BlockingIOError(errno.EAGAIN, "the stream does not block and is full; give one that blocks")
        block = block[taken:]


def coarse_blocks(version: StoredVersion, number: int, out: BinaryIO) -> Generator[Blocks, None, None]:
    """Yield the bytes of a file with coarse values in order; then write its checksums over those in `out`.

    `out` must be readable: some checksums cover others.
    """
    layout = version.layout.files[number]
    checks = Checks(layout)
    position = 0
    for blocks in file_blocks(version, number):
        for block in blocks:
            checks.update(position, block)
            position += len(block)
        yield blocks
    before = -1
    for checked, crc in zip(layout.checked, checks.results, strict=True):
        if checked.start <= before:
            crc = _crc_of(out, checked)
        before = checked.start
        for place in checked.positions:
            os.pwrite(out.fileno(), crc.to_bytes(4, "little"), place)


def _crc_of(out: BinaryIO, checked: Checked) -> int:
    crc = 0
    for start in range(checked.start, checked.stop, _GROUP):
        crc = crc32(os.pread(out.fileno(), min(_GROUP, checked.stop - start), start), crc)
    return crc


def write_all(out: BinaryIO, blocks: Blocks) -> int:
    """Write all of `blocks` to an unbuffered file; return the number of bytes."""
    left = deque(memoryview(block) for block in blocks)
    nbytes = sum(map(len, left))
    while left:
        written = os.writev(out.fileno(), [*islice(left, _AT_ONCE)])
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]
    return nbytes


def file_blocks(version: StoredVersion, number: int) -> Iterator[Blocks]:
    """Yield the bytes of a file in order; a pool of threads decodes chunks ahead."""
    skeleton = version.skeleton(number)

    def work(stretches: list[tuple[_Stretch, int]]) -> Blocks:
        return [
            skeleton[first:last] if extent < 0 else version.read_extent(number, extent, first, last)
            for (extent, first, last), _ in stretches
        ]

    workers = worker_count()
    with ThreadPoolExecutor(workers, thread_name_prefix="ckstore") as pool:
        # A thread gets many small chunks at once.
        groups = batches(_stretches(version, number), itemgetter(1), _GROUP)
        yield from in_order(pool, work, groups, 2 * workers)


def _stretches(version: StoredVersion, number: int) -> Iterator[tuple[_Stretch, int]]:
    """Yield all ranges of a file in order, with their bytes."""
    layout = version.layout.files[number]
    extents, position = layout.extents[:], 0
    for piece in pieces(layout):
        if piece.extent < 0:
            start, position = position, position + piece.stop - piece.start
            yield (-1, start, position), position - start
            continue
        size = ITEM_SIZES[extents[piece.extent].dtype]
        for first, last in version.contents.stretches(number, piece.extent, 0, (piece.stop - piece.start) // size):
            yield (piece.extent, first, last), (last - first) * size
