"""torch: save and load states under names of versions, and accumulate gradients for the scheme that ranks weights."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckstore.errors import UsageError
from ckstore.formats.paths import path_to_text
from ckstore.integrations.lineage import ingest_next, lineage_of
from ckstore.integrations.names import opened, read_sound, run_and_step, version_name
from ckstore.integrations.torch_reading import read

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

    from ckstore.reading.live_comparison import StateReport
    from ckstore.store import Store
    from ckstore.version import Version
    from ckstore.writing.ingest import IngestReport

_log = logging.getLogger("ckstore")

#: Weights of the newest gradient and of the earlier mean (Agrawal et al., SoCC 2024).
_NEW, _OLD = 0.9, 0.1


def save(
    state: Any,
    name: str | os.PathLike[str],
    store: Store | str | os.PathLike[str] | None = None,
    *,
    metrics: Mapping[str, Any] | None = None,
    replace: bool = False,
    allow_empty: bool = False,
) -> IngestReport | None:
    """Save a state like `torch.save`, under the name of a version.

    After `load` of an earlier version of the run, later versions are kept as superseded ones.

    Parameters
    ----------
    state
        Any state that `torch.save` accepts. Objects that `Version.state_dict` cannot rebuild are pickled.
    name
        `ckstore:RUN@STEP`, or `ckstore:RUN` if the state contains its step. `torch.save` handles any other name, as the
        path of a file.
    store
        The store, or its path; by default as for `ckstore.open`. An open store keeps caches for the next save.
    metrics, replace, allow_empty
        As for `Store.ingest`.

    Returns
    -------
    IngestReport or None
        A report; None for a file.

    Raises
    ------
    ConflictError
        The run has a different state at that step, and `replace` is not set.
    UsageError
        The step or the name of the run is invalid.
    """
    import torch

    spec = version_name(name)
    if spec is None:
        torch.save(state, name)
        return None
    run, step = run_and_step(spec)
    with opened(store) as found:
        return ingest_next(
            found, state, run=run, step=step, metrics=dict(metrics or {}), replace=replace, on_unknown="pickle",
            allow_empty=allow_empty,
        )  # fmt: skip


def load(
    name: str | os.PathLike[str],
    store: Store | str | os.PathLike[str] | None = None,
    *,
    map_location: Any = None,
    weights_only: bool = True,
) -> Any:
    """Load a version like `torch.load`.

    If the latest version is damaged, a warning says so, and the newest sound one before it is loaded.

    Parameters
    ----------
    name
        `ckstore:gpt@100`, `ckstore:gpt@latest`, or `ckstore:` with a number, a tag or an id. `torch.load` handles any
        other name, as the path of a file.
    store
        The store, or its path; by default as for `ckstore.open`.
    map_location, weights_only
        As for `torch.load`. Without `map_location`, tensors are returned on the CPU. Types that neither
        `Version.state_dict` nor torch knows need ``weights_only=False``, which runs code that the state names.

    Raises
    ------
    NotFoundError
        No such version exists.
    UsageError
        `map_location` is given, and the version is not a torch file.
    """
    import torch

    spec = version_name(name)
    if spec is None:
        return torch.load(name, map_location=map_location, weights_only=weights_only)
    with opened(store) as found:
        reading = partial(read, map_location=map_location, weights_only=weights_only)
        version, state = read_sound(found, spec, reading)
        lineage_of(found).note(found, version, is_certain=False)
        return state


def check_files(version: Version, parts: Mapping[str, Any]) -> None:
    """Check the parts of a state whose files a version has; see `check_resumed`."""
    files = {entry.path for entry in version._stored.document.files}
    state = {file: part for file, part in parts.items() if file in files and part is not None}
    if state:
        check_resumed(version, state)


def check_resumed(version: Version, state: Mapping[str, Any]) -> StateReport:
    """Compare the parts of a resumed training's state with a version; warn where they differ.

    An optimiser that started empty shows as missing tensors. After `dcp.load`, each rank compares its own parts.

    Parameters
    ----------
    version
        The version that the training resumes from.
    state
        The parts to compare, by their names in the version, which may have others: ``{"model": model, "optimizer":
        optimizer}``, or with names of files as in ``{"model.safetensors": model, "optimizer.pt": optimizer}``. See
        `Version.compare`.

    Examples
    --------
    >>> check_resumed(store["gpt@300"], {"model": store["gpt@300"].state_dict()["model"]}).tensors
    2
    """
    report = version.compare(state)
    names = ((name, name if type(name) in (str, int) else repr(name)) for name in state)
    parts = tuple(f"{text}/" for name, key in names for text in (name, path_to_text((key,))))
    report = replace(report, missing=tuple(path for path in report.missing if f"{path}/".startswith(parts)))
    if report:
        _log.info("Resumed from %s: %s", version.name, report)
    else:
        warnings.warn(f"The training is not as {version.name} has it. {report}", stacklevel=2)
    return report


class GradientAccumulator:
    """Accumulates the exponential mean of a model's gradients before each save, in CPU memory.

    The scheme `dynaquant` ranks weights by their sensitivity |g w|, where g is this mean:
    ``g = 0.9 * gradient + 0.1 * g``. `Store.ingest` takes it as `gradients`.

    Parameters
    ----------
    modules
        A module, or nested mappings of modules with the structure of the ingested state: ``{"model": model}`` if that
        is ``{"model": model.state_dict(), ...}``.
    every
        Steps between saves: a save follows each step that `every` divides.
    window
        Number of steps before a save in which gradients are gathered; other steps cost nothing. To the accuracy of
        float32, 8 steps give the same mean as 50.

    Raises
    ------
    UsageError
        `every` or `window` is below 1, or `modules` contains another type.

    Notes
    -----
    Memory: 4 bytes for each element that has a gradient; gradients on a GPU need their own size in pinned memory, too.
    Infinities and NaN, as in steps that a gradient scaler skips, count as 0.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> accumulator = GradientAccumulator({"model": model}, every=10)
    >>> model(torch.tensor([[1.0, -2.0]])).sum().backward()
    >>> accumulator.after_backward(10)
    >>> accumulator.before_clearing()
    >>> model.zero_grad()
    >>> accumulator.gradients()
    {'model/weight': tensor([[ 0.9000, -1.8000]])}
    """

    def __init__(self, modules: Module | Mapping[str, Any], *, every: int, window: int = 50) -> None:
        for name, value in (("every", every), ("window", window)):
            if value < 1:
                raise UsageError(f"`{name}` must be 1 or more steps, not {value}.")
        self.every = every
        self.window = window
        self._parameters: dict[str, Parameter] = dict(_parameters(modules, ()))
        self._means: dict[Parameter, Tensor] = {}
        self._copies: dict[Parameter, Tensor] = {}
        self._pending: list[Parameter] = []
        self._streams: dict[Any, Any] = {}
        self._last = 0

    def after_backward(self, step: int) -> None:
        """Add the gradients of a step; call once a step, after unscaling and clipping.

        Parameters
        ----------
        step
            Number of the current step in the run, as it is after the step.
        """
        if -step % self.every >= self.window:
            return
        self._add_copies()
        if step != self._last + 1:
            self._means.clear()
        self._last = step
        for parameter in dict.fromkeys(self._parameters.values()):
            if parameter.grad is None:
                if parameter in self._means:
                    self._means[parameter].mul_(_OLD)
            elif parameter.grad.is_cuda:
                self._copy(parameter, parameter.grad.detach())
            else:
                self._add(parameter, parameter.grad.detach().cpu())

    def before_clearing(self) -> None:
        """Make the GPU's current stream wait for the copies, before gradients are cleared or overwritten."""
        import torch

        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def gradients(self) -> dict[str, Tensor]:
        """Return the means by the tensors' paths in the state, as float32; the next gathered step changes them.

        Parameters without a gradient are left out; tied parameters appear under each of their names.
        """
        self._add_copies()
        return {path: self._means[found] for path, found in self._parameters.items() if found in self._means}

    def _copy(self, parameter: Parameter, gradient: Tensor) -> None:
        """Start copying a gradient from its GPU, on a separate stream."""
        import torch

        device = gradient.device
        if parameter not in self._copies:
            self._copies[parameter] = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._copies[parameter].copy_(gradient, non_blocking=True)
        self._pending.append(parameter)

    def _add_copies(self) -> None:
        """Add the gradients of the last copies."""
        if self._pending:
            for stream in self._streams.values():
                stream.synchronize()
            for parameter in self._pending:
                self._add(parameter, self._copies[parameter])
            self._pending.clear()

    def _add(self, parameter: Parameter, gradient: Tensor) -> None:
        import torch

        mean = self._means.get(parameter)
        if mean is None:
            mean = self._means[parameter] = torch.zeros(gradient.shape, dtype=torch.float32)
        mean.mul_(_OLD).add_(gradient.nan_to_num(0, 0, 0), alpha=_NEW)


def _parameters(modules: Module | Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters of nested modules by their paths in the state; tied parameters under each name."""
    from ckstore.formats.paths import path_to_text

    if isinstance(modules, Mapping):
        for name, inner in modules.items():
            yield from _parameters(inner, (*path, name))
    elif hasattr(modules, "named_parameters"):
        for name, parameter in modules.named_parameters(remove_duplicate=False):
            yield path_to_text((*path, name)), parameter
    else:
        raise UsageError(f"{type(modules).__name__} is not a module; give modules, nested as in the state.")
