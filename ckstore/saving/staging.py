"""Copies of state dicts in shared memory: the program writes them, the saver's process reads them.

packed = Packed(describe_state_dict(state))             # the tree, and the offset of each extent
area.reserve(packed.stop); area.stage(packed)           # the extents in order, then everything else as a pickle
StagedStates(area.descriptor).read(start, stop)         # the same in the saver's process: extents in shared memory
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.errors import UsageError
from ckstore.formats.layout import Extent, Tensor
from ckstore.formats.torch.live_state import LiveState, Memory
from ckstore.runtime.memory import INGEST_BYTES, available, nameless_file, populate
from ckstore.runtime.threads import shared, worker_count

#: Alignment of extents in bytes: copies are faster at cache lines.
_ALIGNMENT = 64

#: An area exceeds its first state by this fraction, since the sizes of states vary a little.
_HEADROOM = 32

#: The maximal number of threads that copy: a few of them fill the bandwidth of the memory.
_COPIERS = 4

#: Bytes that are written at once.
_PIECE = 8 << 20


class Packed:
    """The layout of a described state dict in an area: tensors first, then everything else.

    `offsets` are those of the extents. From `start` to `stop` is the pickle: plain values and nodes of layouts, but no
    objects of the caller. Another one may lie before it, up to `after`.
    """

    def __init__(self, state: LiveState, after: int = 0) -> None:
        self.state = state
        self.offsets: list[int] = []
        self.start = -(-after // _ALIGNMENT) * _ALIGNMENT
        for extent in state.extents:
            self.offsets.append(self.start)
            self.start += -(-extent.nbytes // _ALIGNMENT) * _ALIGNMENT
        tensors = [
            (one.path, one.dtype, one.shape, one.strides, one.extent, one.offset, one.marks) for one in state.tensors
        ]
        extents = [(one.start, one.dtype, one.shape, one.path) for one in state.extents]
        self.text = pickle.dumps((state.tree, state.shared, tensors, extents, self.offsets), pickle.HIGHEST_PROTOCOL)
        self.stop = self.start + len(self.text)


class Area:
    """Memory for one staged state dict; it grows with the largest one, and is reused.

    `descriptor` is that of an anonymous file, which another process maps, too.
    """

    def __init__(self) -> None:
        self.descriptor = nameless_file()
        self._mapping: mmap.mmap | None = None
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._is_pinned = False
        self._is_mapped = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._memory.nbytes

    def reserve(self, nbytes: int) -> None:
        """Ensure at least `nbytes` of memory; raise `UsageError` if the machine or a limit has too little."""
        if nbytes <= self.nbytes:
            return
        free = available()
        if free is not None and free < nbytes - self.nbytes + INGEST_BYTES:
            raise UsageError(
                f"A save copies {nbytes / 1e9:.2f} GB and needs {INGEST_BYTES / 1e9:.2f} GB in addition, but only "
                f"{free / 1e9:.2f} GB of memory are left; save less, or call `Store.ingest`, which makes no copy."
            )
        self._unpin()
        size = -(-(nbytes + nbytes // _HEADROOM) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.descriptor, size)
        self._mapping = mmap.mmap(self.descriptor, size)
        self._memory = np.frombuffer(self._mapping, np.uint8)
        self._is_mapped = False

    def populate(self) -> None:
        """Map all pages, before, while or after the area is written."""
        mapping = self._mapping
        if mapping is not None and not self._is_mapped:
            populate(mapping)
            self._is_mapped = mapping is self._mapping  # Another thread may have reserved more.

    def stage(self, packed: Packed) -> None:
        """Copy a state dict into reserved memory; the caller may change it afterwards.

        Raise `InputError` if another thread changed the state dict after it was described.
        """
        state, memory = packed.state, self._memory

        def copy(job: tuple[Memory, Extent, int]) -> Any:
            source, extent, offset = job
            if source.is_remote or self._is_mapped:
                return source.copy_into(memory[offset : offset + extent.nbytes])
            for start in range(0, extent.nbytes, _PIECE):
                self._write(offset + start, source.view(start, min(_PIECE, extent.nbytes - start)))
            return None

        self._pin()
        # The largest first, so that no thread waits long for another.
        jobs = sorted(zip(state.memories, state.extents, packed.offsets, strict=True), key=lambda job: -job[1].nbytes)
        streams = {copy(job) for job in jobs if job[0].is_remote}  # Other threads have other streams.
        deque(shared(copy, [job for job in jobs if not job[0].is_remote], min(_COPIERS, worker_count())), 0)
        memory[packed.start : packed.stop] = np.frombuffer(packed.text, np.uint8)
        for stream in streams - {None}:
            stream.synchronize()
        state.check_unchanged()

    def close(self) -> None:
        """Free the memory."""
        self._unpin()
        self._memory = np.empty(0, np.uint8)
        self._mapping = None
        os.close(self.descriptor)

    def _write(self, offset: int, view: memoryview) -> None:
        """Write into pages that are not mapped yet: the system neither clears nor maps them."""
        while view:
            written = os.pwrite(self.descriptor, view, offset)
            view, offset = view[written:], offset + written

    def _pin(self) -> None:
        """Register the memory with CUDA if it is used, so that GPUs write to it directly."""
        torch = sys.modules.get("torch")
        if not self._is_pinned and torch is not None and torch.cuda.is_initialized():
            status = torch.cuda.cudart().cudaHostRegister(self._memory.ctypes.data, self.nbytes, 0)
            self._is_pinned = int(status) == 0

    def _unpin(self) -> None:
        if self._is_pinned:
            sys.modules["torch"].cuda.cudart().cudaHostUnregister(self._memory.ctypes.data)
            self._is_pinned = False


class StagedStates:
    """The view of an area, given by the descriptor of its file, in the saver's process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = memoryview(b"")

    def read(self, start: int, stop: int) -> LiveState:
        """Return the state dict of the pickle in a range, with its extents in the area."""
        if stop > len(self._memory):
            size = os.fstat(self._descriptor).st_size
            self._memory = memoryview(mmap.mmap(self._descriptor, size, access=mmap.ACCESS_READ))
        tree, pairs, tensors, extents, offsets = pickle.loads(self._memory[start:stop])
        state = LiveState(
            tree, [Tensor(*one) for one in tensors], [Extent(*one) for one in extents], shared=pairs, is_still=True
        )
        state.memories += [
            _StagedBytes(self._memory[offset : offset + extent.nbytes])
            for extent, offset in zip(state.extents, offsets, strict=True)
        ]
        return state


class _StagedBytes:
    is_remote = False

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._data[offset : offset + nbytes]

    def copy_into(self, target: npt.NDArray[np.uint8]) -> Any:
        target[:] = np.frombuffer(self._data, np.uint8)

    def sample(self) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)  # Staged bytes do not change.
