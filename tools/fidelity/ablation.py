"""DynaQuant's ablation: what each step of its coding saves, late in the GPT's training."""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.codecs.schemes.dynaquant import DynaQuantSettings, coded_bits, dynaquant_quantise
from tools.fidelity.settings import Bench
from tools.fidelity.states import load

#: Smaller tensors are not quantised.
_LEAST = 1 << 16


@dataclass(frozen=True)
class Ablation:
    """Bits an element of the last version's weights against the version before.

    Attributes
    ----------
    huffman
        Huffman codes of the differences of levels.
    run_lengths
        Huffman codes of run lengths.
    rearranged
        The same, with the elements rearranged by their level in the version before.
    """

    huffman: float
    run_lengths: float
    rearranged: float


def measure(bench: Bench) -> Ablation:
    """Quantise the weights of the last two versions with the default settings, and code the differences three ways."""
    before, last = (load(path)["model"] for path in bench.run("gpt")[-2:])
    settings = DynaQuantSettings()
    totals = [0, 0, 0]
    elements = 0
    for name, weight in last.items():
        if weight.numel() < _LEAST:
            continue
        quantised = [dynaquant_quantise(state[name].numpy().reshape(-1), settings) for state in (before, last)]
        levels = max(lattice.levels for lattice, _, _ in quantised)
        bits = coded_bits(quantised[1][1], quantised[0][1], levels)
        totals = [total + more for total, more in zip(totals, bits, strict=True)]
        elements += weight.numel()
    return Ablation(*(total / elements for total in totals))
