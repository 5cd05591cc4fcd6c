"""`torch.distributed.checkpoint` on a store instead of a directory: the ranks' shards become one version."""

from __future__ import annotations

import dataclasses
import io
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckstore.commit.naming import DEFAULT_RUN
from ckstore.dtypes import torch_dtype
from ckstore.errors import UsageError
from ckstore.formats.dcp import nested
from ckstore.integrations.lineage import has_loaded, lineage_of
from ckstore.integrations.names import opened
from ckstore.storage.durable import temporary_path, write_explained
from ckstore.storage.root import PACKS, place
from ckstore.store import Store

if TYPE_CHECKING:
    from ckstore.version import Version
    from ckstore.writing.ingest import IngestReport

#: Alignment of tensors in the staging file, in bytes.
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Staged:
    """The staging file of all ranks, and the offset of each tensor in it."""

    path: str
    starts: dict[str, int]


class StoreWriter(StorageWriter):
    """A `StorageWriter` for `dcp.save` and `dcp.async_save` that stores whole tensors as one version.

    Each rank copies its shards into one staging file in the store's directory. The coordinator stores this file as a
    state dict and removes it. The version therefore does not depend on the number of ranks, and the next version is
    stored against it even if that number changes. The version is durable when the coordinator's save returns. After a
    load of an earlier version of the run, later versions are kept as superseded ones.

    Parameters
    ----------
    store
        A store, or its path. All ranks must run on one machine.
    run, step
        Run and step of the version, as for `Store.ingest`.
    **options
        Other options of `Store.ingest`, such as `metrics`.

    Attributes
    ----------
    report
        The `IngestReport`, on the coordinator after a save; otherwise None.

    Raises
    ------
    UsageError
        If the save uses no collectives, the planner caches plans, or a `checkpoint_id` is given.

    Notes
    -----
    The staging file takes the size of the state on the store's disk during a save.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], run: str | None = None, step: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._store = store if isinstance(store, Store) else place(store)
        if isinstance(store, Store):
            store._checked_run(run)
        self._ingest = {"run": run, "step": step, **options}
        if "parent" not in options and has_loaded(self._store):
            with opened(self._store) as found:  # In this process: another one may store the version.
                name, replaces = DEFAULT_RUN if run is None else run, bool(options.get("replace"))
                parent = lineage_of(found).parent(found, name, step, replaces=replaces)
                self._ingest["parent"] = None if parent is None else parent.number
        self._staged: _Staged | None = None
        self._removal: Any = None
        self.report: IngestReport | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": _place_of(self._store), "_staged": None, "_removal": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save."""
        if checkpoint_id:
            raise UsageError("StoreWriter stores a version of a run; set run and step, and leave checkpoint_id out.")
        self._discard()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this rank for a save."""
        if not kwargs.get("use_collectives", True):
            raise UsageError("StoreWriter needs collectives; leave use_collectives=False out.")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the staging file."""
        if not all(getattr(plan, "usable", True) for plan in plans):  # `usable` exists since torch 2.7.
            raise UsageError(
                "StoreWriter needs a new plan for each save; leave enable_plan_caching out of the planner."
            )
        whole = {
            item.index.fqn: (item.tensor_data.size, item.tensor_data.properties.dtype)
            for plan in plans
            for item in plan.items
            if item.tensor_data is not None
        }
        starts: dict[str, int] = {}
        nbytes = 0
        for name, (size, dtype) in whole.items():
            starts[name] = nbytes
            nbytes += -(-prod(size) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with opened(self._store) as store:
            path = temporary_path(store.path / PACKS)
        self._discard()
        self._removal = weakref.finalize(self, path.unlink, missing_ok=True)
        with write_explained(path.parent, nbytes):
            _allocate(path, max(nbytes, 1))
        self._staged = _Staged(str(path), starts)
        return [dataclasses.replace(plan, storage_data=self._staged) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's shards to their offsets in the whole tensors."""
        staged: _Staged = plan.storage_data
        memory = np.memmap(staged.path, np.uint8, "r+")
        results = []
        for item in plan.items:
            value = planner.resolve_data(item)
            if isinstance(value, io.BytesIO):
                results.append(WriteResult(item.index, len(value.getbuffer()), value.getvalue()))
                continue
            described = item.tensor_data
            assert described is not None
            whole = _mapped(memory, staged.starts[item.index.fqn], described.size, described.properties.dtype)
            chunk = described.chunk
            for axis, (first, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                whole = whole.narrow(axis, first, size)
            whole.copy_(value.detach())
            results.append(WriteResult(item.index, whole.nbytes, None))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Store the version."""
        staged = self._staged
        assert staged is not None
        try:
            state = nested(_leaves(metadata, staged, results))
            with opened(self._store) as store:
                self.report = store.ingest(state, **self._ingest)
                lineage_of(store).follow(self.report)
        finally:
            self._discard()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: checkpoint ids are not supported."""
        return False

    def _discard(self) -> None:
        """Remove the staging file."""
        if self._removal is not None:
            self._removal()
        self._staged = self._removal = None


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
            for item in plan.items:
                leaf = flat[item.storage_index.fqn]
                if item.type == LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    torch.save(_filled(leaf), data)
                    data.seek(0)
                    planner.load_bytes(item, data)
                    continue
                key = tuple(
                    slice(first, first + size) for first, size in zip(item.storage_offsets, item.lengths, strict=True)
                )
                target = planner.resolve_tensor(item).detach()
                target.copy_(leaf.source.torch(key))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: checkpoint ids are not supported."""
        return False


def _place_of(store: Store | str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the address of a store, which another process opens for each use."""
    return store.place if isinstance(store, Store) else store


def _allocate(path: Path, nbytes: int) -> None:
    """Create a file of `nbytes` allocated bytes: a full disk under a mapping would raise no error, but kill."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _mapped(memory: Any, start: int, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in mapped memory, with its own storage."""
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    stop = start + prod(size) * dtype.itemsize
    return torch.from_numpy(memory[start:stop]).view(dtype).view(size)


def _leaves(
    metadata: Metadata, staged: _Staged, results: list[list[WriteResult]]
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Return the tensors and objects of a save, by the planner's paths."""
    memory = np.memmap(staged.path, np.uint8, "r+")
    objects = {one.index.fqn: one.storage_data for rank in results for one in rank if one.storage_data is not None}
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    for name, described in metadata.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        if isinstance(described, TensorStorageMetadata):
            yield path, _mapped(memory, staged.starts[name], described.size, described.properties.dtype)
        else:
            # Written by ranks of this job, hence trusted.
            yield path, torch.load(io.BytesIO(objects[name]), weights_only=False)


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
