"""Changes packs, log and catalog together: finished packs are committed in one transaction, or removed.

with Change(repository, writer) as change:
change.finish(document, blobs)    # the packs are durable and named, and this process can read them
change.commit_version(...)        # a new version; without a commit the packs are removed
change.commit_again(...)          # or objects of existing versions, stored again
change.commit_encoded(...)        # or the encoded form of a hot version
change.keep(...)                  # or the version is left to a later `Change.of_packs`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from msgspec import structs

from ckstore.commit.costs import Costs, write_costs
from ckstore.commit.going_back import Marks, marks_of
from ckstore.commit.naming import check_run_is_no_tag
from ckstore.encoding.object_writer import ObjectWriter, version_row
from ckstore.errors import CkstoreError, ConflictError, IntegrityError, NotFoundError
from ckstore.objects.documents import ManifestDocument, VersionDocument
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage import manifest, root
from ckstore.storage.catalog import Placement, VersionRow, key
from ckstore.storage.pack import RAW, PackInfo
from ckstore.storage.pack_reader import is_named
from ckstore.storage.rows import keys
from ckstore.storage.zip_stream import digest_file

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RawPacks:
    """Packs that may be freed, with the keys in each, and the keys that hot versions still need raw."""

    packs: Mapping[str, Collection[int]]
    needed: Collection[int]


class Change:
    """The finished `packs` of one change, from the last object of `writer` to the commit; a context manager.

    New records are known from the start, to compute restore costs, and readable once their packs have names. Objects
    that are stored again keep their old records for other readers until then.
    """

    def __init__(self, repository: Repository, writer: ObjectWriter) -> None:
        self.repository = repository
        self.packs: Sequence[PackInfo] = ()
        self.writer = writer
        self._document: VersionDocument | None = None
        self._is_committed = self._is_new = False
        self._left = ExitStack()

    @classmethod
    def of_packs(cls, repository: Repository, found: Sequence[tuple[PackInfo, ManifestDocument]]) -> Self:
        """Return the change of a version that was kept: its packs and their documents, the last one with the version.

        Raise `IntegrityError` if that is none.
        """
        packs = [pack for pack, _ in found]
        pack, last = found[-1]
        change = cls(repository, ObjectWriter.of_packs(found))
        change.packs, change._document = packs, last.described()
        if change._document is None:
            raise IntegrityError(f"Pack {pack.name} describes no version.")
        change._entry = repository.packs.find_entry(pack.name, manifest.MEMBER)
        return change

    def __enter__(self) -> Self:
        resolver = self.repository.resolver
        self._hold = self._left.enter_context(resolver.under_way())
        encoded = [record.id for record in self.writer.encoded_records]
        known = resolver.known(encoded) if encoded else ()
        self._hold([record for record in self.writer.records if record.id not in known])
        return self

    def __exit__(self, *raised: object) -> None:
        # Records first: nobody may look them up in removed packs, even if the removal fails.
        self._left.close()
        if not self._is_new:
            self.repository.resolver.forget()  # Its objects were moved or removed.
        if not self._is_committed:
            # The version's pack first: `recover` must not find it without the values in the others.
            remove_uncommitted(self.repository, reversed(self.writer.finished))

    def check_unencoded(self) -> None:
        """Raise `ConflictError` if another process has encoded some of the objects since.

        An object with a base must be new to the store: otherwise its base could itself be stored against it.
        """
        catalog = self.repository.catalog
        objects = catalog.find_objects(keys([record.id for record in self.writer.encoded_records]).values())
        if any(not pack.endswith(RAW) for pack, _ in objects.values()):
            raise ConflictError("Another process has encoded some of these objects; try again.")

    def finish(
        self,
        document: VersionDocument | None = None,
        blobs: Mapping[str, bytes] | None = None,
        *,
        again: bool = False,
        trial: bool = False,
    ) -> None:
        """Finish the packs and make them durable.

        `document` and `blobs` are the metadata of a version, which exists already with `again`. The packs of a `trial`
        will not be committed: `recover` leaves them alone.
        """
        self._document = document
        self.packs, self._entry = self.writer.finish(document, dict(blobs or {}), again=again, trial=trial)
        self._hold(self.writer.placed(self.packs))

    def read_back(self) -> None:
        """Raise `IntegrityError` unless the finished packs hold the bytes that were written."""
        for pack in self.packs:
            with open(self.repository.path / root.PACKS / pack.name, "rb") as file:
                is_intact = is_named(pack.name, digest_file(file))
            if not is_intact:
                raise IntegrityError(f"Pack {pack.name} was not written as it should be; check the disk and try again.")

    @contextmanager
    def version(self) -> Iterator[StoredVersion]:
        """Yield the version in the finished packs, read from these alone."""
        assert self._document is not None
        row = version_row(self._document, self.packs, self._entry)
        with self.repository.reopened("r") as uncommitted, uncommitted.resolver.under_way() as hold:
            hold(self.writer.placed(self.packs))
            yield StoredVersion(uncommitted, row, is_committed=False)

    def keep(self, promise: Callable[[VersionRow, Sequence[PackInfo]], None]) -> VersionRow:
        """Leave a new version to a later `of_packs` once its packs are promised; return the row that it would have."""
        assert self._document is not None
        row = version_row(self._document, self.packs, self._entry)
        promise(row, self.packs)
        self._is_committed = True
        return row

    def commit_kept(self, lease: int) -> int:
        """Commit a version that was kept, unless it was committed already, and end the lease; return its number.

        Raise `ConflictError` if the run went on without it.
        """
        catalog, document = self.repository.catalog, self._document
        assert document is not None
        for row in catalog.with_uid(document.uid):
            self._is_committed = True
            return row.number
        latest = catalog.latest(document.run)
        parent = self._parent_of_kept(document, latest)
        if latest is not None and latest.number != parent and latest.created > document.created:
            raise ConflictError(f"Run {document.run} in {self.repository.place} went on without step {document.step}.")
        self._document = structs.replace(document, parent=parent)
        bases = {record.base for record in self.writer.encoded_records if record.base is not None}
        return self.commit_version(bases | set(document.objects), lease)

    def _parent_of_kept(self, document: VersionDocument, latest: VersionRow | None) -> int | None:
        """Return the number of the parent, which perhaps was kept, too, and committed under another number.

        If it was left out or forgotten, perhaps another one has its number: return that of the run's latest version if
        that is older.
        """
        number = document.parent
        if number is None:
            return None
        if latest is not None and self.repository.resolver.number_of(latest.pack) == number:
            return latest.number
        with suppress(NotFoundError):
            if self.repository.catalog.version(number).created <= document.created:
                return number
        return None if latest is None or latest.number > number else latest.number

    def commit_version(
        self,
        needs: Iterable[str],
        lease: int,
        *,
        replaces: bool = False,
        heals: bool = False,
        run: str | None = None,
        marks: Callable[[VersionRow], tuple[bool, Marks]] | None = None,
    ) -> int:
        """Commit a new version, and end its lease; return its number, another one if a mirror has taken its own.

        The objects that it `needs` must still exist. It `replaces` the one at its run and step; if it `heals` that one,
        it takes its tags. `run` is the present name of its run, which was perhaps renamed. `marks`, called within the
        transaction, tell whether it is superseded itself, and which versions it marks; by default these follow from its
        parent. Raise `ConflictError` if the run and step are taken, or a base was freed.
        """
        catalog, document = self.repository.catalog, self._document
        assert document is not None
        objects, raw = self.writer.places(self.packs)
        placed = [*objects, *raw]
        lost = self._lost_pack(document.replaces) if heals else None

        def place(row: VersionRow) -> None:
            # Another process may have committed an object of the same key since this one looked.
            self.repository.resolver.check_keys([record.id for record in self.writer.records])
            catalog.commit_version(
                row,
                self.packs,
                objects,
                raw=raw,
                references=document.blob_packs(),
                uses=catalog.places_of(_keys(document.objects, placed)),
                bases=self._bases(()),  # Some of the new ones may have been committed elsewhere since.
                replace=replaces,
                requires=_keys(needs, placed),
                bands=document.bands,
            )

        def change() -> int:
            row = self._under_free_number(document, document.run if run is None else run)
            if self._is_found(row):
                if marks is not None and marks(row)[0]:
                    self._mark(row, Marks([row]), replaces=False)
                place(row)
                catalog.end_lease(lease)
                return row.number
            if catalog.latest(row.run) is None:
                check_run_is_no_tag(catalog, row.run)  # Another process may have set the tag since.
            is_own = heals and not document.goes_back  # It takes the place of another.
            is_superseded, changed = (False, Marks()) if is_own else (marks or self._marks)(row)
            row = replace(row, superseded=is_superseded)
            self._mark(row, changed, replaces=replaces)
            tags = self._tags_of_healed(row, document.replaces) if heals else []
            replaced = catalog.at_step(row.run, row.step) if replaces and row.step is not None else None
            if replaced is not None:
                catalog.note({"change": "forget", "versions": [replaced.number], "uids": [replaced.uid]})
            place(row)
            for tag in tags:
                catalog.set_tag(tag, row.number)
                catalog.note({"change": "tag", "tag": tag, "version": row.number})
            if lost is not None and any(pack.name == lost for pack in catalog.unreferenced_packs()):
                catalog.remove_packs([lost])
            catalog.end_lease(lease)
            return row.number

        number = self._commit(change)
        self._is_new = True
        return number

    def commit_again(
        self,
        record: Mapping[str, Any],
        before: VersionRow | None = None,
        *,
        untagged: bool = False,
        costs: Costs | None = None,
    ) -> None:
        """Commit objects of existing versions, and write `record` to the log, with the names of the packs.

        With `before`, the row of a version as it was read, raise `ConflictError` if another process has changed the
        version, or if it is tagged and must be `untagged`; `NotFoundError` if it was forgotten.
        """

        def change() -> None:
            if before is not None:
                self._check_unchanged(before)
            if before is not None and untagged:
                self.repository.catalog.check_untagged([before.number])
            self._move(record, before)
            write_costs(self.repository.catalog, costs or {})

        self._commit(change)

    def commit_encoded(self, before: VersionRow, lease: int, frees: Callable[[Sequence[str]], RawPacks]) -> None:
        """Commit the objects of a hot version, encoded; end its lease, and delete the raw packs that it `frees`.

        `frees` is called within the transaction, with the raw packs that may go. Raise `ConflictError` if another
        process has changed the version, or encoded its objects; `NotFoundError` if it was forgotten.
        """
        catalog = self.repository.catalog

        def change() -> list[str]:
            self._check_unchanged(before)
            self.check_unencoded()
            former = catalog.former_raw_packs(before.number)
            packs = self._move({"change": "encode", "version": before.number}, before)
            if any(name.endswith(RAW) for name in packs):
                raise ConflictError("Objects of this version are only stored unencoded; try again.")
            catalog.note_swept({pack.name: 0 for pack in self.packs})  # It needs all of them.
            raw = frees(former)
            freed = [gone for name, keys in raw.packs.items() for gone in catalog.free_packs([name], keys, raw.needed)]
            if freed:
                catalog.note_gone(freed)
            catalog.end_lease(lease)
            return freed

        remove_files(self.repository, self._commit(change))

    def _commit(self, change: Callable[[], T]) -> T:
        self.repository.packs.publish([pack.name for pack in self.writer.finished])
        result = self.repository.catalog.commit(change)
        self._is_committed = True
        return result

    def _check_unchanged(self, before: VersionRow) -> None:
        """Raise `ConflictError` if a version was changed since: leases do not stop other mirrors."""
        if self.repository.catalog.version(before.number).described != before.described:
            raise ConflictError(f"Version {before.number} was changed by another process; try again.")

    def _move(self, record: Mapping[str, Any], before: VersionRow | None) -> Set[str]:
        """Give the objects their new places, and their version, if any, its new document; note it in the log.

        Return the packs that hold the version's objects.
        """
        catalog, resolver, document = self.repository.catalog, self.repository.resolver, self._document
        if before is not None:  # Objects that are stored again have their keys.
            resolver.check_keys({one.id for one in self.writer.records} - set(resolver.document(before).objects))
        objects, _ = self.writer.places(self.packs)
        # A lease protects older objects from this mirror's `gc`, but not from another mirror's.
        needed = {record.base for record in self.writer.encoded_records if record.base is not None}
        catalog.note({**record, "packs": [pack.name for pack in self.packs]})
        catalog.require(_keys(needed | set(() if document is None else document.objects), objects))
        catalog.add_packs(self.packs, self._bases(objects))
        catalog.move_objects(objects)
        if document is None:
            return frozenset()
        # A `gc` of another mirror may have rewritten packs since; it keeps the blobs of this version.
        references = document.blob_packs()
        moved = catalog.moved_packs(references)
        row = version_row(document, self.packs, self._entry)
        uses = catalog.places_of(map(key, document.objects))
        catalog.replace_version(row, {moved.get(name, name) for name in references}, uses)
        return uses.keys()

    def _bases(self, placed: Iterable[Placement]) -> set[str]:
        """Return the names of the packs that hold the bases of the new objects."""
        bases = {record.base for record in self.writer.encoded_records if record.base is not None}
        return set(self.repository.catalog.places_of(_keys(bases, placed)))

    def _tags_of_healed(self, row: VersionRow, replaced: int | None) -> list[str]:
        """Return the tags of the version that is healed, and delete them."""
        catalog = self.repository.catalog
        self._check_unhealed(row, replaced)
        tags = [] if replaced is None else catalog.tags_of(replaced)
        for tag in tags:
            catalog.delete_tag(tag)
        return tags

    def _under_free_number(self, document: VersionDocument, run: str) -> VersionRow:
        """Return the row of a new version, renumbered if another mirror has taken its number, in its present run."""
        catalog = self.repository.catalog
        number = catalog.free_number(document.number)
        if number != document.number:
            catalog.note({"change": "renumber", "uid": document.uid, "from": document.number, "version": number})
        row = version_row(structs.replace(document, number=number), self.packs, self._entry)
        if run == row.run:
            return row
        catalog.note({"change": "rename", "run": run, "uids": [row.uid]})
        return replace(row, run=run)

    def _is_found(self, row: VersionRow) -> bool:
        """Return whether a `recover` has found the version, and committed it, since its packs were written."""
        try:
            return self.repository.catalog.version(row.number).uid == row.uid
        except NotFoundError:
            return False

    def _marks(self, row: VersionRow) -> tuple[bool, Marks]:
        """Return whether a new version is superseded from the start, and the versions that it marks.

        It is superseded if it does not go back itself, and another process went back behind its parent.
        """
        catalog = self.repository.catalog
        assert self._document is not None
        if self._document.goes_back:
            return False, marks_of(catalog, row.run, row.parent)
        parent = None if row.parent is None else catalog.version(row.parent)
        return parent is not None and parent.superseded and parent.run == row.run, Marks()

    def _mark(self, row: VersionRow, marks: Marks, *, replaces: bool) -> None:
        """Mark the versions, and note it in the log; the version that is replaced will be forgotten instead."""
        catalog = self.repository.catalog
        assert self._document is not None
        superseded = [item for item in marks.superseded if not replaces or item.step is None or item.step != row.step
                      or any(item.step == other.step for other in marks.present)]  # fmt: skip
        if self._document.goes_back or superseded or marks.present or row.superseded:
            catalog.mark_versions([item.number for item in superseded], [item.number for item in marks.present])
            uids = [item.uid for item in superseded] + [row.uid] * row.superseded
            present = [item.uid for item in marks.present]
            catalog.note({"change": "supersede", "by": row.uid, "superseded": uids, "present": present})

    def _check_unhealed(self, row: VersionRow, replaced: int | None) -> None:
        """Raise `ConflictError` if another process has replaced the version since."""
        existing = None if row.step is None else self.repository.catalog.at_step(row.run, row.step)
        if existing is not None and existing.number != replaced:
            raise ConflictError(
                f"Another process stored {row.run}@{row.step} again as version {existing.number}; check that version."
            )

    def _lost_pack(self, replaced: int | None) -> str | None:
        """Return the pack of the replaced version if its manifest, the list of its contents, is lost."""
        if replaced is None:
            return None
        with suppress(NotFoundError):
            row = self.repository.catalog.version(replaced)
            try:
                self.repository.resolver.manifest(row.pack)
            except IntegrityError:
                return row.pack
        return None


def remove_files(repository: Repository, names: Sequence[str]) -> None:
    """Delete the files of packs that are no longer in the catalog."""
    if not names:
        return
    # Under the lock: a `recover` since the commit may have re-added them.
    with repository.catalog.transaction():
        known = repository.catalog.known_packs(names)
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
    return sorted({*keys(identities).values()} - {place[0] for place in placed})
