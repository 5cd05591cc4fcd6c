"""Measures the bytes that ranks of a save hand to one another, as objects do not end where shards do.

usage: python -m tools.bench.handed_over

For the weights and moments of a decoder of 32 layers of width 4,096 in bfloat16 and float32, cut along the first axis
(FSDP) or the last one (half of a tensor-parallel model): 66 GB. No tensor is made. Parts are the objects there would be
if each rank stored its own stretches; those of a last axis are rows.
"""

from __future__ import annotations

from math import prod

import torch

from ckstore.formats.torch.live_state import Absent, describe_state_dict
from ckstore.writing.ranks import Outline, Piece, Shard

_WIDTH, _HIDDEN, _LAYERS, _WORDS = 4096, 11008, 32, 32000
_SHAPES = {
    "embed": (_WORDS, _WIDTH),
    "norm": (_WIDTH,),
    **{
        f"layers.{layer}.{name}": shape
        for layer in range(_LAYERS)
        for name, shape in {
            **dict.fromkeys(("q", "k", "v", "o"), (_WIDTH, _WIDTH)),
            **dict.fromkeys(("gate", "up"), (_HIDDEN, _WIDTH)),
            "down": (_WIDTH, _HIDDEN),
            **dict.fromkeys(("norm1", "norm2"), (_WIDTH,)),
        }.items()
    },
}


def main() -> None:
    """Print a line for each way of cutting and number of ranks."""
    print("cut      ranks  handed over  most written by a rank  objects   parts")
    for axis, name in ((0, "first"), (-1, "last")):
        for ranks in (2, 8, 64):
            print(f"{name:5} {ranks:8}  {'{:11.1%}  {:22.1%}  {:7,}  {:6,}'.format(*_measured(axis, ranks))}")


def _measured(axis: int, ranks: int) -> tuple[float, float, int, int]:
    """Return the share of the bytes that ranks send; the most a rank writes, by its share; numbers of objects."""
    state = {
        kind: {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in _SHAPES.items()}
        for kind, dtype in {"model": torch.bfloat16, "first": torch.float32, "second": torch.float32}.items()
    }
    described = describe_state_dict(state, outline=True)
    shapes = {id(tensor): tuple(tensor.shape) for tensors in state.values() for tensor in tensors.values()}
    shards = {
        number: _shards(shapes[memory.identity], axis, ranks)
        for number, memory in enumerate(described.memories)
        if isinstance(memory, Absent)
    }
    sent = total = objects = parts = 0
    written = [0] * ranks
    for rank, tasks in enumerate(Outline(described, shards, ranks, 0).tasks()):
        for task in tasks:
            if task.writer == rank:
                objects += 1
                parts += sum(_stretches(piece) for piece in task.pieces)
                written[rank] += sum(task.sizes)
                total += sum(task.sizes)
                sent += sum(piece.nbytes for piece in task.pieces if piece.shard.rank != rank)
    return sent / total, max(written) / (total / ranks), objects, parts


def _stretches(piece: Piece) -> int:
    """Return the number of stretches of the tensor in a piece."""
    length = prod(piece.shard.sizes[1:]) if piece.shard.sizes[1:] != piece.shard.shape[1:] else prod(piece.shard.sizes)
    return -(-piece.high // length) - piece.low // length


def _shards(shape: tuple[int, ...], axis: int, ranks: int) -> list[Shard]:
    """Return the shards of a tensor as torch cuts it."""
    axis %= len(shape)
    size = -(-shape[axis] // ranks)
    found = []
    for rank, first in enumerate(range(0, shape[axis], size)):
        sizes = tuple(min(size, shape[axis] - first) if place == axis else n for place, n in enumerate(shape))
        found.append(Shard(rank, 0, shape, tuple(first if place == axis else 0 for place in range(len(shape))), sizes))
    assert sum(prod(shard.sizes) for shard in found) == prod(shape)
    return found


if __name__ == "__main__":
    main()
