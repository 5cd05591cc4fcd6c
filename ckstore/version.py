"""One version: its tensors one by one, as Zarr arrays, as a state dict, and as files."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckstore.dtypes import require_torch
from ckstore.errors import NotFoundError, UsageError
from ckstore.objects.documents import Deviation, LayoutDocument, VersionDocument
from ckstore.policy import Fidelity
from ckstore.reading.stored_version import StoredVersion, stored_version
from ckstore.repository import Address
from ckstore.runtime.collector import collection_seldom
from ckstore.storage.catalog import VersionRow

if TYPE_CHECKING:
    import zarr

    from ckstore.formats.layout import FileLayout, Tensor
    from ckstore.reading.salvage import SalvageReport
    from ckstore.tensor import LazyTensor

Result = TypeVar("Result")


class Version(Mapping[str, "LazyTensor"]):
    """A version of a store: a mapping of tensor paths to lazy tensors. Made by `Store.__getitem__`.

    Two versions are equal when they are the same version of the same store, read at the same fidelity.

    Parameters
    ----------
    stored
        The reader of the version.
    """

    def __init__(self, stored: StoredVersion) -> None:
        self.stored = stored

    def __reduce__(self) -> tuple[type[Version], tuple[StoredVersion]]:
        """In another process it is read from the same store, which is opened there once."""
        return Version, (self.stored,)

    def __repr__(self) -> str:
        return f"<ckstore.Version {self.number} {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.stored.identity == other.stored.identity

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def row(self) -> VersionRow:
        """The catalog's row: number, run, step, parent, sizes, depth, cost."""
        return self.stored.row

    @property
    def number(self) -> int:
        """Number in the store, from 1 on."""
        return self.row.number

    @property
    def id(self) -> str:
        """Id of 40 hexadecimal characters: the same in every store that the version is sent to."""
        return self.row.uid

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.row.run

    @property
    def step(self) -> int | None:
        """Training step; None where the version has none."""
        return self.row.step

    @property
    def name(self) -> str:
        """`run@step`, or the run's name where the version has no step."""
        return self.run if self.step is None else f"{self.run}@{self.step}"

    @property
    def parent(self) -> int | None:
        """Number of the version before this one; None for the first."""
        return self.row.parent

    @property
    def created(self) -> datetime:
        """Time of the commit, in UTC."""
        return datetime.fromisoformat(self.row.created)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics by name, as given at ingest."""
        return self.row.metrics

    @property
    def tags(self) -> list[str]:
        """Tags that point at the version now, sorted."""
        return [tag for tag, number in self.stored.repository.catalog.tags().items() if number == self.number]

    @property
    def source(self) -> str | None:
        """Path of the ingested file or directory; empty for a state dict."""
        return self.row.source

    @property
    def original_bytes(self) -> int:
        """Size of the ingested files, in bytes."""
        return self.row.original_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that the version added to the store."""
        return self.row.stored_bytes

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return self.row.elements

    @property
    def depth(self) -> int:
        """Number of deltas between the version and a base."""
        return self.row.depth

    @property
    def cost(self) -> float:
        """Predicted restore cost, as a multiple of restoring a version that is stored exactly and in full."""
        return self.row.cost

    @property
    def hot(self) -> bool:
        """Whether the version is stored unencoded."""
        return self.row.hot

    @property
    def dropped(self) -> tuple[str, ...]:
        """Globs over the paths of tensors that a policy has dropped from the version."""
        return self.row.dropped

    @property
    def document(self) -> VersionDocument:
        """What the manifest says of the version."""
        return self.stored.document

    @property
    def layout(self) -> LayoutDocument:
        """How its files are cut."""
        return self.stored.layout

    @property
    def paths(self) -> dict[str, tuple[int, Tensor]]:
        """(File number, tensor) by path as text, in the order of the files."""
        return self.stored.paths

    @property
    def fidelity(self) -> Fidelity:
        """Of the values that are read: `exact`, or `coarse` where there are no others or these are wanted."""
        return self.stored.fidelity

    def at_fidelity(self, fidelity: Fidelity) -> Version:
        """The same version, read exactly or from its coarse layers alone.

        Coarse values of an exact version are those of its linear lattices; objects whose only layer is exact (moments,
        16-bit floats, small tensors) come as they are. A coarse version is read as it always is: objects that it
        holds exactly come exactly.

        Raises
        ------
        UsageError
            There is no such fidelity.
        CkstoreError
            Exact values are wanted of a version that has none.
        """
        return Version(self.stored.at_fidelity(fidelity))

    def deviations(self) -> dict[str, Deviation]:
        """How far the tensors of a coarse version are off, by path; tensors that are exact are left out.

        Where a tensor is cut into parts, `max_abs` is their largest and `rms` over all of them.
        """
        from ckstore.reading.deviations import tensor_deviations

        return tensor_deviations(self.stored)

    def storage(self, path: str | None = None) -> dict[str, Any]:
        """Return how the version, or the tensor at a path, is stored; nothing is decoded.

        Of a version: the number of objects and of those that this version added (`here`), objects by kind (`base`,
        `delta`; `linear`, `rounded`, `codebook`, `ordinal`; `own`, `chained`, `patched`), and `coarse_bytes` and
        `exact_bytes`. Of a tensor: `lattice`, `layers`, `bundled`, `depth`, and `bits` an element by layer.

        Raises
        ------
        NotFoundError
            The version has no tensor at that path.
        """
        from ckstore.reading.storage_facts import StorageFacts, tensor_storage

        facts = StorageFacts(self.stored)
        if path is None:
            return facts.summary()
        return tensor_storage(facts, *self._place(path))

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __contains__(self, path: object) -> bool:
        return path in self.paths

    def __getitem__(self, path: str) -> LazyTensor:
        """Return the tensor at a path, such as `model/h.0.attn.weight`; nothing is read before it is sliced."""
        from ckstore.tensor import LazyTensor

        return LazyTensor(self.stored, path, *self._place(path))

    def _place(self, path: str) -> tuple[int, Tensor]:
        """Return the file number and the layout of a tensor; raise `NotFoundError` with near matches."""
        with suppress(KeyError):
            return self.paths[path]
        from difflib import get_close_matches

        from ckstore.formats.paths import match_texts

        if self.document.dropped and match_texts([path], self.document.dropped):
            raise NotFoundError(
                f"Version {self.number} has dropped {', '.join(self.document.dropped)}, and {path} with it; "
                "choose a version that has it."
            )
        near = get_close_matches(str(path), self.paths, 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; see `ckstore ls`."
        raise NotFoundError(f"Version {self.number} has no tensor {path}{hint}")

    @cached_property
    def arrays(self) -> zarr.Group:
        """All tensors as a read-only Zarr group of plain arrays, by path; chunks are decoded when they are read.

        What Zarr lacks (bfloat16, float8) are unsigned integers of the same bits with an attribute `dtype`. Axes are
        called `<name>_dim0` and so on, so ``xarray.open_zarr(version.arrays.store, group="model")`` opens each group.
        """
        from ckstore.views.groups import version_group

        return version_group(self.stored)

    @collection_seldom()
    def state_dict(self, allow: Sequence[type] = (), *, mmap: bool | Literal["checked"] = False) -> Any:
        """The version as nested containers of torch tensors; needs torch.

        A version of one file gives what `torch.load` would: parameters, conj and neg views and `requires_grad` with it.
        Objects of well-known types of the standard library, NumPy and torch are made again, others come as
        `ckstore.formats.Unknown`; tensors of other subclasses come as plain ones, without attributes of their own. A
        directory gives a dict by file, for the files of kinds that hold tensors, but npz and npy files without any. A
        checkpoint of torch.distributed.checkpoint gives the state dict that was saved, with whole tensors: as it is
        where the version is one, by its directory where it is a part. Of what the version has dropped, dictionaries
        have no entries, and lists None.

        Parameters
        ----------
        allow
            More classes whose objects are made: dataclasses, enumerations, named tuples and whatever pickles by its
            attributes. Their `__new__` and `__setstate__` are called with what the file holds; nothing is imported.
        mmap
            Map the tensors of a hot version and read nothing, as `torch.load(mmap=True)` does: bytes come from the disk
            when they are touched, and what is written to them stays in memory. No checksum is compared: damage to the
            disk gives wrong values, where a read raises `IntegrityError`. "checked" compares those of all that is
            mapped once, by several threads, and so reads it. Tensors of more than 2^22 elements, and all of encoded
            versions, are read and checked in either case.

        Raises
        ------
        UsageError
            No file is of a kind that holds tensors, an object of an allowed class cannot be made, torch is missing, or
            `mmap` is something else.
        IntegrityError
            What is read, or checked, is damaged.
        """
        if mmap not in (True, False, "checked"):
            raise UsageError(f'mmap is True, False or "checked", not {mmap!r}.')
        require_torch()
        from ckstore.reading.sharded import sharded_directories, sharded_files
        from ckstore.reading.state_dict import build, build_sharded

        if not mmap:
            self.stored.foresee()
        if not self.document.is_directory:
            return build(self.stored, 0, allow, mmap=mmap)
        found: dict[str, Any] = {}
        for directory in sharded_directories(self.stored):
            tree = build_sharded(self.stored, directory, allow)
            found |= {directory: tree} if directory else tree
        sharded = sharded_files(self.stored)
        trees = {
            entry.path: build(self.stored, number, allow, mmap=mmap)
            for number, entry in enumerate(self.document.files)
            if _has_values(self.layout.files[number]) and number not in sharded
        }
        return found | {path: tree for path, tree in trees.items() if tree is not None}

    def checkout(
        self,
        target: str | os.PathLike[str],
        *,
        format: Literal["original", "safetensors", "pt", "npz"] | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        strip: bool = False,
        force: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[str]:
        """Write the version's files as they went in, or its tensors in another format.

        Parameters
        ----------
        target
            The file or directory to be; it is written beside and renamed.
        format
            `original` is byte for byte what was ingested, or where values are coarse the same file with these and
            with checksums that fit them; the others see `ckstore.reading.export.export`. By default it is `original`,
            or what the target's name ends with where tensors are chosen.
        include, exclude
            Globs over the paths of tensors; where the version is a directory and no format is named, of its files.
        strip
            Write one subtree of tensors alone, under the names that they have in it: what ``load_state_dict`` takes.
        force
            Overwrite what is there; a directory is replaced whole, with all that was in it.
        progress
            Called with numbers of bytes that were decoded.

        Returns
        -------
        list of str
            Paths of the tensors, or of the files of a directory, that were left out.

        Raises
        ------
        ConflictError
            The target exists, and `force` is not set.
        NotFoundError
            No tensor or file is chosen.
        UsageError
            Tensors are chosen, and no format; with `strip`, they lie in several subtrees, or two have one name.
        """
        from ckstore.reading.subtree import format_for

        place = pathlib.Path(target)
        form = format_for(self.stored, place, format, globs=bool(include or exclude), strip=strip)
        if form == "original":
            from ckstore.reading.checkout import checkout

            return checkout(self.stored, place, include, exclude, force=force, progress=progress)
        from ckstore.reading.export import export

        return export(self.stored, place, form, include, exclude, strip=strip, force=force, progress=progress)

    def salvage(
        self, target: str | os.PathLike[str], *, force: bool = False, progress: Callable[[int], None] | None = None
    ) -> SalvageReport:
        """Write what is whole of a version of which something was lost, and say what is not.

        Files that are whole come as they went in. Of every other one the whole tensors are written as `pt`, nested as
        they were, to a file of its name and `.salvaged.pt`; nothing is written in its own place.

        Parameters
        ----------
        target
            The file or directory to be; it is written beside and renamed.
        force
            Overwrite what is there.
        progress
            Called with numbers of bytes that were written.

        Raises
        ------
        ConflictError
            The target exists, and `force` is not set.
        IntegrityError
            Nothing at all is whole.
        """
        from ckstore.reading.salvage import salvage

        return salvage(self.stored, pathlib.Path(target), force=force, progress=progress)


def called(function: Callable[[Version], Result], address: Address, version: tuple[str, int]) -> Result:
    """Call a function with the version of an id and a number in the store of an address: what workers do."""
    return function(Version(stored_version(address, *version)))


def _has_values(layout: FileLayout) -> bool:
    """Whether a file has a tree; npz and npy files whose arrays are bytes here have none."""
    return bool(layout.tensors) or layout.kind not in ("opaque", "npy", "npz", "dcp-metadata")
