"""Changes packs, log and catalog together: finished packs are committed in one transaction, or removed.

with Change(repository, writer) as change:
change.finish(document, blobs)    # the packs are durable and named, and this process can read them
change.commit(...)                # one transaction; without it the packs are removed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any, Self

from ckstore.commit.costs import Costs, write_costs
from ckstore.encoding.writer import ObjectWriter, version_row
from ckstore.errors import CkstoreError, ConflictError, IntegrityError
from ckstore.objects.documents import VersionDocument
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import Placement, VersionRow, key
from ckstore.storage.pack import PackInfo


@dataclass(frozen=True, slots=True)
class RawPacks:
    """Packs that may be freed, with the keys in each, and the keys that hot versions still need raw."""

    packs: Mapping[str, Collection[int]]
    needed: Collection[int]


class Change:
    """The packs of one change, from the last written object to the commit; a context manager.

    Parameters
    ----------
    repository
        The store to change.
    writer
        The written objects.

    Attributes
    ----------
    packs
        The finished packs.
    row
        The catalog's row of the version in the packs, if there is one.
    """

    def __init__(self, repository: Repository, writer: ObjectWriter) -> None:
        self.repository = repository
        self.packs: Sequence[PackInfo] = ()
        self.row: VersionRow | None = None
        self.writer = writer
        self._document: VersionDocument | None = None
        self._again = False
        self._committed = False
        self._left = ExitStack()

    def __enter__(self) -> Self:
        self._hold = self._left.enter_context(self.repository.resolver.under_way())
        return self

    def __exit__(self, *raised: object) -> None:
        # Records first: nobody may look them up in removed packs, even if the removal fails.
        self._left.close()
        if not self._committed or self._is_move:
            self.repository.resolver.forget()  # Its objects were moved or removed.
        if not self._committed:
            remove_uncommitted(self.repository, self.writer.finished)

    @property
    def _is_move(self) -> bool:
        """Whether the change stores objects of existing versions again, without a new version."""
        return self.row is None or self._again

    def check_unencoded(self) -> None:
        """Raise `ConflictError` if another process has encoded some of the objects since.

        An object with a base must be new to the store: otherwise its base could itself be stored against it.
        """
        catalog = self.repository.catalog
        raw = set(catalog.raw_packs())
        objects = catalog.find_objects(key(record.id) for record in self.writer.encoded_records)
        if any(pack not in raw for pack, _ in objects.values()):
            raise ConflictError("Another process has encoded some of these objects; try again.")

    def register_pending(self) -> None:
        """Make new records known before their packs have names, to compute restore costs; values are not readable yet.

        Objects that are stored again keep their old records for other readers.
        """
        known = self.repository.resolver.known(record.id for record in self.writer.encoded_records)
        self._hold(record for record in self.writer.records if record.id not in known)

    def finish(
        self,
        document: VersionDocument | None = None,
        blobs: Mapping[str, bytes] | None = None,
        *,
        again: bool = False,
        trial: bool = False,
    ) -> None:
        """Finish the packs and make them durable.

        Parameters
        ----------
        document, blobs
            The metadata of a version, and its blobs.
        again
            The version exists already and gets a new document.
        trial
            The packs will not be committed: `recover` leaves them alone.
        """
        self._document = document
        self.packs, self._entry = self.writer.finish(document, dict(blobs or {}), again=again, trial=trial)
        self._again = again
        self._hold(self.writer.placed(self.packs))
        if document is not None:
            self.row = version_row(document, self.packs, self._entry)

    @contextmanager
    def version(self) -> Iterator[StoredVersion]:
        """Yield the version in the finished packs, read from these alone."""
        assert self.row is not None
        with self.repository.reopened("r") as uncommitted, uncommitted.resolver.under_way() as hold:
            hold(self.writer.placed(self.packs))
            yield StoredVersion(uncommitted, self.row, is_committed=False)

    def commit(
        self,
        record: Mapping[str, Any] | None = None,
        *,
        needs: Iterable[str] = (),
        replace: bool = False,
        heals: bool = False,
        costs: Costs | None = None,
        frees: Callable[[], RawPacks] | None = None,
        lease: int | None = None,
        before: VersionRow | None = None,
        untagged: bool = False,
    ) -> None:
        """Commit the packs to the catalog, and the rest of the change to the log.

        Parameters
        ----------
        record
            The log record, without the names of packs; None for a new version.
        needs
            Ids of objects that must still exist.
        replace
            The new version replaces the one at its run and step.
        heals
            The new version also takes the tags of the version that it replaces.
        costs
            New restore costs and depths, by number of the version.
        frees
            Called within the transaction; returns the raw packs of the version while it was hot.
        lease
            Number of the lease that ends with this commit.
        before
            The row of an existing version, as it was read: leases do not stop other mirrors from changing it.
        untagged
            The existing version must have no tag.

        Raises
        ------
        ConflictError
            The run and step are taken, another process has encoded the raw objects or changed the version, a base was
            freed, or the existing version is tagged.
        NotFoundError
            The existing version was forgotten since.
        """
        catalog = self.repository.catalog
        objects, raw = self.writer.places(self.packs)
        bases = self._bases(objects)
        references = set() if self._document is None else self._document.blob_packs()
        lost = self._lost_pack() if heals else None
        self.repository.packs.publish([pack.name for pack in self.packs])

        def change() -> list[str]:
            row = self.row
            if record is not None:
                if "version" in record:
                    version = catalog.version(record["version"])
                    if before is not None and version.described != before.described:
                        raise ConflictError(f"Version {version.number} was changed by another process; try again.")
                    if untagged:
                        catalog.check_untagged([version.number])
                    if frees is not None:
                        if not version.hot:
                            raise ConflictError(f"Version {version.number} was compacted by another process.")
                        self.check_unencoded()
                catalog.note({**record, "packs": [pack.name for pack in self.packs]})
            if row is not None and not self._is_move:
                row = self._under_free_number(row)
                if heals:
                    self._check_unhealed(row)
                tags = self._take_tags() if heals else []
                catalog.commit_version(
                    row,
                    self.packs,
                    objects,
                    raw=raw,
                    references=references,
                    replace=replace,
                    requires=_keys(needs, [*objects, *raw]),
                )
                self._set_tags(tags, row.number)
                if lost is not None and any(pack.name == lost for pack in catalog.unreferenced_packs()):
                    catalog.remove_packs([lost])
                self.row = row
            else:
                catalog.require(bases)
                catalog.add_packs(self.packs)
                catalog.move_objects(objects)
                if row is not None:
                    # A `gc` of another mirror may have rewritten packs since; it keeps the blobs of this version.
                    moved = catalog.moved_packs(references)
                    catalog.replace_version(row, references={moved.get(name, name) for name in references})
            raw_packs = RawPacks({}, ()) if frees is None else frees()
            freed = [
                gone
                for name, keys in raw_packs.packs.items()
                for gone in catalog.free_packs([name], keys, raw_packs.needed)
            ]
            if freed:
                catalog.note_gone(freed)
            write_costs(catalog, costs or {})
            if lease is not None:
                catalog.end_lease(lease)
            return freed

        freed = catalog.commit(change)
        self._committed = True
        remove_files(self.repository, freed)

    def _bases(self, objects: Iterable[Placement]) -> list[int]:
        """Return the keys of older objects that the change depends on.

        A lease protects them from this mirror's `gc`, but not from another mirror's.
        """
        needed = {record.base for record in self.writer.encoded_records if record.base is not None}
        if self._document is not None and self._again:
            needed |= set(self._document.objects)
        return _keys(needed, objects)

    def _under_free_number(self, row: VersionRow) -> VersionRow:
        """Return the row, renumbered if another mirror has taken its number."""
        catalog = self.repository.catalog
        document = self._document
        assert document is not None
        number = catalog.free_number(document.number)
        if number == document.number:
            return row
        renumbered = replace_fields(document, number=number)
        catalog.note({"change": "renumber", "uid": document.uid, "from": document.number, "version": renumbered.number})
        return version_row(renumbered, self.packs, self._entry)

    def _check_unhealed(self, row: VersionRow) -> None:
        """Raise `ConflictError` if another process has replaced the version since."""
        existing = None if row.step is None else self.repository.catalog.at_step(row.run, row.step)
        if existing is not None and self._document is not None and existing.number != self._document.replaces:
            raise ConflictError(
                f"Another process stored {row.run}@{row.step} again as version {existing.number}; check that version."
            )

    def _lost_pack(self) -> str | None:
        """Return the pack of the replaced version if its manifest, the list of its contents, is lost."""
        replaced = None if self._document is None else self._document.replaces
        found = [row for row in self.repository.catalog.versions() if row.number == replaced]
        try:
            for row in found:
                self.repository.resolver.manifest(row.pack)
        except IntegrityError:
            return found[0].pack
        return None

    def _take_tags(self) -> list[str]:
        """Remove the tags of the replaced version; return them."""
        catalog = self.repository.catalog
        replaced = None if self._document is None else self._document.replaces
        tags = [tag for tag, meant in catalog.tags().items() if meant == replaced]
        for tag in tags:
            catalog.delete_tag(tag)
        return tags

    def _set_tags(self, tags: Sequence[str], number: int) -> None:
        for tag in tags:
            self.repository.catalog.set_tag(tag, number)
            self.repository.catalog.note({"change": "tag", "tag": tag, "version": number})


def remove_files(repository: Repository, names: Sequence[str]) -> None:
    """Delete the files of packs that are no longer in the catalog."""
    if not names:
        return
    # Under the lock: a `recover` since the commit may have re-added them.
    with repository.catalog.transaction():
        known = {pack.name for pack in repository.catalog.packs()}
        for name in names:
            if name not in known:
                repository.packs.remove(name)


def remove_uncommitted(repository: Repository, packs: Iterable[PackInfo]) -> None:
    """Delete the packs of an uncommitted change: `recover` would commit it.

    It holds the write lock: a concurrent `recover` may have added the packs to the catalog.
    """
    # If the catalog is unavailable now, a later `gc` deletes them.
    with suppress(CkstoreError):
        remove_files(repository, [pack.name for pack in packs])


def _keys(identities: Iterable[str], placed: Iterable[Placement]) -> list[int]:
    """Return the sorted keys of ids, without objects of the same commit."""
    return sorted({key(identity) for identity in identities} - {place[0] for place in placed})
