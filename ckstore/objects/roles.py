"""The roles of tensors by their paths: optimiser states by their place and name. Values have the last word."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ckstore.formats.layout import Path, Segment

#: Names of states that no layer has, of any optimiser: roles wherever they are.
_ANYWHERE = {
    "exp_avg": "first",
    "exp_avg_sq": "second",
    "max_exp_avg_sq": "second",
    "exp_avg_var": "second",  # of AdaBelief
    "max_exp_avg_var": "second",
    "exp_avg_diff": "first",  # of Adan
    "exp_hessian_diag_sq": "second",  # of AdaHessian
    "exp_inf": "second",  # of Adamax
    "momentum_buffer": "first",
    "square_avg": "second",
    "acc_delta": "second",  # of Adadelta
    "sum_of_squares": "second",  # of Adagrad in optax
}

#: Names that are states only in an optimiser's tree. An `other` state stays exact: rounding breaks factors, bases,
#: curvature pairs, centred variances and scales, or saves next to nothing.
_IN_STATES = {
    **dict.fromkeys(("variance", "hessian", "step_size", "step_sizes", "nu", "nu_max", "velocity", "state2"), "second"),
    **dict.fromkeys(("e_g", "e_x", "second_moment", "second_momentum", "accumulator", "vmean", "u_product"), "second"),
    **dict.fromkeys(("accumulated_gradients", "accumulated_squares", "velocity_hat"), "second"),
    **dict.fromkeys(("mu", "trace", "momentum", "momentums", "state1", "first_moment", "first_momentum"), "first"),
    **dict.fromkeys(("row_var", "col_var", "v_row", "v_col", "exp_avg_sq_row", "exp_avg_sq_col"), "other"),
    **dict.fromkeys(("grad_avg", "prev_grad", "prev_grads", "acc_grads", "preconditioner", "preconditioners"), "other"),
    **dict.fromkeys(("factor_matrices", "inv_factor_matrices", "old_dirs", "old_stps", "prev_flat_grad"), "other"),
    **dict.fromkeys(("h_diag", "absmax", "absmax1", "absmax2", "qmap", "qmap1", "qmap2"), "other"),
}

#: Names that layers have as well: the last resort.
_SHORT = {
    "m": "first",
    "v": "second",
    "sum": "second",
    **dict.fromkeys(("prev", "gg", "q", "d", "t", "al", "ro", "scale", "codes", "rms", "count", "step", "lr"), "other"),
    "z": "weight",  # of schedule-free optimisers
    "ax": "weight",  # of ASGD
}

#: Names of trees of optimiser states: whole segments, and words between dots, which may be names of layers.
_STATES = re.compile(
    r"(?:\w+_)?(?:opt|optim|optimi[sz]ers?)(?:_?states?)?(?:_dict)?(?:_\w{1,8}|\d+)?|inner_state|slots|slot_variables"
)
_STATE_WORDS = re.compile(r"(?:\w+_)?(?:opt_states?|optim|optimi[sz]ers?)(?:_?states?)?(?:_dict)?(?:_\d+|\d+)?")

#: In every path that has a name from `_ANYWHERE`, or that of a tree.
_HINTS = re.compile("|".join(("opt", "state", "slot", *_ANYWHERE)))

#: Names in layers that no optimiser of torch gives to its states.
_LAYERS = {"weight", "bias"}

#: Scalars next to the tensors in a tree of optimiser states.
_COUNTERS = {"step", "count", "iteration", "iterations"}

#: The maximal number of paths whose roles are cached: versions of a run have the same ones.
_PATHS = 1 << 14


#: States of every Adam in torch: its second moments bound no variance of its first ones.
ADAM = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


class State(NamedTuple):
    """An optimiser's state by its path.

    Attributes
    ----------
    role
        `first`, `second`, `weight` (a copy of weights), `other` (must stay exact), or `state` if its name is unknown.
    name
        The word that names it; empty if unknown.
    parameter
        The rest of the path, which states of one parameter share.
    """

    role: str
    name: str
    parameter: tuple[Segment, ...]


def role_of(path: Path) -> str:
    """Return the role of the optimiser's state at a path; empty if it is not one.

    Examples
    --------
    >>> role_of(("optimizer", "state", 0, "exp_avg_sq")), role_of(("opt_state", 0, "nu", "dense", "kernel"))
    ('second', 'second')
    >>> role_of(("optimizer", "vars", 3)), role_of(("params", "mu"))
    ('state', '')
    """
    state = state_of(path)
    return "" if state is None else state.role


def may_be_states(texts: Iterable[str]) -> bool:
    """Return whether any of many paths, as text, may be that of a state outside of known trees."""
    return _HINTS.search("\n".join(texts).lower()) is not None


@lru_cache(_PATHS)
def state_of(path: Path, tree: int = -1) -> State | None:
    """Return the optimiser's state at a path, None for other tensors.

    `tree` is the number of segments that lead to a known tree of states; -1 if none is known.
    """
    if path and isinstance(name := path[-1], str) and (role := _ANYWHERE.get(name)):
        return State(role, name, path[:-1])
    if tree < 0 and not _HINTS.search("/".join(map(str, path)).lower()):
        return None
    words = [(place, word) for place, segment in enumerate(path) for word in _words(segment)]
    if not words:
        return None
    start = _start(path) if tree < 0 else tree
    last = len(words) - 1
    if role := _ANYWHERE.get(words[last][1]):
        return _state(path, words, last, role)
    if start is None and words[last][1] == "sum" and "state" in path:
        return _state(path, words, last, "second")
    if start is None:
        return None
    below = [number for number, (place, _) in enumerate(words) if place >= start]
    if any(word == "state" for _, word in words):
        below = [last, *below]  # As in torch, after the parameter; optax has names before it, which may have any name.
    for names in (_ANYWHERE, _IN_STATES, _SHORT):
        for number in below:
            if role := names.get(words[number][1]):
                return _state(path, words, number, role)
    is_of_torch = tree < 0 and isinstance(path[start], int)  # Or a list of models.
    return None if is_of_torch and words[last][1] in _LAYERS else State("state", "", path)


def trees_of(paths: Iterable[tuple[Path, int]]) -> set[Path]:
    """Return the paths of trees with a counter next to two tensors of one size; paths are given with sizes."""
    listed = list(paths)
    found = {path[:-1] for path, count in listed if count == 1 and len(path) > 1 and path[-1] in _COUNTERS}
    if not found:
        return found
    # Names with dots are those of layers, which may count as well.
    found -= {path[:-1] for path, _ in listed if path and isinstance(path[-1], str) and "." in path[-1]}
    sizes: dict[Path, list[int]] = {tree: [] for tree in found}
    for path, count in listed:
        for length in range(1, len(path)):
            if count > 1 and path[:length] in found:
                sizes[path[:length]].append(count)
    return {tree for tree, counts in sizes.items() if len(set(counts)) < len(counts)}


def tree_length(path: Path, trees: Collection[Path]) -> int:
    """Return the number of segments that lead to the tree of states of a path; -1 outside of `trees`."""
    return next((length for length in range(1, len(path)) if path[:length] in trees), -1) if trees else -1


def _words(segment: Segment) -> list[str]:
    if not isinstance(segment, str):
        return []
    lower = segment.lower()
    return [lower] if "." not in lower and "/" not in lower else [word for word in re.split("[./]", lower) if word]


def _start(path: Path) -> int | None:
    """Return the place in a path after which its segments belong to an optimiser; None outside of optimisers."""
    for place, segment in enumerate(path[:-1]):
        if isinstance(segment, str):
            if _STATES.fullmatch(segment.lower()):
                return place + 1
            if segment == "state" and isinstance(path[place + 1], int):
                return place + 1
    for place, segment in enumerate(path):
        words = _words(segment)
        if len(words) > 1 and any(_STATE_WORDS.fullmatch(word) for word in words[:-1]):
            return place
    return None


def _state(path: Path, words: Sequence[tuple[int, str]], number: int, role: str) -> State:
    place, name = words[number]
    segment = path[place]
    assert isinstance(segment, str)
    if segment.lower() == name:
        return State(role, name, (*path[:place], *path[place + 1 :]))
    rest = re.sub(rf"(^|[./]){re.escape(name)}(?=$|[./])", "", segment, count=1, flags=re.IGNORECASE)
    return State(role, name, (*path[:place], rest, *path[place + 1 :]))
