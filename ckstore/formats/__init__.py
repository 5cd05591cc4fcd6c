"""File formats: parses every file into skeleton, extents and tensors, and writes it back."""

from __future__ import annotations

from ckstore.formats.detect import holds_tensors, is_pointer, parse
from ckstore.formats.directory import Entry, has_checkpoint, require_checkpoint, scan
from ckstore.formats.facts import step_of
from ckstore.formats.layout import (
    Checked,
    Extent,
    FileLayout,
    Path,
    Segment,
    Source,
    Tensor,
    TensorRef,
    Unknown,
)
from ckstore.formats.paths import match_paths, path_to_text, text_to_path
from ckstore.formats.skeleton import Piece, fill_crcs, pieces, split_skeleton, stored_crcs
from ckstore.formats.sources import BytesSource, CompositeSource, FileSource
from ckstore.formats.trees import plain_tree, select_tensors, tensor_numbers

__all__ = [
    "BytesSource",
    "Checked",
    "CompositeSource",
    "Entry",
    "Extent",
    "FileLayout",
    "FileSource",
    "Path",
    "Piece",
    "Segment",
    "Source",
    "Tensor",
    "TensorRef",
    "Unknown",
    "fill_crcs",
    "has_checkpoint",
    "holds_tensors",
    "is_pointer",
    "match_paths",
    "parse",
    "path_to_text",
    "pieces",
    "plain_tree",
    "require_checkpoint",
    "scan",
    "select_tensors",
    "split_skeleton",
    "step_of",
    "stored_crcs",
    "tensor_numbers",
    "text_to_path",
]
