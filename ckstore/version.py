"""One version: its tensors one by one, as Zarr arrays, as a state dict, and as files."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from ckstore.dtypes import require_torch
from ckstore.errors import IntegrityError, NotFoundError, UsageError
from ckstore.objects.documents import Deviation
from ckstore.policy import Fidelity
from ckstore.reading.stored_version import ChangedVersionError, StoredVersion, stored_version
from ckstore.repository import Address
from ckstore.runtime.arguments import FLAG, NAME, TEXT, checked
from ckstore.runtime.cached import cached_property
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.provenance import CONFIG, MADE, own_metrics
from ckstore.steps import by_step

if TYPE_CHECKING:
    from ckstore.formats.layout import FileLayout, Tensor
    from ckstore.reading.live_comparison import StateReport
    from ckstore.reading.salvage import SalvageReport
    from ckstore.reading.weight_patches import WeightPatch
    from ckstore.tensor import LazyTensor
    from ckstore.views.groups import TypedGroup

Result = TypeVar("Result")


class Version(Mapping[str, "LazyTensor"]):
    """A version of a store: a mapping of tensor paths to lazy tensors. Made by `Store.__getitem__`.

    Versions are equal if their store, number and fidelity are.

    Parameters
    ----------
    stored
        The reader of the version.

    Examples
    --------
    >>> version = store["best"]
    >>> version.name, version.step, version.metrics, version.tags
    ('gpt@200', 200, {'val_loss': 2.7}, ['best'])
    >>> {path: tensor.shape for path, tensor in version.items()}
    {'model/weight': (256, 128), 'model/bias': (128,)}
    """

    def __init__(self, stored: StoredVersion) -> None:
        self._stored = stored

    def __reduce__(self) -> tuple[type[Version], tuple[StoredVersion]]:
        """Another process reads the version from the same store, which it opens once."""
        return Version, (self._stored,)

    def __repr__(self) -> str:
        return f"<ckstore.Version {self.number} {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._stored.identity == other._stored.identity

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def number(self) -> int:
        """Number in the store, from 1 on."""
        return self._stored.row.number

    @property
    def id(self) -> str:
        """Id of 40 hexadecimal characters: the same in every store that the version is sent to."""
        return self._stored.row.uid

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._stored.row.run

    @property
    def step(self) -> int | None:
        """Training step; None where the version has none."""
        return self._stored.row.step

    @property
    def name(self) -> str:
        """`run@step`, or the run's name where the version has no step."""
        return self.run if self.step is None else f"{self.run}@{self.step}"

    @property
    def parent(self) -> int | None:
        """Number of the version before this one; None for the first."""
        return self._stored.row.parent

    @property
    def created(self) -> datetime:
        """Time of the commit, in UTC."""
        return datetime.fromisoformat(self._stored.row.created)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics by name, as given at ingest."""
        return own_metrics(self._stored.row.metrics)

    @property
    def made(self) -> Mapping[str, Any]:
        """The origin of the version: git commit, `dirty`, command line, host, and versions of Python and torch.

        Examples
        --------
        >>> sorted({"commit", "dirty", "torch", *store["best"].made} - {"command", "host", "python"})
        ['commit', 'dirty', 'torch']
        """
        return _mapping(self._stored.row.metrics.get(MADE))

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that was given at ingest; empty without one.

        Examples
        --------
        >>> report = store.ingest({"weight": np.zeros(8)}, run="toy", config={"lr": 3e-4, "hub_token": "abc"})
        >>> store["toy"].config
        {'lr': 0.0003}
        """
        return _mapping(self._stored.row.metrics.get(CONFIG))

    @property
    def tags(self) -> list[str]:
        """Tags that point at the version now, sorted."""
        return self._stored.repository.catalog.tags_of(self.number)

    @property
    def source(self) -> str | None:
        """Path of the ingested file or directory; empty for a state dict."""
        return self._stored.row.source

    @property
    def original_bytes(self) -> int:
        """Bytes of the ingested files."""
        return self._stored.row.original_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that the version added to the store."""
        return self._stored.row.stored_bytes

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return self._stored.row.elements

    @property
    def depth(self) -> int:
        """Number of deltas between the version and a base."""
        return self._stored.row.depth

    @property
    def cost(self) -> float:
        """Predicted restore cost, as a multiple of a full, exact copy's."""
        return self._stored.row.cost

    @property
    def hot(self) -> bool:
        """Whether the version is stored unencoded."""
        return self._stored.row.hot

    @property
    def superseded(self) -> bool:
        """Whether the run went back to an earlier version since, and went on from there."""
        return self._stored.row.superseded

    @property
    def dropped(self) -> tuple[str, ...]:
        """Globs over the paths of tensors that a policy has dropped from the version."""
        return self._stored.row.dropped

    @property
    def fidelity(self) -> Fidelity:
        """Fidelity of the values: `exact` or `coarse`."""
        return self._stored.fidelity

    @property
    def settings(self) -> dict[str, Any] | None:
        """Scheme and settings of a coarse version, with the results of its search; None for an exact version."""
        coarse = self._stored.document.coarse
        return None if coarse is None else {"scheme": coarse.scheme, **coarse.parameters}

    def deviations(self) -> dict[str, Deviation]:
        """Return the errors of the tensors of a coarse version by path, without the tensors that are exact.

        Of a tensor in several parts, `max_abs` is the largest of all parts and `rms` is taken over all of them.

        Examples
        --------
        >>> report = store.thin("gpt@100")
        >>> {path: round(item.relative, 3) for path, item in store["gpt@100"].deviations().items()}
        {'model/weight': 0.036}
        """
        from ckstore.reading.deviations import tensor_deviations

        return tensor_deviations(self._stored)

    @checked(path=TEXT)
    def storage(self, path: str | None = None) -> dict[str, Any]:
        """Return how the version, or the tensor at a path, is stored; nothing is decoded.

        Of a version: the number of objects and how many of them this version added (`here`), objects by kind (exact:
        `raw`, `full`, `delta`, `patches`, `cast`; coarse: `linear`, `rounded`, `codebook`, `factors`), those
        `stored_against_others`, and `coarse_bytes` and `exact_bytes`. Of a tensor: `form`, `bundled`, `depth`, and
        `bits` an element.

        Raises
        ------
        NotFoundError
            The version has no tensor at that path.

        Examples
        --------
        >>> store["best"].storage("model/weight")["form"]
        'delta'
        """
        from ckstore.reading.storage_facts import StorageFacts

        facts = StorageFacts(self._stored)
        if path is None:
            return facts.summary()
        return facts.of_tensor(*self._place(path))._asdict()

    @checked()
    def describe(self, globs: Sequence[str] = ()) -> dict[str, Any]:
        """Return the facts of `ckstore show --json`; nothing is decoded.

        To the columns of `Store.log` it adds `children` (numbers), `contents` (the files), `metrics_from` (files with
        metrics), `storage`, `coarse` (`settings`), and `tensors`: dtype, shape, storage and error of each that `globs`
        match.

        Examples
        --------
        >>> store["best"].describe()["contents"][0]["kind"]
        'torch-zip'
        """
        from ckstore.reading.storage_facts import Figures, StorageFacts, tensor_object

        paths, forms, deviations, tensors = self.match(globs), self._stored.forms(), self.deviations(), []
        stored = cache(Figures._asdict)
        for path, figures in zip(paths, StorageFacts(self._stored).of_tensors(paths), strict=True):
            off = deviations.get(path)
            error = None if off is None else {"max_abs": off.max_abs, "rms": off.rms, "relative": off.relative}
            tensors.append({**tensor_object(path, *forms[path]), **stored(figures), "error": error})
        return {**self._summary(), "tensors": tensors}

    def _summary(self) -> dict[str, Any]:
        """Return the facts of `describe` without those of tensors."""
        from ckstore.reading.storage_facts import StorageFacts
        from ckstore.table import version_record

        return {
            **version_record(self._stored.row, self.tags),
            "children": [row.number for row in self._stored.repository.catalog.children(self.number)],
            "contents": [
                {"path": entry.path, "kind": layout.kind, "bytes": entry.size, "tensors": len(layout.tensors),
                 "blake3": entry.blake3}
                for entry, layout in zip(self._stored.document.files, self._stored.layout.files, strict=True)
            ],
            "metrics_from": _sources(self._stored.document.facts.get("metrics"), self.metrics),
            "storage": StorageFacts(self._stored).summary(),
            "coarse": self.settings,
        }  # fmt: skip

    @checked()
    def match(self, globs: Sequence[str] = ()) -> list[str]:
        """Return the paths of the tensors that globs match, in the order of the files; all without globs.

        `*` matches any characters, including `/`, and `?` matches one. A glob that matches a path also matches
        everything below it.

        Raises
        ------
        NotFoundError
            No tensor matches; the message names near matches.

        Examples
        --------
        >>> store["best"].match(["*.weight", "*/weight"])
        ['model/weight']
        """
        texts = list(self._stored.numbers)
        if not globs:
            return texts
        from difflib import get_close_matches

        from ckstore.formats.paths import match_texts

        numbers = match_texts(texts, globs)
        if not numbers:
            near = get_close_matches(globs[0], texts, 3, 0.4)
            hint = f"near: {', '.join(near)}" if near else f"see `ckstore ls {self.number}`"
            raise NotFoundError(f"Version {self.number} has no tensor that matches {' or '.join(globs)}; {hint}.")
        return [texts[number] for number in numbers]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.numbers)

    def __len__(self) -> int:
        return len(self._stored.numbers)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and path in self._stored.numbers

    @checked(path=TEXT)
    def __getitem__(self, path: str) -> LazyTensor:
        """Return the tensor at a path, such as `model/h.0.attn.weight`; nothing is read before it is sliced."""
        from ckstore.tensor import LazyTensor

        return LazyTensor(self._stored, path, *self._place(path))

    @checked()
    def select(self, *globs: str) -> dict[str, LazyTensor]:
        """Return the tensors that globs match, by path; see `match`.

        Examples
        --------
        >>> list(store["best"].select("*.weight", "*/weight"))
        ['model/weight']
        """
        return {path: self[path] for path in self.match(globs)}

    @checked(path=TEXT)
    def subtree(self, path: str) -> dict[str, LazyTensor]:
        """Return the tensors below a path, by their names in it; raise `NotFoundError` if there is none.

        Examples
        --------
        >>> store["best"].subtree("model")["weight"].shape
        (256, 128)
        """
        before = f"{path.rstrip('/')}/"
        found = {name.removeprefix(before): self[name] for name in self._stored.numbers if name.startswith(before)}
        if not found:
            raise NotFoundError(f"Version {self.number} has no tensors below {path}; see `ckstore ls`.")
        return found

    def _place(self, path: str) -> tuple[int, Tensor]:
        """Return the file number and the layout of a tensor; raise `NotFoundError` with near matches."""
        with suppress(KeyError):
            return self._stored.place(path)
        from difflib import get_close_matches

        from ckstore.formats.paths import match_texts

        if self._stored.document.dropped and match_texts([path], self._stored.document.dropped):
            raise NotFoundError(
                f"Version {self.number} has dropped {', '.join(self._stored.document.dropped)}, and {path} with it; "
                "choose a version that has it."
            )
        if any(name.startswith(f"{path}/") for name in self._stored.numbers):
            said = f"`version.subtree({path!r})` has them"
            raise NotFoundError(f"Version {self.number} has tensors below {path}: {said}.")
        near = get_close_matches(str(path), self._stored.numbers, 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; see `ckstore ls`."
        raise NotFoundError(f"Version {self.number} has no tensor {path}{hint}")

    @cached_property
    def arrays(self) -> TypedGroup:
        """All tensors as a read-only Zarr group of plain arrays, by path; a read decodes the chunks that it touches.

        Tensors of bfloat16 and float8, which Zarr lacks, become float32 with an attribute `dtype`. Axes are named
        `<name>_dim0` and so on, for ``xarray.open_zarr(version.arrays.store, group="model")``.
        """
        from ckstore.views.groups import version_group

        return version_group(self._stored)

    def _repr_html_(self) -> str:
        from html import escape

        from ckstore.report.sparkline import sparkline
        from ckstore.table import Table

        rows = by_step(
            [
                row
                for row in self._stored.repository.catalog.versions(self.run)
                if not row.superseded or row.number == self.number
            ]
        )
        names = list(self.metrics)
        history = {name: [row.metrics.get(name) for row in rows] for name in names}
        place = next((place for place, row in enumerate(rows) if row.number == self.number), None)
        facts = {
            "version": self.number, "tensors": len(self), "elements": self.elements, "fidelity": self.fidelity,
            "MB": self.original_bytes / 1e6, "stored MB": self.stored_bytes / 1e6, "tags": ", ".join(self.tags),
            **self.metrics,
        }  # fmt: skip
        return f"<p>{escape(self.name)}</p>{Table([facts])._repr_html_()}{sparkline(history, place)}"

    def _unchanged(self, read: Callable[[], Result]) -> Result:
        """Return the result of `read`, which begins again where others thin or encode the version while it reads."""
        while True:
            try:
                return read()
            except ChangedVersionError:
                self._stored = self._stored.present()
                self.__dict__.pop("arrays", None)

    @collection_seldom()
    @checked()
    def state_dict(self, allow: Sequence[type] = (), *, mmap: bool | Literal["checked"] = False) -> Any:
        """Return the version as nested containers of torch tensors, on the CPU; needs torch.

        One file gives the result of `torch.load`, with parameters, conj and neg views and `requires_grad`. Objects of
        well-known types of the standard library, NumPy and torch are restored; other objects become
        `ckstore.formats.Unknown`, and tensors of other subclasses plain tensors. A directory gives a dict by file,
        without files that hold no tensors; a torch.distributed.checkpoint the saved state dict with whole tensors.
        Dropped tensors are absent from dicts, and None in lists.

        Parameters
        ----------
        allow
            Further classes to restore: dataclasses, enumerations, named tuples and classes that pickle by their
            attributes. Their `__new__` and `__setstate__` are called with values of the file; nothing is imported.
            Classes that the program registered with `torch.serialization.add_safe_globals` are restored, too.
        mmap
            Map the tensors of a hot version, as ``torch.load(mmap=True)`` does; written values stay in memory. A plain
            map compares no checksum: damage gives wrong values instead of an `IntegrityError`. `checked` compares all
            checksums once, in threads. Tensors of more than 2^22 elements and encoded versions are read and checked.

        Raises
        ------
        UsageError
            No file holds tensors, an object of an allowed class cannot be restored, `mmap` is invalid, or torch is
            missing.
        IntegrityError
            The version is damaged.

        Examples
        --------
        >>> store["best"].state_dict()["model"]["bias"].shape
        (128,)
        """
        require_torch()
        return self._unchanged(lambda: self._state_dict(allow, mmap=mmap))

    def _state_dict(self, allow: Sequence[type], *, mmap: bool | Literal["checked"]) -> Any:
        from ckstore.reading.sharded import sharded_directories, sharded_files
        from ckstore.reading.state_dict import build, build_sharded

        if not mmap:
            self._stored.prefetch()
        if not self._stored.document.is_directory:
            return build(self._stored, 0, allow, mmap=mmap)
        found: dict[str, Any] = {}
        for directory in sharded_directories(self._stored):
            tree = build_sharded(self._stored, directory, allow)
            found |= {directory: tree} if directory else tree
        sharded = sharded_files(self._stored)
        trees = {
            entry.path: build(self._stored, number, allow, mmap=mmap)
            for number, entry in enumerate(self._stored.document.files)
            if _has_values(self._stored.layout.files[number]) and number not in sharded
        }
        return found | {path: tree for path, tree in trees.items() if tree is not None}

    @checked(state=None)
    def compare(self, state: Any, allow: Sequence[type] = ()) -> StateReport:
        """Compare a state in memory with the version: whether a training was really resumed; needs torch.

        Objects whose content ids agree are not decoded. Tensors are compared bit for bit, other values by equality; an
        optimiser that started empty shows as missing tensors.

        Parameters
        ----------
        state
            The state as it was saved: nested dictionaries, lists and tuples of tensors, arrays and values. An object
            with a method `state_dict`, such as a module or an optimiser, counts as its result. A DTensor is compared as
            far as this process holds it.
        allow
            As for `state_dict`.

        Examples
        --------
        >>> state = store["gpt@300"].state_dict()
        >>> print(store["gpt@300"].compare(state))
        All 2 tensors and 0 values are equal.
        >>> bool(store["gpt@200"].compare(state))
        False
        """
        require_torch()
        from ckstore.reading.live_comparison import compare_state

        return self._unchanged(lambda: compare_state(self._stored, state, allow))

    @checked(base=NAME)
    def patches(self, base: str | int | Version | None = None) -> Iterator[WeightPatch]:
        """Yield the changed elements of each tensor since another version of the store, without one all; needs torch.

        Tensors have their names in the model, whatever shard has them; tensors of equal objects are not read.

        Raises
        ------
        UsageError
            A tensor of the base is missing, or two tensors have one name.

        Examples
        --------
        >>> [(patch.name, patch.values.shape) for patch in store["gpt@200"].patches("gpt@100")]
        [('model/weight', torch.Size([32768]))]
        """
        require_torch()
        from ckstore.reading.weight_patches import patches

        yield from patches(None if base is None else self._other(base), self._stored)

    @checked(base=NAME)
    def write_patch(self, base: str | int | Version, target: str | os.PathLike[str], *, force: bool = False) -> int:
        """Write the changes since another version as a delta directory for inference engines; return its bytes.

        See `ckstore patch`.

        Raises
        ------
        ConflictError
            The target exists without `force`.
        UsageError
            A tensor is new, is missing, or has another form.

        Examples
        --------
        >>> store["gpt@200"].write_patch("gpt@100", "delta") > 0
        True
        """
        from ckstore.reading.weight_patches import write_delta

        return self._unchanged(lambda: write_delta(self._other(base), self._stored, pathlib.Path(target), force=force))

    def _other(self, name: Any) -> StoredVersion:
        """Return another version of the same store."""
        repository = self._stored.repository
        return type(self._stored)(repository, repository.catalog.resolve(name))

    @checked(strip=FLAG)
    def checkout(
        self,
        target: str | os.PathLike[str],
        *,
        format: Literal["original", "safetensors", "pt", "npz"] | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        strip: bool = False,
        force: bool = False,
        progress: Callable[[int], None] | None = None,
        signed_by: str | os.PathLike[str] | None = None,
    ) -> list[str]:
        """Write the version's files as they were ingested, or its tensors in another format.

        Parameters
        ----------
        target
            The file or directory to write. It becomes visible when it is complete.
        format
            `original`: the ingested files byte for byte, of a coarse version with coarse values and matching checksums.
            `safetensors`, `pt`, `npz`: the tensors. By default the format of the target's suffix, and `original` where
            the suffix says nothing else than the version's own.
        include, exclude
            Globs over the paths of tensors; of a directory in its original form, over its files.
        strip
            Write one subtree of tensors under their names in it, as ``load_state_dict`` takes them.
        force
            Overwrite an existing target; an existing directory is replaced as a whole.
        progress
            Called with numbers of processed bytes.
        signed_by
            File with a public key, or certificates of authorities: write nothing but the original files of a version
            that was signed with it.

        Returns
        -------
        list of str
            Paths of the tensors, or of the files of a directory, that were not written.

        Raises
        ------
        ConflictError
            The target exists without `force`.
        NotFoundError
            No tensor or file matches.
        UsageError
            The format of chosen tensors is unknown; or `strip` finds several subtrees, or two tensors of one name; or
            tensors of a signed version are asked for.
        IntegrityError
            The version is damaged, or not signed as it must be.

        Examples
        --------
        >>> store["best"].checkout("best.npz", include=["*/weight"])
        ['model/bias']
        """
        from ckstore.reading.subtree import format_for

        place = pathlib.Path(target)
        form = format_for(self._stored, place, format, globs=bool(include or exclude), strip=strip)
        if form == "original":
            from ckstore.reading.checkout import checkout

            def restored() -> list[str]:
                if signed_by is not None:
                    self.require_signed(signed_by)
                return checkout(self._stored, place, include, exclude, force=force, progress=progress)

            return self._unchanged(restored)
        if signed_by is not None:
            raise UsageError("A signature covers files, not tensors; leave the format out.")
        from ckstore.reading.export import export

        return self._unchanged(
            lambda: export(self._stored, place, form, include, exclude, strip=strip, force=force, progress=progress)
        )

    @checked()
    def require_signed(self, key: str | os.PathLike[str]) -> None:
        """Raise `IntegrityError` unless the files of the version were signed with a key; see `Store.sign`.

        Parameters
        ----------
        key
            PEM file with the public key, or with certificates of authorities; one of them issued the signer's.

        Examples
        --------
        >>> store["best"].require_signed("public.pem")
        Traceback (most recent call last):
        ...
        ckstore.errors.UsageError: The key public.pem cannot be read ...
        """
        from ckstore.reading.signature import require_signed

        require_signed(self._stored, pathlib.Path(key))

    @checked()
    def write(
        self,
        out: BinaryIO,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        signed_by: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the bytes of a file to a binary stream, such as `sys.stdout.buffer`.

        Parameters
        ----------
        out
            The stream; a raw one must block. After an error it has a part of the file.
        include, exclude
            Globs that choose one file of a directory.
        signed_by
            Write nothing but a file that was signed with a key, once all of it has been compared; see `checkout`.

        Raises
        ------
        UsageError
            They do not choose a single file.
        IntegrityError
            The version is damaged, or not signed as it must be.

        Examples
        --------
        >>> with open("best.pt", "wb") as file:
        ...     store["best"].write(file)
        """
        from ckstore.reading.checkout import write_file

        if signed_by is not None:
            self.require_signed(signed_by)
        write_file(self._stored, out, include, exclude, compare_first=signed_by is not None)

    def sha256(self) -> dict[str, str]:
        """Return the SHA-256 of each file as a checkout writes it, by path, without files with dropped tensors.

        Every byte is decoded; `describe` has the BLAKE3 of the files.

        Raises
        ------
        IntegrityError
            The version is damaged.

        Examples
        --------
        >>> list(store["best"].sha256())
        ['state_dict.pt']
        """
        from ckstore.reading.checkout import sha256_of_files

        return self._unchanged(lambda: sha256_of_files(self._stored))

    def opaque(self) -> dict[str, dict[str, str]]:
        """Return the reasons for opaque bytes, by path and name of the part, which is empty for a whole file.

        Examples
        --------
        >>> store["best"].opaque()
        {}
        """
        from ckstore.reading.opaque import opaque_parts

        return opaque_parts(self._stored)

    def fallback(self) -> Version | None:
        """Return the newest sound version before this one in its run, to resume from if this one is damaged.

        Follows parents, and reads all of a version to tell whether it is sound. None if there is no sound one.

        Examples
        --------
        >>> store["gpt@300"].fallback()
        <ckstore.Version 2 gpt@200>
        """
        from ckstore.reading.fallback import before

        return next(filter(Version._is_sound, map(Version, before(self._stored))), None)

    def _is_sound(self) -> bool:
        """Return whether all files can be restored: neither damaged, nor without tensors that the version dropped."""
        from ckstore.reading.fallback import read_all

        try:
            self._unchanged(lambda: read_all(self._stored))
        except (IntegrityError, NotFoundError):
            return False
        return True

    @checked()
    def salvage(
        self, target: str | os.PathLike[str], *, force: bool = False, progress: Callable[[int], None] | None = None
    ) -> SalvageReport:
        """Recover the intact parts of a damaged version.

        Intact files are written as they were ingested; the intact tensors of a damaged file, nested as they were, to a
        file with the suffix `.salvaged.pt`.

        Parameters
        ----------
        target
            The file or directory to write. It becomes visible when it is complete.
        force
            Overwrite an existing target; an existing directory is replaced as a whole.
        progress
            Called with numbers of processed bytes.

        Raises
        ------
        ConflictError
            The target exists without `force`.
        IntegrityError
            Nothing is intact.

        Examples
        --------
        >>> store["best"].salvage("salvaged.pt").files
        ['state_dict.pt']
        """
        from ckstore.reading.salvage import salvage

        return salvage(self._stored, pathlib.Path(target), force=force, progress=progress)


def called(function: Callable[[Version], Result], address: Address, version: tuple[str, int]) -> Result:
    """Call a function with a version, by the address of its store, its id and its number."""
    return function(Version(stored_version(address, *version)))


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping of the catalog; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def _sources(read: Any, metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the file that each metric was read from, unless its value was changed; a store may hold anything."""
    found = {}
    for name, item in read.items() if isinstance(read, dict) else ():
        match item:
            case [value, str(path)] if name in metrics and metrics[name] == value:
                found[name] = path
    return found


def _has_values(layout: FileLayout) -> bool:
    """Return whether a file has values; npz and npy files of opaque arrays have none."""
    return bool(layout.tensors) or layout.kind not in ("opaque", "npy", "npz", "dcp-metadata")
