"""Fidelity and retention policies."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from msgspec import Meta

from ckstore.codecs.schemes import LATTICE, OWN, scheme_of
from ckstore.errors import FormatVersionError, IntegrityError, UsageError
from ckstore.runtime.arguments import FLOAT, TEXT, TEXTS, WHOLE, plain_fields
from ckstore.steps import periods_of, seconds_of
from ckstore.storage.schema import LIMIT, Number, Plain, Positive, Text, Whole, Word, check, decode
from ckstore.storage.schema import fields as typed

if TYPE_CHECKING:
    from ckstore.codecs.schemes.dynaquant import DynaQuantSettings

Fidelity = Literal["exact", "coarse"]

FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)
SCHEMES = (LATTICE, *OWN)

#: Training resumed from a version of this quality shows no difference: `tools/bench/schemes --only coarse` measures it.
QUALITY = 1.5

#: Latest versions of a run that stay unencoded: training resumes from the latest.
HOT = 1

#: Qualities beyond these are useless: steps of powers of two do not follow, or a model does not survive.
_FINEST, _COARSEST = 0.125, 64.0

_SETTINGS = {"levels": Whole, "prune": Number, "protect": Number, "metric": Text, "embedding_levels": Whole}
_RETENTION = {
    "exact_last": Positive, "exact_every": Positive, "exact_best": list[Text], "keep_last": Positive | Word,
    "keep_every": Positive | Word, "drop": Annotated[list[Word], Meta(min_length=1)], "whole_last": Positive,
    "max_bytes": Positive,
}  # fmt: skip
_POLICY = typed(
    {"fidelity": Fidelity},
    {
        "hot": Whole, "scheme": Word, "quality": Number, "max_abs_error": Number, "max_rel_error": Number,
        "settings": typed(_SETTINGS), "retention": typed({}, _RETENTION),
    },
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention of a run's older versions; by default they all stay.

    Tagged versions, versions that another run continues, and the best stay unchanged. The latest N are the N with the
    highest steps and the N that were ingested last; superseded versions are among them only if the run has fewer
    others, and are never the best or the first of N steps.

    Attributes
    ----------
    exact_last
        Keep the latest N versions exact; older ones become coarse. None keeps all exact.
    exact_every
        Also keep the first older version of every N steps exact.
    exact_best
        `METRIC:min` or `METRIC:max`: keep the version with the smallest or largest value, and keep it exact.
    keep_last
        Keep the latest N versions, or those of a time such as `30d` before the run's last ingest; older ones are
        forgotten. None keeps all.
    keep_every
        Also keep the first older version of every N steps, or of periods: `1d`, or `1h:24,1d:7` for the last 24 hours
        and 7 days that have a version.
    drop
        Globs over tensor paths: older versions lose matching tensors, unless `exact_every` or `exact_best` keeps them
        exact.
    whole_last
        The latest N versions lose no tensors; by default `exact_last`.
    max_bytes
        In the policy of the store: while its packs take more bytes, forget the oldest version of any run, but no run's
        latest. Forgotten versions that `undo` could bring back go first.

    Examples
    --------
    >>> str(Retention(exact_last=3, exact_best=("val_loss:min",), keep_last="30d"))
    'exact-last 3, exact-best val_loss:min, keep-last 30d'
    """

    exact_last: int | None = None
    exact_every: int | None = None
    exact_best: tuple[str, ...] = ()
    keep_last: int | str | None = None
    keep_every: int | str | None = None
    drop: tuple[str, ...] = ()
    whole_last: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        plain_fields(
            self, exact_last=WHOLE, exact_every=WHOLE, whole_last=WHOLE, max_bytes=WHOLE, exact_best=TEXTS, drop=TEXTS
        )
        for name in ("exact_last", "exact_every", "keep_last", "keep_every", "whole_last", "max_bytes"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise UsageError(f"`{name}` must be 1 or more, not {value}.")
        if isinstance(self.keep_last, str):
            seconds_of(self.keep_last)
        if self.keep_every is not None:
            periods_of(self.keep_every)
        if (self.whole_last is not None and not self.drop) or "" in self.drop:
            raise UsageError("`whole_last` requires `drop`, which names the tensors to drop.")
        for name, needs, said in (
            ("drop", "`whole_last` or `exact_last`", self.kept_whole),
            ("exact_every", "`exact_last`", self.kept_whole),
            ("keep_every", "`keep_last`", self.keep_last),
        ):
            if getattr(self, name) and said is None:
                raise UsageError(f"`{name}` requires {needs}.")
        if self.exact_best and not self:
            raise UsageError("`exact_best` requires `exact_last` or `keep_last`.")
        for name in ("exact_last", "whole_last"):
            value = getattr(self, name)
            if value is not None and isinstance(self.keep_last, int) and value > self.keep_last:
                raise UsageError(f"`{name}` {value} must be at most `keep_last` {self.keep_last}.")
        for best in self.exact_best:
            metric, _, sense = best.rpartition(":")
            if not metric or sense not in ("min", "max"):
                raise UsageError(
                    f"{best!r} does not say whether its lowest or highest values are best; give one such as loss:min."
                )

    def __bool__(self) -> bool:
        return any(said is not None for said in (self.exact_last, self.keep_last, self.max_bytes)) or bool(self.drop)

    def __str__(self) -> str:
        said = [
            f"{name.replace('_', '-')} {' '.join(value) if isinstance(value, tuple) else value}"
            for name, value in self.to_json().items()
        ]
        return ", ".join(said) or "stay"

    @property
    def kept_whole(self) -> int | None:
        """The number of latest versions that lose no tensors; None for all."""
        return self.exact_last if self.whole_last is None else self.whole_last

    def to_json(self) -> dict[str, Any]:
        """Return the settings that differ from the default, by name."""
        said = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in said.items() if value}


