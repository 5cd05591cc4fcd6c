"""Publishes the weights of a training: each state becomes a version with the files of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckstore.errors import UsageError
from ckstore.formats.paths import listed
from ckstore.runtime.arguments import checked
from ckstore.saving.saver import Saver
from ckstore.scanning.published import Template

if TYPE_CHECKING:
    from ckstore.repository import Address
    from ckstore.writing.ingest import IngestReport


class Publisher(Saver):
    """Stores weights in a separate process, encoded at once, for followers; made by `Store.publish`.

    Each version has the files of a model's directory with new weights; that directory is never written.

    Examples
    --------
    >>> from safetensors.numpy import save_file
    >>> Path("model").mkdir()
    >>> save_file({"w": np.zeros(8, np.float32)}, "model/model.safetensors")
    >>> with store.publish("policy", like="model") as publisher:
    ...     saving = publisher.save({"w": np.ones(8, np.float32)}, step=1)
    >>> list(store["policy"])
    ['model.safetensors/w']
    """

    def __init__(self, store: Address, run: str, workers: int, like: Path, dtype: str | None) -> None:
        self._template = Template(like, dtype)
        super().__init__(store, run, workers, self._template.nbytes, (str(like.resolve()), dtype))

    def __repr__(self) -> str:
        return super().__repr__().replace("Saver", "Publisher")

    @checked()
    def save(
        self,
        state: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        config: Any = None,
        replace: bool = False,
        busy: Literal["wait", "skip"] = "wait",
        **others: Any,
    ) -> Future[IngestReport]:
        """Copy the weights of a state dict, and publish them as the run's next version in the background.

        Parameters
        ----------
        state
            Tensors by their names in the directory `like`. Others may only be further names of these, as of tied
            weights. They are cast to the dtype of the publisher on their device.
        step, metrics, config, replace, busy
            As for `Saver.save`.

        Returns
        -------
        Future
            Future of the `IngestReport`, done once followers can read the version.

        Raises
        ------
        CkstoreError or OSError
            An earlier save failed.
        UsageError
            Names or shapes differ from those of the directory, or a reason of `Saver.save`.

        Examples
        --------
        >>> from safetensors.numpy import save_file
        >>> Path("model").mkdir()
        >>> save_file({"w": np.zeros(8, np.float32)}, "model/model.safetensors")
        >>> with store.publish("policy", like="model") as publisher:
        ...     saving = publisher.save({"w": np.ones(8, np.float32)}, step=1, metrics={"reward": 0.5})
        >>> saving.result().version
        <ckstore.VersionRow 4 policy@1>
        """
        if others:
            raise UsageError(f"A publisher takes no {listed(sorted(others))}; use `Store.saver`.")
        return super().save(self._weights(state), step=step, metrics=metrics, config=config, replace=replace, busy=busy)

    def _weights(self, state: Any) -> dict[str, Any]:
        """Return the directory's tensors of a state, in their dtypes."""
        if not isinstance(state, Mapping):
            raise UsageError(f"A publisher takes a state dict of tensors by name, not a {type(state).__name__}.")
        template = self._template
        template.check({name: tuple(getattr(state[name], "shape", ())) for name in template.tensors if name in state})
        known = {place for name in template.tensors if (place := _place(state[name])) is not None}
        others = [str(name) for name, value in state.items() if name not in template.tensors]
        if foreign := [name for name in others if _place(state[name]) not in known]:
            raise UsageError(f"`like` lacks {listed(foreign)}; give the state dict of the same model.")
        return {name: _cast(state[name], dtype, name) for name, (dtype, _) in template.tensors.items()}


def _place(value: Any) -> Any:
    """Return a key that names of one tensor share; None for other values."""
    return value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data if hasattr(value, "ctypes") else None


def _cast(value: Any, dtype: str, name: str) -> Any:
    """Return a contiguous tensor of a dtype; arrays must have it."""
    if hasattr(value, "detach"):
        import torch

        wanted = getattr(torch, dtype)
        return value.detach().to(wanted).contiguous() if isinstance(wanted, torch.dtype) else value.detach()
    if getattr(getattr(value, "dtype", None), "name", "") != dtype:
        raise UsageError(f"{name} is not {dtype}, which `like` has, or is no tensor; give a torch tensor to be cast.")
    import numpy as np

    return np.asarray(value, order="C")
