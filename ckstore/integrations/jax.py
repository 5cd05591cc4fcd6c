"""JAX: trees of arrays go into a store, and come back in the shape of a tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ckstore.errors import UsageError
from ckstore.formats.paths import path_to_text

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckstore.operations.ingest import IngestReport
    from ckstore.store import Store

#: The names on the way to a leaf.
_Path = tuple[str | int, ...]


def save(
    store: Store,
    tree: Any,
    *,
    run: str,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> IngestReport:
    """Store a tree of arrays as a version.

    Parameters
    ----------
    store
        The store, open to be written to.
    tree
        Whatever JAX takes for a tree: dictionaries, lists, tuples, named tuples and registered dataclasses, such as a
        `TrainState` of flax or the state of an optimiser of optax. Its leaves are arrays of JAX or NumPy on any device,
        bfloat16 and float8 included, keys of random number generators, and numbers.
    run, step, metrics, replace
        As for `Store.ingest`.

    Raises
    ------
    ConflictError
        The run has another tree at that step, and `replace` is not set.
    UsageError
        A leaf is no array of a dtype that can be stored, or parts of one are with other processes.
    """
    import jax

    state: dict[str | int, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = _path(keys)
        if not path:
            raise UsageError("A lone array has no name in a version; save it in a dictionary.")
        node = state
        for key in path[:-1]:
            node = node.setdefault(key, {})
        if path[-1] in node:
            raise UsageError(f"Two leaves are called {path_to_text(path)}; use keys that differ as text.")
        node[path[-1]] = _array(leaf, path)
    return store.ingest(state, run=run, step=step, metrics=dict(metrics or {}), replace=replace)


def load(store: Store, name: str, *, like: Any) -> Any:
    """A version as a tree.

    Parameters
    ----------
    store
        The store.
    name
        The version, such as `flax@latest`.
    like
        A tree of the same names; each leaf comes as what its counterpart here is: an array of JAX on the same devices,
        sharded in the same way, also where only a `jax.ShapeDtypeStruct` stands for it, an array of NumPy, a key, or a
        number. It may be a part of what was saved, such as ``{"params": params}``.

    Raises
    ------
    NotFoundError
        There is no such version, or it has no tensor of that name.
    UsageError
        A leaf has another shape or dtype. Numbers may have another width.
    """
    import jax

    version = store[name]
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    made = []
    for keys, leaf in leaves:
        text = path_to_text(_path(keys))
        made.append(_leaf(np.asarray(version[text][...]), leaf, text))
    return jax.tree_util.tree_unflatten(structure, made)


def _path(keys: tuple[Any, ...]) -> _Path:
    """The names on the way to a leaf, as the classes of keys that JAX has call them."""
    found = []
    for key in keys:
        name = next(getattr(key, attribute) for attribute in ("key", "idx", "name") if hasattr(key, attribute))
        found.append(name if type(name) in (str, int) else str(name))
    return tuple(found)


def _array(leaf: Any, path: _Path) -> npt.NDArray[Any]:
    """A leaf in the memory of this process."""
    import jax

    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise UsageError(
                f"Parts of {path_to_text(path)} are with other processes; gather the tree first, with"
                " `jax.experimental.multihost_utils.process_allgather`."
            )
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
    found = np.asarray(leaf)
    if found.dtype == object or found.dtype.kind in "SUMm":
        raise UsageError(
            f"{path_to_text(path)} is no array of numbers, but a {type(leaf).__name__}; leave it out, or register its"
            " class as a tree with JAX."
        )
    return found


def _leaf(found: npt.NDArray[Any], like: Any, text: str) -> Any:
    """What was stored, as what it is to be like."""
    import jax

    if _is_key(like):
        return jax.random.wrap_key_data(found, impl=jax.random.key_impl(like))
    is_number = isinstance(like, bool | int | float | complex) and not isinstance(like, np.generic)
    wanted = np.asarray(like) if is_number else like
    is_same_kind = not found.shape and found.dtype.kind == np.dtype(wanted.dtype).kind
    if found.shape != wanted.shape or (found.dtype != wanted.dtype and not is_same_kind):
        raise UsageError(
            f"{text} has dtype {found.dtype} and shape {list(found.shape)} in the store, and {wanted.dtype} and"
            f" {list(wanted.shape)} in `like`; give a tree like the one that was saved."
        )
    if is_number:
        return type(like)(found.item())
    found = found.astype(wanted.dtype, copy=False)
    if isinstance(like, np.ndarray):
        return found
    return found[()] if isinstance(like, np.generic) else jax.device_put(found, getattr(like, "sharding", None))


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is a key of random number generators, whose dtype is no number's."""
    import jax

    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
