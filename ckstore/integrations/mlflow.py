"""Artifacts of MLflow in a store, by the scheme ``ckstore`` of an experiment's artifact location."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from unicodedata import normalize
from urllib.parse import unquote, urlsplit

import ckstore
from ckstore.errors import ConflictError, InputError, NoStoreError, NotFoundError
from ckstore.integrations.apart import TakenError, runs_for, store_apart

if TYPE_CHECKING:
    from ckstore.storage.rows import VersionRow
    from ckstore.writing.ingest import IngestReport

#: The beginning of the last part of a run's name after a file, such as `mlflow/4f0c…/checkpoints/+ema`.
_MARK = "+"
#: Characters of artifact paths that no run's name has, or that begin such a part: escaped as in URLs.
_ESCAPED = re.compile(r"[%@*?^~]|\.{2,}|:{2,}|^\+|^[ .-]|[ .]$")
#: Begins the names of runs: the id of a run of MLflow alone could be the beginning of a version's id.
_ABOVE = "mlflow"


class Artifacts:
    """The artifacts of a run of MLflow: each call of `log_artifact` or `log_artifacts` stores a version.

    The version's run in the store has the id of MLflow's run and the artifact path, as in ``mlflow/4f0c…/checkpoints``,
    and its step is that of the file. A second file of a step is stored in a run after its name, as in
    ``mlflow/4f0c…/checkpoints/+ema``. Of two versions with a file at one path, MLflow sees the later one.
    """

    def __init__(self, artifact_uri: str, *arguments: Any, **named: Any) -> None:
        super().__init__(artifact_uri, *arguments, **named)  # type: ignore[call-arg]
        parts = [part for part in unquote(urlsplit(artifact_uri).path).split("/") if part]
        for count in range(len(parts), 0, -1):
            with suppress(NoStoreError):
                self._store = ckstore.open(Path("/", *parts[:count]), "r")
                parts = parts[count:]
                break
        else:
            self._store = ckstore.open(None, "r")
        if "artifacts" in parts:  # MLflow's directory between the id of a run and its artifact paths.
            parts.remove("artifacts")
        self._root = "/".join([_ABOVE, *parts])

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Store a file as a version."""
        self._log(local_file, artifact_path, {posixpath.basename(local_file)})

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store a directory as a version, or each of its files if none holds tensors."""
        names = {path.relative_to(local_dir).as_posix() for path in Path(local_dir).rglob("*") if path.is_file()}
        try:
            self._log(local_dir, artifact_path, names)
        except InputError:
            for name in names:
                self.log_artifact(f"{local_dir}/{name}", posixpath.dirname(posixpath.join(artifact_path or "", name)))

    def _log(self, source: str, artifact_path: str | None, names: set[str]) -> None:
        run = _run_at(posixpath.join(self._root, artifact_path or ""))
        with ckstore.open(self._store.place, "a") as store:
            [planned] = store.plan(source, run=run, force=True)

            def is_among(row: VersionRow) -> bool:
                return {entry.path for entry in store[row.number]._stored.document.files} <= names

            def ingest(run: str, parent: int | None, replace: bool) -> IngestReport:
                is_first = store._catalog.latest() is not None and store._catalog.latest(run) is None
                report = store.ingest(
                    source, run=run, step=planned.step, parent="auto" if is_first else None, force=True,
                    allow_empty=True, replace=replace,
                )  # fmt: skip
                if not is_among(report.version):
                    raise TakenError(f"{report.version} has the content of {source} under another name.")
                return report

            runs = runs_for(run, posixpath.basename(source), planned.step, mark=_MARK)
            store_apart(store, runs, planned.step, ingest, holds=is_among)

    def _every_file(self) -> Iterator[tuple[str, ckstore.Version, Any]]:
        """Yield the path, the version and the entry of each file of all versions, the oldest first.

        The path begins with the root only if the file is one of the artifacts.
        """
        above = f"{self._root}/"
        for version in self._store.versions():
            place = _place_of(version.run)
            if f"{place}/".startswith(above) or above.startswith(f"{place}/"):
                for entry in version._stored.document.files:
                    yield f"{place}/{entry.path}", version, entry

    def _files(self) -> dict[str, tuple[ckstore.Version, Any]]:
        """Return the latest version and the entry of each artifact by its path."""
        above = f"{self._root}/"
        return {
            path.removeprefix(above): (version, entry)
            for path, version, entry in self._every_file()
            if path.startswith(above)
        }

    def list_artifacts(self, path: str | None = None) -> list[Any]:
        """Return the files and directories in a directory."""
        from mlflow.entities import FileInfo

        below = f"{path.rstrip('/')}/" if path else ""
        found = {}
        for name, (_, entry) in self._files().items():
            if name.startswith(below):
                child = below + name.removeprefix(below).split("/")[0]
                found[child] = FileInfo(child, child != name, entry.size if child == name else None)
        return [found[child] for child in sorted(found)]

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Forget the versions with the file, or with the files of the directory; ``mlflow gc`` calls it.

        Their bytes stay until `Store.gc`. A version keeps all its files: where one has others, too, or a tag,
        `ConflictError` is raised and none is forgotten.
        """
        place = posixpath.join(self._root, artifact_path or "").rstrip("/")
        within: dict[int, bool] = {}
        for path, version, _ in self._every_file():
            is_chosen = f"{path}/".startswith(f"{place}/")
            if within.setdefault(version.number, is_chosen) != is_chosen:
                raise ConflictError(
                    f"{version.name} has files besides {artifact_path or place.removeprefix(f'{_ABOVE}/')},"
                    " and keeps all; delete the directory of all."
                )
        if chosen := [number for number, is_chosen in within.items() if is_chosen]:
            with ckstore.open(self._store.place, "a") as store:
                store.forget(chosen)

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        """Restore a file; MLflow calls it for each file of `download_artifacts`."""
        if remote_file_path not in (files := self._files()):
            raise NotFoundError(f"No artifact {remote_file_path!r}; `list_artifacts` lists them.")
        version, entry = files[remote_file_path]
        with open(local_path, "wb") as file:
            version.write(cast(BinaryIO, file), include=[entry.path] if version._stored.document.is_directory else ())


def _run_at(place: str) -> str:
    """Return the run of the artifacts in a directory."""
    return "/".join(_ESCAPED.sub(_escape, normalize("NFC", part)) for part in place.strip("/").split("/"))


def _escape(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())


def _place_of(run: str) -> str:
    """Return the directory of a run's artifacts: a run after a file is below that of the file's directory."""
    return unquote(re.sub(rf"/\{_MARK}[^/]*$", "", run))


def artifact_repository(artifact_uri: str, *arguments: Any, **named: Any) -> Any:
    """Return MLflow's repository of the artifacts at a URI: the entry point of the scheme ``ckstore``.

    Parameters
    ----------
    artifact_uri
        ``ckstore:///data/store/4f0c…/artifacts``: MLflow appends to the location of the experiment, which is the path
        of a store. Without a store in the path, the store is `$CKSTORE`.
    arguments, named
        Those of MLflow's repositories.
    """
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

    return type("CkstoreArtifactRepository", (Artifacts, ArtifactRepository), {})(artifact_uri, *arguments, **named)
