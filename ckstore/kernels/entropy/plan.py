"""The encoder's plan: for every group its kind, plane, layouts and code lengths, by measured cost."""

from __future__ import annotations

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.directory import (
    ADAPTIVE,
    BITS,
    COUNT,
    DENSE,
    KIND,
    PAIRS,
    SPARSE,
    SYMBOL_COUNT,
    WIDEST,
)
from ckstore.kernels.entropy.plan_dense import choose_planes, plan_dense
from ckstore.kernels.entropy.plan_pairs import plan_pairs
from ckstore.kernels.entropy.words import Array, int64

CHOOSE_PLANES, PLAN_DENSE, PLAN_PAIRS = range(3)
"""Steps of the plan."""


@kernel
def plan_groups(
    step: int,
    groups: Array,
    number: int,
    numbers: Array,
    wide: Array,
    few_values: Array,
    runs: Array,
    values: Array,
    joints: Array,
    bins: Array,
    rows: Array,
    lengths: Array,
    costs: Array,
) -> int:
    """Carry out one step of the plan of the first `number` groups; what the steps share is compiled once.

    `CHOOSE_PLANES` follows `survey_groups` and fills PLANE and FORM; it returns the bytes of all planes. `PLAN_DENSE`
    follows `take_numbers`, and returns how many groups are PAIRED: those that have pairs anyway, and those that might
    do better so. If there are any, `PLAN_PAIRS` follows `extract_pairs`.

    Parameters
    ----------
    groups, rows, lengths
        As for `code_directory`.
    numbers : uint16
        Direct numbers, where their elements stand; the plan may join them.
    wide : uint64
        Samples of groups that may have planes; then wide numbers.
    few_values, runs, values : uint64
        Pairs of adaptive groups, and of others.
    joints : uint16
        Filled with the joint numbers of pairs.
    bins : int64, 2^TABLE_BITS
        Room for histograms.
    costs : float64, (64, 2)
        Filled with estimated bits and entropy in bits.
    """
    if step == CHOOSE_PLANES:
        return choose_planes(groups, number, wide, bins)
    if step == PLAN_DENSE:
        return plan_dense(groups, number, numbers, wide, bins, rows, lengths, costs)
    plan_pairs(groups, number, few_values, runs, values, joints, bins, rows, lengths, costs)
    return int64(0)


@kernel
def measure(groups: Array, number: int) -> tuple[int, int, int]:
    """(bytes that one stream may need, bits of all streams, bytes that the directory may need)."""
    room = int64(0)
    bits = int64(0)
    # A decision costs at most 10.4 bits: 135 of them in a pair, 15 in a code length, below 6,000 in a group's rest.
    directory = 8192 * int64(number)
    for index in range(number):
        group = groups[index]
        kind = group[KIND]
        if kind == ADAPTIVE:
            directory += 192 * group[PAIRS]
        elif kind in (DENSE, SPARSE):
            items = group[COUNT] if kind == DENSE else group[PAIRS]
            room += (items // 4 + 1) * group[WIDEST]
            bits += group[BITS]
            directory += 24 * group[SYMBOL_COUNT]
    return room // 8 + 32, bits, directory