def _retention(value: Any) -> Retention:
    if not isinstance(value, Retention):
        raise TypeError
    return value


def _settings(value: Any) -> DynaQuantSettings:
    from ckstore.codecs.schemes.dynaquant import DynaQuantSettings

    if not isinstance(value, DynaQuantSettings):
        raise TypeError
    return value


@dataclass(frozen=True, slots=True)
class Policy:
    """The fidelity of a version, and the retention of its run.

    Attributes
    ----------
    fidelity
        `exact`: every bit is restored. `coarse`: weights and moments are rounded.
    scheme
        For coarse versions: `lattice`, the published `lc` or `dynaquant`, `factors` of a fine-tune, or one of another
        package.
    quality
        For coarse versions: the step in units of the change since the parent; smaller is finer.
    max_abs_error, max_rel_error
        Instead of a quality: the largest error of an element, absolute or as a fraction of its tensor's root mean
        square.
    settings
        Instead of a quality, for `dynaquant`.
    hot
        Keep the latest N versions of a run unencoded; 0 encodes all at once. By default 1.
    retention
        Retention of older versions.

    Examples
    --------
    >>> policy = Policy("coarse", quality=1.0, hot=0)
    >>> store.ingest({"weight": np.random.randn(300, 300)}, run="toy", policy=policy).version.fidelity
    'coarse'
    """

    fidelity: Fidelity = "exact"
    scheme: str = LATTICE
    quality: float = QUALITY
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    settings: DynaQuantSettings | None = None
    hot: int | None = None
    retention: Retention = field(default_factory=Retention)

    def __post_init__(self) -> None:
        own = {"retention": (_retention, "a ckstore.Retention"), "settings": (_settings, "`DynaQuantSettings`")}
        plain_fields(self, fidelity=TEXT, scheme=TEXT, quality=FLOAT, max_abs_error=FLOAT, max_rel_error=FLOAT, **own)
        if self.fidelity not in FIDELITIES:
            raise UsageError(f"Unknown fidelity {self.fidelity}; choose one of {', '.join(FIDELITIES)}.")
        if self.scheme not in SCHEMES:
            scheme_of(self.scheme)
        if not _FINEST <= self.quality <= _COARSEST:
            raise UsageError(f"Quality must be between {_FINEST} and {_COARSEST:g}, not {self.quality}.")
        if self.hot is not None and not 0 <= self.hot < LIMIT:
            raise UsageError(f"The number of hot versions must be 0 or more, not {self.hot}.")
        for bound in (self.max_abs_error, self.max_rel_error):
            if bound is not None and not 0 < bound < float("inf"):
                raise UsageError(f"An error bound must be above 0, not {bound}.")
        if self.is_bounded and self.scheme != LATTICE:
            raise UsageError(f"The scheme {self.scheme} does not support error bounds; leave one of them out.")
        if self.settings is not None and self.scheme != "dynaquant":
            raise UsageError(f"The scheme {self.scheme} does not take settings; choose dynaquant, or leave them out.")

    def to_text(self) -> str:
        """Return the policy as stored in the catalog and the log.

        Examples
        --------
        >>> Policy.from_text(Policy("coarse").to_text()) == Policy("coarse")
        True
        """
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
        """Invert `to_text`; raise `IntegrityError` for a damaged text, `FormatVersionError` for an unknown option."""
        try:
            said = decode(text, Plain)
            check(said, _POLICY)
            if "settings" in said:
                from ckstore.codecs.schemes.dynaquant import DynaQuantSettings

                said["settings"] = DynaQuantSettings(**said["settings"])
            if "retention" in said:
                kept = said["retention"]
                lists = {name: tuple(kept.get(name, ())) for name in ("exact_best", "drop")}
                said["retention"] = Retention(**{**kept, **lists})
            # The package of a scheme is needed to write versions, not to open the store.
            foreign = said.pop("scheme") if said.get("scheme", LATTICE) not in SCHEMES else LATTICE
            policy = cls(**said)
            if foreign != LATTICE:
                object.__setattr__(policy, "scheme", foreign)
            return policy
        except TypeError as error:  # An unexpected argument: the schema has checked the known ones.
            raise FormatVersionError(
                f"The policy {text!r} has an option that this ckstore does not know; install a later ckstore."
            ) from error
        except (ValueError, UsageError) as error:
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
        """The number of a run's latest versions that stay hot."""
        return HOT if self.hot is None else self.hot

    @property
    def is_coarse(self) -> bool:
        """Whether weights and moments are rounded."""
        return self.fidelity == "coarse"

    @property
    def is_bounded(self) -> bool:
        """Whether an error bound takes the place of the quality."""
        return self.max_abs_error is not None or self.max_rel_error is not None

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that a coarse version records."""
        if self.is_bounded:
            bounds = {"max_abs_error": self.max_abs_error, "max_rel_error": self.max_rel_error}
            return {name: bound for name, bound in bounds.items() if bound is not None}
        if self.settings is not None:
            return asdict(self.settings)
        return {"quality": self.quality}
