"""The ablation of Inshrinkerator's delta coding."""

from __future__ import annotations

import numpy as np

from ckstore.codecs.integers import encode_integers
from ckstore.codecs.schemes.dynaquant import DynaQuantSettings, RankStatistics, Treatment, assign, treated
from tests.codecs.test_dynaquant import weights
from tools.fidelity.coded_bits import coded_bits, run_lengths


def test_runs_are_written_as_the_paper_does_and_can_be_read_back():
    rng = np.random.default_rng(9)
    for values in (np.zeros(0, int), np.zeros(5, int), rng.integers(0, 3, 500), np.repeat(rng.integers(0, 9, 50), 7)):
        written = run_lengths(values)
        read, count = [], 1
        for symbol in written.tolist():
            if symbol > 0:
                count = symbol
                assert count > 1
            else:
                read += [-symbol] * count
                count = 1
        assert read == values.tolist()


def late_training_pair(count: int = 400_000) -> tuple[np.ndarray, np.ndarray, int]:
    """Indices of two versions late in a training, and the number of levels.

    Weights decay by 2 % and move in proportion to themselves, so that crossing a threshold, and its direction,
    depend on the level: 8 % of the indices change.
    """
    before = weights(10, count)
    moves = np.random.default_rng(10).normal(size=count) * 0.05 * np.abs(before)
    after = (0.98 * before + moves).astype(np.float32)
    settings = DynaQuantSettings(16, 0.2, 0.005)
    ranks = RankStatistics()
    ranks.add(before, None)
    treatment = Treatment(ranks.split(settings, known=False), settings.levels, None)
    lattice, base, _ = treated(before, treatment)
    return assign(lattice, after, treatment)[0], base, lattice.levels


def test_the_ablation_comes_out_in_the_papers_order():
    indices, base, levels = late_training_pair()
    assert 0.05 < np.mean(indices != base) < 0.15
    ratios = [32 * indices.size / bits for bits in coded_bits(indices, base, levels)]
    assert ratios[0] < 32, "a Huffman code takes a bit an element"
    assert ratios[1] > 1.3 * ratios[0]
    assert ratios[2] > 1.05 * ratios[1]


def test_the_entropy_coder_with_levels_as_classes_needs_no_more_than_the_papers_coding():
    indices, base, levels = late_training_pair()
    delta = np.remainder(base.astype(np.int32) - indices, levels).astype(np.int32)
    assert 8 * len(encode_integers(delta, base)) < coded_bits(indices, base, levels).rearranged


def test_coded_bits_are_those_of_a_huffman_code():
    """Four symbols of 1, 1, 2 and 4: lengths 3, 3, 2, 1; then the table of 5 bits and a distance's gamma code each."""
    indices = np.array([0, 1, 2, 2, 3, 3, 3, 3], np.uint8)[::-1].copy()
    bits = coded_bits(indices, np.full(8, 3, np.uint8), 4)
    assert bits.huffman == 3 + 3 + 4 + 4 + 4 * (5 + 1)
    assert coded_bits(indices[:0], indices[:0], 4) == (0, 0, 0)
