"""Puts something else in the place of the tensors of a layout's tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckstore.formats.layout import TensorRef, Unknown


def replace_tensors(tree: Any, replacement: Callable[[int], Any]) -> Any:
    """The tree with ``replacement(n)`` in place of tensor n; a container that stands at several places stays one."""
    done: dict[int, Any] = {}

    def visit(node: Any) -> Any:
        if isinstance(node, TensorRef):
            return replacement(node.index)
        if not isinstance(node, dict | list | tuple | Unknown):
            return node
        if id(node) not in done:
            done[id(node)] = convert(node)
        return done[id(node)]

    def convert(node: dict[Any, Any] | list[Any] | tuple[Any, ...] | Unknown) -> Any:
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if isinstance(node, list):
            return [visit(item) for item in node]
        if isinstance(node, tuple):
            return tuple(visit(item) for item in node)
        return Unknown(node.name, visit(node.args), visit(node.state), visit(node.items))

    return visit(tree)
