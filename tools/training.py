"""The training of each run and the contents of its checkpoints; `tools.runs` lists the runs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ckstore import GradientAccumulator
from tools import models

Report = Callable[[str], None]

#: Steps of the run that `slow` continues, at most as many as its own.
_BEFORE_SLOW = 100

#: First rows of the table of `embedding`, over the contexts of a step.
_TABLE = 35

#: Rows that `lora` adds to its adapters at a time.
_RANK = 8

#: Continuations of a text that `policy` compares, and their bytes.
_GROUP = 4
_SAMPLED = 8


@dataclass(frozen=True)
class TextSettings:
    """A run over text.

    Attributes
    ----------
    width, layers, heads, context
        Of the GPT.
    batch
        Sequences a step.
    steps, every
        Optimiser steps, and steps between two checkpoints.
    rate
        Highest learning rate: reached after a tenth of the steps, then down a cosine to a tenth of it.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    every: int
    rate: float = 1e-3

    def model(self, *, tied: bool = False) -> models.GPT:
        """Return a new GPT of these sizes."""
        return models.GPT(self.width, self.layers, self.heads, self.context, tied=tied)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        warm = max(1, self.steps // 10)
        if step <= warm:
            return self.rate * step / warm
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm))))


@dataclass(frozen=True)
class ImageSettings:
    """A run over images.

    Attributes
    ----------
    widths, blocks
        Of the CNN.
    epochs, batch
        A checkpoint follows every epoch.
    rate
        Learning rate at the start, down a cosine to zero.
    """

    widths: tuple[int, ...]
    blocks: int
    epochs: int = 20
    batch: int = 64
    rate: float = 0.05


def gpt(settings: TextSettings, out: Path, report: Report) -> None:
    """Train a GPT with AdamW; `step*.pt` hold `model`, `optimizer`, `step`, `loss`, `rng` and `config`."""
    _language_model(settings, out, report, tied=False, decay=None)


def ema(settings: TextSettings, out: Path, report: Report) -> None:
    """Train a GPT with tied embeddings; `step*.pt` also hold `ema`, an average of the weights that starts equal."""
    _language_model(settings, out, report, tied=True, decay=0.98)


def _language_model(settings: TextSettings, out: Path, report: Report, *, tied: bool, decay: float | None) -> None:
    text = torch.cat(models.sources())
    model = settings.model(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    average = {name: value.clone() for name, value in model.state_dict().items()} if decay is not None else None
    if average is not None:
        _save(out, 0, model, optimizer, settings, ema=average)
    for step in range(1, settings.steps + 1):
        loss = language_step(model, optimizer, text, settings, generator, settings.rate_at(step))
        if average is not None and decay is not None:
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 1 - decay)
        if step % settings.every == 0:
            extra = {} if average is None else {"ema": average}
            _save(out, step, model, optimizer, settings, loss=loss, rng=generator.get_state(), **extra)
            report(f"step {step}: loss {loss:.3f}")


