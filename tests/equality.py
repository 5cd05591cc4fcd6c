"""Compares nested containers of tensors, bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in C order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
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


def marks_of(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    """Return torch's flags of a tensor besides its device and type."""
    return tensor.is_conj(), tensor.is_neg(), tensor.requires_grad


def storage_of(tensor: torch.Tensor) -> int:
    """Return a key that identifies a storage."""
    return tensor.untyped_storage().data_ptr()
