"""Encodes an object again without a base that will be deleted; its ids and values stay the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckstore.codecs.integers import encode_changes
from ckstore.codecs.lattice import FLOATS, common_factor, ordinal_classes, ordinal_difference, scaled
from ckstore.codecs.patches import find_changes
from ckstore.encoding.estimate import Encoded
from ckstore.encoding.exact import CONTEXT_GAIN, PATCH_WORTH, exact_frame, exact_patch
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import ContentRecord, LatticeRecord


@dataclass(frozen=True, slots=True)
class Reencoded:
    """An object's new layers.

    Attributes
    ----------
    content
        Its content id.
    record
        The record of its integers.
    layers
        The encoded payloads.
    parent, factor
        Of a chained or patched exact layer.
    """

    content: str
    record: LatticeRecord
    layers: Encoded
    parent: str | None = None
    factor: float = 1.0


def reanchored(reader: ObjectReader, item: tuple[str, str | None], kept: set[str]) -> Reencoded:
    """Encode an object against its nearest remaining ancestor, or in full if that is smaller.

    Parameters
    ----------
    item
        Its lattice id and content id.
    kept
        Content ids that versions claim. Those of them stored against a deleted object are stored again too.
    """
    lattice, content = item
    assert content is not None
    record = reader.resolver.lattice(lattice)
    layer = reader.exact_layer(lattice, content)
    if layer is None:
        return _ordinal(reader, record, kept)
    return _chained(reader, record, layer, kept)


def _chained(reader: ObjectReader, record: LatticeRecord, layer: ContentRecord, kept: set[str]) -> Reencoded:
    """Encode a chained or patched exact layer, against an ancestor or own."""
    ancestor = next((level for level in reader.content_chain(layer)[1:] if level.id in kept), None)
    own = _exact_layer(reader, record, layer, None, 1.0)
    result = Reencoded(layer.id, record, own)
    if ancestor is None:
        return result
    factor = common_factor(reader.exact(layer, 0), reader.exact(ancestor, 0), record.dtype)
    chained = _exact_layer(reader, record, layer, ancestor, factor)
    if _size(chained) < _size(own):
        result = Reencoded(layer.id, record, chained, ancestor.id, factor)
    if layer.mode == "patched":
        patched = _patches(reader, layer, ancestor)
        if _size(patched) <= PATCH_WORTH * _size(result.layers):
            result = Reencoded(layer.id, record, patched, ancestor.id)
    return result


def _patches(reader: ObjectReader, layer: ContentRecord, ancestor: ContentRecord) -> Encoded:
    encoded = Encoded(layer.lattice, [], [], patched=True)
    for chunk in range(len(layer.lengths)):
        encoded.exact.append(exact_patch(reader.exact(layer, chunk), reader.exact(ancestor, chunk))[0])
    return encoded


def _exact_layer(
    reader: ObjectReader, record: LatticeRecord, layer: ContentRecord, ancestor: ContentRecord | None, factor: float
) -> Encoded:
    encoded = Encoded(record.id, [], [])
    for chunk in range(record.chunks):
        bits = reader.exact(layer, chunk)
        integers = reader.integers(record, chunk)
        start = chunk * record.chunk
        before = None if ancestor is None else scaled(reader.exact(ancestor, chunk), record.dtype, factor)
        encoded.exact.append(exact_frame(record.linear, bits, integers, start, before))
    return encoded


def _ordinal(reader: ObjectReader, record: LatticeRecord, kept: set[str]) -> Reencoded:
    """Encode ordinals, against an ancestor or in full."""
    ancestor = next((level for level in reader.chain(record)[1:] if level.id in kept), None)
    full = _ordinals(reader, record, None, 1.0, context=False)
    alone = replace(record, base=None, context=False, factor=1.0, debt=0, patches=())
    best = Reencoded(record.id, alone, full)
    if ancestor is not None:
        factor = common_factor(reader.ordinals(record, 0), reader.ordinals(ancestor, 0), record.dtype)
        for context in (False, True):
            layers = _ordinals(reader, record, ancestor, factor, context=context)
            if _size(layers) < (1 - CONTEXT_GAIN * context) * _size(best.layers):
                moved = replace(record, base=ancestor.id, context=context, factor=factor, debt=0, patches=())
                best = Reencoded(record.id, moved, layers)
        if record.patches:
            patched = _ordinals(reader, record, ancestor, 1.0, context=False, patched=True)
            if _size(patched) <= PATCH_WORTH * _size(best.layers):
                best = Reencoded(record.id, replace(record, base=ancestor.id, debt=0), patched)
    return best


def _ordinals(
    reader: ObjectReader, record: LatticeRecord, base: LatticeRecord | None, factor: float, *, context: bool,
    patched: bool = False,
) -> Encoded:  # fmt: skip
    encoded = Encoded(record.id, [], [], patched=patched)
    for chunk in range(record.chunks):
        bits = reader.ordinals(record, chunk)
        if patched and base is not None:
            changes = find_changes(bits, reader.ordinals(base, chunk), is_float=record.dtype in FLOATS)
            encoded.coarse.append(changes.patch())
            continue
        before = None if base is None else scaled(reader.ordinals(base, chunk), record.dtype, factor)
        difference = ordinal_difference(bits, before, record.dtype)
        classes = ordinal_classes(before, record.dtype) if context and before is not None else None
        encoded.coarse.append(encode_changes(difference, classes))
    return encoded


def _size(layers: Encoded) -> int:
    return sum(len(payload) for payload in [*layers.exact, *(chunk for chunk in layers.coarse if chunk is not None)])
