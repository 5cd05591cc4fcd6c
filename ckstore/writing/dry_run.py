"""The packs of a dry run, in a temporary directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ckstore.encoding.object_writer import ObjectWriter
from ckstore.objects.records import Record
from ckstore.repository import Repository
from ckstore.storage.pack_reader import PackReader
from ckstore.storage.root import PACKS


@contextmanager
def scratch_packs(repository: Repository, *, dry_run: bool) -> Iterator[ScratchPacks | None]:
    """Yield the packs of a dry run and delete them afterwards; yield None otherwise."""
    if not dry_run:
        yield None
        return
    with TemporaryDirectory(prefix="ckstore-") as scratch, closing(ScratchPacks(repository, Path(scratch))) as blocks:
        yield blocks


class ScratchPacks:
    """The packs of a store, together with those of a dry run in another directory."""

    def __init__(self, repository: Repository, scratch: Path) -> None:
        self._repository = repository
        self.path = scratch
        self.read_price = repository.packs.read_price
        (scratch / PACKS).mkdir()
        self._scratch = PackReader.of(scratch)
        self._names: set[str] = set()

    def pread(self, pack: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of a pack."""
        return self._reader(pack).pread(pack, offset, length)

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a pack from `offset` on."""
        self._reader(pack).read_into(pack, offset, target)

    def _reader(self, pack: str) -> PackReader:
        return self._scratch if pack in self._names else self._repository.packs

    def keep(self, writer: ObjectWriter, fresh: Sequence[Record]) -> None:
        """Make the new objects of a thinned version known: its child's are stored against them."""
        packs, _ = writer.finish(None, {})
        self._names |= {pack.name for pack in packs}
        wanted = {record.id for record in fresh}
        self._repository.resolver.add(record for record in writer.placed(packs) if record.id in wanted)

    def close(self) -> None:
        """Close the packs of the dry run."""
        self._scratch.close()
