"""Types of layers by the names that libraries give to weights."""

from __future__ import annotations

import pytest

from ckstore.encoding.estimator import layer_type


@pytest.mark.parametrize(
    ("path", "axes", "expected"),
    [
        (("model", "h.0.attn.weight"), 2, "attention"),
        (("model", "layers", 3, "self_attn.q_proj.weight"), 2, "attention"),
        (("bert.encoder.layer.0.attention.self.query.weight",), 2, "attention"),
        (("blocks.0.qkv.weight",), 2, "attention"),
        (("model", "wte.weight"), 2, "embedding"),
        (("model", "wpe.weight"), 2, "embedding"),
        (("model.embed_tokens.weight",), 2, "embedding"),
        (("embeddings.word_embeddings.weight",), 2, "embedding"),
        (("model", "emb.weight"), 2, "embedding"),
        (("pos_embed",), 3, "embedding"),
        (("patch_embed.proj.weight",), 4, "convolution"),
        (("layer1.0.conv1.weight",), 4, "convolution"),
        (("features.0.weight",), 3, "convolution"),
        (("model", "h.0.up.weight"), 2, "linear"),
        (("model", "lm_head.weight"), 2, "linear"),
        (("assemble.weight",), 2, "linear"),
        ((0, 1), 1, "linear"),
    ],
)
def test_layer_types(path: tuple[str | int, ...], axes: int, expected: str) -> None:
    assert layer_type(path, axes) == expected
