"""Stores objects of existing versions in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckstore.commit.change import Change
from ckstore.commit.costs import present_costs, update_costs
from ckstore.commit.dependents import dependent_versions
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
    reader, identities = repository.reader, sorted(identities)
    with PackWriter(repository.path, "encoded") as pack:
        writer = ObjectWriter(pack)
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            todo = [reader.resolver.record(identity) for identity in identities]
            for encoded in in_order(pool, partial(in_full, reader), todo, worker_count() + 1):
                writer.put(encoded)
        with Change(repository, writer) as change:
            change.finish()
            added = sum(pack.bytes for pack in change.packs)
            if most is not None and added > most:
                return 0
            costs = present_costs(repository, dependent_versions(repository, identities))
            change.commit_again({"change": "rebase", "versions": list(versions)}, costs=costs)
    update_costs(repository, identities)
    return added
