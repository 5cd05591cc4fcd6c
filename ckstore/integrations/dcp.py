"""`torch.distributed.checkpoint` on a store instead of a directory: the ranks' shards become one version."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import logging
import os
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckstore import __version__
from ckstore.commit.naming import DEFAULT_RUN
from ckstore.dtypes import ITEM_SIZES, torch_dtype
from ckstore.errors import CkstoreError, UsageError
from ckstore.formats.dcp import nested
from ckstore.formats.torch.live_state import Absent, LiveState, OnUnknown, describe_state_dict
from ckstore.intake.unsent import Unsent
from ckstore.integrations.lineage import has_loaded, lineage_of
from ckstore.integrations.names import opened
from ckstore.reading.buffers import prefetch_parts
from ckstore.saving import termination
from ckstore.storage.durable import timestamp
from ckstore.storage.root import place
from ckstore.store import Store
from ckstore.writing.ingest import reserved
from ckstore.writing.parents import units_after
from ckstore.writing.ranks import Bytes, Outline, Part, PartPlan, Shard, Written, write_part
from ckstore.writing.request import IngestOptions, named_parent, request_of

if TYPE_CHECKING:
    from ckstore.storage.catalog import VersionRow
    from ckstore.tensor import LazyTensor
    from ckstore.version import Version
    from ckstore.writing.ingest import IngestReport

_log = logging.getLogger("ckstore")

#: Bytes of messages that a rank sends ahead of their receivers.
_AHEAD = 64 << 20

#: Bytes of shards that are fetched from a remote store ahead of their use.
_FETCHED = 512 << 20


@dataclass(frozen=True)
class _Job:
    """The rank of the coordinator, its version of ckstore, and the number of ranks."""

    coordinator: int
    version: str
    world: int


class StoreWriter(StorageWriter):
    """A `StorageWriter` for `dcp.save` and `dcp.async_save` that stores whole tensors as one version.

    Each rank writes objects of the version into a pack of its own, in the store; the coordinator commits the packs. The
    objects do not depend on the number of ranks, so that the next version is stored against this one even if that
    number changes: a rank that holds a part of an object sends it to the rank that holds most. Nothing is visible
    before the commit, and the version is durable when the coordinator's save returns. After a load of an earlier
    version of the run, later versions are kept as superseded ones.

    Parameters
    ----------
    store
        A store, or its path or URL, which all ranks reach.
    run, step
        Run and step of the version, as for `Store.ingest`.
    process_group
        The process group of the save, with a backend for the CPU, such as gloo; by default the default group, or all
        its ranks with gloo if it is for GPUs alone. Its timeout limits each wait for another rank.
    staging
        A `Staging` of the store: the version is durable on the ranks' machines when the save returns, and in the bucket
        later.
    **options
        Other options of `Store.ingest`, such as `metrics`.

    Attributes
    ----------
    report
        The `IngestReport`, on the coordinator after a save; otherwise None.
    pushed
        With `staging`, a future of the version's row in the bucket, on the coordinator after a save.

    Raises
    ------
    UsageError
        An option is invalid, the save uses no collectives or another process group, that group has no backend for the
        CPU, the planner caches plans, a `checkpoint_id` is given, or a rank has another store of the same path.
    CkstoreError
        Another rank did not answer in time; the message names it.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        run: str | None = None,
        step: int | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        staging: Staging | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._store = store if isinstance(store, Store) else place(store)
        self._unsent = None if staging is None else staging._unsent_of(store)
        if isinstance(store, Store):
            store._checked_run(run)
        self._group = process_group
        options.pop("progress", None)
        if unknown := options.keys() - IngestOptions.__dataclass_fields__.keys():
            raise UsageError(f"`Store.ingest` has no option {min(unknown)}; leave it out.")
        self._options = IngestOptions(run, step, **options)
        if "parent" not in options and has_loaded(self._store):
            with opened(self._store) as found:  # In this process: another one may store the version.
                name, replaces = DEFAULT_RUN if run is None else run, bool(options.get("replace"))
                parent = lineage_of(found).parent(found, name, step, replaces=replaces)
                self._options = dataclasses.replace(self._options, parent=None if parent is None else parent.number)
        self._rank = 0
        self._plans: Sequence[SavePlan] = ()
        self._begun: Any = None
        self._end: Any = None
        self.report: IngestReport | None = None
        self.pushed: concurrent.futures.Future[VersionRow] | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._unsent is not None:
            raise UsageError("A save with `staging` stays in its process; leave the process of `async_save` out.")
        # Another process has a default group of its own.
        return self.__dict__ | {"_store": _place_of(self._store), "_group": None, "_begun": None, "_end": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save."""
        if checkpoint_id:
            raise UsageError("StoreWriter stores a version of a run; set run and step, and leave checkpoint_id out.")
        self._discard()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this rank for a save."""
        if not kwargs.get("use_collectives", True):
            raise UsageError("StoreWriter needs collectives; leave use_collectives=False out.")
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Keep the plans, and tell all ranks which one is the coordinator."""
        if not all(getattr(plan, "usable", True) for plan in plans):  # `usable` exists since torch 2.7.
            raise UsageError(
                "StoreWriter needs a new plan for each save; leave enable_plan_caching out of the planner."
            )
        self._plans = plans
        return [dataclasses.replace(plan, storage_data=_Job(self._rank, __version__, len(plans))) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's objects; send its parts of the other ranks'."""
        job: _Job = plan.storage_data
        try:
            part = self._write(plan, planner, job, _Exchange(self._group, self._rank, job.world))
        except BaseException:
            self._discard()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex("part"), 0, part)])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner, job: _Job, exchange: _Exchange) -> Part | None:
        """Return this rank's part; None if another rank fails, which says so itself."""
        values: dict[int, Any] = {}
        error: Exception | None = None
        with ExitStack() as stack:
            try:
                if job.version != __version__:
                    raise UsageError(
                        f"This rank has ckstore {__version__}, and the coordinator {job.version}; install the same one."
                    )
                store = stack.enter_context(opened(self._store))
                values = {number: _resolved(planner, item) for number, item in enumerate(plan.items)}
            except Exception as raised:
                error = raised
            objects = {
                plan.items[number].index.fqn: value.getvalue()
                for number, value in values.items()
                if isinstance(value, io.BytesIO)
            }
            own = part = None
            try:
                if self._rank == job.coordinator:
                    own, error = self._divided(exchange, job, objects, error)
                else:
                    exchange.send_object(job.coordinator, None if error else objects)
                    own = exchange.receive_object(job.coordinator)
                if own is not None:
                    publish = None if self._unsent is None else self._unsent.keep
                    part = write_part(store._repository, own, self._held(values), exchange, publish)
            except Exception as raised:
                error = error or raised
            exchange.check_all(job.coordinator)
            if error is not None:
                raise error
            return part

    def _held(self, values: Mapping[int, Any]) -> Callable[[int], Bytes]:
        """Return a function that returns the bytes of a shard by its number; those of objects have negative ones."""

        def held(number: int) -> Bytes:
            if number < 0:
                state = self._begun.written.outline.state
                data = state.view(-1 - number, 0, state.extents[-1 - number].nbytes)
                return np.frombuffer(data, np.uint8)
            value = values[number].detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            found: Bytes = value.view(torch.uint8).cpu().numpy()
            return found

        return held

    def _divided(
        self,
        exchange: _Exchange,
        job: _Job,
        objects: Mapping[str, bytes],
        error: Exception | None,
    ) -> tuple[PartPlan | None, Exception | None]:
        """Begin a version; send each rank its plan, or None after an error. Return this rank's, and the error."""
        others = [rank for rank in range(job.world) if rank != self._rank]
        found = {self._rank: objects}
        plans: list[PartPlan | None] = [None] * job.world
        for rank in others:
            try:
                found[rank] = exchange.receive_object(rank)
            except CkstoreError as raised:
                error = error or raised
        try:
            if error is None and None not in found.values():
                plans = [*self._planned({name: data for one in found.values() for name, data in one.items()})]
        except Exception as raised:
            error = raised
        for rank in others:
            try:
                exchange.send_object(rank, plans[rank])
            except CkstoreError as raised:
                error = error or raised
        return plans[self._rank], error

    def _planned(self, objects: Mapping[str, bytes]) -> Iterator[PartPlan]:
        """Reserve a number, under a lease; return the plan of each rank."""
        self._discard()
        stack = ExitStack()
        self._end = weakref.finalize(self, stack.close)
        store = stack.enter_context(opened(self._store))
        repository = store._repository
        repository.require_writable()
        request = request_of(repository.catalog, self._options)
        if self._unsent is not None and (not request.is_hot or request.verify or request.replace):
            raise UsageError(
                "A save with `staging` is neither encoded at once, nor replaces a version; leave hot=0, `verify`,"
                " `replace` and searches out."
            )
        state, shards = _outlined(self._plans, objects, self._options.on_unknown)
        parent = named_parent(repository.catalog, self._options.parent, request.run, request.step)
        continued = None if parent is None else partial(units_after, repository, parent)
        outline = Outline(state, shards, len(self._plans), self._rank, continued)
        number, lease = stack.enter_context(reserved(repository.catalog))
        created = timestamp()
        self._begun = _Begun(store, self._options, Written(outline, (), number, created, lease))
        share = not (request.policy.is_coarse and request.is_hot)
        for rank, tasks in enumerate(outline.tasks()):
            yield PartPlan(rank, number, created, share, tasks, outline.samples)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the version."""
        begun: _Begun = self._begun
        parts = [one.storage_data for rank in results for one in rank]
        try:
            written = dataclasses.replace(begun.written, parts=parts)
            if self._unsent is None:
                self.report = begun.store._taking().ingest_parts(written, begun.options)
            else:
                self.report = self._unsent.keep_version(written, begun.options)
                if self.report.is_new:
                    self.pushed = self._unsent.pushed(self.report.version.pack)
            lineage_of(begun.store).follow(self.report)
        finally:
            self._discard()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: checkpoint ids are not supported."""
        return False

    def _discard(self) -> None:
        """End the lease of a save that failed."""
        if self._end is not None:
            self._end()
        self._begun = self._end = None


