"""Files that are written in parts have the digest of all their bytes."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from ckstore.following.written_files import WrittenFiles
from ckstore.runtime.threads import worker_count
from ckstore.storage import durable


@pytest.mark.parametrize("size", [0, 1, 1024, 5 << 20, (5 << 20) + 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_digest_is_that_of_written_and_other_bytes(tmp_path: Path, size: int, share: float) -> None:
    generator = np.random.default_rng(size)
    before, after = generator.integers(0, 256, (2, size), np.uint8)
    path = tmp_path / "file"
    path.write_bytes(before.tobytes())
    descriptor = os.open(path, os.O_RDWR)
    cuts = [0, *sorted(generator.integers(0, size + 1, 9).tolist()), size]
    parts = [(7, low, low, high) for low, high in pairwise(cuts) if low < high]
    chosen = [part for part in parts if generator.random() < share]
    files = WrittenFiles({7: descriptor}, {7: size})
    for start in range(0, len(chosen), 2):
        files.note(files.write(after, chosen[start : start + 2]))
    expected = before.copy()
    for _, first, low, high in chosen:
        expected[first : first + high - low] = after[low:high]
    assert files.digests() == {7: blake3(expected.tobytes()).hexdigest()}
    assert path.read_bytes() == expected.tobytes()
    files.close()
    os.close(descriptor)


def test_files_share_the_threads_that_sync_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}

    def sync(descriptor: int) -> None:
        synced[descriptor] = threading.get_ident()

    monkeypatch.setattr(durable, "sync_file", sync)
    data = np.ones(1 << 20, np.uint8)
    with ExitStack() as stack:
        descriptors = {number: os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(50)}
        for descriptor in descriptors.values():
            stack.callback(os.close, descriptor)
        files = stack.enter_context(closing(WrittenFiles(descriptors, dict.fromkeys(descriptors, data.size))))
        for number in descriptors:
            files.note(files.write(data, [(number, 0, 0, data.size)]))
        assert set(files.digests().values()) == {blake3(data.tobytes()).hexdigest()}
        assert synced.keys() == set(descriptors.values())
        assert len(set(synced.values())) <= worker_count()
