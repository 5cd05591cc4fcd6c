"""Journals of trainings that are killed: the digest of each state before it is saved and when it is resumed.

Lines of the file that `LOG` names, each durable before the training goes on: `pid`, `begun STEP DIGEST`, `done STEP`,
`resumed STEP DIGEST`, `ended`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def note(*words: Any) -> None:
    """Add a line to the file."""
    descriptor = os.open(os.environ["LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    os.fsync(descriptor)
    os.close(descriptor)


def digest(*states: Any) -> str:
    """Return the digest of all tensors and plain values of nested states."""
    found = hashlib.sha256()
    for part in _leaves(states):
        found.update(part)
    return found.hexdigest()[:16]


def digest_of_files(directory: str | os.PathLike[str]) -> str:
    """Return the digest of all files of a directory and their names."""
    files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
    return digest([(str(path.relative_to(directory)), path.read_bytes()) for path in files])


def _leaves(node: Any) -> Iterator[bytes]:
    if isinstance(node, Mapping):
        for key in sorted(node, key=str):
            yield str(key).encode()
            yield from _leaves(node[key])
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _leaves(item)
    elif hasattr(node, "detach"):
        local = node.to_local() if hasattr(node, "to_local") else node
        yield str((local.dtype, tuple(local.shape))).encode()
        yield local.detach().cpu().contiguous().numpy().tobytes()
    else:
        yield node if isinstance(node, bytes) else repr(node).encode()
