"""One run: its versions in order, and their tensors as arrays with a leading axis over the versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from ckstore.errors import NotFoundError, UsageError
from ckstore.runtime.arguments import PATH, WHOLE, checked, shown
from ckstore.runtime.cached import cached_property
from ckstore.steps import step_of_value

if TYPE_CHECKING:
    from pathlib import Path

    from ckstore.table import Table
    from ckstore.version import Version
    from ckstore.views.groups import TypedGroup


class Run:
    """A run of a store, or some of its versions, by step; by number where some have no step. Made by `Store.run`.

    Parameters
    ----------
    name
        Name of the run.
    versions
        Its versions at the time of the call.

    Examples
    --------
    >>> run = store.run("gpt")
    >>> run.steps, run.latest, run.metrics
    ([100, 200, 300], <ckstore.Version 3 gpt@300>, {'val_loss': [3.1, 2.7, 2.8]})
    >>> run[200], run[200:], len(run)
    (<ckstore.Version 2 gpt@200>, <ckstore.Run gpt, 2 versions>, 3)
    """

    def __init__(self, name: str, versions: Sequence[Version]) -> None:
        self.name = name
        self.versions = list(versions)

    def __reduce__(self) -> tuple[type[Run], tuple[str, list[Version]]]:
        """Another process reads the versions from the same store, which it opens once."""
        return Run, (self.name, self.versions)

    def __repr__(self) -> str:
        return f"<ckstore.Run {self.name}, {len(self)} version{'s' * (len(self) != 1)}>"

    def __len__(self) -> int:
        return len(self.versions)

    def __iter__(self) -> Iterator[Version]:
        return iter(self.versions)

    def __reversed__(self) -> Iterator[Version]:
        return reversed(self.versions)

    def __contains__(self, version: object) -> bool:
        return version in self.versions

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.name == other.name and self.versions == other.versions

    def __hash__(self) -> int:
        return hash(self.name)

    @overload
    def __getitem__(self, step: int) -> Version: ...

    @overload
    def __getitem__(self, step: slice) -> Run: ...

    def __getitem__(self, step: int | slice) -> Version | Run:
        """Return the version at a step, or the run of the versions in a half-open range of steps.

        ``run[100:400]`` has the steps 100 to 399, and ``run[100:400:2]`` every other version of them. The list
        `run.versions` has positions.

        Raises
        ------
        NotFoundError
            The run has no version at that step.
        UsageError
            A bound of the range, or its step, is negative.
        """
        if isinstance(step, slice):
            return self._between(step)
        asked = step_of_value(step)
        if asked is None:
            raise UsageError(f"A run is indexed by step, an integer, not {shown(step)}.")
        for version in self.versions:
            if version.step == asked:
                return version
        steps = [at for at in self.steps if at is not None]
        near = sorted(steps, key=lambda at: (abs(at - asked), at))[:3]
        hint = f"the nearest are {', '.join(map(str, sorted(near)))}" if near else "its versions have no steps"
        raise NotFoundError(f"Run {self.name} has no version at step {asked}; {hint}.")

    def _between(self, steps: slice) -> Run:
        bounds = [None if bound is None else step_of_value(bound) for bound in (steps.start, steps.stop)]
        if any(
            bound is None and asked is not None for bound, asked in zip(bounds, (steps.start, steps.stop), strict=True)
        ):
            raise UsageError(
                f"The bounds of a range of steps are integers, not {shown(steps.start)} and {shown(steps.stop)}."
            )
        every = None if steps.step is None else step_of_value(steps.step)
        if steps.step is not None and (every is None or every < 1):
            raise UsageError(f"A range of steps takes every nth version, not every {shown(steps.step)}.")
        first, last = bounds
        if any(bound is not None and bound < 0 for bound in bounds):
            raise UsageError("The bounds of a range of steps must be 0 or more; `tail(n)` returns the last n versions.")
        if first is None and last is None:
            return Run(self.name, self.versions[::every])
        chosen = [
            version
            for version in self.versions
            if version.step is not None
            and (first is None or version.step >= first)
            and (last is None or version.step < last)
        ]
        return Run(self.name, chosen[::every])

    @checked()
    def tail(self, count: int) -> Run:
        """Return the run of the last `count` versions.

        Examples
        --------
        >>> store.run("gpt").tail(2).steps
        [200, 300]
        """
        if count < 0:
            raise UsageError(f"The number of versions must be 0 or more, not {count}.")
        return Run(self.name, self.versions[max(len(self.versions) - count, 0) :])

    @checked(target=PATH)
    def checkout(
        self,
        target: str | os.PathLike[str],
        *,
        force: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[Path]:
        """Write the files of all versions into a directory, under their own names; return the path of each version.

        Names that repeat get the step: `state_dict-400.pt`. Files that are there with the same bytes are left alone, so
        that a second call continues an interrupted one.

        Parameters
        ----------
        target
            The directory; a missing one is made.
        force
            Overwrite files with other content.
        progress
            Called with numbers of written bytes.

        Raises
        ------
        ConflictError
            A file with other content exists, without `force`; nothing is written then.

        Examples
        --------
        >>> [path.name for path in store.run("gpt")[200:].checkout("restored")]
        ['state_dict-200.pt', 'state_dict-300.pt']
        """
        from pathlib import Path

        from ckstore.reading.restore import is_there, places

        paths = places([version._stored for version in self], Path(target))
        chosen = zip(self.versions, paths, strict=True)
        missing = [(version, path) for version, path in chosen if not is_there(version._stored, path, force=force)]
        for version, path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            version.checkout(path, format="original", force=force, progress=progress)
        return paths

    @property
    def steps(self) -> list[int | None]:
        """The step of each version; None where it has none."""
        return [version.step for version in self.versions]

    def table(self) -> Table:
        """Return a table of the versions, with the columns of `Store.log`.

        Examples
        --------
        >>> store.run("gpt")[200:].table().columns("step", "val_loss")
        [{'step': 200, 'val_loss': 2.7}, {'step': 300, 'val_loss': 2.8}]
        """
        from ckstore.table import Table, version_record

        return Table(version_record(version._stored.row, version.tags) for version in self)

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """The values of each metric by name, one per version; None where a version lacks it."""
        names = dict.fromkeys(name for version in self.versions for name in version.metrics)
        return {name: [version.metrics.get(name) for version in self.versions] for name in names}

    @property
    def latest(self) -> Version:
        """The version with the highest step; where none has a step, the one that was ingested last."""
        if not self.versions:
            raise NotFoundError(f"No version of run {self.name} is chosen; choose more steps.")
        return max(self.versions, key=lambda version: (version.step is not None, version.step or 0, version.number))

    @checked(sample=WHOLE)
    def statistics(
        self, measures: Sequence[str] | None = None, globs: Sequence[str] = (), *, sample: int = 1 << 20
    ) -> Table:
        """Return the measures of tensors over the versions: a row per tensor and version, a column per measure.

        Values are None where a measure has no meaning.

        Parameters
        ----------
        measures
            Keys of measures: `change`, `ratio`, `rms`, `distance`, `unchanged`, `nonfinite`, `rank`, `spectral`,
            `v_low`, `v_high`, `m_over_sqrt_v`, `deviation` and `bits`; by default all. The last two decode nothing.
            The page on reports defines them.
        globs
            Globs over the paths of tensors.
        sample
            Read about this many elements of a larger tensor: the column `sampled` has their share.

        Raises
        ------
        UsageError
            A measure is unknown.

        Examples
        --------
        >>> [row] = store.run("gpt")[200:300].statistics(["rms", "bits"], ["model/weight"])
        >>> row["path"], row["step"], round(row["rms"], 3)
        ('model/weight', 200, 1.001)
        """
        from ckstore.report.measures import MEASURES, ROW
        from ckstore.report.statistics import statistics
        from ckstore.table import Table

        keys = list(MEASURES if measures is None else measures)
        if unknown := [key for key in keys if key not in MEASURES]:
            raise UsageError(f"There is no measure {unknown[0]!r}; choose from {', '.join(MEASURES)}.")
        values = not {*ROW, "ratio"}.isdisjoint(keys)
        found = statistics([version._stored for version in self], globs, sample=sample, values=values)
        return Table(
            {"path": tensor.path, "role": tensor.role, "version": version.number, "step": version.step,
             "sampled": tensor.sampled, **{key: found.value(key, number, place) for key in keys}}
            for number, tensor in enumerate(found.tensors)
            for place, version in enumerate(self)
            if tensor.objects[place] is not None
        )  # fmt: skip

    def _repr_html_(self) -> str:
        from html import escape

        from ckstore.report.sparkline import sparkline
        from ckstore.table import Table

        rows = Table(
            {"version": version.number, "step": version.step, **{name: version.metrics.get(name) for name in names},
             "stored MB": version.stored_bytes / 1e6, "tags": ", ".join(version.tags)}
            for names in [list(self.metrics)[:4]]
            for version in self.versions[-10:]
        )  # fmt: skip
        left = f"<p>the last 10 of {len(self)} versions</p>" if len(self) > len(rows) else ""
        return f"<p>{escape(self.name)}</p>{left}{rows._repr_html_()}{sparkline(self.metrics)}"

    @cached_property
    def arrays(self) -> TypedGroup:
        """The run as a read-only Zarr group: each tensor is one array with a leading axis over the versions.

        ``run.arrays["model/weight"][:, 0]`` is the history of a row of a weight. The group has the tensors that all
        versions hold with the same dtype and shape; its attribute `left_out` lists the paths of the others, `missing`
        or `changed`; part of a run (``run[100:].arrays``) may leave out fewer. A renamed tensor has its last path, and
        the attribute `renamed` has the former ones. The attributes `versions` and `steps` label the leading axis,
        `version`.
        """
        from ckstore.views.groups import run_group

        return run_group(self.name, [version._stored for version in self.versions])
