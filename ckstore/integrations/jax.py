"""JAX: save pytrees into a store, and load them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ckstore.errors import UsageError
from ckstore.formats.paths import path_to_text
from ckstore.integrations.lineage import ingest_next, lineage_of
from ckstore.integrations.names import read_sound

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckstore.store import Store
    from ckstore.version import Version
    from ckstore.writing.ingest import IngestReport

#: Path of a leaf.
_Path = tuple[str | int, ...]


def save(
    store: Store,
    tree: Any,
    *,
    run: str,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    replace: bool = False,
    allow_empty: bool = False,
) -> IngestReport:
    """Store a pytree as a version.

    After `load` of an earlier version of the run, later versions are kept as superseded ones.

    Parameters
    ----------
    store
        A writable store.
    tree
        Any pytree: dictionaries, lists, tuples, named tuples and registered dataclasses, such as flax's `TrainState` or
        the state of an optax optimiser. Leaves may be JAX or NumPy arrays on any device, including bfloat16 and
        float8, random keys, and numbers.
    run, step, metrics, replace, allow_empty
        As for `Store.ingest`.

    Raises
    ------
    ConflictError
        The run has a different tree at that step, and `replace` is not set.
    UsageError
        A leaf is not an array of a supported dtype, or is sharded over other processes.
    """
    import jax

    state: dict[str | int, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = _path(keys)
        if not path:
            raise UsageError("A single array has no name in a version; save it in a dictionary.")
        node = state
        for key in path[:-1]:
            node = node.setdefault(key, {})
        if path[-1] in node:
            raise UsageError(f"Two leaves have the path {path_to_text(path)}; use keys that differ as text.")
        node[path[-1]] = _array(leaf, path)
    return ingest_next(
        store, state, run=run, step=step, metrics=dict(metrics or {}), replace=replace, allow_empty=allow_empty
    )  # fmt: skip


def load(store: Store, name: str, *, like: Any) -> Any:
    """Load a version as a pytree.

    If the latest version is damaged, a warning says so, and the newest sound one before it is loaded.

    Parameters
    ----------
    store
        The store.
    name
        The version, such as `flax@latest`.
    like
        A tree of the same names, or a part of the saved one, such as ``{"params": params}``. Each leaf is returned as
        its counterpart in `like`: a JAX array with the same sharding (a `jax.ShapeDtypeStruct` suffices), a NumPy
        array, a random key, or a number.

    Raises
    ------
    NotFoundError
        No such version exists, or the version has no tensor of that name.
    UsageError
        A leaf has another shape or dtype. Numbers may differ in width.
    """
    import jax

    leaves, structure = jax.tree_util.tree_flatten_with_path(like)

    def read(version: Version) -> list[Any]:
        named = [(path_to_text(_path(keys)), leaf) for keys, leaf in leaves]
        return [_leaf(np.asarray(version[text][...]), leaf, text) for text, leaf in named]

    version, found = read_sound(store, name, read)
    lineage_of(store).note(store, version, is_certain=False)
    return jax.tree_util.tree_unflatten(structure, found)


def _path(keys: tuple[Any, ...]) -> _Path:
    """Return the path of a leaf from JAX's key objects."""
    found = []
    for key in keys:
        name = next(getattr(key, attribute) for attribute in ("key", "idx", "name") if hasattr(key, attribute))
        found.append(name if type(name) in (str, int) else str(name))
    return tuple(found)


def _array(leaf: Any, path: _Path) -> npt.NDArray[Any]:
    """Return a leaf in host memory."""
    import jax

    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise UsageError(
                f"{path_to_text(path)} is sharded over other processes; gather the tree first, with"
                " `jax.experimental.multihost_utils.process_allgather`."
            )
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
    found = np.asarray(leaf)
    if found.dtype == object or found.dtype.kind in "SUMm":
        raise UsageError(
            f"{path_to_text(path)} is a {type(leaf).__name__}, not an array of numbers; leave it out, or register its"
            " class as a pytree with JAX."
        )
    return found


def _leaf(found: npt.NDArray[Any], like: Any, text: str) -> Any:
    """Return the stored array in the form of its counterpart."""
    import jax

    if _is_key(like):
        return jax.random.wrap_key_data(found, impl=jax.random.key_impl(like))
    is_number = isinstance(like, bool | int | float | complex) and not isinstance(like, np.generic)
    wanted = np.asarray(like) if is_number else like
    is_same_kind = not found.shape and found.dtype.kind == np.dtype(wanted.dtype).kind
    if found.shape != wanted.shape or (found.dtype != wanted.dtype and not is_same_kind):
        raise UsageError(
            f"{text} has dtype {found.dtype} and shape {list(found.shape)} in the store, and {wanted.dtype} and"
            f" {list(wanted.shape)} in `like`; give a tree like the saved one."
        )
    if is_number:
        return type(like)(found.item())
    found = found.astype(wanted.dtype, copy=False)
    if isinstance(like, np.ndarray):
        return found
    return found[()] if isinstance(like, np.generic) else jax.device_put(found, getattr(like, "sharding", None))


def _is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of random keys, whose dtype is not numeric."""
    import jax

    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
