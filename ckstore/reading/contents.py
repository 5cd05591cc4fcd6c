"""The contents of a version by its document and layout: its tensors, and the places of their elements in units."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import NotFoundError
from ckstore.formats.layout import Path, Tensor, places_of
from ckstore.formats.paths import path_to_text
from ckstore.formats.shards import join
from ckstore.objects.documents import VersionDocument
from ckstore.objects.layouts import LayoutDocument
from ckstore.objects.units import chunk_of
from ckstore.runtime.cached import cached_property

#: dtype and shape of a tensor.
Form = tuple[str, tuple[int, ...]]


class Contents:
    """The tensors, extents and units of a version; reads nothing."""

    def __init__(self, document: VersionDocument, layout: LayoutDocument) -> None:
        self._document = document
        self._layout = layout

    @cached_property
    def dropped(self) -> frozenset[tuple[int, int]]:
        """(File, extent) of dropped tensors."""
        if not self._document.dropped:
            return frozenset()
        layout = self._layout
        files, extents, _, counts = layout.stretches
        left = layout.extent_shapes.products.copy()
        np.subtract.at(left, layout.bases[files] + extents, counts)
        gone = np.flatnonzero(left)
        owners = np.searchsorted(layout.bases, gone, "right") - 1
        return frozenset(zip(owners.tolist(), (gone - layout.bases[owners]).tolist(), strict=True))

    def require_whole(self, files: Iterable[int]) -> None:
        """Raise `NotFoundError` if the version has dropped tensors of one of these files."""
        gone = {file for file, _ in self.dropped}
        for file in files:
            if file in gone:
                document = self._document
                besides = ", or leave the file out with `exclude`" if document.is_directory else ""
                raise NotFoundError(
                    f"Version {document.number} has dropped {', '.join(document.dropped)}, so that "
                    f"{document.files[file].path} cannot be restored; export its other tensors with `format` pt"
                    f"{besides}."
                )

    def is_changed(self, file: int) -> bool:
        """Return whether a restored file would differ from the original: values are coarse or dropped."""
        if any(place[0] == file for place in self.dropped):
            return True
        units = self._layout.units
        return any(member.file == file for unit in self._document.coarse_units for member in units[unit].members)

    @cached_property
    def _listed(self) -> tuple[dict[str, int], list[tuple[int, Tensor]]]:
        """The numbers of all tensors by path as text, and the tensors that shards make up, with their first files.

        The latter's numbers follow those of the tensors in files.
        """
        layout, firsts = self._layout, self._layout.bounds[1]
        found: dict[str, int] = {}
        shards: dict[str, list[tuple[int, Tensor]]] = {}
        for file, (first, last) in enumerate(pairwise(firsts)):
            texts = layout.texts[first:last]
            if prefix := self.prefix(file):
                starts = [f"{path_to_text(path)}/" if path else "" for path in (prefix, prefix[:-1])]
                texts = [
                    (starts[number in layout.boxes] + text).removesuffix("/")
                    for number, text in enumerate(texts, first)
                ]
            found |= zip(texts, range(first, last), strict=True)
            for number, text in enumerate(texts, first) if layout.boxes else ():
                if number in layout.boxes:
                    shards.setdefault(text, []).append((file, self._layout.files[file].tensors[number - first]))
        found |= {path: firsts[-1] + place for place, path in enumerate(shards)}
        return found, [(parts[0][0], join(parts)) for parts in shards.values()]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each tensor by path as text, in the order of the files, without dropped tensors."""
        found = self._listed[0]
        if not self.dropped:
            return found
        rows = zip(found.items(), self.rows(found).values(), strict=True)
        return {path: number for (path, number), (file, one) in rows if self.dropped.isdisjoint(one.places(file))}

    def row(self, number: int) -> tuple[int, Tensor]:
        """Return the file number and the layout of a tensor."""
        firsts = self._layout.bounds[1]
        if number >= firsts[-1]:
            return self._listed[1][number - firsts[-1]]
        file = bisect_right(firsts, number) - 1
        return file, self._layout.files[file].tensors[number - firsts[file]]

    def rows(self, numbers: Mapping[str, int]) -> dict[str, tuple[int, Tensor]]:
        """Return (file number, tensor) by path, of tensors given by number."""
        files = (zip(repeat(number), layout.tensors) for number, layout in enumerate(self._layout.files))
        found = [*chain.from_iterable(files), *self._listed[1]]
        return dict(zip(numbers, map(found.__getitem__, numbers.values()), strict=True))

    def forms(self, numbers: Mapping[str, int]) -> dict[str, Form]:
        """Return dtype and shape by path, of tensors given by number."""
        dtypes = map(self._layout.names.__getitem__, self._layout.dtypes.tolist())
        found = [
            *zip(dtypes, self._layout.shapes.cut(), strict=True),
            *((one.dtype, one.shape) for _, one in self._listed[1]),
        ]
        return dict(zip(numbers, map(found.__getitem__, numbers.values()), strict=True))

    def lone_units(self) -> list[int]:
        """Return the unit of each tensor by number; -1 for one that is in several units or in none."""
        starts, _, units, *_ = map(np.array, self._layout.parts)
        lone = np.append(np.where(np.diff(starts) == 1, np.append(units, -1)[starts[:-1]], -1), -1)
        places = places_of(self._layout.extents, self._layout.counts)
        return [*lone[places].tolist(), *[-1] * len(self._listed[1])]

    def prefix(self, file: int, tensor: Tensor | None = None) -> Path:
        """Return the prefix of the paths of a file's tensors: its path in a directory, or the shards' directory."""
        path = tuple(self._document.files[file].path.split("/")) if self._document.is_directory else ()
        return path[:-1] if tensor is not None and tensor.shards else path

    @cached_property
    def _named(self) -> dict[tuple[int, int], list[str]]:
        """Paths of the tensors of every (file, extent) with tensors."""
        found: dict[tuple[int, int], list[str]] = {}
        for path, (file, tensor) in self.rows(self.numbers).items():
            for place in tensor.places(file):
                found.setdefault(place, []).append(path)
        return found

    def tensors_of(self, number: int) -> list[str]:
        """Return the paths of the tensors with elements in a unit."""
        members = dict.fromkeys((member.file, member.extent) for member in self._layout.units[number].members)
        return list(dict.fromkeys(path for place in members for path in self._named.get(place, ())))

    def names(self, number: int) -> list[str]:
        """Return the paths of a unit's tensors, or of its files if it has none."""
        files = {self._document.files[member.file].path for member in self._layout.units[number].members}
        return self.tensors_of(number) or sorted(files)

    def _span(self, file: int, extent: int) -> tuple[int, int, int]:
        """Return an extent's first part, the part after its last, and the coded elements of each of its elements."""
        first, last = self._layout.bounds[0][file : file + 2]
        place, starts, scales = first + extent, self._layout.parts[0], self._layout.parts[4]
        return (starts[place], starts[place + 1], scales[place]) if first <= place < last else (0, 0, 1)

    def units_of(self, file: int, extent: int | None = None) -> list[int]:
        """Return the numbers of the units that hold an extent, in order; of all extents of the file without one."""
        if extent is None:
            begin, end = map(self._layout.parts[0].__getitem__, self._layout.bounds[0][file : file + 2])
        else:
            begin, end, _ = self._span(file, extent)
        return self._layout.parts[2][begin:end]

    def parts(self, file: int, extent: int) -> list[tuple[int, int, int]]:
        """Return the parts of an extent in units: (first element, unit number, first element in the unit), in order."""
        begin, end, _ = self._span(file, extent)
        _, firsts, units, positions, _ = self._layout.parts
        return list(zip(firsts[begin:end], units[begin:end], positions[begin:end], strict=True))

    @cached_property
    def item_sizes(self) -> list[int]:
        """The bytes of a coded element of each unit."""
        return [ITEM_SIZES[self._layout.names[number]] for number in self._layout.unit_dtypes.tolist()]

    @cached_property
    def chunk_lengths(self) -> list[int]:
        """The elements of each unit's chunks."""
        shapes = self._layout.unit_shapes.cut()
        found = {shape: chunk_of(shape) for shape in set(shapes)}
        return list(map(found.__getitem__, shapes))

    def identity(self, file: int, tensor: Tensor) -> tuple[Any, ...]:
        """Return the form of a tensor and the places of its elements in objects; equal identities are equal bits."""
        objects, coarse = self._document.objects, self._document.coarse_units
        boxes = [(shard.box, shard.shape, shard.offset, shard.strides, shard.lazy) for _, shard in tensor.shards]
        parts = [
            (first, coarse[unit].decoded if unit in coarse else objects[unit], position)
            for place in tensor.places(file)
            for first, unit, position in self.parts(*place)
        ]
        return tensor.dtype, tensor.shape, tensor.offset, tensor.strides, tensor.lazy, boxes, parts

    def units_in_order(self) -> Iterator[int]:
        """Yield the numbers of the units in the order of the files."""
        yield from self._layout.parts[2]

    def cover(self, file: int, extent: int, first: int, last: int) -> list[tuple[int, int, int, int]]:
        """Return the parts of chunks that cover the elements from `first` to before `last` of an extent, in order.

        Each is the number of the unit, the number of the chunk, and first and last position of the part within that
        chunk, in elements of the unit. Raise `NotFoundError` if the version has dropped the extent.
        """
        begin, end, scale = self._span(file, extent)
        first, last = scale * first, scale * last
        found: list[tuple[int, int, int, int]] = []
        if first >= last:
            return found
        if self.dropped and (file, extent) in self.dropped:
            self.require_whole([file])
        _, firsts, units, positions, _ = self._layout.parts
        index = bisect_right(firsts, first, begin, end) - 1 if first else begin
        while first < last:
            number = units[index]
            length = self.chunk_lengths[number]
            stop = min(last, firsts[index + 1]) if index + 1 < end else last
            chunk, low = divmod(first + positions[index] - firsts[index], length)
            while first < stop:
                high = min(low + stop - first, length)
                found.append((number, chunk, low, high))
                chunk, low, first = chunk + 1, 0, first + high - low
            index += 1
        return found

    def stretches(self, file: int, extent: int, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut the elements from `first` to before `last` of an extent into ranges that lie in one chunk each."""
        scale = self._span(file, extent)[2]
        position = first * scale
        count = self._layout.files[file].extents[extent].count if last is None else last
        for _, _, low, high in self.cover(file, extent, first, count):
            yield position // scale, (position + high - low) // scale
            position += high - low
