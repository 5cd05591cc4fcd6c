"""Partial checkpoints, the baselines of LC-Checkpoint's evaluation of rework (Chen et al., ICML 2020, section 5).

Each checkpoint writes a part of the parameters into a running checkpoint, whose values then have mixed ages. SCAR (Qiao
et al., ICML 2019) writes the blocks that changed most since each was last written. TOPN writes the elements that
changed most, with their places. Moments are written with their parameters.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from tools.fidelity.states import Parameter, State, parameters

#: Bytes of an element's place, for TOPN.
_PLACE = 4


@dataclass
class RunningCheckpoint:
    """A checkpoint that is updated in parts.

    Attributes
    ----------
    state
        The state of a restore. Begins as a whole checkpoint, which it takes over.
    """

    state: State

    def scar(self, state: State, share: float) -> int:
        """Write the blocks (rows) with the largest mean squared change, a share of all elements; return the bytes."""
        pairs = self._pairs(state)
        weights = [new.weight for _, new in pairs]
        changes = [_rows(new.weight - old.weight).square().mean(1) for old, new in pairs]
        lengths = torch.cat([torch.full((len(rows),), rows.shape[1]) for rows in map(_rows, weights)])
        order = torch.cat(changes).argsort(descending=True, stable=True)
        chosen = order[lengths[order].cumsum(0) <= share * lengths.sum()]
        flags = torch.zeros(len(order), dtype=torch.bool)
        flags[chosen] = True
        written = 0
        for (old, new), rows in zip(pairs, torch.split(flags, [len(c) for c in changes]), strict=True):
            for into, values in _tensors(old, new):
                _rows(into)[rows] = _rows(values)[rows]
                written += values.element_size() * int(rows.sum()) * _rows(values).shape[1]
        self._take_rest(state)
        return written

    def topn(self, state: State, share: float) -> int:
        """Write the elements with the largest changes, a share of all elements; return the bytes."""
        pairs = self._pairs(state)
        changes = torch.cat([(new.weight - old.weight).abs().flatten() for old, new in pairs])
        flags = torch.zeros(len(changes), dtype=torch.bool)
        flags[changes.topk(int(share * len(changes))).indices] = True
        written = 0
        for (old, new), mask in zip(pairs, torch.split(flags, [new.weight.numel() for _, new in pairs]), strict=True):
            written += _PLACE * int(mask.sum())
            for into, values in _tensors(old, new):
                into.view(-1)[mask] = values.reshape(-1)[mask]
                written += values.element_size() * int(mask.sum())
        self._take_rest(state)
        return written

    def _pairs(self, state: State) -> list[tuple[Parameter, Parameter]]:
        return list(zip(parameters(self.state), parameters(state), strict=True))

    def _take_rest(self, state: State) -> None:
        """Write everything that is neither weight nor moment in full; it is small."""
        kept = parameters(self.state)
        self.state = copy.copy(state)
        self.state["model"] = state["model"] | {parameter.name: parameter.weight for parameter in kept}
        entries = {
            index: entry | kept[index].moments for index, entry in state.get("optimizer", {}).get("state", {}).items()
        }
        self.state["optimizer"] = state["optimizer"] | {"state": entries}


def share_of(nbytes: float, state: State, *, places: bool) -> float:
    """Return the share of the elements in a partial checkpoint of `nbytes`; with `places`, in TOPN's form."""
    found = parameters(state)
    elements = sum(parameter.weight.numel() for parameter in found)
    whole = sum(value.nbytes for parameter in found for value in (parameter.weight, *parameter.moments.values()))
    return min(1.0, nbytes / (whole + (_PLACE * elements if places else 0)))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of (blocks, elements): the rows of a matrix; a vector is one block."""
    return tensor.view(len(tensor), -1) if tensor.ndim > 1 else tensor.view(1, -1)


def _tensors(old: Parameter, new: Parameter) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(old.weight, new.weight), *((old.moments[name], new.moments[name]) for name in new.moments)]
