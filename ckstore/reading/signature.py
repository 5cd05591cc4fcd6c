"""Signatures of versions by OpenSSF model signing: of their files' BLAKE3, without the files."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ckstore.errors import CkstoreError, IntegrityError, UsageError
from ckstore.reading.checkout import checked_blocks
from ckstore.runtime.provenance import SIGNATURE

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

_OWN, _USUAL = "blake3", "sha256"
#: Errors for texts that are no keys, and for keys of other kinds, which lack a curve.
_NO_KEY = (AttributeError, TypeError, ValueError)


class _Digests:
    """The digests of a version's files, in place of hashes of a directory."""

    def __init__(self, version: StoredVersion, algorithm: str) -> None:
        self._version = version
        self._algorithm = algorithm

    def add_ignored_paths(self, **_: Any) -> None:
        """Ignore no file: a version with files that were not signed is refused."""

    def hash(self, *_: Any, **__: Any) -> Any:
        """Return the manifest of the version's files; that of a single file has no name for it."""
        from model_signing import manifest

        document, how = self._version.document, {"method": "files", "hash_type": self._algorithm}
        kind = manifest.SerializationType.from_args({**how, "allow_symlinks": False})
        items = [
            kind.new_item(
                entry.path if document.is_directory else ".",
                manifest.hashing.Digest(self._algorithm, self._digest(number)),
            )
            for number, entry in enumerate(document.files)
        ]
        return manifest.Manifest(document.run, items, kind)

    def _digest(self, number: int) -> bytes:
        if self._algorithm == _OWN:
            return bytes.fromhex(self._version.document.files[number].blake3)
        hasher = hashlib.sha256()
        for blocks in checked_blocks(self._version, number):  # A checkout compares BLAKE3.
            for block in blocks:
                hasher.update(block)
        return hasher.digest()


def sign(version: StoredVersion, key: Path) -> dict[str, Any]:
    """Return the signature of a version's files, a Sigstore bundle, with a private key; see `Store.sign`."""
    text, signing = _text(key), _library("signing")
    _require_plain(version, UsageError)
    config = signing.Config().set_hashing_config(_Digests(version, _OWN))
    with TemporaryDirectory() as place:
        target = Path(place) / "model.sig"
        try:
            if "BEGIN CERTIFICATE" in text:
                config.use_certificate_signer(private_key=key, signing_certificate=key, certificate_chain=[key])
            else:
                config.use_elliptic_key_signer(private_key=key)
            config.sign(place, target)
        except _NO_KEY as error:
            raise UsageError(f"{key} is no private key to sign with{_why(error)}; make one of P-256 as PEM.") from error
        found: dict[str, Any] = json.loads(target.read_text())
    return found


def require_signed(version: StoredVersion, key: Path) -> None:
    """Raise `IntegrityError` unless a version's files were signed with the private key of a public one.

    The file may have certificates of authorities in its place: then one of theirs signed it.
    """
    text, verifying = _text(key), _library("verifying")
    config = verifying.Config()
    try:
        if "BEGIN CERTIFICATE" in text:
            config.use_certificate_verifier(certificate_chain=[key])
        else:
            config.use_elliptic_key_verifier(public_key=key)
    except _NO_KEY as error:
        raise UsageError(
            f"{key} is neither a public key nor a certificate to check with{_why(error)}; give one of P-256 as PEM."
        ) from error
    _require_plain(version, IntegrityError)
    signature = version.row.metrics.get(SIGNATURE)
    if not isinstance(signature, dict):
        raise IntegrityError(f"Version {version.row.number} is not signed; sign it with `ckstore metric --sign`.")
    with TemporaryDirectory() as place:
        target = Path(place) / "model.sig"
        target.write_text(json.dumps(signature))
        try:
            config.set_hashing_config(_Digests(version, _algorithm(signature))).verify(place, target)
        except CkstoreError:
            raise
        except Exception as error:  # The signature may come from anyone, and parsing it fails in many ways.
            raise IntegrityError(f"Version {version.row.number} is not signed by {key}{_why(error)}.") from error


def _why(error: Exception) -> str:
    """Return the reason that an error gives, in parentheses; none for one that only programmers understand."""
    text = str(error).rstrip(". ")
    return f" ({text})" if text and not isinstance(error, AttributeError) else ""


def unsigned(versions: Sequence[StoredVersion], key: Path) -> list[str]:
    """Return a sentence for each version that was not signed with a key."""
    found = []
    for version in versions:
        try:
            require_signed(version, key)
        except IntegrityError as error:
            found.append(str(error))
    return found


def _algorithm(signature: dict[str, Any]) -> str:
    """Return the algorithm that a signature names; of others than these two no digest agrees."""
    payload = json.loads(b64decode(signature["dsseEnvelope"]["payload"]))
    return _OWN if payload["predicate"]["serialization"]["hash_type"] == _OWN else _USUAL


def _require_plain(version: StoredVersion, kind: type[CkstoreError]) -> None:
    """Raise an error if files differ from the originals, or if there are links, which signatures do not cover."""
    number = version.row.number
    paths = [entry.path for entry in version.document.files]
    if len(set(paths)) < len(paths):
        raise kind(f"Version {number} has two files of one path, which no signature covers; ingest its files again.")
    if version.document.links:
        raise kind(f"Version {number} has links, which no signature covers; store a directory without links.")
    if any(map(version.is_changed, range(len(version.document.files)))):
        raise kind(f"The files of version {number} differ from the signed ones: it is coarse, or dropped tensors.")


def _text(key: Path) -> str:
    try:
        return key.read_text()
    except (OSError, ValueError) as error:
        raise UsageError(f"The key {key} cannot be read ({error}); name a PEM file.") from error


def _library(name: str) -> Any:
    try:
        import model_signing
    except ImportError as error:
        raise UsageError(f"Signatures need model-signing ({error}); `pip install 'ckstore[sign]'`.") from error
    return getattr(model_signing, name)