@dataclass(frozen=True)
class _Begun:
    """A save that the coordinator has begun."""

    store: Store
    options: IngestOptions
    written: Written


class _Exchange:
    """Messages between the ranks of a process group; see `Exchange`."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int) -> None:
        self._group, self._rank, self._world = group, rank, world
        self._lost: dict[int, CkstoreError] = {}
        self._sent: deque[tuple[Any, torch.Tensor, int]] = deque()
        self._waiting = 0
        if world == 1:
            return
        if (dist.get_rank(group), dist.get_world_size(group)) != (rank, world):
            raise UsageError("The save has another process group than StoreWriter; give both the same `process_group`.")
        self._group = _cpu_group(group)

    def send(self, rank: int, data: Bytes) -> None:
        """Send bytes in the background."""
        tensor = torch.from_numpy(data)
        self._sent.append((self._tried(rank, dist.isend, tensor), tensor, rank))
        self._waiting += data.size
        while self._waiting > _AHEAD and len(self._sent) > 1:
            self._settle()

    def receive(self, rank: int, nbytes: int) -> Bytes:
        """Return the next message of a rank."""
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self._wait(rank, self._tried(rank, dist.irecv, tensor))
        found: Bytes = tensor.numpy()
        return found

    def flush(self) -> None:
        """Wait until all messages are sent."""
        error: CkstoreError | None = None
        while self._sent:
            try:
                self._settle()
            except CkstoreError as raised:
                error = error or raised
        if error is not None:
            raise error

    def send_object(self, rank: int, value: Any) -> None:
        """Send an object of this job."""
        data = np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)
        self.send(rank, np.array([data.size], "<i8").view(np.uint8))
        self.send(rank, data)

    def receive_object(self, rank: int) -> Any:
        """Return an object that a rank of this job sent."""
        [size] = self.receive(rank, 8).view("<i8")
        return pickle.loads(self.receive(rank, int(size)).data)

    def check_all(self, coordinator: int) -> None:
        """Raise `CkstoreError` on all ranks if one of them is lost."""
        lost: set[int] = set()
        with suppress(CkstoreError):
            if self._rank != coordinator:
                self.send_object(coordinator, self._lost.keys() - {coordinator})
                lost |= self.receive_object(coordinator)
            for rank in self._others() if self._rank == coordinator else ():
                with suppress(CkstoreError):
                    lost |= self.receive_object(rank)
            lost |= self._lost.keys()
            for rank in self._others() if self._rank == coordinator else ():
                with suppress(CkstoreError):
                    self.send_object(rank, lost)
            self.flush()
        for rank in sorted(lost | self._lost.keys()):
            raise self._lost.get(rank) or self._losing(rank, "another rank says so")

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank]

    def _settle(self) -> None:
        work, tensor, rank = self._sent.popleft()
        self._waiting -= tensor.numel()
        self._wait(rank, work)

    def _tried(self, rank: int, begin: Callable[..., Any], tensor: torch.Tensor) -> Any:
        if rank in self._lost:
            raise self._lost[rank]
        peer = rank if self._group is None else dist.get_global_rank(self._group, rank)
        try:
            return begin(tensor, peer, group=self._group)
        except RuntimeError as error:
            raise self._losing(rank, error) from error

    def _wait(self, rank: int, work: Any) -> None:
        if rank in self._lost:
            raise self._lost[rank]
        try:
            work.wait()
        except RuntimeError as error:
            raise self._losing(rank, error) from error

    def _losing(self, rank: int, error: RuntimeError | str) -> CkstoreError:
        """Note that a rank is lost: later waits for it fail at once."""
        self._lost[rank] = CkstoreError(
            f"Rank {rank} died, or did not answer within the timeout of the process group ({error}); nothing was"
            " committed, and the save can be repeated on ranks that live."
        )
        _log.error("%s", self._lost[rank])
        return self._lost[rank]


class Staging:
    """Saves into a bucket that are durable on the disks of the ranks' machines first, and sent in the background.

    All ranks make one, before they look for a version to resume from: it finishes the saves of an earlier job. A
    version becomes visible in the bucket when the packs of all ranks are there. One that lacks a pack, which only a
    lost machine had, is refused with a warning.

    Parameters
    ----------
    store
        A store in a bucket; its `cache` is on the machine's disk.
    process_group
        As for `StoreWriter`.

    Raises
    ------
    UsageError
        The store is in a directory.
    CkstoreError
        A rank cannot reach the bucket, or did not answer in time.

    Examples
    --------
    >>> from ckstore.integrations.dcp import Staging, StoreWriter
    >>> with Staging(store) as staging:
    ...     StoreWriter(store, "gpt", 100, staging=staging)
    Traceback (most recent call last):
    ckstore.errors.UsageError: ... is a directory; only saves into a bucket are durable elsewhere first.
    """

    def __init__(self, store: Store, *, process_group: dist.ProcessGroup | None = None) -> None:
        self._store = store
        self._group = _cpu_group(process_group) if dist.is_initialized() else None
        self._unsent = Unsent(store._repository)
        try:
            self._together(self._unsent.send)
            self._together(self._unsent.finish)
        except BaseException:
            self._unsent.close()
            raise
        store._catalog.refresh()
        self._unsent.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._unsent.close()

    def close(self) -> None:
        """Send the rest, on all ranks; packs that cannot be sent stay on the disks for the next job."""
        self._unsent.stop()
        try:
            self._together(self._unsent.send)
            self._together(self._unsent.commit)
        except CkstoreError as error:
            _log.warning("%s The next job sends the rest.", error)
        finally:
            self._unsent.close()

    def _unsent_of(self, store: Store | str | os.PathLike[str]) -> Unsent:
        if store is not self._store:
            raise UsageError("`staging` is of another store; give the open store that it was made with.")
        return self._unsent

    def _together(self, action: Callable[[], None]) -> None:
        """Do the same on all ranks, and wait for the others; raise `CkstoreError` on all of them if one fails."""
        error: Exception | None = None
        try:
            action()
        except (CkstoreError, OSError) as raised:
            error = raised
        found = [None if error is None else str(error)]
        if dist.is_initialized():
            found *= dist.get_world_size(self._group)
            try:
                dist.all_gather_object(found, found[0], self._group)
            except RuntimeError as raised:
                raise CkstoreError(f"A rank died, or did not answer in time ({raised}).") from raised
        for rank, text in enumerate(found):
            if text is not None:
                raise CkstoreError(f"Rank {rank}: {text}") from error


class StoreReader(StorageReader):
    """A `StorageReader` for `dcp.load`, on any number of ranks; each rank decodes only the chunks of its shards.

    Parameters
    ----------
    store
        A store, or its path.
    version
        Name of the version, such as `run@latest`. All ranks read the version that the coordinator finds.
    allow
        Further classes to instantiate; see `Version.state_dict`.

    Raises
    ------
    UsageError
        If the version holds no dictionary, or a `checkpoint_id` is given.

    Notes
    -----
    Every version that holds a dictionary can be read, not only versions of `StoreWriter`. Nested entries are named as
    in torch: keys joined by dots.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], version: str | int, *, allow: tuple[type, ...] = ()
    ) -> None:
        super().__init__()
        self._store = store if isinstance(store, Store) else place(store)
        self._named = version
        self._allow = allow
        self._uid = ""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": _place_of(self._store)}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load."""
        if checkpoint_id:
            raise UsageError("StoreReader reads the version that it was made with; leave checkpoint_id out.")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the version's tensors and objects."""
        with opened(self._store) as store:
            version = store[self._named]
            self._uid = version.id
            flat, mapping = flatten_state_dict(_outline(version, self._allow))
            lineage_of(store).note(store, version, is_certain=False)
        described: dict[str, Any] = {}
        for name, leaf in flat.items():
            if isinstance(leaf, _Placeholder):
                chunk = ChunkStorageMetadata(torch.Size([0] * leaf.ndim), leaf.shape)
                described[name] = TensorStorageMetadata(TensorProperties(leaf.dtype), leaf.shape, [chunk])
            else:
                described[name] = BytesStorageMetadata()
        return Metadata(described, planner_data=mapping, storage_data=dict.fromkeys(flat))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this rank for a load."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Fix the version that all ranks read: `latest` may name a newer one by now."""
        return [dataclasses.replace(plan, storage_data=self._uid) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the chunks of this rank's shards."""
        with opened(self._store) as store:
            version = store[plan.storage_data]
            flat, _ = flatten_state_dict(_outline(version, self._allow))
            for items in _windows(plan.items, flat):
                prefetch_parts(
                    version._stored,
                    (
                        (one._tensor, one._file, _box(item))
                        for item in items
                        if (one := _source(item, flat)) is not None
                    ),
                )
                for item in items:
                    self._read(item, flat[item.storage_index.fqn], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _read(item: ReadItem, leaf: Any, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(_filled(leaf), data)
            data.seek(0)
            planner.load_bytes(item, data)
            return
        key = tuple(slice(positions.start, positions.stop) for positions in _box(item))
        target = planner.resolve_tensor(item).detach()
        target.copy_(leaf.source.torch(key))
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: checkpoint ids are not supported."""
        return False


class StopSignal:
    """SIGTERM to any rank, noticed by all of them at the same step; then they save, and end with the signal's status.

    All ranks make one, in their main threads. Without a process group it notes the signal of this process.

    Parameters
    ----------
    grace
        Seconds from the signal until the scheduler kills the job.
    timeout
        Seconds for which a rank waits for another one.

    Raises
    ------
    CkstoreError
        A rank died, or did not call `is_asked` in time.
    UsageError
        The program handles SIGTERM itself, or this is not the main thread.

    Examples
    --------
    >>> with StopSignal(grace=60) as stop:
    ...     for step in range(3):
    ...         if stop.is_asked():
    ...             break
    """

    def __init__(self, grace: float = 30.0, *, timeout: float = 300.0) -> None:
        self._grace = grace
        self._is_distributed = dist.is_initialized() and dist.get_world_size() > 1
        self._group: Any = None
        self._begun: tuple[Any, torch.Tensor] | None = None
        self._deadline: float | None = None
        termination.watch(self)
        if not termination.is_watching():
            termination.leave(self, None)
            raise UsageError(
                "StopSignal handles SIGTERM, in the main thread of a program without a handler of its own."
            )
        if self._is_distributed:  # A group of its own: saves use theirs in the background.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def is_asked(self) -> bool:
        """Return whether a rank has received SIGTERM, the same on all ranks, which call this once a step.

        The answer is of the previous call's time, so that no rank waits for messages.
        """
        if self._deadline is not None:
            return True
        if not self._is_distributed:
            self._note(is_asked=termination.is_asked())
            return self._deadline is not None
        try:
            if self._begun is not None:
                work, asked = self._begun
                work.wait()
                self._note(is_asked=bool(asked.item()))
            asked = torch.tensor([termination.is_asked()], dtype=torch.uint8)
            self._begun = dist.all_reduce(asked, dist.ReduceOp.MAX, self._group, async_op=True), asked
        except RuntimeError as error:
            raise CkstoreError(f"A rank died, or did not ask for the signal in time ({error}).") from error
        return self._deadline is not None

    @property
    def remaining(self) -> float | None:
        """Seconds of the grace that are left, for `Future.result`; None before `is_asked` has returned True."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def close(self, error: BaseException | None = None) -> None:
        """End the program with the signal's status if a rank has received it, unless an error ends it."""
        termination.leave(self, error)

    @property
    def waits(self) -> bool:
        """Whether other ranks do not know of a signal yet."""
        return self._is_distributed and self._deadline is None

    def _note(self, *, is_asked: bool) -> None:
        if is_asked:
            self._deadline = termination.ask() + self._grace


def _box(item: ReadItem) -> list[range]:
    """Return the positions of an item's elements along each axis of the stored tensor."""
    return [range(first, first + size) for first, size in zip(item.storage_offsets, item.lengths, strict=True)]


def _source(item: ReadItem, flat: Mapping[str, Any]) -> LazyTensor | None:
    """Return the tensor that an item is a part of; None for objects."""
    return None if item.type == LoadItemType.BYTE_IO else flat[item.storage_index.fqn].source


def _windows(items: Sequence[ReadItem], flat: Mapping[str, Any]) -> Iterator[list[ReadItem]]:
    """Yield items in groups that a cache of fetched blocks holds."""
    window: list[ReadItem] = []
    nbytes = 0
    for item in items:
        source = _source(item, flat)
        size = 0 if source is None else prod(item.lengths) * ITEM_SIZES[source.dtype_name]
        if window and nbytes + size > _FETCHED:
            yield window
            window, nbytes = [], 0
        window.append(item)
        nbytes += size
    yield window


def _cpu_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group that has a backend for the CPU; for the default one, another one if needed."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    if group is not None:
        raise UsageError(
            "StoreWriter needs a process group with a backend for the CPU; give `process_group` of"
            " dist.new_group(backend='gloo') to it and to the save."
        )
    return _default_cpu_group()


def _default_cpu_group() -> dist.ProcessGroup:
    """Return a group of all ranks for the CPU, made once for a default group that has none, as with NCCL alone."""
    world = dist.group.WORLD
    if not _made or _made[0] is not world:
        _made[:] = [world, dist.new_group(backend="gloo")]
    found: dist.ProcessGroup = _made[1]
    return found


#: The default group, and that of all its ranks for the CPU.
_made: list[Any] = []


def _place_of(store: Store | str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the address of a store, which another process opens for each use."""
    return store.place if isinstance(store, Store) else store


def _resolved(planner: SavePlanner, item: WriteItem) -> Any:
    """Return a shard, or the bytes of an object."""
    value: Any = planner.resolve_data(item)
    described = item.tensor_data
    if described is not None and (value.shape, value.dtype) != (described.chunk.sizes, described.properties.dtype):
        raise UsageError(f"The planner gives another tensor for {item.index.fqn} than it has planned.")
    return value


def _outlined(
    plans: Sequence[SavePlan], objects: Mapping[str, bytes], on_unknown: OnUnknown
) -> tuple[LiveState, dict[int, list[Shard]]]:
    """Return the state of a save without its tensors, and the shards of each of its extents."""
    paths: dict[str, Any] = {}
    for plan in plans:
        paths |= plan.planner_data or {}
    shards: dict[str, list[Shard]] = {}
    leaves: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for number, item in enumerate(plan.items):
            name, described = item.index.fqn, item.tensor_data
            if described is None:
                # Written by ranks of this job, hence trusted.
                leaves[name] = torch.load(io.BytesIO(objects[name]), weights_only=False)
                continue
            if name not in leaves:
                leaves[name] = torch.empty(described.size, dtype=described.properties.dtype, device="meta")
            chunk = described.chunk
            shard = Shard(rank, number, tuple(described.size), tuple(chunk.offsets), tuple(chunk.sizes))
            shards.setdefault(name, []).append(shard)
    tree = nested((tuple(paths.get(name, (name,))), leaf) for name, leaf in leaves.items())
    state = describe_state_dict(tree, on_unknown, outline=True)
    names = {id(leaf): name for name, leaf in leaves.items()}
    held = {
        number: shards[names[memory.identity]]
        for number, memory in enumerate(state.memories)
        if isinstance(memory, Absent)
    }
    return state, held


class _Placeholder(torch.Tensor):
    """A tensor without values, with the function that reads them."""

    source: Any


def _outline(version: Version, allow: tuple[type, ...]) -> dict[str, Any]:
    """Return the state dict of a version with placeholders for tensors."""
    from ckstore.reading.state_dict import outline

    def leaf(path: str) -> Any:
        lazy = version[path]
        if "array" in version._stored.paths[path][1].marks:
            return lazy.numpy()
        empty = torch.empty(lazy.shape, dtype=torch_dtype(lazy.dtype_name), device="meta")
        found = empty.as_subclass(_Placeholder)
        found.source = lazy
        return found

    tree = outline(version._stored, leaf, allow)
    if not isinstance(tree, dict):
        raise UsageError(f"{version!r} holds no dictionary; read it with `Version.state_dict`.")
    return tree


def _filled(leaf: Any) -> Any:
    """Return an object with its placeholders replaced by tensors."""
    if isinstance(leaf, _Placeholder):
        return leaf.source.torch()
    if type(leaf) in (list, tuple):
        return type(leaf)(map(_filled, leaf))
    if isinstance(leaf, dict):
        return {key: _filled(value) for key, value in leaf.items()}
    return leaf
