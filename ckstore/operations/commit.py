"""The one way in which packs, log and catalog change: what was written is finished, looked at, and committed, or goes.

with Change(repository, writer) as change:
change.finish(document, blobs)    # the packs are durable, have their names, and can be read, here only
change.commit(...)                # one transaction; without it the packs go again
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any, Self

from ckstore.encoding.writer import ObjectWriter, version_row
from ckstore.errors import CkstoreError, ConflictError, IntegrityError
from ckstore.objects.documents import VersionDocument
from ckstore.operations.costs import Costs, write_costs
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import Placement, VersionRow, key
from ckstore.storage.pack import PackInfo


@dataclass(frozen=True, slots=True)
class RawPacks:
    """Packs that may be freed: the keys in each, by its name, and those that hot versions need as they are."""

    packs: Mapping[str, Collection[int]]
    needed: Collection[int]


class Change:
    """The packs of one change, from the last object that was written to the commit; a context manager.

    Parameters
    ----------
    repository
        What changes.
    writer
        The objects.

    Attributes
    ----------
    packs
        The finished packs.
    row
        The catalog's row of the version that they hold, if they hold one.
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
        # Records first: nobody may look for them in packs that go, not even where removing these fails.
        self._left.close()
        if not self._committed or self._is_move:
            self.repository.resolver.forget()  # Objects are elsewhere now, or nowhere.
        if not self._committed:
            remove_uncommitted(self.repository, self.writer.finished)

    @property
    def _is_move(self) -> bool:
        """Whether objects of older versions are stored again, instead of those of a new one for the first time."""
        return self.row is None or self._again

    def check_unencoded(self) -> None:
        """Raise `ConflictError` where another process has encoded some of the objects meanwhile.

        What is stored against other objects must be new to the store: its base could have it for a base.
        """
        catalog = self.repository.catalog
        raw = set(catalog.raw_packs())
        lattices = catalog.find_lattices(key(record.id) for record in self.writer.lattices)
        contents = catalog.find_contents(key(record.id) for record in self.writer.contents)
        if contents or any(pack not in raw for pack, _ in lattices.values()):
            raise ConflictError("Another process has encoded some of these objects meanwhile; try again.")

    def foresee(self) -> None:
        """Let the resolver know new records before their packs have names: what restoring costs is known, no values.

        Objects that are stored again keep the records that others read them by.
        """
        resolver = self.repository.resolver
        lattices = resolver.known_lattices(record.id for record in self.writer.lattices)
        contents = resolver.known(record.id for record in self.writer.contents)
        self._hold(
            [
                *(record for record in self.writer.lattices if record.id not in lattices),
                *(record for record in self.writer.contents if record.id not in contents),
                *self.writer.raw,
            ]
        )

    def finish(
        self,
        document: VersionDocument | None = None,
        blobs: Mapping[str, bytes] | None = None,
        *,
        again: bool = False,
        trial: bool = False,
    ) -> None:
        """Finish the packs, which are durable then.

        Parameters
        ----------
        document, blobs
            What is said of a version, and what that refers to.
        again
            The version is there already, and is described again.
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
        """The version that the finished packs hold, read from these alone."""
        assert self.row is not None
        with self.repository.reopened("r") as uncommitted, uncommitted.resolver.under_way() as hold:
            hold(self.writer.placed(self.packs))
            yield StoredVersion(uncommitted, self.row, is_committed=False)

    def commit(
        self,
        record: Mapping[str, Any] | None = None,
        *,
        needs: tuple[Iterable[str], Iterable[str]] = ((), ()),
        replace: bool = False,
        heals: bool = False,
        costs: Costs | None = None,
        frees: Callable[[], RawPacks] | None = None,
        lease: int | None = None,
        before: VersionRow | None = None,
        untagged: bool = False,
    ) -> None:
        """Let the catalog take over what was written, and the log what its manifests do not tell.

        Parameters
        ----------
        record
            What the log says, but for the names of packs; None for a new version.
        needs
            Ids of lattices and of exact layers that must still be there.
        replace
            A new version takes the place of the one at its run and step.
        heals
            A new version takes the tags of the one that it replaces, too.
        costs
            Restore costs and depths that follow, by number of the version.
        frees
            Called within the transaction; returns the packs that the version was stored in while it was hot.
        lease
            Number of the lease that ends with this.
        before
            The version that is described again, as it was read: leases do not keep other mirrors from changing it.
        untagged
            The version that is described again must have no tag.

        Raises
        ------
        ConflictError
            Another version is at that run and step by now, another process has encoded what was raw or described the
            version again, what something is stored against was freed, or the version that is described again is tagged.
        NotFoundError
            The version that is described again was forgotten meanwhile.
        """
        catalog = self.repository.catalog
        lattices, contents, raw = self.writer.places(self.packs)
        bases = self._bases(lattices, contents)
        references = set() if self._document is None else self._document.blob_packs()
        lost = self._lost_pack() if heals else None
        self.repository.packs.publish([pack.name for pack in self.packs])

        def change() -> list[str]:
            row = self.row
            if record is not None:
                if "version" in record:
                    version = catalog.version(record["version"])
                    if before is not None and version.described != before.described:
                        raise ConflictError(f"Version {version.number} was changed by others meanwhile; try again.")
                    if untagged:
                        catalog.check_untagged([version.number])
                    if frees is not None:
                        if not version.hot:
                            raise ConflictError(f"Version {version.number} was compacted meanwhile.")
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
                    lattices,
                    contents,
                    raw=raw,
                    references=references,
                    replace=replace,
                    requires_lattices=_keys(needs[0], [*lattices, *raw]),
                    requires_contents=_keys(needs[1], contents),
                )
                self._set_tags(tags, row.number)
                if lost is not None and any(pack.name == lost for pack in catalog.unreferenced_packs()):
                    catalog.remove_packs([lost])
                self.row = row
            else:
                catalog.require(*bases)
                catalog.add_packs(self.packs)
                catalog.move_lattices(lattices)
                catalog.move_contents(contents)
                if row is not None:
                    catalog.replace_version(row, references=references)
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

    def _bases(self, lattices: Iterable[Placement], contents: Iterable[Placement]) -> tuple[list[int], list[int]]:
        """Keys of the older lattices and exact layers that a version described again is, or objects are stored against.

        A lease keeps the `gc` of this mirror from freeing them, but not that of another one.
        """
        find = self.repository.resolver.content
        below = {record.lattice for record in self.writer.contents}
        below |= {record.base for record in self.writer.lattices if record.base is not None}
        parents = {record.parent for record in self.writer.contents if record.parent is not None}
        if self._document is not None and self._again:
            below |= {lattice for lattice, _ in self._document.objects}
            parents |= {content for _, content in self._document.objects if content is not None and find(content)}
        return _keys(below, lattices), _keys(parents, contents)

    def _under_free_number(self, row: VersionRow) -> VersionRow:
        """The row; of a remote store under another number, where another mirror has given that one away meanwhile."""
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
        """Raise `ConflictError` where another process has replaced the version meanwhile, and told so."""
        there = None if row.step is None else self.repository.catalog.at_step(row.run, row.step)
        if there is not None and self._document is not None and there.number != self._document.replaces:
            raise ConflictError(
                f"{row.run}@{row.step} was stored again meanwhile as version {there.number}; look at it."
            )

    def _lost_pack(self) -> str | None:
        """The pack of the version that is replaced, where its manifest is lost: then nothing tells what is in it."""
        replaced = None if self._document is None else self._document.replaces
        found = [row for row in self.repository.catalog.versions() if row.number == replaced]
        try:
            for row in found:
                self.repository.resolver.manifest(row.pack)
        except IntegrityError:
            return found[0].pack
        return None

    def _take_tags(self) -> list[str]:
        """Take the tags off the version that is replaced."""
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
    """Remove the files of packs that the catalog does not have any more."""
    if not names:
        return
    # With the lock held: a `recover` that ran since the commit has taken them in again.
    with repository.catalog.transaction():
        known = {pack.name for pack in repository.catalog.packs()}
        for name in names:
            if name not in known:
                repository.packs.remove(name)


def remove_uncommitted(repository: Repository, packs: Iterable[PackInfo]) -> None:
    """Take back the packs of a change that was not committed: `recover` would make it visible.

    With the write lock held: a `recover` that is at work may have taken them in, and nobody would find them there.
    """
    # Where nobody can say now whether the commit took place, `gc` removes what no version needs.
    with suppress(CkstoreError):
        remove_files(repository, [pack.name for pack in packs])


def _keys(identities: Iterable[str], placed: Iterable[Placement]) -> list[int]:
    """Keys of ids, in order, without those that are committed with them."""
    return sorted({key(identity) for identity in identities} - {place[0] for place in placed})
