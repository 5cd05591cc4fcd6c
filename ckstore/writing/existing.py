"""Compares an ingest with the existing version at its run and step: content, fidelity and integrity."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ckstore.errors import ConflictError, IntegrityError
from ckstore.reading.stored_version import ChangedVersionError, StoredVersion
from ckstore.repository import Repository
from ckstore.scanning.scanned import ScannedVersion
from ckstore.storage.catalog import VersionRow
from ckstore.writing.request import Request


def is_there(repository: Repository, existing: VersionRow, scanned: ScannedVersion, request: Request) -> bool:
    """Return whether an existing version satisfies the request, so that nothing must be stored."""
    return (
        not _is_lost(repository, existing)
        and _is_same(repository, existing, scanned)
        and _is_enough(repository, existing, request)
        and _is_whole(repository, existing)
    )


def in_place_of(repository: Repository, existing: VersionRow, scanned: ScannedVersion, request: Request) -> Request:
    """Return the request that replaces the existing version.

    A damaged or less faithful version of the same content is stored again after the same parent, with the same metrics.
    So is a version with a lost manifest: its content is unknown. Raise `ConflictError` if the existing version has
    other content, and `request.replace` is not set, or it is tagged.
    """
    if _is_lost(repository, existing) or _is_same(repository, existing, scanned):
        parent = request.parent
        if parent is not None and parent.number >= existing.number:  # The run's latest, as the default parent.
            parent = None if existing.parent is None else repository.catalog.version(existing.parent)
        metrics = {**existing.metrics, **request.metrics}
        return replace(
            request,
            parent=parent,
            metrics=metrics,
            replace=True,
            heals=True,
            goes_back=request.goes_back and existing.superseded,
        )
    if not request.replace:
        raise ConflictError(
            f"{request.run}@{request.step} holds other content as version {existing.number}; "
            "choose another `step` or `run`, or set `replace`; if the run goes on from an earlier version, name that as"
            " `parent`; for several inputs, use `step_from` (`ingest_many`)."
        )
    repository.catalog.check_untagged([existing.number])
    return request


def _is_lost(repository: Repository, existing: VersionRow) -> bool:
    """Return whether `recover` found the manifest of a version lost: only its row is left."""
    try:
        repository.resolver.document(existing)
    except IntegrityError:
        return not repository.catalog.objects_in(existing.pack)
    return False


def _is_same(repository: Repository, existing: VersionRow, scanned: ScannedVersion) -> bool:
    """Return whether a version has the scanned bytes and, for a directory, the same names and modes."""
    document = repository.resolver.document(existing)
    if document.is_directory != scanned.is_directory:
        return False
    if not scanned.is_directory:
        return [file.blake3 for file in document.files] == [file.blake3 for file in scanned.files]
    stored = {(file.path, file.blake3, file.mode) for file in document.files}
    given = {(file.path, file.blake3, file.mode) for file in scanned.files}
    return (
        stored == given
        and set(document.links) == set(scanned.links)
        and set(document.directories) == set(scanned.directories)
    )


def _is_enough(repository: Repository, existing: VersionRow, request: Request) -> bool:
    """Return whether a version of the same content is as faithful as the request, and has all its tensors."""
    if existing.dropped:
        return False
    document, policy = repository.resolver.document(existing), request.policy
    coarse = None if document.coarse is None else (document.coarse.scheme, document.coarse.parameters)
    if document.hot is not None and (asked := document.hot.asked).is_coarse:  # Exact until its encoding.
        coarse = asked.scheme, asked.parameters()
    if coarse is None or not policy.is_coarse:
        return coarse is None
    found = coarse[1] if coarse[0] == policy.scheme else {}
    if request.search is not None:
        return bool(found.get("degradation", inf) <= request.search.max_degradation)
    if policy.is_bounded:
        return all(found.get(name, inf) <= bound for name, bound in policy.parameters().items())
    return bool(found.get("quality", 0.0) <= policy.quality)


def _is_whole(repository: Repository, row: VersionRow) -> bool:
    """Return whether all parts of a version exist, in packs that exist and are long enough."""
    repository.resolver.forget()  # Another process may have recorded a loss since.
    version = StoredVersion(repository, row)
    try:
        version.check_present()
        packs = version.document.blob_packs()
        return repository.catalog.known_packs(packs) >= packs
    except (IntegrityError, ChangedVersionError):
        return False
