"""Stores objects of existing versions in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckstore.commit.change import Change
from ckstore.commit.costs import present_costs, update_costs
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.encoding.reencode import in_full
from ckstore.repository import Repository
from ckstore.runtime.threads import in_order, worker_count
from ckstore.storage.pack import PackWriter


def store_in_full(
    repository: Repository, identities: Iterable[str], versions: Sequence[int], most: int | None = None
) -> int:
    """Store objects of these versions in full, in one commit; return the bytes that it added.

    If they take more than `most` bytes, nothing is committed, and the result is 0. The caller holds a lease. `gc` frees
    the superseded objects.
    """
    reader = repository.reader
    with PackWriter(repository.path, "encoded") as pack:
        writer = ObjectWriter(pack)
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            todo = [reader.resolver.record(identity) for identity in sorted(identities)]
            for encoded in in_order(pool, partial(in_full, reader), todo, worker_count() + 1):
                writer.put(encoded)
        with Change(repository, writer) as change:
            change.finish()
            added = sum(pack.bytes for pack in change.packs)
            if most is not None and added > most:
                return 0
            # The cost of a version without deltas does not change.
            costs = present_costs(repository, [row for row in repository.catalog.versions() if row.depth > 0])
            change.commit_again({"change": "rebase", "versions": list(versions)}, costs=costs)
    update_costs(repository)
    return added
