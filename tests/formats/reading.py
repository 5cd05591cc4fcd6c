"""Helpers of the format tests: read tensors from a parsed file with NumPy alone, and reassemble files."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.detect import parse
from ckstore.formats.layout import FileLayout, Source, Tensor, TensorRef, Unknown
from ckstore.formats.skeleton import fill_crcs, pieces, stored_crcs
from ckstore.formats.sources import CompositeSource


def in_memory(data: bytes) -> Source:
    """A file that is a byte string."""
    return CompositeSource(data, (), len(data))


def saved(value: Any, **options: Any) -> bytes:
    """Return the output of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def zipped(entries: Mapping[str, bytes | str], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive of entries by name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return out.getvalue()


def unzipped(data: bytes) -> dict[str, bytes]:
    """Return the entries of a zip archive by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def bits(data: bytes, layout: FileLayout, tensor: Tensor) -> np.ndarray:
    """The elements of a tensor as unsigned bytes: its shape and a last axis of the item size."""
    item = ITEM_SIZES[tensor.dtype]
    if tensor.extent < 0:
        return np.zeros((*tensor.shape, item), np.uint8)
    extent = layout.extents[tensor.extent]
    assert ITEM_SIZES[extent.dtype] == item
    flat = np.frombuffer(data, np.uint8, extent.nbytes, extent.start)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    assert tensor.offset >= 0
    assert tensor.offset + reach < extent.count
    return np.lib.stride_tricks.as_strided(
        flat[tensor.offset * item :],
        (*tensor.shape, item),
        (*(stride * item for stride in tensor.strides), 1),
        writeable=False,
    )


def torch_bits(tensor: torch.Tensor) -> np.ndarray:
    """The same of a torch tensor."""
    plain = tensor.detach().contiguous().reshape(-1)
    flat = plain.view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return flat.numpy().reshape((*tensor.shape, tensor.element_size()))


def assert_tree_equals(data: bytes, layout: FileLayout, tree: Any, loaded: Any) -> int:
    """Compare a tree with torch's result; return the number of tensors compared."""
    if isinstance(loaded, torch.Tensor):
        if vars(loaded):
            assert isinstance(tree, Unknown)
            assert (tree.name, tree.state) == ("torch.Tensor", vars(loaded))
            (tree,) = tree.args or ()
        assert isinstance(tree, TensorRef)
        tensor = layout.tensors[tree.index]
        assert tensor.dtype == str(loaded.dtype).removeprefix("torch.")
        assert tensor.shape == tuple(loaded.shape)
        np.testing.assert_array_equal(bits(data, layout, tensor), torch_bits(loaded))
        return 1
    if isinstance(loaded, torch.Size):
        assert tree == Unknown("torch.Size", (tuple(loaded),))
        return 0
    if isinstance(loaded, dict):
        assert isinstance(tree, dict)
        assert list(tree) == list(loaded)
        return sum(assert_tree_equals(data, layout, tree[key], value) for key, value in loaded.items())
    if isinstance(loaded, list | tuple):
        assert isinstance(tree, list | tuple)
        assert len(tree) == len(loaded)
        return sum(assert_tree_equals(data, layout, *pair) for pair in zip(tree, loaded, strict=True))
    if not isinstance(tree, Unknown):
        assert type(tree) is type(loaded)
        assert tree == loaded
    return 0


def split_skeleton(source: Source, layout: FileLayout) -> bytes:
    """All bytes outside of the extents in file order, with the CRCs of `layout.checked` as zeros."""
    cuts = [piece for piece in pieces(layout) if piece.extent < 0]
    skeleton = b"".join(source.pread(piece.start, piece.stop - piece.start) for piece in cuts)
    return fill_crcs(skeleton, layout, [0] * len(layout.checked))


def assert_comes_back(data: bytes, name: str = "") -> FileLayout:
    """Take a file apart and put it together; parse it again from its skeleton alone; returns its layout."""
    source = in_memory(data)
    layout = parse(source, name)
    starts = [extent.start for extent in layout.extents]
    assert starts == sorted(starts)
    assert all(extent.nbytes for extent in layout.extents)
    assert all(one.stop <= two.start for one, two in zip(layout.extents, layout.extents[1:], strict=False))
    assert len({extent.path for extent in layout.extents}) == len(layout.extents)
    assert len({tensor.path for tensor in layout.tensors}) == len(layout.tensors)
    skeleton = split_skeleton(source, layout)
    places = [(extent.start, extent.nbytes) for extent in layout.extents]
    again = parse(CompositeSource(skeleton, places, layout.size), name)
    if layout.kind == "opaque" and places:
        again.bytes_for = layout.bytes_for  # No byte of such a file is in its skeleton.
    assert again == layout
    crcs = [zlib.crc32(data[checked.start : checked.stop]) for checked in layout.checked]
    assert crcs == stored_crcs(source, layout)
    whole = CompositeSource(
        fill_crcs(skeleton, layout, crcs),
        places,
        layout.size,
        lambda index, offset, nbytes: data[places[index][0] + offset : places[index][0] + offset + nbytes],
    )
    assert whole.pread(0, whole.size) == data
    return layout
