"""Thinning: the bytes that a version frees by dropping its exact layers, and whether all others stay unchanged."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tools.fidelity.archives import EXACT, StoreArchive
from tools.fidelity.rows import gpt_language
from tools.fidelity.settings import Bench
from tools.fidelity.states import load

#: Versions of the store; the middle one is thinned.
_VERSIONS = 7


@dataclass(frozen=True)
class Thinning:
    """The result of one thinning.

    Attributes
    ----------
    unshared
        Bytes that the version added to the store; no other version has an object of it.
    freed
        The reduction of the store, with the bytes stored again for others.
    others, changed
        The number of other versions, and of changed ones, which no longer have their SHA-256.
    at_once
        Relative rise of the evaluation loss of the thinned version.
    """

    unshared: int
    freed: int
    others: int
    changed: int
    at_once: float

    @property
    def share(self) -> float:
        """The freed part of the unshared bytes."""
        return self.freed / self.unshared


def measure(bench: Bench) -> Thinning:
    """Ingest the last versions of the GPT exactly and thin one that has others before and after it."""
    paths = bench.run("gpt")[-_VERSIONS:]
    middle = len(paths) // 2
    with bench.scratch() as scratch:
        archive = StoreArchive(scratch / "store", EXACT)
        for path in paths:
            archive.add(path)
        rows = archive.store.versions()
        before = archive.nbytes()
        archive.store.thin([rows[middle].number])
        archive.store.gc(grace=0)
        freed = before - archive.nbytes()
        changed = 0
        for index, (row, path) in enumerate(zip(rows, paths, strict=True)):
            if index != middle:
                out = scratch / "out"
                archive.store[row.number].checkout(out, force=True)
                changed += _sha256(out) != _sha256(path)
        language = gpt_language(bench)
        exact = language.loss(load(paths[middle])["model"])
        rise = language.loss(archive.restore(middle)["model"]) / exact - 1
        archive.remove()
    return Thinning(rows[middle].stored_bytes, freed, len(paths) - 1, changed, rise)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
