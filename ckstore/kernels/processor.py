"""What the processor has that kernels are compiled for, beyond what every one has."""

from __future__ import annotations

from numba.core.registry import cpu_target


def has(*features: str) -> bool:
    """Whether kernels may contain instructions of all of these features, by LLVM's names."""
    _, _, known = cpu_target.target_context.codegen().magic_tuple()
    return {f"+{feature}" for feature in features} <= set(known.split(","))
