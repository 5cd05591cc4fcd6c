"""Packs that are written aside, and go: what a dry run would have put into the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ckstore.encoding.writer import ObjectWriter
from ckstore.objects.records import LatticeRecord
from ckstore.repository import Repository
from ckstore.storage.pack_reader import PackReader
from ckstore.storage.root import PACKS


@contextmanager
def scratch_packs(repository: Repository, *, dry_run: bool) -> Iterator[ScratchPacks | None]:
    """The packs of a dry run, which go with it; None where packs are written into the store."""
    if not dry_run:
        yield None
        return
    with TemporaryDirectory(prefix="ckstore-") as scratch, closing(ScratchPacks(repository, Path(scratch))) as blocks:
        yield blocks


class ScratchPacks:
    """The packs of a store, and those of a dry run, which lie elsewhere."""

    def __init__(self, repository: Repository, scratch: Path) -> None:
        self._repository = repository
        self.path = scratch
        self.is_remote = repository.packs.is_remote
        (scratch / PACKS).mkdir()
        self._scratch = PackReader(scratch)
        self._names: set[str] = set()

    def pread(self, pack: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes of a pack."""
        return self._reader(pack).pread(pack, offset, length)

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target` with what stands from `offset` on of a pack."""
        self._reader(pack).read_into(pack, offset, target)

    def _reader(self, pack: str) -> PackReader:
        return self._scratch if pack in self._names else self._repository.packs

    def keep(self, writer: ObjectWriter, fresh: Sequence[LatticeRecord]) -> None:
        """Make known the lattices that a thinned version would have: its child's are taken from these."""
        packs, _ = writer.finish(None, {})
        for pack in packs:
            if pack.kind == "exact":
                (self.path / PACKS / pack.name).unlink()
            else:
                self._names.add(pack.name)
        wanted = {record.id for record in fresh}
        self._repository.resolver.add(record for record in writer.placed(packs) if record.id in wanted)

    def close(self) -> None:
        """Close the packs of the dry run."""
        self._scratch.close()
