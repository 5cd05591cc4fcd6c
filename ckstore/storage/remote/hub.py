"""A store's place in a repository of the Hugging Face Hub, where every write is a commit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckstore.errors import CkstoreError, UnreachableError, UsageError
from ckstore.storage.interface import Listed
from ckstore.storage.remote.bucket import READ_PRICE, NoServerError

#: Prefix of the URLs.
SCHEME = "hf://"
_URL = re.compile(r"hf://(?:(model|dataset)s/)?([\w.-]+/[\w.-]+)", re.ASCII)
_BRANCH = "main"
#: Attempts to commit on top of the head, which others move.
_TRIES = 8
#: Status codes: a condition failed, a range begins after the end, and access is denied.
_CHANGED, _NO_RANGE, _DENIED = 412, 416, (401, 403)


class HubRepository:
    """A repository of models or datasets, ``hf://owner/name`` or ``hf://datasets/owner/name``, on its main branch.

    A file is absent or not in a commit: `put_absent` looks at the head, and commits only on top of it.
    """

    read_price = READ_PRICE

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise UsageError(f"{url} needs the package huggingface_hub; install ckstore[hub].") from error
        match = _URL.fullmatch(url)
        if match is None:
            raise UsageError("The URL of a store on the Hub is hf://owner/name or hf://datasets/owner/name.")
        if unknown := options.keys() - {"endpoint"}:
            raise UsageError(f"Unknown option {min(unknown)} (only endpoint); the token comes from the environment.")
        self.url = url
        self._api = HfApi(endpoint=options.get("endpoint"))
        self._place: dict[str, Any] = {"repo_id": match[2], "repo_type": match[1] or "model"}
        self._answered = False

    def put(self, name: str, data: bytes | Path) -> None:
        """Write a file; overwrite an existing one."""
        with self._explained(name):
            self._put(name, data)

    def put_absent(self, name: str, data: bytes) -> bool:
        """Write a file if it is absent."""
        from huggingface_hub.errors import HfHubHTTPError

        for _ in range(_TRIES):
            with self._explained(name):
                head = self._api.repo_info(**self._place, revision=_BRANCH).sha
                if self._api.get_paths_info(**self._place, paths=[name], revision=head):
                    return False
                try:
                    self._put(name, data, parent_commit=head)
                    return True
                except HfHubHTTPError as error:
                    if error.response.status_code != _CHANGED:
                        raise
        raise UnreachableError(f"{self.url} changed {_TRIES} times while {name} was written; try again.")

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return self._read(name, {})

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return a range of a file."""
        found = self._read(name, {"Range": f"bytes={offset}-{offset + length - 1}"})
        if len(found) != length:
            raise EOFError(f"{name} is shorter than the requested range.")
        return found

    def _read(self, name: str, headers: Mapping[str, str]) -> bytes:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        url = hf_hub_url(**self._place, filename=name, revision=_BRANCH, endpoint=self._api.endpoint)
        with self._explained(name):
            headers = {**build_hf_headers(), "Accept-Encoding": "identity", **headers}
            response = get_session().get(url, headers=headers, follow_redirects=True)
            if response.status_code == _NO_RANGE:
                return b""
            hf_raise_for_status(response)
            return bytes(response.content)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Yield files in order."""
        from huggingface_hub.hf_api import RepoFile

        found: list[Listed] = []
        asked: dict[str, Any] = {"path_in_repo": prefix.rstrip("/") or None, "recursive": True, "expand": True}
        with suppress(FileNotFoundError), self._explained(prefix):
            tree = self._api.list_repo_tree(**self._place, **asked, revision=_BRANCH)
            items = (item for item in tree if isinstance(item, RepoFile) and item.last_commit and item.path > after)
            found.extend(Listed(item.path, item.size, item.last_commit.date) for item in items if item.last_commit)
        return iter(sorted(found, key=lambda item: item.name))

    def delete(self, names: Sequence[str]) -> None:
        """Delete files."""
        from huggingface_hub import CommitOperationDelete

        if names:
            with self._explained(names[0]):
                there = self._api.get_paths_info(**self._place, paths=[*names])
                if gone := [CommitOperationDelete(item.path, is_folder=False) for item in there]:
                    self._api.create_commit(**self._place, operations=gone, commit_message="Delete", revision=_BRANCH)

    def above(self) -> Iterator[HubRepository]:
        """Yield nothing: a store has a repository of its own."""
        return iter(())

    def _put(self, name: str, data: bytes | Path, **given: Any) -> None:
        self._api.upload_file(
            **self._place, path_or_fileobj=data, path_in_repo=name, revision=_BRANCH, commit_message=name, **given
        )

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn the client's error into one sentence."""
        import httpx2
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

        try:
            yield
            self._answered = True
        except EntryNotFoundError:
            self._answered = True
            raise FileNotFoundError(name) from None
        except RepositoryNotFoundError:
            raise CkstoreError(
                f"{self.url} does not exist, or this token may not see it; create the repository first, and set"
                " HF_TOKEN."
            ) from None
        except (httpx2.HTTPError, RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0].rstrip(". ")
            if isinstance(error, HfHubHTTPError) and error.response.status_code in _DENIED:
                raise CkstoreError(f"{self.url} refused {name} ({said}); check HF_TOKEN and its permissions.") from None
            if isinstance(error, httpx2.ConnectError) and not self._answered:
                raise NoServerError(f"{self._api.endpoint} cannot be reached ({said}); check the address.") from None
            raise UnreachableError(f"{self.url} could not be used for {name} ({said}).") from error
