"""Files of versions by URL: ``ckstore://gpt@400/step00400.pt`` for everything that reads through fsspec."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from typing import Any, BinaryIO, cast

from fsspec.spec import AbstractFileSystem

import ckstore
from ckstore.errors import NotFoundError, UsageError


class CkstoreFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A read-only file system: a directory for each version, named by any of its names, with its files.

    Reads decode the chunks that a range touches. A file with coarse values is restored as a whole when it is opened.

    Parameters
    ----------
    store
        The directory or URL of the store. By default `fo`, else `$CKSTORE`, or the nearest `.ckstore` upwards.
    options
        Client options of a store in a bucket; see `ckstore.open`.
    fo
        The store, where the URL names it after the file: ``ckstore://gpt@400/step00400.pt::/data/store``.
    target_protocol
        The scheme of `fo`, which fsspec cuts off: `file` or that of a bucket.

    Examples
    --------
    >>> from ckstore.integrations.fsspec import CkstoreFileSystem
    >>> CkstoreFileSystem("store").cat_file("ckstore://gpt@200/state_dict.pt", 0, 2)
    b'PK'
    """

    protocol = "ckstore"
    cachable = False  # The default store depends on `$CKSTORE` and the working directory.
    root_marker = ""

    def __init__(
        self,
        store: str | None = None,
        options: Mapping[str, str] | None = None,
        fo: str | None = None,
        target_protocol: str = "file",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if fo is not None and target_protocol != "file":
            fo = f"{target_protocol}://{fo}"
        if store is not None and fo is not None and store != fo:
            raise UsageError(f"The store is given twice, as {store} and {fo}; name it once.")
        self._store = ckstore.open(store or fo, "r", options=options)
        self._sources: dict[tuple[str, int], Any] = {}
        self._lock = Lock()

    def _found(self, path: str) -> tuple[ckstore.Version, str]:
        """Return the version at the beginning of a path, and the rest; names of versions may contain slashes.

        One run may be named like the beginning of another: a step counts first, then the longest name of a run.
        """
        parts = self._strip_protocol(path).split("/")
        runs = {run.name for run in self._store._catalog.runs()}
        counts = [*range(1, len(parts) + 1)]
        with_step = [count for count in counts if "@" in parts[count - 1]]
        of_runs = [count for count in reversed(counts) if "/".join(parts[:count]) in runs]
        for count in dict.fromkeys([*with_step, *of_runs, *counts]):
            with suppress(NotFoundError):
                return self._store["/".join(parts[:count])], "/".join(parts[count:])
        try:
            return self._store[parts[0]], ""
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from error

    def _number(self, version: ckstore.Version, inner: str) -> int:
        for number, entry in enumerate(version._stored.document.files):
            if entry.path == inner:
                return number
        raise FileNotFoundError(f"{version.name} has no file {inner!r}; `ls` lists its files.")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Return the versions of the store, or the files and directories at a path."""
        path = self._strip_protocol(path)
        found = [self._directory(name) for name in self._names(path)]
        if not found and path:
            version, inner = self._found(path)
            below = f"{inner}/" if inner else ""
            top = path.removesuffix(inner).rstrip("/")
            entries: dict[str, dict[str, Any]] = {}
            for number, entry in enumerate(version._stored.document.files):
                if entry.path == inner:
                    return [self._file(path, version, number)] if detail else [path]
                if entry.path.startswith(below):
                    name = below + entry.path.removeprefix(below).split("/")[0]
                    is_file = name == entry.path
                    full = f"{top}/{name}"
                    entries[name] = self._file(full, version, number) if is_file else self._directory(full)
            if inner and not entries:
                self._number(version, inner)
            found = list(entries.values())
        return found if detail else [item["name"] for item in found]

    def _names(self, path: str) -> list[str]:
        """Return the next level of the names of versions below a path: `run@step`, or the number.

        Versions without a step, and superseded ones, which may share theirs with another, have a number.
        """
        above = f"{path}/" if path else ""
        versions = self._store.versions()
        names = [str(item.number) if item.step is None or item.superseded else item.name for item in versions]
        below = [name.removeprefix(above) for name in names if name.startswith(above)]
        return list(dict.fromkeys(above + name.split("/")[0] for name in below))

    def _directory(self, name: str) -> dict[str, Any]:
        return {"name": name, "size": 0, "type": "directory", "mode": 0o555}

    def _file(self, name: str, version: ckstore.Version, number: int) -> dict[str, Any]:
        entry, created = version._stored.document.files[number], version.created.timestamp()
        about: dict[str, Any] = {"mode": 0o444, "mtime": created, "ctime": created}
        if not version._stored.is_changed(number):
            about["blake3"] = entry.blake3
        return {"name": name, "size": entry.size, "type": "file", **about}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name, size and type; of a file without coarse values, also its BLAKE3."""
        path = self._strip_protocol(path)
        if self._names(path):
            return self._directory(path)
        version, inner = self._found(path)
        if not inner or any(entry.path.startswith(f"{inner}/") for entry in version._stored.document.files):
            return self._directory(path)
        return self._file(path, version, self._number(version, inner))

    def _source(self, path: str) -> Any:
        """Return the source of a file's bytes: read in ranges, or a restored temporary file for changed values."""
        version, inner = self._found(path)
        key = version.id, self._number(version, inner)
        with self._lock:
            if key not in self._sources:
                stored = version._stored
                if stored.is_changed(key[1]):
                    self._sources[key] = _restored(version, inner)
                else:
                    self._sources[key] = stored.source(key[1])
            return self._sources[key]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return the bytes of a file from `start` to before `end`, which count from the end if negative."""
        source = self._source(path)
        first, last, _ = slice(start, end).indices(source.size)
        return bytes(source.pread(first, max(last - first, 0)))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            raise UsageError("Versions never change: open their files for reading.")
        return _File(self._source(path))


def _restored(version: ckstore.Version, inner: str) -> Any:
    from ckstore.formats.sources import FileSource

    with tempfile.NamedTemporaryFile(prefix="ckstore-") as file:
        version.write(cast(BinaryIO, file), include=[inner] if version._stored.document.is_directory else ())
        return FileSource(file.name)


class _Reader(io.RawIOBase):
    """The bytes of a source as a stream."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._position: int = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        self._position = max(begin + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._source.size - self._position))
        if count:
            view[:count] = self._source.pread(self._position, count)
        self._position += count
        return int(count)


class _File(io.BufferedReader):
    """A buffered stream with the size that fsspec expects of its files."""

    def __init__(self, source: Any) -> None:
        super().__init__(_Reader(source), 1 << 20)
        self.size = int(source.size)
