"""Encodes an object again, in full or against another base; its id and values stay the same."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from ckstore.codecs.integers import encode_changes
from ckstore.encoding.estimate import Encoded, Way
from ckstore.encoding.exact import CONTEXT_GAIN, PATCH_WORTH, encode_values
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Record


def in_full(reader: ObjectReader, record: Record) -> tuple[Record, Encoded]:
    """Encode an object in full; it must not be a sum of deltas."""
    if record.is_exact:
        return _exactly(reader, record, Way(None))
    encoded = Encoded(record.id, [])
    for chunk in range(record.chunks):
        if record.kind == "codebook":
            integers = reader.indices(record, chunk).astype(np.int32) - np.int32(record.codebook.zero)
        else:
            integers = reader.integers(record, chunk)
        encoded.payloads.append(encode_changes(integers))
        if record.protected:
            encoded.aside.append(reader.aside(record, chunk))
    return replace(record, base=None, debt=0), encoded


def without_lost(reader: ObjectReader, record: Record, kept: Collection[str]) -> tuple[Record, Encoded]:
    """Encode an exact object against its nearest ancestor among the ids `kept`, or in full if that is smaller."""
    best = in_full(reader, record)
    ancestor = next((level for level in reader.chain(record)[1:] if level.id in kept), None)
    if ancestor is None:
        return best
    for context in (False, True):
        delta = _exactly(reader, record, Way(ancestor, context=context))
        if delta[1].nbytes < (1 - CONTEXT_GAIN * context) * best[1].nbytes:
            best = delta
    if record.patches:
        patched = _exactly(reader, record, Way(ancestor, patched=True))
        if patched[1].nbytes <= PATCH_WORTH * best[1].nbytes:
            best = patched
    return best


def _exactly(reader: ObjectReader, record: Record, way: Way) -> tuple[Record, Encoded]:
    """Encode an exact object in one way."""
    encoded = Encoded(record.id, [], patched=way.patched)
    for chunk in range(record.chunks):
        before = None if way.base is None else reader.ordinals(way.base, chunk)
        encoded.payloads.append(encode_values(record.dtype, reader.ordinals(record, chunk), before, way))
    base = None if way.base is None else way.base.id
    return replace(record, base=base, context=way.context, debt=0, patches=()), encoded
