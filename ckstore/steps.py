"""Steps: one grammar of numbers for names, contents and arguments.

A number has digits, perhaps in groups of three (`1_000`, `1,000`), and perhaps an exponent (`1e5`) or a suffix (`10k`,
`1M`). A step is a whole number of at most 64 bits: `3.0` and `2.5k` are steps, `2.5` is none. Dates, versions (`-v1`),
ids, metrics (`ppl=12`) and the numbers of shards in names are no steps. Nor are the sizes and numbers in the names of
models (`conv2d`, `float16`, `resnet50`, `gpt-2`, `gpt2-124M`), unless they tell the names of a series apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, Protocol, TypeVar

from ckstore.errors import UsageError

#: Keys of steps in contents, in order.
STEP_KEYS = ("global_step", "step", "iteration", "iter")
EPOCH_KEY = "epoch"

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
#: Longest text of a step. Names have any number of digits; Python converts some thousands.
_LONGEST, _MOST_DIGITS = 40, 1000
_SUFFIXES: Mapping[str, int] = {"k": 1000, "K": 1000, "M": 1_000_000}

# Patterns are texts: to compile all takes as long as a small program takes to start.
#: Words for steps in names, in order; `_` separates groups of digits only after the first three.
_WORDS = ("step", "iter(?:ation)?", "checkpoint|ckpt", "epoch")
_ANY_WORD = rf"(?:global[-_ ]?)?(?:{'|'.join(_WORDS)})s?"
_PLAIN = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])|[0-9]+)"
_GROUPED = rf"(?:[1-9][0-9]{{0,2}}(?:_[0-9]{{3}})+(?!_?[0-9])|{_PLAIN})"
_SCALE = rf"(?:[eE][-+]?[0-9]{{1,2}}(?!\.?[0-9])|[kKM])(?:(?![A-Za-z0-9])|(?=(?i:{_ANY_WORD})))"
_REST = rf"(?:\.[0-9]+(?!\.?[0-9]))?(?:{_SCALE})?"
_NUMBER = rf"({_PLAIN}{_REST})"
_DECIMAL = r"[0-9,]+\.[0-9]+"
#: For the order of names, in which points separate numbers.
_ORDERED = rf"({_PLAIN}(?:(?:\.[0-9]+)?{_SCALE})?)"
_ARGUMENT = rf"([-+]?)({_GROUPED}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,2}}|[kKM])?)"
_AFTER = tuple(
    rf"(?<![A-Za-z])(?i:(?:{word})s?)(?:[-_=. ]*[_=])?(-?)[-_=. ]*({digits}{_REST})"
    for word, digits in zip(_WORDS, (_GROUPED, _GROUPED, _GROUPED, _PLAIN), strict=True)
)
_BEFORE = tuple(rf"({_PLAIN}{_REST})[-_ ]?(?i:(?:{word})s?(?![a-z]))" for word in _WORDS)
#: Digits joined by `_` after a word: groups of one number, or several numbers.
_JOINED = rf"(?<![A-Za-z])(?i:{_ANY_WORD})[-_=. ]*([0-9]+(?:_[0-9]+)+)"
_GROUPS = r"[1-9][0-9]{0,2}(?:_[0-9]{3})+"
_WORD = rf"(?i:\b{_ANY_WORD}\b)"

_DURATION = r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhdw])"
_UNITS: Mapping[str, int] = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_YEAR, _MONTH, _DAY = r"(?:19|20)[0-9]{2}", r"(?:0[1-9]|1[0-2])", r"(?:0[1-9]|[12][0-9]|3[01])"
_HOUR, _SIXTY = r"(?:[01][0-9]|2[0-3])", r"[0-5][0-9]"
_TIME = rf"{_HOUR}(?:{_SIXTY}{_SIXTY}|[-_:.h]{_SIXTY}(?:[-_:.m]{_SIXTY}s?)?)|(?<=[Tt]){_HOUR}{_SIXTY}"
_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
#: Numbers in names that are no steps: dates with times, versions, numbers with several points, ids, shards.
_NO_STEPS = (
    rf"(?<![0-9])(?:{_YEAR}([-_.]){_MONTH}\1{_DAY}|{_DAY}([-_.]){_MONTH}\2{_YEAR}|(?<![a-z]){_YEAR}{_MONTH}{_DAY}"
    rf"|(?<![A-Za-z])(?:{_MONTHS})[-_]?{_DAY})(?:[-_ Tt]+(?:{_TIME})|[Tt]{_HOUR}{_SIXTY})?(?![0-9])"
    r"|(?<![A-Za-z])[vV](?:er(?:sion)?[-_. ]?)?[0-9]+(?:\.[0-9]+)*(?![A-Za-z0-9])"
    r"|(?<![0-9.])[0-9]+(?:\.[0-9]+){2,}(?![0-9])"
    r"|(?<![0-9A-Za-z])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9A-Za-z])"
    r"|(?<![0-9A-Za-z])(?=[0-9]*[a-f])(?=[a-f]*[0-9])(?![0-9]+e[0-9]+(?![0-9a-f]))[0-9a-f]{7,64}(?![0-9A-Za-z])"
    r"|-[0-9]+-of-[0-9]+$"
)
#: Names of metrics, at the end of longer ones, and their values in names.
METRIC = (
    r"(?i:loss|acc|accuracy|perplexity|ppl|f1|bleu|rouge\w{0,3}|au?roc|auc|m?ap|m?iou|fid|psnr|ssim|wer|cer|r?mse"
    r"|mae|nll|error|err|score|reward|metric)(?:[@_-]?(?i:top)?[_-]?[0-9]+)?"
)
_VALUES = rf"(?<![A-Za-z0-9]){METRIC}=-?[0-9]*[.,]?[0-9]+(?:[eE][-+]?[0-9]+)?(?![A-Za-z0-9])"
_FILLER = "~"


class Stepped(Protocol):
    """Has the step and the number of a version."""

    @property
    def step(self) -> int | None:
        """The step, None without one."""

    @property
    def number(self) -> int:
        """The number."""


V = TypeVar("V", bound=Stepped)


@dataclass(frozen=True, slots=True)
class NamedStep:
    """The step in a name, None without one; then `unused` is a number in its place that is no step, else empty."""

    step: int | None
    unused: str = ""


def plain_number(value: Any) -> Any:
    """Return the number of a NumPy scalar, or of an array or tensor without axes; any other value unchanged.

    Examples
    --------
    >>> import numpy as np
    >>> plain_number(np.float32(0.5)), plain_number(np.array(3)), plain_number("3")
    (0.5, 3, '3')
    """
    if isinstance(value, bool | int | float | str) and type(value).__module__ == "builtins":
        return value
    shape, item = getattr(value, "shape", None), getattr(value, "item", None)
    if not callable(item) or isinstance(value, type) or not isinstance(shape, Sequence) or len(shape):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):  # A tensor without data.
        return value


def step_of_value(value: Any) -> int | None:
    """Return the step that a value means: a whole number, or a text of one; None for any other value.

    Examples
    --------
    >>> step_of_value(3.0), step_of_value("1,000"), step_of_value(2.5), step_of_value(True)
    (3, 1000, None, None)
    """
    value = plain_number(value)
    if isinstance(value, str):
        return step_of_text(value)
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() and _LOWEST <= value <= _HIGHEST else None
    if not isinstance(value, int):
        try:
            value = value.__index__()
        except (AttributeError, TypeError, ValueError):
            return None
    return int(value) if _LOWEST <= value <= _HIGHEST else None


def step_of_text(text: str) -> int | None:
    """Return the step that a text means as a whole; None for any other text.

    Examples
    --------
    >>> step_of_text("10k"), step_of_text("1e5"), step_of_text("-3"), step_of_text("2.5"), step_of_text("v1")
    (10000, 100000, -3, None, None)
    """
    found = re.fullmatch(_ARGUMENT, text.strip())
    return None if found is None else _step(*found.groups())


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as `2d`, `36h` or `1w`; raise `UsageError` for another text.

    Examples
    --------
    >>> seconds_of("2d"), seconds_of("36h"), seconds_of("1.5m")
    (172800.0, 129600.0, 90.0)
    """
    found = re.fullmatch(_DURATION, text.strip())
    if found is None:
        raise UsageError(f"{text!r} is not a duration such as 36h, 2d or 1w (s, m, h, d, w).")
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, slots=True)
class Every:
    """A period whose first version is kept, in steps or seconds: of all, or of the last `count` that have a version."""

    size: float
    is_time: bool
    count: int | None = None


