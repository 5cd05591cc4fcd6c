"""Copies of state dicts in memory that the saver's process shares: written by the program, read by that process.

packed = Packed(describe_state_dict(state))             # the tree, and where the bytes of each extent are
area.reserve(packed.stop); area.stage(packed)           # extents one after the other, then the rest as a pickle
StagedStates(area.descriptor).read(start, stop)         # the same in the saver's process: extents in shared memory
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.errors import UsageError
from ckstore.formats.layout import Extent, Tensor
from ckstore.formats.torch.state_dict import LiveState
from ckstore.runtime.memory import available, nameless_file, populate

#: Where extents begin: what copies them wants its cache lines.
_ALIGNMENT = 64

#: States differ a little in size: an area is larger than the first by this part.
_HEADROOM = 32

#: What an ingest takes besides the state: blocks that are read, hashed and written, and the process itself.
INGEST_BYTES = 256 << 20


class Packed:
    """A described state dict on its way into an area: tensors from the beginning on, then what tells of them.

    Parameters
    ----------
    state
        What `describe_state_dict` has returned.

    Attributes
    ----------
    offsets
        Where each extent begins.
    start, stop
        Bytes of the pickle of everything else: plain values and nodes of layouts, nothing of the caller's.
    """

    def __init__(self, state: LiveState) -> None:
        self.state = state
        self.offsets: list[int] = []
        self.start = 0
        for extent in state.extents:
            self.offsets.append(self.start)
            self.start += -(-extent.nbytes // _ALIGNMENT) * _ALIGNMENT
        tensors = [
            (one.path, one.dtype, one.shape, one.strides, one.extent, one.offset, one.marks) for one in state.tensors
        ]
        extents = [(one.start, one.dtype, one.shape, one.path) for one in state.extents]
        self.text = pickle.dumps((state.tree, tensors, extents, self.offsets), pickle.HIGHEST_PROTOCOL)
        self.stop = self.start + len(self.text)


class Area:
    """Memory that one staged state dict lies in; it grows with the largest one, and is used again.

    Attributes
    ----------
    descriptor
        Of a nameless file, which another process maps, too.
    """

    def __init__(self) -> None:
        self.descriptor = nameless_file()
        self._mapping: mmap.mmap | None = None
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._is_pinned = False

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._memory.nbytes

    def reserve(self, nbytes: int) -> None:
        """Have at least so much memory.

        Raises
        ------
        UsageError
            The machine, or what this process may take of it, has not that much left.
        """
        if nbytes <= self.nbytes:
            return
        free = available()
        if free is not None and free < nbytes - self.nbytes + INGEST_BYTES:
            raise UsageError(
                f"A copy of {nbytes / 1e9:.2f} GB is staged, which takes {INGEST_BYTES / 1e9:.2f} GB besides, and only "
                f"{free / 1e9:.2f} GB of memory are left; save less, or call `Store.ingest`, which makes no copy."
            )
        self._unpin()
        size = -(-(nbytes + nbytes // _HEADROOM) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.descriptor, size)
        self._mapping = mmap.mmap(self.descriptor, size)
        self._memory = np.frombuffer(self._mapping, np.uint8)

    def populate(self) -> None:
        """Have all of it handed out before it is written to, or beside that."""
        if self._mapping is not None:
            populate(self._mapping)

    def stage(self, packed: Packed) -> None:
        """Copy a state dict, for which there is memory; what it describes may change afterwards.

        Raises
        ------
        InputError
            It changed since it was described: another thread goes on training.
        """
        state, memory = packed.state, self._memory
        self._pin()
        streams = {
            source.copy_into(memory[offset : offset + extent.nbytes])
            for source, extent, offset in zip(state.memories, state.extents, packed.offsets, strict=True)
        }
        memory[packed.start : packed.stop] = np.frombuffer(packed.text, np.uint8)
        for stream in streams - {None}:
            stream.synchronize()
        state.check_unchanged()

    def close(self) -> None:
        """Give the memory back."""
        self._unpin()
        self._memory = np.empty(0, np.uint8)
        self._mapping = None
        os.close(self.descriptor)

    def _pin(self) -> None:
        """Let GPUs, where they are used, write to the memory themselves."""
        torch = sys.modules.get("torch")
        if not self._is_pinned and torch is not None and torch.cuda.is_initialized():
            status = torch.cuda.cudart().cudaHostRegister(self._memory.ctypes.data, self.nbytes, 0)
            self._is_pinned = int(status) == 0

    def _unpin(self) -> None:
        if self._is_pinned:
            sys.modules["torch"].cuda.cudart().cudaHostUnregister(self._memory.ctypes.data)
            self._is_pinned = False


class StagedStates:
    """What the saver's process sees of an area.

    Parameters
    ----------
    descriptor
        Of the nameless file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = memoryview(b"")

    def read(self, start: int, stop: int) -> LiveState:
        """The state dict whose pickle lies there, as it was described, with its bytes where they were staged."""
        if stop > len(self._memory):
            size = os.fstat(self._descriptor).st_size
            self._memory = memoryview(mmap.mmap(self._descriptor, size, access=mmap.ACCESS_READ))
        tree, tensors, extents, offsets = pickle.loads(self._memory[start:stop])
        state = LiveState(tree, [Tensor(*one) for one in tensors], [Extent(*one) for one in extents], is_still=True)
        state.memories += [
            _StagedBytes(self._memory[offset : offset + extent.nbytes])
            for extent, offset in zip(state.extents, offsets, strict=True)
        ]
        return state


class _StagedBytes:
    def __init__(self, data: memoryview) -> None:
        self._data = data

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._data[offset : offset + nbytes]

    def copy_into(self, target: npt.NDArray[np.uint8]) -> Any:
        target[:] = np.frombuffer(self._data, np.uint8)

    def sample(self) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)  # They do not change.
