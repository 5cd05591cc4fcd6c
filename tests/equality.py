"""Compares nested containers of tensors and other values, bit for bit."""

from __future__ import annotations

import argparse
import struct
import types
from collections import OrderedDict, defaultdict, deque
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import torch

from ckstore.formats.layout import memory_shape


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in C order."""
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(np.asarray(flat.reshape(-1).view(torch.uint8))) if flat.numel() else b""


def assert_same(found: Any, expected: Any, place: str = "", *, strides: bool = True) -> None:
    """Fail where two trees differ in structure, keys, marks, values or bits; ordered dicts count as plain."""
    if isinstance(expected, torch.Tensor):
        assert type(found) is type(expected), place
        assert marks_of(found) == marks_of(expected), place
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        if strides and expected.numel():
            assert found.stride() == expected.stride(), place
        assert bits_of(found) == bits_of(expected), place
    elif isinstance(expected, dict | OrderedDict):
        assert isinstance(found, dict), place
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected], place
        for key, value in expected.items():
            assert_same(found[key], value, f"{place}/{key}", strides=strides)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), place
        assert len(found) == len(expected), place
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{place}/{index}", strides=strides)
    else:
        assert type(found) is type(expected), place
        assert found == expected, place


def assert_identical(found: Any, expected: Any) -> None:
    """Fail where two states differ in types, values, bits, dtypes, marks, attributes, or the identity of objects.

    Strides count where elements lie densely; arrays have the order of theirs, in native byte order. Tensors of one item
    size that share a storage must have the same distances in memory.
    """
    _Comparison().compare(found, expected, "")


class _Comparison:
    def __init__(self) -> None:
        self._alive: list[Any] = []
        self._expected_of: dict[int, Any] = {}
        self._found_of: dict[int, Any] = {}
        self._storages: dict[tuple[str, int, int], tuple[int, int]] = {}

    def compare(self, found: Any, expected: Any, place: str) -> None:
        """Compare two values at a place."""
        kind = type(expected)
        if isinstance(expected, np.ndarray):
            assert type(found) is np.ndarray, place
        elif isinstance(expected, np.generic):
            assert (found.dtype, type(found) is np.record) == (expected.dtype, kind is np.record), place
            assert found.tobytes() == expected.tobytes(), place
            return
        else:
            assert type(found) is kind, place
        if isinstance(expected, float | complex):
            assert _bits(found) == _bits(expected), place
        elif kind is tuple:
            self._compare_items(list(found), list(expected), place)
        elif isinstance(expected, slice):
            parts = [(one.start, one.stop, one.step) for one in (found, expected)]
            self.compare(parts[0], parts[1], place)
        elif isinstance(expected, Decimal):
            assert str(found) == str(expected), place
        elif isinstance(expected, UUID):
            assert (found, found.is_safe) == (expected, expected.is_safe), place
        elif isinstance(expected, np.dtype):
            assert (repr(found), found.isalignedstruct) == (repr(expected), expected.isalignedstruct), place
        elif _is_mutable(expected):
            if not self._is_known(found, expected, place):
                self._compare_object(found, expected, place)
        else:
            assert found == expected, place
            assert getattr(found, "fold", 0) == getattr(expected, "fold", 0), place

    def _is_known(self, found: Any, expected: Any, place: str) -> bool:
        """Return whether both objects were compared with each other; fail if one was with another."""
        self._alive += [found, expected]
        known = id(expected) in self._found_of or id(found) in self._expected_of
        assert self._found_of.setdefault(id(expected), found) is found, f"{place} is another object than before"
        assert self._expected_of.setdefault(id(found), expected) is expected, f"{place} is an object from before"
        return known

    def _compare_object(self, found: Any, expected: Any, place: str) -> None:
        if isinstance(expected, torch.Tensor):
            self._compare_tensors(found, expected, place)
        elif isinstance(expected, np.ndarray):
            native = expected.dtype.newbyteorder("=") if expected.dtype.fields is None else expected.dtype
            assert (found.dtype, found.shape) == (native, expected.shape), place
            orders = [(one.flags.c_contiguous, one.flags.f_contiguous) for one in (found, expected)]
            assert orders[0] == orders[1] or not any(orders[1]), place
            assert found.tobytes() == expected.astype(native).tobytes(), place
        elif isinstance(expected, dict):
            for one, other in zip(found, expected, strict=True):
                self.compare(one, other, f"{place} key {other!r}")
            self._compare_items(list(found.values()), list(expected.values()), place)
            factories = [one.default_factory if isinstance(one, defaultdict) else None for one in (found, expected)]
            assert factories[0] is factories[1], place
        elif isinstance(expected, list | deque):
            self._compare_items(list(found), list(expected), place)
            assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None), place
        elif isinstance(expected, set | frozenset):
            assert sorted(map(_rank, found)) == sorted(map(_rank, expected)), place
        elif isinstance(expected, bytearray):
            assert found == expected, place
        if hasattr(expected, "__dict__"):
            self.compare(dict(vars(found)), dict(vars(expected)), f"{place} attributes")

    def _compare_items(self, found: list[Any], expected: list[Any], place: str) -> None:
        assert len(found) == len(expected), place
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            self.compare(one, other, f"{place}/{index}")

    def _compare_tensors(self, found: torch.Tensor, expected: torch.Tensor, place: str) -> None:
        assert marks_of(found) == marks_of(expected), place
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        if not expected.numel():
            return
        if memory_shape(tuple(expected.shape), expected.stride()) is not None:
            assert found.stride() == expected.stride(), place
        assert bits_of(found) == bits_of(expected), place
        item = expected.element_size()
        here, there = storage_of(found), storage_of(expected)
        assert self._storages.setdefault(("expected", item, there), (here, 0))[0] == here, f"{place} is not tied"
        assert self._storages.setdefault(("found", item, here), (there, 0))[0] == there, f"{place} is tied"
        places = found.data_ptr(), expected.data_ptr()
        first = self._storages.setdefault(("first", item, here), places)
        assert places[0] - first[0] == places[1] - first[1], f"{place} lies elsewhere"


def _is_mutable(value: Any) -> bool:
    return isinstance(
        value,
        torch.Tensor | np.ndarray | dict | list | deque | set | frozenset | bytearray
        | argparse.Namespace | types.SimpleNamespace,
    )  # fmt: skip


def _bits(number: complex) -> bytes:
    return struct.pack("<dd", number.real, number.imag)


def _rank(element: Any) -> tuple[str, str]:
    return type(element).__name__, repr(element)


def marks_of(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    """Return torch's flags of a tensor besides its device and type."""
    return tensor.is_conj(), tensor.is_neg(), tensor.requires_grad


def storage_of(tensor: torch.Tensor) -> int:
    """Return a key that identifies a storage."""
    return tensor.untyped_storage().data_ptr()