def periods_of(value: int | str) -> list[Every]:
    """Return periods such as `200` (steps), `1d`, or `1h:24,1d:7` (the last 24 hours and 7 days that have a version).

    Raise `UsageError` for another text.

    Examples
    --------
    >>> periods_of("1h:24,1d")
    [Every(size=3600.0, is_time=True, count=24), Every(size=86400.0, is_time=True, count=None)]
    """
    found = []
    for part in str(value).split(","):
        text, separator, number = part.strip().partition(":")
        count = step_of_text(number) if separator else None
        steps = step_of_text(text)
        size = seconds_of(text) if steps is None else steps
        if (separator and (count is None or count < 1)) or size <= 0:
            raise UsageError(f"{part!r} keeps nothing; give steps or a duration, as in 200, 1d or 1d:7.")
        found.append(Every(size, steps is None, count))
    return found


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or a text that begins like one."""
    value = plain_number(value)
    if isinstance(value, str):
        return re.match(r"\s*[-+]?[0-9]", value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def named_step(name: str) -> int | None:
    """Return the step after a word such as `step`, `iter`, `checkpoint` or `epoch` in the name of a file or directory.

    Examples
    --------
    >>> named_step("epoch=70-step=4331.ckpt"), named_step("ckpt-1e5"), named_step("checkpoint-2024-05-01")
    (4331, 100000, None)
    """
    return _after_word(_blank(name), _AFTER).step


def step_of_name(name: str) -> NamedStep:
    """Return the step in the name of a file or directory.

    It is the number after `step`, else after `iter`, `checkpoint` or `epoch`, else before one of these words, else the
    last whole number of the name without its endings. A number right after a letter, one digit after a letter and a
    hyphen, and millions after a word and a hyphen belong to the name of a model.

    Examples
    --------
    >>> [step_of_name(name).step for name in ("seed1_step1000.pth", "weights.03-1.26.h5", "10k.pt", "gpt-2.pt")]
    [1000, 3, 10000, None]
    """
    return _step_of(_blank(name), _AFTER)


def steps_of_names(names: Sequence[str]) -> list[NamedStep]:
    """Return the step in each of several names: the differing number, if they differ only in numbers.

    Of several such numbers it is the one that `step_of_name` returns, else the last one. Names that differ otherwise
    are treated one by one.

    Examples
    --------
    >>> names = ["checkpoint_50sims_1.pth.tar", "checkpoint_50sims_100.pth.tar"]
    >>> [found.step for found in steps_of_names(names)]
    [1, 100]
    """
    plain = [_blank(name) for name in names]
    joined = [digits for name in plain for digits in re.findall(_JOINED, name)]
    # `4_7` next to `4_100`: the latter is two numbers, too.
    is_grouped = all(re.fullmatch(_GROUPS, digits) for digits in joined)
    alone = [_step_of(name, _AFTER if is_grouped else _AFTER_PLAIN) for name in plain]
    if len(names) == 1 or differ([found.step for found in alone]):
        return alone
    parts = [re.split(_NUMBER, name) for name in plain]
    if len({tuple(part[::2]) for part in parts}) > 1:
        return alone
    for column in reversed(list(zip(*(part[1::2] for part in parts), strict=True))):
        steps = [None if re.fullmatch(_DECIMAL, text) else _step("", text) for text in column]
        if None not in steps and differ(steps):
            return [NamedStep(step) for step in steps]
    return alone


def differ(steps: Sequence[int | None]) -> bool:
    """Return whether there are steps, and they are distinct."""
    known = [step for step in steps if step is not None]
    return bool(known) and len(set(known)) == len(known)


def by_step(versions: Sequence[V]) -> list[V]:
    """Return the versions of a run in order of step; in order of number if some have no step."""
    has_steps = all(version.step is not None for version in versions)
    return sorted(versions, key=lambda version: ((version.step or 0) if has_steps else 0, version.number))


def without_numbers(name: str) -> str:
    """Return a name with # for each number, date and version before its endings: a series has the same rest.

    Examples
    --------
    >>> without_numbers("ckpt-900.h5"), without_numbers("ckpt-1e5.h5")
    ('ckpt-#.h5', 'ckpt-#.h5')
    """
    stem = _stem(name)
    return re.sub(_NUMBER, "#", re.sub(_NO_STEPS, "#", stem)) + name[len(stem) :]


def without_words(name: str) -> str:
    """Return a name without its words for steps."""
    return re.sub(_WORD, " ", name)


def natural(name: str) -> list[str | Fraction]:
    """Return the sort key of a name that puts `step9` before `step10`, and `10k` before `1e5`.

    Examples
    --------
    >>> sorted(["step1e5", "step10k", "step9", "a"], key=natural)
    ['a', 'step9', 'step10k', 'step1e5']
    """
    return [_value(part) if index % 2 else part for index, part in enumerate(re.split(_ORDERED, name))]


_AFTER_PLAIN = tuple(pattern.replace(_GROUPED, _PLAIN) for pattern in _AFTER)


def _step_of(plain: str, after: Sequence[str]) -> NamedStep:
    """Return the step in a name without endings."""
    found = _after_word(plain, after)
    if found.step is not None:
        return found
    for pattern in _BEFORE:
        if texts := re.findall(pattern, plain):
            step = _step("", texts[-1])
            if step is not None:
                return NamedStep(step)
    wrong = found.unused
    for match in reversed(list(re.finditer(_NUMBER, plain))):
        text = match[1]
        if _goes_on(plain, match) or re.fullmatch(_DECIMAL, text) or text == wrong.removeprefix("-"):
            continue
        if _is_of_a_model(plain[: match.start()], text):
            continue
        step = _step("", text)
        if step is not None:
            return NamedStep(step)
        wrong = wrong or ("" if "e" in text.lower() else text)
    if not wrong:  # `ckpt1000final` has no other number.
        for pattern in after:
            if texts := [match[2] for match in re.finditer(pattern, plain)]:
                return NamedStep(_step("", texts[-1]))
    return NamedStep(None, wrong)


def _after_word(plain: str, after: Sequence[str]) -> NamedStep:
    """Return the last number after the first word that has one."""
    wrong = ""
    for pattern in after:
        found = [match for match in re.finditer(pattern, plain) if not _goes_on(plain, match)]
        if found:
            sign, text = found[-1].groups()
            is_signed = sign and found[-1].start(1) and plain[found[-1].start(1) - 1] in "=_"
            step = _step("-" if is_signed else "", text)
            if step is not None and step >= 0:
                return NamedStep(step)
            wrong = wrong or f"{'-' if is_signed else ''}{text}"
    return NamedStep(None, wrong)


def _is_of_a_model(before: str, number: str) -> bool:
    """Return whether a number belongs to the word before it, as in `resnet50`, `gpt-2` and `gpt2-124M`."""
    if before[-1:] == "-" and number.endswith("M"):
        return re.search(r"[^\W\d_][^\W_]*-$", before) is not None
    return before[-1:].isalpha() or (len(number) == 1 and before[-1:] == "-" and before[-2:-1].isalpha())


def _goes_on(plain: str, match: re.Match[str]) -> bool:
    """Return whether a number is the beginning of a word, as in `50sims` and `7b`."""
    rest = plain[match.end() :]
    return rest[:1].isalpha() and re.match(rf"(?i:{_ANY_WORD})(?![a-z])", rest) is None


def _blank(name: str) -> str:
    """Return a name without its endings, and with a filler for the numbers that are no steps."""
    return re.sub(f"{_NO_STEPS}|{_VALUES}", _FILLER, _stem(PurePosixPath(name.rstrip("/")).name))


def _stem(name: str) -> str:
    """Return a name without its endings."""
    while True:
        cut = name.rpartition(".")
        # An ending has a letter: `model.12` keeps its number.
        if not cut[0] or not cut[2][:1].isalpha() or len(cut[2]) > 12 or not cut[2].isalnum():
            return name
        name = cut[0]


def _step(sign: str, text: str) -> int | None:
    """Return a step of its sign and number; None for one that is not whole or has more than 64 bits."""
    value = _value(text)
    step = value.numerator * (-1 if sign == "-" else 1)
    return step if value.denominator == 1 and len(text) <= _LONGEST and _LOWEST <= step <= _HIGHEST else None


def _value(text: str) -> Fraction:
    plain = text.replace(",", "").replace("_", "")
    scale = _SUFFIXES.get(plain[-1], 1)
    return Fraction(plain.rstrip("kKM")[:_MOST_DIGITS]) * scale
