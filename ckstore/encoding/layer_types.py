"""The layer type of a weight, by its name and shape: layers of one type are pruned alike."""

from __future__ import annotations

import re

from ckstore.formats.layout import Path

_EMBEDDING = re.compile(r"embed|emb\b|\bw[tp]e\b")
_ATTENTION = re.compile(r"attn|attention|qkv")


def layer_type(path: Path, axes: int) -> str:
    """Return the type of the layer of a weight: `convolution`, `embedding`, `attention` or `linear`.

    Four axes mean a convolution under any name, such as the one that embeds patches.
    """
    name = "/".join(segment for segment in path if isinstance(segment, str)).lower()
    if axes > 3:
        return "convolution"
    if _EMBEDDING.search(name):
        return "embedding"
    if _ATTENTION.search(name):
        return "attention"
    return "convolution" if axes == 3 else "linear"
