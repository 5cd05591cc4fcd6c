"""Options of several verbs: the options of an ingest, the fidelity of versions, and the selection of versions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from click.types import IntParamType, StringParamType

from ckstore.cli.output import NAN
from ckstore.cli.verb import RunName, VersionName, option
from ckstore.errors import UsageError
from ckstore.policy import FIDELITIES, QUALITY, SCHEMES, Policy
from ckstore.steps import periods_of, seconds_of, step_of_value

if TYPE_CHECKING:
    from ckstore.writing.request import IngestOptions
    from ckstore.writing.tuning import Search

Decorator = Callable[[Callable[..., Any]], Any]


def with_all(*options: Decorator) -> Decorator:
    """Return the decorator that adds arguments and options to a verb, in this order."""

    def added(function: Callable[..., Any]) -> Any:
        for add in reversed(options):
            function = add(function)
        return function

    return added


class _SchemeName(StringParamType):
    """The name of a scheme; the shell completes ours."""

    name = "scheme"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names with this prefix."""
        return [CompletionItem(name) for name in SCHEMES if name.startswith(incomplete)]


class _Step(IntParamType):
    """A step: `400`, `1_000`, `10k`, `1e5`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        step = step_of_value(value)
        if step is None:
            self.fail(f"{value!r} is not a step: a whole number of at most 64 bits.", param, ctx)
        return step


class Last(StringParamType):
    """A number of versions, or a duration."""

    name = "number or duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the text of a valid duration."""
        number = step_of_value(value)
        try:
            if number is None:
                seconds_of(value)
        except UsageError as error:
            self.fail(str(error).rstrip("."), param, ctx)
        if number is not None and number < 1:
            self.fail(f"{value} keeps nothing; give 1 or more", param, ctx)
        return value if number is None else number


class Size(StringParamType):
    """A number of bytes, perhaps with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number of bytes."""
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?) ?([kMGT]?)(i?)B?", str(value))
        if match is None:
            self.fail(f"{value} is no size; give one such as 500MB or 10GB", param, ctx)
        return round(float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " "))


class Periods(StringParamType):
    """A number of steps, or periods of time."""

    name = "steps or durations"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the text of valid periods."""
        try:
            periods_of(value)
        except UsageError as error:
            self.fail(str(error).rstrip("."), param, ctx)
        number = step_of_value(value)
        return value if number is None else number


STEP_SOURCES = ("name", "content", "order")

#: The options of fidelity; `policy_of` takes them.
policy_options = with_all(
    option(
        "--fidelity",
        "Store bit-exactly (lossless), or quantise floats (lossy).  [default: see `ckstore policy`]",
        type=click.Choice(FIDELITIES),
    ),
    option(
        "--scheme",
        "Scheme of coarse versions: lattice, lc, dynaquant, factors, or another package's.  [default: lattice]",
        type=_SchemeName(),
    ),
    option(
        "--quality Q",
        f"Coarse: step size relative to the change by training; smaller is finer.  [default: {QUALITY:g}]",
        type=float,
    ),
    option("--max-abs-error X", "Coarse: largest error of an element.", type=float),
    option(
        "--max-rel-error X",
        "Coarse: largest error of an element, as a fraction of the tensor's root mean square.",
        type=float,
    ),
)

#: The argument `versions` and the option `run`.
named_options = with_all(
    click.argument("versions", metavar="[VERSION]...", nargs=-1, type=VersionName()),
    option("--run RUN", "Select all versions of this run.", type=RunName()),
)

#: The option `signed_by`.
signed_option = option(
    "--signed-by KEY",
    "Refuse versions that are not signed with this public key, or by a certificate of these authorities, in PEM.",
    type=click.Path(path_type=Path),
)

#: Days for which `gc` keeps forgotten versions, and the exact values of thinned ones.
DAYS = 7

#: The argument and options of a selection, under the names of the parameters of `Store.select`.
selection_options = with_all(
    named_options,
    option("--keep-last N", "Keep the last N of the selected versions, or the last 30d, say.", type=Last()),
    option(
        "--keep-every STEPS",
        "Keep the first selected version of each STEPS steps: for 100, of steps 0 to 99, 100 to 199, and so on; or of "
        "each 1d, say, or of the last 24 hours and 7 days: 1h:24,1d:7.",
        type=Periods(),
    ),
    option("--keep-tagged", "Keep the selected versions that are tagged."),
)


def metrics_of(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Return metrics given as NAME=VALUE; numbers as such, anything else as text."""
    metrics: dict[str, Any] = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not name or not separator:
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE", ctx, parameter)
        metrics[name] = _number(text)
    return metrics


def _number(text: str) -> int | float | str:
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        number = float(text)
        # JSON has no infinities and no NaN: they stay text.
        if number != number:
            return NAN
        if abs(number) < float("inf"):
            return number
    return text


