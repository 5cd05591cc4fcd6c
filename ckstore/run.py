"""One run: its versions in order, and their tensors as arrays with a leading axis over the versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, overload

from ckstore.errors import NotFoundError

if TYPE_CHECKING:
    import zarr

    from ckstore.version import Version


class Run:
    """A run of a store, or some of its versions; made by `Store.run`.

    Parameters
    ----------
    name
        Name of the run.
    versions
        Its versions by number, as they were when it was asked for.
    """

    def __init__(self, name: str, versions: Sequence[Version]) -> None:
        self.name = name
        self.versions = list(versions)

    def __reduce__(self) -> tuple[type[Run], tuple[str, list[Version]]]:
        """In another process it is read from the same store, which is opened there once."""
        return Run, (self.name, self.versions)

    def __repr__(self) -> str:
        return f"<ckstore.Run {self.name}, {len(self)} versions>"

    def __len__(self) -> int:
        return len(self.versions)

    def __iter__(self) -> Iterator[Version]:
        return iter(self.versions)

    @overload
    def __getitem__(self, index: int) -> Version: ...

    @overload
    def __getitem__(self, index: slice) -> Run: ...

    def __getitem__(self, index: int | slice) -> Version | Run:
        """The version at a place in the run, or the run of several of them: `run[-10:].arrays`."""
        if isinstance(index, slice):
            return Run(self.name, self.versions[index])
        return self.versions[index]

    @property
    def steps(self) -> list[int | None]:
        """The step of each version; None where it has none."""
        return [version.row.step for version in self.versions]

    @property
    def latest(self) -> Version:
        """The version with the highest step; where none has a step, the one that was ingested last."""
        if not self.versions:
            raise NotFoundError(f"No version of run {self.name} was chosen; take more of them.")
        return max(
            self.versions, key=lambda version: (version.row.step is not None, version.row.step or 0, version.row.number)
        )

    @cached_property
    def arrays(self) -> zarr.Group:
        """The run as a read-only Zarr group: every tensor as one array with a leading axis over the versions.

        The history of a row of a weight is the slice ``run.arrays["model/weight"][:, 0]``. Only tensors that all
        versions hold with the same dtype and shape are arrays. The group's attribute `left_out` lists the paths of the
        others: `missing` in some version, or `changed` in dtype or shape; a slice of the run (``run[1:].arrays``) may
        have more in common. The attributes `versions` and `steps` tell what is at each place of the leading axis,
        which is called `version`; in xarray, ``dataset.assign_coords(version=run.steps)`` makes the steps its labels.
        """
        from ckstore.views.groups import run_group

        return run_group(self.name, [version.stored for version in self.versions])