def finetune(settings: TextSettings, source: Path, out: Path, report: Report) -> None:
    """Train `source`, a checkpoint of `gpt`, on English text; `step*.pt` begin with the unchanged model."""
    text = models.prose()
    model = settings.model()
    model.load_state_dict(torch.load(source, weights_only=True)["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(4)
    _save(out, 0, model, optimizer, settings, loss=0.0, rng=generator.get_state())
    for step in range(1, settings.steps + 1):
        loss = language_step(model, optimizer, text, settings, generator, settings.rate)
        if step % settings.every == 0:
            _save(out, step, model, optimizer, settings, loss=loss, rng=generator.get_state())
            report(f"step {step}: loss {loss:.3f}")


def slow(settings: TextSettings, out: Path, report: Report) -> None:
    """Fine-tune a larger GPT, trained for a few steps here, so slowly that many values do not change."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        steps = min(_BEFORE_SLOW, settings.steps)
        before = replace(settings, steps=steps, every=steps, rate=1e-3)
        gpt(before, Path(scratch), report)
        finetune(settings, max(Path(scratch).iterdir()), out, report)


def language_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    settings: TextSettings,
    generator: torch.Generator,
    rate: float,
) -> float:
    """Take one optimiser step on a batch of windows of `text`; return the loss before it."""
    tokens = models.windows(text, settings.batch, settings.context + 1, generator)
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return _step(optimizer, loss, rate)


def frozen(settings: TextSettings, source: Path, out: Path, report: Report) -> None:
    """Train a head that identifies a text's module on the frozen weights of `source`, a checkpoint of `gpt`."""
    texts = models.sources()
    backbone = settings.model()
    backbone.load_state_dict(torch.load(source, weights_only=True)["model"])
    model = models.Classifier(backbone, settings.width, len(texts))
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=settings.rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(2)
    for step in range(1, settings.steps + 1):
        classes = torch.randint(len(texts), (settings.batch,), generator=generator)
        tokens = torch.cat([models.windows(texts[c], 1, settings.context, generator) for c in classes.tolist()])
        loss = _step(optimizer, functional.cross_entropy(model(tokens), classes), settings.rate_at(step))
        if step % settings.every == 0:
            _save(out, step, model, optimizer, settings, loss=loss, rng=generator.get_state())
            report(f"step {step}: loss {loss:.3f}")


def bf16(checkpoints: list[Path], out: Path, report: Report) -> None:
    """Write the weights of `gpt`'s checkpoints as bfloat16 in safetensors, the inference format of mixed precision."""
    for path in checkpoints:
        checkpoint = torch.load(path, weights_only=True)
        weights = {name: value.to(torch.bfloat16) for name, value in checkpoint["model"].items()}
        step = checkpoint["step"]
        save_file(weights, out / f"step{step:05d}.safetensors", metadata={"format": "pt", "step": str(step)})
        report(f"step {step}: {sum(w.numel() for w in weights.values()):,} weights")


def mixed(checkpoints: list[Path], out: Path, report: Report) -> None:
    """Write `gpt`'s checkpoints as mixed precision saves them: a bfloat16 model, float32 masters in the optimiser."""
    for path in checkpoints:
        checkpoint = torch.load(path, weights_only=True)
        masters = checkpoint["model"]
        checkpoint["model"] = {name: value.to(torch.bfloat16) for name, value in masters.items()}
        checkpoint["optimizer"]["fp32_from_fp16"] = masters
        torch.save(checkpoint, out / path.name)
        report(f"step {checkpoint['step']}: {len(masters)} masters")


def compiled(checkpoints: list[Path], out: Path, report: Report) -> None:
    """Write `gpt`'s checkpoints as if the model was compiled halfway: later names begin with `_orig_mod.`."""
    for number, path in enumerate(checkpoints):
        checkpoint = torch.load(path, weights_only=True)
        if 2 * number >= len(checkpoints):
            checkpoint["model"] = {f"_orig_mod.{name}": value for name, value in checkpoint["model"].items()}
        torch.save(checkpoint, out / path.name)
        report(f"step {checkpoint['step']}: {next(iter(checkpoint['model']))}")


def lora(settings: TextSettings, source: Path, out: Path, report: Report) -> None:
    """Train adapters of rank 8 on the frozen weights of `source`, a checkpoint of `gpt`, and halfway new rows up to 16.

    `step*.pt` hold the adapters as `model`, and their moments.
    """
    text = models.prose()
    backbone = settings.model()
    backbone.load_state_dict(torch.load(source, weights_only=True)["model"])
    weights = {name: value.detach() for name, value in backbone.named_parameters()}
    generator = torch.Generator().manual_seed(7)
    adapters: dict[str, Tensor] = {}
    for step in range(settings.steps + 1):
        if step in (0, settings.steps // 2):
            for name, weight in weights.items():
                if weight.ndim == 2:
                    rows = 0.02 * torch.randn(_RANK, weight.shape[1], generator=generator)
                    for key, new in (f"{name}.lora_A", rows), (f"{name}.lora_B", torch.zeros(_RANK, len(weight))):
                        grown = torch.cat([adapters[key].detach(), new]) if key in adapters else new
                        adapters[key] = grown.requires_grad_()
            names = [key.removesuffix(".lora_A") for key in adapters if key.endswith(".lora_A")]
            optimizer = torch.optim.AdamW(adapters.values(), lr=settings.rate, weight_decay=0.0)
        tokens = models.windows(text, settings.batch, settings.context + 1, generator)
        merged = {name: weights[name] + adapters[f"{name}.lora_B"].T @ adapters[f"{name}.lora_A"] for name in names}
        logits = torch.func.functional_call(backbone, merged, (tokens[:, :-1],))
        loss = _step(optimizer, functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), settings.rate)
        if step % settings.every == 0:
            state = {"model": adapters, "optimizer": optimizer.state_dict(), "step": step, "config": asdict(settings)}
            torch.save(state, out / f"step{step:05d}.pt")
            report(f"step {step}: loss {loss:.3f}")


def policy(settings: TextSettings, source: Path, out: Path, report: Report) -> None:
    """Train `source`, a checkpoint of `gpt`, by reinforcement: to continue texts as they are.

    The policy has bfloat16 weights, copies of the float32 weights that Adam changes; `step*.safetensors` are the
    policies of all steps. A continuation's advantage is over the others of the same text.
    """
    text = torch.cat(models.sources())
    master = settings.model()
    master.load_state_dict(torch.load(source, weights_only=True)["model"])
    model = settings.model()
    optimizer = torch.optim.AdamW(master.parameters(), lr=settings.rate, betas=(0.9, 0.999), weight_decay=0.0)
    generator = torch.Generator().manual_seed(5)
    for step in range(settings.steps + 1):
        weights = {name: value.to(torch.bfloat16) for name, value in master.state_dict().items()}
        save_file(weights, out / f"step{step:05d}.safetensors", metadata={"format": "pt", "step": str(step)})
        model.load_state_dict(weights)
        truth = models.windows(text, settings.batch, settings.context, generator).repeat_interleave(_GROUP, 0)
        tokens = truth[:, :-_SAMPLED]
        with torch.no_grad():
            for _ in range(_SAMPLED):
                chances = model(tokens)[:, -1].softmax(1)
                tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
        rewards = (tokens == truth)[:, -_SAMPLED:].float().mean(1).view(-1, _GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        logits = model(tokens[:, :-1])[:, -_SAMPLED:]
        losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, -_SAMPLED:], reduction="none").mean(1)
        model.zero_grad()
        torch.autograd.backward((losses * advantages.flatten()).mean())
        for own, copied in zip(master.parameters(), model.parameters(), strict=True):
            own.grad = copied.grad
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        report(f"step {step}: reward {rewards.mean().item():.3f}")


def embedding(settings: TextSettings, out: Path, report: Report) -> None:
    """Train a growing table of hashed contexts to predict the next byte.

    About 2 % of its rows change at a step of Adagrad, and 0.5 % more are there at the next: contexts with a larger hash
    come later.
    """
    text = torch.cat(models.sources()).long()
    windows = text.unfold(0, settings.context, 1)
    rows = [round(_TABLE * settings.batch * 1.005**step) for step in range(settings.steps + 1)]
    hashed = (windows[:, :-1] * torch.tensor([3, 59, 1009, 17_393])).sum(1) * 40_503 % rows[-1]
    hashed, order = hashed.sort(stable=True)
    table = nn.Embedding(rows[-1], settings.width, sparse=True)
    model = nn.ModuleDict({"table": table, "head": nn.Linear(settings.width, 256)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=settings.rate)
    generator = torch.Generator().manual_seed(6)
    for step, present in enumerate(rows):
        states = optimizer.state_dict()
        states["state"] = {n: {**item, "sum": item["sum"][:present].clone()} for n, item in states["state"].items()}
        weights = model.state_dict() | {"table.weight": table.weight.detach()[:present].clone()}
        state = {"model": weights, "optimizer": states, "step": step, "config": asdict(settings)}
        torch.save(state, out / f"step{step:05d}.pt")
        chosen = torch.randint(int(torch.searchsorted(hashed, present)), (settings.batch,), generator=generator)
        loss = functional.cross_entropy(model["head"](table(hashed[chosen])), windows[order[chosen], -1])
        optimizer.zero_grad()
        with torch.sparse.check_sparse_tensor_invariants(enable=True):  # type: ignore[no-untyped-call]
            torch.autograd.backward(loss)
            optimizer.step()
        report(f"step {step}: {present:,} rows, loss {loss.item():.3f}")


def cnn(settings: ImageSettings, out: Path, report: Report) -> None:
    """Train a CNN with SGD momentum; `epoch*.pt` hold `model`, `optimizer`, `epoch` and `accuracy` on 397 digits.

    Files of the same names in `gradients` hold the mean gradients before each, as gathered by `GradientAccumulator`.
    """
    images, classes = models.digits()
    train = len(images) - models.HELD_OUT_DIGITS
    model = models.CNN(settings.widths, settings.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(3)
    batches = train // settings.batch
    accumulator = GradientAccumulator({"model": model}, every=batches)
    (out / "gradients").mkdir()
    for epoch in range(1, settings.epochs + 1):
        model.train()
        order = torch.randperm(train, generator=generator)
        for index in range(batches):
            chosen = order[index * settings.batch : (index + 1) * settings.batch]
            progress = (epoch - 1 + index / batches) / settings.epochs
            loss = functional.cross_entropy(model(images[chosen]), classes[chosen])
            _step(optimizer, loss, settings.rate * 0.5 * (1 + math.cos(math.pi * progress)))
            accumulator.after_backward((epoch - 1) * batches + index + 1)
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[train:]).argmax(1) == classes[train:]).double().mean().item()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "accuracy": accuracy}
        torch.save(state, out / f"epoch{epoch:02d}.pt")
        torch.save(accumulator.gradients(), out / "gradients" / f"epoch{epoch:02d}.pt")
        report(f"epoch {epoch}: accuracy {accuracy:.3f}")


def _step(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    return loss.item()


def _save(
    out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, settings: TextSettings, **extra: Any
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "config": asdict(settings)}
    torch.save(state | extra, out / f"step{step:05d}.pt")
