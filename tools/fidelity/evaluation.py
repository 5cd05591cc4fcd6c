"""The effects of restored states on training: loss at once, and loss after resuming with the same batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools import models
from tools.fidelity.states import State, digest
from tools.training import ImageSettings, TextSettings, language_step

T = TypeVar("T")

#: Windows that are evaluated at once.
_BATCH = 32

#: The generator of a seed of batches begins here; that of the runs' own batches begins elsewhere.
_FIRST_SEED = 1000


class _Judge:
    """Judges states; of the same state and question only once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], object] = {}

    def once(self, compute: Callable[[], T], *key: object) -> T:
        """Return the figure of a key, which names everything that it depends on."""
        if key not in self._known:
            self._known[key] = compute()
        return cast("T", self._known[key])


class Language(_Judge):
    """Judges the states of a run over text.

    Parameters
    ----------
    settings
        Of the run.
    text
        The text of resumed training, uint8.
    held_out
        Unseen windows, int64 of shape (windows, context + 1).
    """

    def __init__(self, settings: TextSettings, text: Tensor, held_out: Tensor) -> None:
        super().__init__()
        self.settings = settings
        self.text = text
        self.held_out = held_out

    def loss(self, weights: Mapping[str, Tensor]) -> float:
        """Return the mean cross entropy of the held-out windows, in nats per byte."""
        return self.once(lambda: mean_loss(self._model(weights), self.held_out), "loss", digest(weights))

    def resumed(self, state: State, step: int, *, seed: int, steps: int) -> float:
        """Return the loss after `steps` more steps with the batches of a seed; the state has done `step` steps."""

        def compute() -> float:
            batches = torch.Generator().manual_seed(_FIRST_SEED + seed)
            model, _, going = self.go_on(state, step, batches)
            for _ in range(steps):
                going()
            return mean_loss(model, self.held_out)

        return self.once(compute, "resumed", _trained(state), step, seed, steps)

    def go_on(
        self, state: State, step: int, batches: torch.Generator
    ) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
        """Return model and optimiser of a state, and a function that trains one step and returns the loss before it."""
        model = self._model(state["model"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.settings.rate)
        # An optimiser modifies the tensors that it is given.
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        done = step

        def going() -> float:
            nonlocal done
            done += 1
            rate = self.settings.rate_at(min(done, self.settings.steps))
            return language_step(model, optimizer, self.text, self.settings, batches, rate)

        return model, optimizer, going

    def _model(self, weights: Mapping[str, Tensor]) -> models.GPT:
        with torch.random.fork_rng(devices=[]):
            model = self.settings.model()
        model.load_state_dict(weights)
        return model


def mean_loss(model: nn.Module, windows: Tensor) -> float:
    """Return the mean cross entropy of the next byte over windows of shape (windows, context + 1), in nats per byte.

    Infinite for a broken model, whose output is not a number.
    """
    total = 0.0
    with torch.no_grad():
        for tokens in torch.split(windows, _BATCH):
            logits = model(tokens[:, :-1]).flatten(0, 1)
            total += functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").item()
    return total / windows[:, 1:].numel() if math.isfinite(total) else math.inf


def held_out_sources(settings: TextSettings, count: int) -> Tensor:
    """Return `count` windows of the standard library's modules of 30,000 to 40,000 bytes, unseen by all runs."""
    text = torch.cat(models.sources(30_000, 40_000))
    return models.windows(text, count, settings.context + 1, torch.Generator().manual_seed(_FIRST_SEED - 1))


def held_out_prose(settings: TextSettings, batches: Tensor, count: int) -> Tensor:
    """Return up to `count` windows of `models.prose()`, evenly spaced, without any byte that a fine-tune saw.

    Parameters
    ----------
    settings
        Of the fine-tune.
    batches
        State of its generator before its first step: its batches are drawn again to find the bytes that it saw.
    count
        Number of windows.
    """
    text = models.prose()
    length = settings.context + 1
    generator = torch.Generator()
    generator.set_state(batches)
    seen = torch.zeros(len(text), dtype=torch.bool)
    places = torch.arange(len(text))
    for _ in range(settings.steps):
        seen[models.windows(places, settings.batch, length, generator)] = True
    whole = len(text) // length
    free = torch.nonzero(~seen[: whole * length].view(whole, length).any(1)).flatten()
    chosen = free[torch.linspace(0, len(free) - 1, min(count, len(free))).long()]
    return text[chosen[:, None] * length + torch.arange(length)].long()


class Digits(_Judge):
    """Judges the states of a run over digits by held-out digits.

    Parameters
    ----------
    settings
        Of the run.
    """

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__()
        self.settings = settings
        images, classes = models.digits()
        self.images, self.classes = images[-models.HELD_OUT_DIGITS :], classes[-models.HELD_OUT_DIGITS :]

    def accuracy(self, weights: Mapping[str, Tensor]) -> float:
        """Return the share of right answers."""

        def compute() -> float:
            with torch.random.fork_rng(devices=[]):
                model = models.CNN(self.settings.widths, self.settings.blocks)
            model.load_state_dict(weights)
            model.eval()
            with torch.no_grad():
                logits = model(self.images)
            return float((logits.argmax(1) == self.classes).double().mean())

        return self.once(compute, digest(weights))


def rework(rises: Mapping[int, float], losses: Sequence[float], steps: Sequence[int]) -> float | None:
    """Return the steps of training that rises of the loss are worth, on average; None where the loss does not fall.

    Parameters
    ----------
    rises
        In nats per byte, by number of the checkpoint. At each the loss falls as it does between its neighbours.
    losses, steps
        Of all checkpoints of the run.
    """
    fall = 0.0
    for index in rises:
        before, after = max(0, index - 1), min(len(losses) - 1, index + 1)
        fall += (losses[before] - losses[after]) / (steps[after] - steps[before])
    return sum(rises.values()) / fall if fall > 0 else None


def evenly(count: int, points: int) -> list[int]:
    """Return up to `points` evenly spaced numbers below `count`; the last one is `count` - 1."""
    return sorted({round((count - 1) * (point + 1) / points) for point in range(min(points, count))})


def _trained(state: State) -> str:
    """Return a digest of the trained part: weights and optimiser."""
    return digest({"model": state["model"], "optimizer": state["optimizer"]})
