"""The models of the trained runs and their data: a byte-level GPT on Python's own sources, a CNN on digits."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """One pre-norm transformer block.

    Parameters
    ----------
    width
        Of the residual stream.
    heads
        Attention heads; divides `width`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, context, width)."""
        batch, context, width = x.shape
        q, k, v = self.attn(self.norm1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, context, width))
        change: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + change


class GPT(nn.Module):
    """A decoder-only transformer over bytes.

    Parameters
    ----------
    width, layers, heads, context
        The usual sizes; `context` in bytes.
    tied
        Whether the output layer shares the embedding's weights.
    """

    def __init__(self, width: int, layers: int, heads: int, context: int, *, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(256, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.lm_head.weight = self.wte.weight

    def features(self, tokens: Tensor) -> Tensor:
        """Return final activations, (batch, context, width), of bytes (batch, context)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next byte, (batch, context, 256)."""
        logits: Tensor = self.lm_head(self.features(tokens))
        return logits


class Classifier(nn.Module):
    """A frozen GPT under a small trainable head.

    Parameters
    ----------
    backbone
        The trained model.
    width
        Of the backbone.
    classes
        Number of classes.
    """

    def __init__(self, backbone: GPT, width: int, classes: int) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the classes, (batch, classes), from the mean over the context."""
        with torch.no_grad():
            pooled = self.backbone.features(tokens).mean(1)
        logits: Tensor = self.head(pooled)
        return logits


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm around a shortcut.

    Parameters
    ----------
    before, after
        Channels.
    stride
        Of the first convolution and the shortcut.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (batch, channels, height, width)."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class CNN(nn.Module):
    """A residual network for 8 x 8 images of ten classes.

    Parameters
    ----------
    widths
        Channels of each stage; every stage but the first halves the image.
    blocks
        Residual blocks a stage.
    """

    def __init__(self, widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, 1, 1, bias=False)
        layers = []
        before = widths[0]
        for stage, after in enumerate(widths):
            for block in range(blocks):
                layers.append(Residual(before, after, 2 if stage > 0 and block == 0 else 1))
                before = after
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (batch, 10), of images (batch, 1, 8, 8)."""
        logits: Tensor = self.fc(self.layers(self.stem(x)).mean((2, 3)))
        return logits


def sources(least: int = 40_000, below: float = math.inf) -> list[Tensor]:
    """Return the modules of the standard library with sizes from `least` to before `below`, by name, each uint8."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_bytes() for path in paths]
    return [torch.from_numpy(np.frombuffer(text, np.uint8).copy()) for text in texts if least <= len(text) < below]


def prose() -> Tensor:
    """Return the English text of Python's built-in help, which is not in `sources`, as a uint8 tensor."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    return torch.from_numpy(np.frombuffer(path.read_bytes(), np.uint8).copy())


def windows(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `batch` stretches of `length` bytes at random places of `text`, as int64 of shape (batch, length)."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


#: The last ones of `digits`, which no run is trained on.
HELD_OUT_DIGITS = 397


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 handwritten digits: images (n, 1, 8, 8) in 0 to 1 and their classes (n,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
