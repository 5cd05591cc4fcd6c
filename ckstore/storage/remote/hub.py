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
_URL = re.compile(r"hf://(?:(model|dataset)s/)?((?!(?:models|datasets|spaces|buckets)/)[\w.-]+/[\w.-]+)", re.ASCII)
_BRANCH = "main"
#: Attempts to commit on top of the head, which others move.
_TRIES = 8
#: Seconds without a byte after which a request has failed.
_SILENCE = 60.0
#: Status codes: a condition failed, a range begins after the end or is sent, access is denied, a request is wrong.
_CHANGED, _NO_RANGE, _RANGE, _DENIED, _WRONG = 412, 416, 206, (401, 403), (400, 413, 422)


class HubRepository:
    """A repository of models or datasets, ``hf://owner/name`` or ``hf://datasets/owner/name``, on its main branch.

    A file is absent or not in a commit: `put_absent` looks at the head, and commits only on top of it.
    """

    read_price = READ_PRICE

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        try:
            import httpx2  # noqa: F401  # Older packages have another client.
            from huggingface_hub import HfApi
            from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
        except ImportError as error:
            raise UsageError(f"{url} needs huggingface_hub 2.4 or later; `pip install 'ckstore[hub]'`.") from error
        match = _URL.fullmatch(url)
        if match is None:
            raise UsageError("The URL of a store on the Hub is hf://owner/name or hf://datasets/owner/name.")
        try:
            validate_repo_id(match[2])
        except ValueError as error:
            raise UsageError(f"{url} cannot be a repository of the Hub ({_said(error)}); correct the name.") from error
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
                # All facts would be those of all files.
                head = self._api.repo_info(**self._place, revision=_BRANCH, expand="sha").sha
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
        found = self._read(name, {"Range": f"bytes={offset}-{offset + length - 1}"}, offset, length)
        if len(found) != length:
            raise EOFError(f"{name} is shorter than the requested range.")
        return found

    def _read(self, name: str, headers: Mapping[str, str], offset: int = 0, length: int | None = None) -> bytes:
        """Return the bytes of a file, or a part of it, which a server that ignores ranges sends whole."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        url = hf_hub_url(**self._place, filename=name, revision=_BRANCH, endpoint=self._api.endpoint)
        with self._explained(name):
            headers = {**build_hf_headers(), "Accept-Encoding": "identity", **headers}
            response = get_session().get(url, headers=headers, follow_redirects=True, timeout=_SILENCE)
            if response.status_code == _NO_RANGE:
                return b""
            hf_raise_for_status(response)
            found = bytes(response.content)
            is_whole = length is not None and response.status_code != _RANGE
            return found[offset:][:length] if is_whole else found

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

        for _ in range(_TRIES) if names else ():
            # A file that somebody else deletes in the meantime fails the commit.
            with suppress(FileNotFoundError), self._explained(names[0]):
                there = self._api.get_paths_info(**self._place, paths=[*names])
                if gone := [CommitOperationDelete(item.path, is_folder=False) for item in there]:
                    self._api.create_commit(**self._place, operations=gone, commit_message="Delete", revision=_BRANCH)
                return
        if names:
            raise UnreachableError(f"{self.url} changed {_TRIES} times while files were deleted; try again.")

    def above(self) -> Iterator[HubRepository]:
        """Yield nothing: a store has a repository of its own."""
        return iter(())

    def _put(self, name: str, data: bytes | Path, **given: Any) -> None:
        from huggingface_hub import CommitOperationAdd

        added = CommitOperationAdd(name, data)
        self._api.create_commit(**self._place, operations=[added], revision=_BRANCH, commit_message=name, **given)
        # The client says nothing, and commits without the file.
        if added._should_ignore:
            raise UsageError(f"{self.url} ignores {name}, as its .gitignore says; delete that from the repository.")

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn the client's error into one sentence."""
        import httpx2
        from huggingface_hub import errors

        try:
            yield
            self._answered = True
        except errors.EntryNotFoundError:
            self._answered = True
            raise FileNotFoundError(name) from None
        except errors.RepositoryNotFoundError:
            raise CkstoreError(
                f"{self.url} does not exist, or this token may not see it; create the repository first, and set"
                " HF_TOKEN."
            ) from None
        except errors.OfflineModeIsEnabled:
            raise CkstoreError(f"{self.url} cannot be reached offline; unset HF_HUB_OFFLINE.") from None
        except CkstoreError:
            raise
        except (httpx2.HTTPError, httpx2.InvalidURL, RuntimeError, ValueError) as error:
            status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
            if status in _DENIED:
                raise CkstoreError(
                    f"{self.url} refused {name} ({_said(error)}); check HF_TOKEN and its permissions."
                ) from None
            if status in _WRONG:
                raise CkstoreError(f"{self.url} refused {name} ({_said(error)}).") from None
            if isinstance(error, httpx2.InvalidURL | httpx2.ConnectError) and not self._answered:
                raise NoServerError(
                    f"{self._api.endpoint} cannot be reached ({_said(error)}); check the address."
                ) from None
            raise UnreachableError(f"{self.url} could not be used for {name} ({_said(error)}).") from error


def _said(error: Exception) -> str:
    """Return the first line of an error, as a part of a sentence."""
    return str(error).partition("\n")[0].rstrip(". ")
