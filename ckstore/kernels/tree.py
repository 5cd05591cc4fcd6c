"""Kernels of the tree that BLAKE3 makes of bytes: `tree.c`. A node's value is 8 words.

The leaves are chunks of 1,024 bytes.
"""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_chunk_values = function("chunk_values", "pip")
_parent_values = function("parent_values", "pp")
_largest_trees = function("largest_trees", "pipp")
_root_value = function("root_value", "pipp")

#: Bytes of a leaf.
LEAF = 1024


def chunk_values(data: Array, first: int, out: Array) -> None:
    """Fill `out`, uint32 (n, 8), with the values of whole leaves, uint8 (n * 1024), from number `first` on."""
    check(_chunk_values(id(data), first, id(out)))


def parent_values(children: Array, out: Array) -> None:
    """Fill `out`, uint32 (n, 8), with the values of the nodes above pairs of children, uint32 (2n, 8)."""
    check(_parent_values(id(children), id(out)))


def largest_trees(values: Array, first: int, nodes: Array, levels: Array) -> int:
    """Find the largest trees, at places of their size, above leaves from number `first` on, in order.

    Parameters
    ----------
    values : uint32, (n, 8)
        The leaves' values, which are overwritten.
    nodes : uint32, (at least 128, 8)
        Filled with the values of the roots.
    levels : uint8, (as many,)
        Filled with the binary logarithms of their numbers of leaves.

    Returns the number of trees.
    """
    return check(_largest_trees(id(values), first, id(nodes), id(levels)))


def root_value(data: Array, number: int, above: Array, out: Array) -> None:
    """Fill `out`, uint32 (8), with the digest of bytes.

    Parameters
    ----------
    data : uint8, (at most 1024)
        The last leaf.
    number
        Its number.
    above : uint32, (n, 8)
        The values of the largest whole trees before it, in order.
    """
    check(_root_value(id(data), number, id(above), id(out)))
