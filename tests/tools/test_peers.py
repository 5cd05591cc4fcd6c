"""The benchmark's peers are lossless and its chains add up, so that comparisons with ckstore are fair."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tools.bench import chains, fm_delta, pieces
from tools.bench.peers import PEERS, Peer
from tools.bench.pieces import Piece
from tools.bench.series import Series

TENSOR_PEERS = [peer for peer in PEERS if not peer.whole_files]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_lossless(peer: Peer) -> None:
    """Of any length and bits, in memory that begins anywhere."""
    rng = np.random.default_rng(0)
    for count, dtype, first in itertools.product((0, 16, 272), ("float32", "bfloat16", "float64", "int8"), (0, 1)):
        data, base = rng.integers(0, 256, (2, count + 1), np.uint8)[:, first : first + count]
        before = data.copy()
        assert np.array_equal(peer.decode(peer.encode(data, dtype), dtype), data)
        if peer.encode_delta is not None and peer.decode_delta is not None:
            assert np.array_equal(peer.decode_delta(peer.encode_delta(data, base, dtype), base, dtype), data)
        assert np.array_equal(data, before), "a peer changed its input"


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Series:
    """Four versions of a weight that hardly moves and a small one that comes, grows and goes."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=40_000).astype(np.float32)
    versions = []
    for index in range(4):
        weight = weight + rng.normal(size=weight.size).astype(np.float32) * np.float32(1e-6)
        large = Piece("float32", (("w", weight.nbytes),), weight.view(np.uint8))
        names = ["a", "b"] if index != 1 else ["b"]
        sizes = [64 if index == 2 and name == "a" else 32 for name in names]
        small = rng.normal(size=sum(sizes) // 4).astype(np.float32).view(np.uint8)
        bundle = Piece("float32", tuple(zip(names, sizes, strict=True)), small)
        versions.append([large, bundle, Piece("opaque", (("", 7),), np.full(7, index, np.uint8))])
    monkeypatch.setattr(pieces, "tensors", lambda series, index: versions[index])
    return Series("walk", tuple(Path(str(index)) for index in range(4)))


@pytest.mark.parametrize("peer", TENSOR_PEERS, ids=lambda peer: peer.name)
def test_sizes(peer: Peer, walk: Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "time_ratio", lambda slow, fast: 1.5)
    stored = chains.PeerSeries(peer, walk, tmp_path / "out")
    free, bound = stored.sizes(1.5), stored.sizes(1.4)
    assert bound.period == 1
    assert free.pairs == bound.pairs
    if peer.encode_delta is None:
        assert bound.chains == free.chains == free.pairs
    else:
        assert free.period == 4
        assert free.chains == free.pairs < 0.8 * bound.chains
    wanted = b"".join(piece.data.tobytes() for piece in pieces.tensors(walk, 3))
    for depth in range(4):
        stored.restore(depth)
        assert (tmp_path / "out").read_bytes() == wanted


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_fm_delta_codes_differences_near_their_entropy(item: int) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, 50_000 * item, np.uint8)
    data = base.copy()
    data.view(f"u{item}")[::7] += np.uint8(1)
    payload = fm_delta.encode(data, base, item)
    assert np.array_equal(fm_delta.decode(payload, base, item), data)
    # The symbols 0, 1 and -1 in shares of 6/7, 1/14 and 1/14.
    assert 0.73 * 50_000 / 8 < len(payload) < 0.78 * 50_000 / 8
    assert np.array_equal(fm_delta.decode(fm_delta.encode(base[::-1].copy(), base, item), base, item), base[::-1])


def test_a_lossy_peer_is_found(walk: Series, tmp_path: Path) -> None:
    exact = TENSOR_PEERS[0]
    lossy = Peer("lossy", exact.encode, lambda payload, dtype: exact.decode(payload, dtype) & 0xFE)
    with pytest.raises(AssertionError, match="lossy does not restore"):
        chains.PeerSeries(lossy, walk, tmp_path / "out")
