"""Encodes an object again, in full or against another base; its id and values stay the same."""

from __future__ import annotations

from collections.abc import Container

from msgspec.structs import replace

from ckstore.codecs.integers import encode_changes
from ckstore.encoding.estimate import Encoded, Way
from ckstore.encoding.exact import CONTEXT_GAIN, PATCH_WORTH, encode_values, encoded_as
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Cast, Codebook, Linear, Patches, Record, Rounded


def in_full(reader: ObjectReader, record: Record) -> Encoded:
    """Encode an object in full; it must not be a sum."""
    chunks = range(record.chunks)
    if isinstance(record, Codebook):
        payloads = [encode_changes(record.lattice.stored(reader.numbers(record, chunk))) for chunk in chunks]
        return Encoded(replace(record, base=None, debt=0), [*payloads])
    if isinstance(record, Linear | Rounded):
        payloads = [encode_changes(reader.integers(record, chunk)) for chunk in chunks]
        whole = record if isinstance(record, Rounded) else replace(record, base=None, debt=0, cast=False)
        return Encoded(whole, [*payloads])
    return _exactly(reader, record, Way(None))


def without_lost(reader: ObjectReader, record: Record, kept: Container[str]) -> Encoded:
    """Encode an exact object against its nearest ancestor among the ids `kept`, or in full if that is smaller."""
    best = in_full(reader, record)
    ancestors = (level for level in reader.chains.levels(record) if level.dtype == record.dtype)
    ancestor = next((level for level in ancestors if level.id in kept and level is not record), None)
    if ancestor is None:
        return best
    for context in (False, True):
        delta = _exactly(reader, record, Way(ancestor, context=context))
        if delta.nbytes < (1 - CONTEXT_GAIN * context) * best.nbytes:
            best = delta
    if isinstance(record, Patches) and not isinstance(record, Cast):
        patched = _exactly(reader, record, Way(ancestor, patched=True))
        if patched.nbytes <= PATCH_WORTH * best.nbytes:
            best = patched
    return best


def _exactly(reader: ObjectReader, record: Record, way: Way) -> Encoded:
    """Encode an exact object in one way."""
    payloads = []
    for chunk in range(record.chunks):
        before = None if way.base is None else reader.before(way.base, record, chunk)
        payloads.append(encode_values(record, reader.ordinals(record, chunk), before, way))
    return encoded_as(record.common, way, payloads)
