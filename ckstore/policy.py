"""Fidelity and retention policies."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckstore.errors import IntegrityError, UsageError
from ckstore.storage import schema
from ckstore.storage.schema import items, number, one_of, read_json, text, whole

if TYPE_CHECKING:
    from ckstore.codecs.schemes.dynaquant import DynaQuantSettings

Fidelity = Literal["exact", "coarse"]
Scheme = Literal["lattice", "lc", "dynaquant"]

FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

#: Training resumed from a version of this quality does not notice: `tools/bench/fidelity` prints by how much.
QUALITY = 1.5

#: So many of a run's latest versions stay as they were written: the latest is what training resumes from.
HOT = 1

#: Qualities beyond these say nothing: steps of powers of two do not follow, or a model does not survive.
_FINEST, _COARSEST = 0.125, 64.0


_POLICY = schema.fields(
    {"fidelity": one_of(*FIDELITIES)},
    {
        "hot": whole(), "scheme": one_of(*SCHEMES), "quality": number(), "max_abs_error": number(),
        "max_rel_error": number(),
        "settings": schema.fields(
            {"levels": whole(), "prune": number(), "protect": number(), "metric": text(), "embedding_levels": whole()}
        ),
        "retention": schema.fields(
            {},
            {
                "exact_last": whole(1), "exact_every": whole(1), "exact_best": items(text()), "keep_last": whole(1),
                "keep_every": whole(1), "drop": items(text(1), 1), "whole_last": whole(1),
            },
        ),
    },
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Retention:
    """What becomes of a run's older versions; nothing, unless something is said.

    Versions that have a tag, that another run's version follows, or that are the best, stay as they are. The latest N
    are the N with the highest steps, and the N that were ingested last, which are the same where steps go up.

    Attributes
    ----------
    exact_last
        So many of the latest versions stay exact; older ones become coarse. None leaves all as they are.
    exact_every
        Of the older ones, the first of every so many steps stays exact as well.
    exact_best
        `METRIC:min` or `METRIC:max`: the version with the least or the largest value stays exact as well, and is not
        forgotten.
    keep_last
        So many of the latest versions stay; older ones are forgotten. None forgets none.
    keep_every
        Of the older ones, the first of every so many steps stays as well.
    drop
        Globs over the paths of tensors that versions lose which are not among the latest, but for those that stay
        exact by `exact_every` and `exact_best`.
    whole_last
        So many of the latest versions lose nothing; by default as many as `exact_last`.
    """

    exact_last: int | None = None
    exact_every: int | None = None
    exact_best: tuple[str, ...] = ()
    keep_last: int | None = None
    keep_every: int | None = None
    drop: tuple[str, ...] = ()
    whole_last: int | None = None

    def __post_init__(self) -> None:
        for name in ("exact_last", "exact_every", "keep_last", "keep_every", "whole_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_option(name)} must be 1 or more, not {value}.")
        if (self.whole_last is not None and not self.drop) or "" in self.drop:
            raise UsageError("--whole-last is for versions that lose tensors; name these with --drop GLOB.")
        for name, needs, said in (
            ("drop", "--whole-last N or --exact-last N", self.kept_whole),
            ("exact_every", "--exact-last N", self.kept_whole),
            ("keep_every", "--keep-last N", self.keep_last),
        ):
            if getattr(self, name) and said is None:
                raise UsageError(f"{_option(name)} is for versions that are older than {needs} says; give it.")
        if self.exact_best and not self:
            raise UsageError("--exact-best is for versions that would not stay; give --exact-last or --keep-last.")
        for name in ("exact_last", "whole_last"):
            value = getattr(self, name)
            if value is not None and self.keep_last is not None and value > self.keep_last:
                raise UsageError(
                    f"{_option(name)} {value} is more than --keep-last {self.keep_last} keeps; {_option(name)[2:]} must"
                    " be at most keep-last."
                )
        for best in self.exact_best:
            metric, _, sense = best.rpartition(":")
            if not metric or sense not in ("min", "max"):
                raise UsageError(f"{best!r} says no best version; give a metric and its sense, such as loss:min.")

    def __bool__(self) -> bool:
        return self.exact_last is not None or self.keep_last is not None or bool(self.drop)

    def __str__(self) -> str:
        said = [
            f"{name.replace('_', '-')} {value if isinstance(value, int) else ' '.join(value)}"
            for name, value in self.to_json().items()
        ]
        return ", ".join(said) or "stay"

    @property
    def kept_whole(self) -> int | None:
        """How many of the latest versions lose nothing; None for all."""
        return self.exact_last if self.whole_last is None else self.whole_last

    def to_json(self) -> dict[str, Any]:
        """What is said, by name."""
        said = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in said.items() if value}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Policy:
    """How faithful a version is to be.

    Attributes
    ----------
    fidelity
        `exact`: every bit comes back. `coarse`: no exact layer is written.
    scheme
        Of coarse versions: `lattice` (the default), or one of the published ones, `lc` and `dynaquant`.
    quality
        Of coarse versions: the step in units of what training moved since the parent; smaller is finer.
    max_abs_error, max_rel_error
        Of coarse versions, instead of a quality: no element differs by more than this, or by more than this part of
        its tensor's root mean square.
    settings
        Of the scheme `dynaquant`, instead of a quality.
    hot
        How many of a run's latest versions stay as they were written, raw, until `compact` encodes them; with 0 all
        are encoded at once. None leaves it at `HOT`.
    retention
        What becomes of a run's older versions.
    """

    fidelity: Fidelity = "exact"
    scheme: Scheme = "lattice"
    quality: float = QUALITY
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    settings: DynaQuantSettings | None = None
    hot: int | None = None
    retention: Retention = field(default_factory=Retention)

    def __post_init__(self) -> None:
        if self.fidelity not in FIDELITIES:
            raise UsageError(f"There is no fidelity {self.fidelity}; choose one of {', '.join(FIDELITIES)}.")
        if self.scheme not in SCHEMES:
            raise UsageError(f"There is no scheme {self.scheme}; choose one of {', '.join(SCHEMES)}.")
        if not _FINEST <= self.quality <= _COARSEST:
            raise UsageError(f"Quality must be between {_FINEST} and {_COARSEST:g}, not {self.quality}.")
        if self.hot is not None and self.hot < 0:
            raise UsageError(f"The number of hot versions must be 0 or more, not {self.hot}.")
        for bound in (self.max_abs_error, self.max_rel_error):
            if bound is not None and not 0 < bound < float("inf"):
                raise UsageError(f"An error bound must be above 0, not {bound}.")
        if self.is_bounded and self.scheme != "lattice":
            raise UsageError(f"The scheme {self.scheme} knows no error bounds; leave it out, or the bound.")
        if self.settings is not None and self.scheme != "dynaquant":
            raise UsageError(f"The scheme {self.scheme} has no such settings; choose dynaquant, or leave them out.")

    @classmethod
    def asked(
        cls,
        fidelity: Fidelity | None = None,
        scheme: Scheme | None = None,
        quality: float | None = None,
        max_abs_error: float | None = None,
        max_rel_error: float | None = None,
    ) -> Policy | None:
        """What follows from what was said: coarse where anything is said of coarse versions; None for nothing.

        Raises
        ------
        UsageError
            Exact versions are asked for, and something is said of coarse ones.
        """
        quantised = [value for value in (scheme, quality, max_abs_error, max_rel_error) if value is not None]
        if fidelity is None and not quantised:
            return None
        if fidelity == "exact" and quantised:
            raise UsageError("Schemes, qualities and error bounds are for coarse versions; leave fidelity exact out.")
        return cls(
            fidelity or "coarse", scheme or "lattice", QUALITY if quality is None else quality,
            max_abs_error, max_rel_error,
        )  # fmt: skip

    def to_text(self) -> str:
        """As the catalog and the log keep it."""
        said: dict[str, Any] = {"fidelity": self.fidelity}
        if self.is_coarse:
            own = self.parameters() if self.settings is None else {"settings": self.parameters()}
            said |= {"scheme": self.scheme, **own}
        if self.hot is not None:
            said["hot"] = self.hot
        if self.retention:
            said["retention"] = self.retention.to_json()
        return json.dumps(said, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Policy:
        """The inverse of `to_text`; raises `IntegrityError` for what it could not have written."""
        try:
            said = read_json(text, _POLICY)
            if "settings" in said:
                from ckstore.codecs.schemes.dynaquant import DynaQuantSettings

                said["settings"] = DynaQuantSettings(**said["settings"])
            if "retention" in said:
                kept = said["retention"]
                lists = {name: tuple(kept.get(name, ())) for name in ("exact_best", "drop")}
                said["retention"] = Retention(**{**kept, **lists})
            return cls(**said)
        except (TypeError, ValueError, UsageError) as error:
            raise IntegrityError(
                f"The catalog's policy {text!r} is damaged ({error}); set it with `ckstore policy`."
            ) from error

    def __str__(self) -> str:
        kept = "" if self.hot is None else f", {self.hot} hot"
        if not self.is_coarse:
            return self.fidelity + kept
        plain = {name: f"{value:g}" if isinstance(value, float) else value for name, value in self.parameters().items()}
        said = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in plain.items())
        return f"{self.fidelity}, scheme {self.scheme}, {said}{kept}"

    @property
    def kept_hot(self) -> int:
        """How many of a run's latest versions stay hot."""
        return HOT if self.hot is None else self.hot

    @property
    def is_coarse(self) -> bool:
        """Whether exact layers are left out."""
        return self.fidelity == "coarse"

    @property
    def is_bounded(self) -> bool:
        """Whether an error bound takes the place of the quality."""
        return self.max_abs_error is not None or self.max_rel_error is not None

    def parameters(self) -> dict[str, Any]:
        """What a coarse version says of itself."""
        if self.is_bounded:
            bounds = {"max_abs_error": self.max_abs_error, "max_rel_error": self.max_rel_error}
            return {name: bound for name, bound in bounds.items() if bound is not None}
        if self.settings is not None:
            return asdict(self.settings)
        return {"quality": self.quality}

    @property
    def lc_bits(self) -> int:
        """Bits of LC-Checkpoint's codebooks: 3, as in its paper, at the default quality."""
        return min(max(round(4.5 - self.quality), 1), 8)

    def dynaquant(self, *, known: bool) -> DynaQuantSettings:
        """Inshrinkerator's setting: the one of this quality on the diagonal of its search space.

        `known` says that there are sensitivities to prune by.
        """
        from ckstore.codecs.schemes.dynaquant import EMBEDDING_LEVELS, LEVELS, PROTECT, PRUNE, DynaQuantSettings

        if self.settings is not None:
            return self.settings
        place = min(max(round(self.quality) - 1, 0), len(LEVELS) - 1)
        protect, embedding_levels = (axis[place * len(axis) // len(LEVELS)] for axis in (PROTECT, EMBEDDING_LEVELS))
        metric = "sensitivity" if known else "magnitude"
        return DynaQuantSettings(LEVELS[place], PRUNE[place], protect, metric, int(embedding_levels))
