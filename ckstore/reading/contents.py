"""The contents of a version by its document and layout: its tensors, and the places of their elements in units."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from ckstore.codecs.lattice import PARTS
from ckstore.errors import NotFoundError
from ckstore.formats.layout import Path, Tensor
from ckstore.formats.paths import path_to_text, texts_of
from ckstore.formats.shards import join
from ckstore.objects.documents import VersionDocument
from ckstore.objects.layouts import LayoutDocument
from ckstore.runtime.cached import cached_property


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
        left = {
            (number, index): extent.count
            for number, layout in enumerate(self._layout.files)
            for index, extent in enumerate(layout.extents)
        }
        for unit in self._layout.units:
            for member in unit.members:
                left[member.file, member.extent] -= member.count
        return frozenset(place for place, count in left.items() if count)

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
    def paths(self) -> dict[str, tuple[int, Tensor]]:
        """(File number, tensor) by path as text, in the order of the files, without dropped tensors."""
        found: dict[str, tuple[int, Tensor]] = {}
        shards: dict[str, list[tuple[int, Tensor]]] = {}
        for number, layout in enumerate(self._layout.files):
            prefix = self.prefix(number)
            texts = texts_of([tensor.path for tensor in layout.tensors]) if layout.texts is None else layout.texts
            if not prefix and not [tensor for tensor in layout.tensors if tensor.box is not None]:
                found |= zip(texts, zip(repeat(number), layout.tensors), strict=True)
                continue
            starts = [f"{path_to_text(path)}/" if path else "" for path in (prefix, prefix[:-1])]
            for text, tensor in zip(texts, layout.tensors, strict=True):
                path = (starts[tensor.box is not None] + text).removesuffix("/")
                found[path] = number, tensor
                if tensor.box is not None:
                    shards.setdefault(path, []).append((number, tensor))
        found |= {path: (parts[0][0], join(parts)) for path, parts in shards.items()}
        if not self.dropped:
            return found
        return {
            path: (file, tensor)
            for path, (file, tensor) in found.items()
            if self.dropped.isdisjoint(tensor.places(file))
        }

    def prefix(self, file: int, tensor: Tensor | None = None) -> Path:
        """Return the prefix of the paths of a file's tensors: its path in a directory, or the shards' directory."""
        path = tuple(self._document.files[file].path.split("/")) if self._document.is_directory else ()
        return path[:-1] if tensor is not None and tensor.shards else path

    @cached_property
    def _named(self) -> dict[tuple[int, int], list[str]]:
        """Paths of the tensors of every (file, extent) with tensors."""
        found: dict[tuple[int, int], list[str]] = {}
        for path, (file, tensor) in self.paths.items():
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

    @cached_property
    def places(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """Parts of each (file, extent) in units: (first element, unit number, first element in the unit), in parts."""
        layouts = self._layout.files
        double = {
            (number, index)
            for number, layout in enumerate(layouts)
            for index, extent in enumerate(layout.extents)
            if extent.dtype in PARTS
        }
        places: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for number, unit in enumerate(self._layout.units):
            position = 0
            for member in unit.members:
                place = member.file, member.extent
                # Complex numbers are two floats of a unit.
                scale = 2 if double and place in double else 1
                part = (member.first * scale, number, position)
                if place in places:
                    places[place].append(part)
                else:
                    places[place] = [part]
                position += member.count * scale
        for parts in places.values():
            if len(parts) > 1:
                parts.sort()
        return places

    @cached_property
    def chunk_lengths(self) -> list[int]:
        """The elements of each unit's chunks."""
        return [unit.chunk for unit in self._layout.units]

    def identity(self, file: int, tensor: Tensor) -> tuple[Any, ...]:
        """Return the form of a tensor and the places of its elements in objects; equal identities are equal bits."""
        objects, coarse = self._document.objects, self._document.coarse_units
        boxes = [(shard.box, shard.shape, shard.offset, shard.strides, shard.lazy) for _, shard in tensor.shards]
        parts = [
            (first, coarse[unit].decoded if unit in coarse else objects[unit], position)
            for place in tensor.places(file)
            for first, unit, position in self.places.get(place, ())
        ]
        return tensor.dtype, tensor.shape, tensor.offset, tensor.strides, tensor.lazy, boxes, parts

    def units_in_order(self) -> Iterator[int]:
        """Yield the numbers of the units in the order of the files."""
        for place in sorted(self.places):
            for _, number, _ in self.places[place]:
                yield number

    def cover(self, file: int, extent: int, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the parts of chunks that cover the elements from `first` to before `last` of an extent, in order.

        Each is the number of the unit, the number of the chunk, and first and last position of the part within that
        chunk, in elements of the unit. Raise `NotFoundError` if the version has dropped the extent.
        """
        if self._layout.files[file].extents[extent].dtype in PARTS:
            first, last = 2 * first, 2 * last
        if first >= last:
            return
        place = file, extent
        if place in self.dropped:
            self.require_whole([file])
        parts = self.places[place]
        index = bisect_right(parts, first, key=lambda part: part[0]) - 1 if first else 0
        while first < last:
            begin, number, position = parts[index]
            length = self.chunk_lengths[number]
            stop = min(last, parts[index + 1][0]) if index + 1 < len(parts) else last
            low, high = position + first - begin, position + stop - begin
            for chunk in range(low // length, -(-high // length)):
                start = chunk * length
                yield number, chunk, max(low - start, 0), min(high - start, length)
            first = stop
            index += 1

    def stretches(self, file: int, extent: int, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut the elements from `first` to before `last` of an extent into ranges that lie in one chunk each."""
        cut = self._layout.files[file].extents[extent]
        scale = 2 if cut.dtype in PARTS else 1
        position = first * scale
        for _, _, low, high in self.cover(file, extent, first, cut.count if last is None else last):
            yield position // scale, (position + high - low) // scale
            position += high - low