def _part(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return float(value[:-1]) / 100 if value.endswith("%") else float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number such as 0.005 or 0.5%", ctx, parameter) from None


#: The options of a search; `search_of` takes them.
search_options = with_all(
    option(
        "--max-degradation X",
        "Store as coarsely as the result of --eval is at most X worse.  [default with --eval: 5%]",
        callback=_part,
    ),
    option(
        "--max-rework STEPS",
        "Instead: at most the worth of STEPS steps of training, by the fall of the loss among the run's metrics.",
        type=click.FloatRange(min=0.0),
    ),
    option(
        "--eval COMMAND",
        "Command that prints a loss last; {} is the path of a checkpoint. It runs without a shell.",
        name="evaluation",
    ),
    option("--jobs N", "Number of parallel evaluations.  [default: 1]", type=click.IntRange(min=1)),
    option("--maximise", "Higher --eval output is better, as for an accuracy."),
)

#: The options of an ingest; `options_of` takes them.
ingest_options = with_all(
    option("--run NAME", "Run of the versions.  [default: main]", type=RunName()),
    option(
        "--step N",
        "Step of the version, such as 400, 10k or 1e5, for a single PATH.  [default: the step in the file or its name]",
        type=_Step(),
    ),
    option(
        "--parent VERSION",
        "Parent of the first version: an earlier one of the run supersedes the versions after it, `auto` is the nearest"
        " stored version.  [default: the run's at the step below, or for a new run the most similar one]",
        type=VersionName(),
    ),
    option(
        "--metric NAME=VALUE", "Add a metric, for a single PATH.", name="metrics", multiple=True, callback=metrics_of
    ),
    option(
        "--config FILE",
        "Keep the configuration in a JSON or YAML file with the version; without values that are named as secrets.",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
    ),
    option("--replace", "Replace the version at the same run and step."),
    option("--verify", "Decode each version and compare it with its input before it becomes visible."),
    option(
        "--force",
        "Store refused inputs: damaged files and files without tensors as opaque bytes, incomplete directories, "
        "several checkpoints as one version.",
    ),
    option(
        "--max-restore-cost X",
        "Limit the cost of a restore, as a multiple of a full copy's; a higher limit saves bytes.  [default: 2]",
        type=click.FloatRange(min=1.0),
    ),
    policy_options,
    option(
        "--gradients FILE",
        "Gradients for --scheme dynaquant: tensors by path, for a single PATH.",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
    ),
    search_options,
)


def _config(file: Path | None) -> Any:
    """Return the configuration in a file; None without one."""
    if file is None:
        return None
    text = file.read_text("utf-8")
    read: Callable[[str], Any] = json.loads
    errors: tuple[type[Exception], ...] = (ValueError, RecursionError)
    if file.suffix.lower() in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise UsageError(f"{file} is YAML, which PyYAML reads: `pip install pyyaml`, or give JSON.") from None
        read, errors = yaml.safe_load, (*errors, yaml.YAMLError)
    try:
        return read(text)
    except errors as error:
        raise UsageError(f"{file} cannot be read as a configuration: {' '.join(str(error).split())}.") from error


def policy_of(given: dict[str, Any]) -> Policy | None:
    """Take the options of fidelity out of `given`; return their policy, or None without any."""
    names = ("fidelity", "scheme", "quality", "max_abs_error", "max_rel_error")
    said = {name: value for name in names if (value := given.pop(name)) is not None}
    if said.get("fidelity") == "exact" and len(said) > 1:
        raise UsageError("Schemes, qualities and error bounds are for coarse versions; leave --fidelity exact out.")
    return Policy(**{"fidelity": "coarse", **said}) if said else None


def options_of(given: dict[str, Any]) -> IngestOptions:
    """Return the options of an ingest, given under the names of `ingest_options`."""
    from ckstore.writing.request import IngestOptions

    policy = policy_of(given)
    given["config"] = _config(given["config"])
    search = search_of(given)
    return IngestOptions(**given, policy=policy, search=search)


def search_of(given: dict[str, Any]) -> Search | None:
    """Take the options of a search out of `given`; return it, or None without any."""
    command, tolerated, rework, jobs, maximise = (
        given.pop(name) for name in ("evaluation", "max_degradation", "max_rework", "jobs", "maximise")
    )
    if command is None:
        if maximise or any(value is not None for value in (tolerated, rework, jobs)):
            raise UsageError(
                "--max-degradation, --max-rework, --maximise and --jobs are for a search; give its evaluation with"
                " --eval."
            )
        return None
    from ckstore.cli.evaluation import evaluator
    from ckstore.writing.tuning import TOLERANCE, Search

    if tolerated is not None and rework is not None:
        raise UsageError("Give --max-degradation or --max-rework, not both.")
    return Search(evaluator(command), TOLERANCE if tolerated is None else tolerated, maximise, jobs or 1, rework)
