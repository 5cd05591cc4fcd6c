"""What is at the run and step of a version already: the same content or other, faithful enough, whole or not."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ckstore.errors import ConflictError, IntegrityError
from ckstore.objects.reader import ObjectReader
from ckstore.operations.request import Request
from ckstore.repository import Repository
from ckstore.scanning.scanned import ScannedVersion
from ckstore.storage.catalog import VersionRow


def is_there(repository: Repository, standing: VersionRow, scanned: ScannedVersion, request: Request) -> bool:
    """Whether a version is what is asked for, faithful enough and whole: nothing is to be stored."""
    return (
        not _is_lost(repository, standing)
        and _is_same(repository, standing, scanned)
        and _is_enough(repository, standing, request)
        and _is_whole(repository, standing)
    )


def in_place_of(repository: Repository, standing: VersionRow, scanned: ScannedVersion, request: Request) -> Request:
    """The request that puts a version in the place of the one that is there.

    A damaged version, or one that is less faithful, of the same content is stored again after the same parent, with
    the same metrics. So is one whose manifest is lost: nobody knows any more what it was.

    Raises
    ------
    ConflictError
        That one holds other content, and `request.replace` is not set, or it is tagged.
    """
    if _is_lost(repository, standing) or _is_same(repository, standing, scanned):
        parent = request.parent
        if parent is not None and parent.number >= standing.number:  # The run's latest, where none was named.
            parent = None if standing.parent is None else repository.catalog.version(standing.parent)
        metrics = {**standing.metrics, **request.metrics}
        return replace(request, parent=parent, metrics=metrics, replace=True, heals=True)
    if not request.replace:
        raise ConflictError(
            f"{request.run}@{request.step} holds other content as version {standing.number}; "
            "choose another step or run, use --replace, or of several inputs tell where steps come from (--step-from)."
        )
    repository.catalog.check_untagged([standing.number])
    return request


def _is_lost(repository: Repository, standing: VersionRow) -> bool:
    """Whether `recover` has found that the manifest of a version in a remote store is lost: only its row is left."""
    try:
        repository.resolver.document(standing)
    except IntegrityError:
        return repository.packs.is_remote and not repository.catalog.lattices_in(standing.pack)
    return False


def _is_same(repository: Repository, standing: VersionRow, scanned: ScannedVersion) -> bool:
    """Whether a version holds what was scanned: of one file its bytes, of a directory also names and modes."""
    document = repository.resolver.document(standing)
    if document.is_directory != scanned.is_directory:
        return False
    if not scanned.is_directory:
        return [file.sha256 for file in document.files] == [file.sha256 for file in scanned.files]
    there = {(file.path, file.sha256, file.mode) for file in document.files}
    here = {(file.path, file.sha256, file.mode) for file in scanned.files}
    return (
        there == here
        and set(document.links) == set(scanned.links)
        and set(document.directories) == set(scanned.directories)
    )


def _is_enough(repository: Repository, standing: VersionRow, request: Request) -> bool:
    """Whether a version of the same content is as faithful as what is asked for, and has given up nothing."""
    if standing.dropped:
        return False
    document, policy = repository.resolver.document(standing), request.policy
    coarse = None if document.coarse is None else (document.coarse.scheme, document.coarse.parameters)
    if document.hot is not None and (asked := document.hot.asked).is_coarse:  # It is exact only until it is compacted.
        coarse = asked.scheme, asked.parameters()
    if coarse is None or not policy.is_coarse:
        return coarse is None
    said = coarse[1] if coarse[0] == policy.scheme else {}
    if request.search is not None:
        return bool(said.get("degradation", inf) <= request.search.max_degradation)
    if policy.is_bounded:
        return all(said.get(name, inf) <= bound for name, bound in policy.parameters().items())
    return bool(said.get("quality", 0.0) <= policy.quality)


def _is_whole(repository: Repository, row: VersionRow) -> bool:
    """Whether all that restoring a version takes is recorded, in packs that are there and long enough."""
    resolver, reader = repository.resolver, ObjectReader(repository.resolver, repository.packs)
    resolver.forget()  # What another process has found to be lost meanwhile counts.
    document = resolver.document(row)
    if not repository.catalog.has_packs(document.blob_packs()):
        return False
    try:
        for reference in (document.layout, document.crcs, *(file.skeleton for file in document.files)):
            resolver.blob(reference, row.pack)
        for lattice, content in set(document.objects):
            for record in reader.records(lattice, content):
                if record.end > repository.packs.size(record.pack):
                    return False
    except IntegrityError:
        return False
    return True
