"""Versions and runs as datasets of xarray: ``open_dataset("ckstore://gpt@400", engine="ckstore", group="model")``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xarray
from xarray.backends import BackendEntrypoint

import ckstore
from ckstore.errors import NotFoundError, UsageError

_SCHEME = "ckstore://"


class CkstoreBackend(BackendEntrypoint):
    """Opens a version, or all versions of a run with the axis `version`; arrays are decoded when they are sliced.

    Parameters of ``open_dataset``: `store` is the directory or URL of the store, by default `$CKSTORE` or the nearest
    `.ckstore` upwards; `group` a group of tensors, such as `model`.

    Examples
    --------
    >>> import xarray
    >>> from ckstore.integrations.xarray import CkstoreBackend
    >>> model = xarray.open_dataset("ckstore://gpt@200", engine=CkstoreBackend, store="store", group="model")
    >>> model["weight"].shape
    (256, 128)
    """

    description = "Versions and runs of a ckstore store"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "store", "group")
    supports_groups = True

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return whether this is a URL of ckstore."""
        return isinstance(filename_or_obj, str) and filename_or_obj.startswith(_SCHEME)

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: Any = None,
        store: str | None = None,
        group: str | None = None,
    ) -> Any:
        """Return the dataset of a group of tensors; of a run, if the URL is the name of one."""
        return self._opened(xarray.open_dataset, filename_or_obj, store, group=group, drop_variables=drop_variables)

    def open_datatree(
        self, filename_or_obj: Any, *, drop_variables: Any = None, store: str | None = None, group: str | None = None
    ) -> Any:
        """Return all groups of tensors, or those of a group, as a tree of datasets."""
        return self._opened(xarray.open_datatree, filename_or_obj, store, group=group, drop_variables=drop_variables)

    def open_groups_as_dict(
        self, filename_or_obj: Any, *, drop_variables: Any = None, store: str | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the datasets of all groups of tensors, or of those of a group, by their paths in the tree."""
        tree = self.open_datatree(filename_or_obj, drop_variables=drop_variables, store=store, group=group)
        return {node.path: node.to_dataset() for node in tree.subtree}

    def _opened(self, opener: Callable[..., Any], filename_or_obj: Any, store: str | None, **options: Any) -> Any:
        if not self.guess_can_open(filename_or_obj):
            raise UsageError(f"{filename_or_obj!r} is not a URL such as ckstore://gpt@400 or ckstore://gpt.")
        name = filename_or_obj.removeprefix(_SCHEME)
        opened = ckstore.open(store, "r")
        arrays: Any
        try:
            run = opened.run(name)
        except NotFoundError:
            arrays, labels = opened[name].arrays, dict[str, Any]()
        else:
            arrays, labels = run.arrays, {} if None in run.steps else {"version": run.steps}
        few = arrays.metadata.consolidated_metadata is not None
        found = opener(arrays.store, engine="zarr", consolidated=few, chunks=None, **options)
        found.coords.update(labels)
        return found
