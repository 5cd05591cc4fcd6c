"""How a version was made: the state of the program and of its working directory, and its configuration."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

#: Names among the metrics of a version that hold its origin and its configuration.
MADE, CONFIG = "made", "config"
RESERVED = (MADE, CONFIG)
#: The name of a version's signature.
SIGNATURE = "signature"
#: Names that are no metrics of the user.
HIDDEN = (*RESERVED, SIGNATURE)
#: Setting this environment variable to 0 leaves the origin out.
VARIABLE = "CKSTORE_MADE"

#: Most bytes of a configuration as JSON, and characters of a command line.
LARGEST, _LONGEST = 1 << 14, 300
_SECRET = re.compile(
    r"(?:^|[^a-z])(?:token|key|password|passwd|passphrase|secret|credentials?)$|(?:api|access|secret|auth)_?key|secret"
    r"|password",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LOGIN = re.compile(r"://[^/@\s]+@")
_HIDDEN = "***"
#: Names of values in the text of an object.
_NAMED = re.compile(r"(?<![\w-])([\w-]+)['\"]?\s*[=:]")
#: Seconds after which git has no answer.
_PATIENCE = 2.0
_GIT = ("git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no")


def own_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the user, without origin, configuration and signature."""
    return {name: value for name, value in metrics.items() if name not in HIDDEN}


def is_secret(name: str) -> bool:
    """Return whether a name is that of a secret.

    Examples
    --------
    >>> is_secret("hub_token"), is_secret("API_KEY"), is_secret("apiKey"), is_secret("max_tokens"), is_secret("keys")
    (True, True, True, False, False)
    """
    return _SECRET.search(_CAMEL.sub("_", name)) is not None


def made() -> dict[str, Any]:
    """Return commit and state of the working directory in git, command line, host, and versions of libraries.

    The command line has no values of options, or variables, that are named as secrets. Git is asked once in a process
    and directory.
    """
    if os.environ.get(VARIABLE) == "0":
        return {}
    import platform
    import socket

    torch = sys.modules.get("torch")
    found: dict[str, Any] = {
        **_git(_working_directory()),
        "command": command_line(sys.argv),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": None if torch is None else str(getattr(torch, "__version__", "")),
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def command_line(arguments: Sequence[str]) -> str:
    """Return a command line without secrets, cut off if it is long; a program of `python -m` by its package.

    Examples
    --------
    >>> command_line(["/home/me/train.py", "--hub-token", "abc", "--lr=3e-4", "WANDB_API_KEY=abc"])
    "train.py --hub-token '***' --lr=3e-4 'WANDB_API_KEY=***'"
    >>> command_line(["/usr/lib/python3/ckstore/__main__.py", "encode"])
    'ckstore encode'
    """
    import shlex

    shown: list[str] = []
    # Programs set `sys.argv`, with numbers and paths, too.
    for number, argument in enumerate(arguments := [*map(str, arguments)]):
        name, separator, _ = argument.partition("=")
        before = arguments[number - 1] if number else ""
        if separator and is_secret(name):
            argument = f"{name}={_HIDDEN}"
        elif number > 1 and before.startswith("-") and "=" not in before and is_secret(before.lstrip("-")):
            argument = _HIDDEN
        shown.append(_LOGIN.sub(f"://{_HIDDEN}@", argument) if number else _program(argument))
    text = shlex.join(shown).replace("\0", r"\0").encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _program(path: str) -> str:
    """Return the name of a program, given its path."""
    directory, name = os.path.split(path)
    return os.path.basename(directory) or name if name == "__main__.py" else name


def plain_config(config: Any) -> dict[str, Any]:
    """Return a configuration (a mapping, a namespace, a dataclass) as plain JSON values, without secrets.

    Namespaces, dataclasses and named tuples within become mappings, without fields that a dataclass does not show;
    other values become their text, those with secrets in it the name of their type.

    Examples
    --------
    >>> plain_config({"lr": 3e-4, "hub_token": "abc", "model": {"layers": 4, "act": max}})
    {'lr': 0.0003, 'model': {'layers': 4, 'act': '<built-in function max>'}}
    """
    kept = json.loads(json.dumps(_plain(_mapping(config), (config,))), parse_constant=str)
    assert isinstance(kept, dict)
    return kept


def fitting(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that was not asked for, without its largest values if it is too large."""
    left = dict(config)
    while left and len(json.dumps(left)) > LARGEST:
        del left[max(left, key=lambda name: len(json.dumps(left[name])))]
    return left


def _mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if _is_dataclass(config):
        return {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config) if field.repr}
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _plain(value: Any, above: tuple[Any, ...]) -> Any:
    """Return a value without secrets; `above` are the objects that hold it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item, above) for name, item in value.items() if not is_secret(str(name))}
    if isinstance(value, list | tuple):
        return _plain(value._asdict(), above) if hasattr(value, "_asdict") else [_plain(item, above) for item in value]
    if value is None or isinstance(value, int | float):
        return value
    if getattr(value, "shape", None) == () and isinstance(number := value.item(), int | float):
        return number
    if isinstance(value, str | os.PathLike):
        value = str(value)
        return _LOGIN.sub(f"://{_HIDDEN}@", value)
    if _is_dataclass(value) or (type(value).__name__.endswith("Namespace") and hasattr(value, "__dict__")):
        is_within_itself = any(value is one for one in above)
        return type(value).__name__ if is_within_itself else _plain(_mapping(value), (*above, value))
    text = str(value)
    return type(value).__name__ if any(map(is_secret, _NAMED.findall(text))) else _plain(text, above)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # It was deleted.
        return ""


@lru_cache(16)
def _git(directory: str) -> dict[str, Any]:
    """Return the commit of a working directory, and whether tracked files differ from it; nothing without one."""
    import subprocess

    place = directory
    while place and not os.path.exists(os.path.join(place, ".git")):
        above = os.path.dirname(place)
        place = "" if above == place else above
    if not place:
        return {}
    try:
        done = subprocess.run(
            _GIT, cwd=directory, capture_output=True, timeout=_PATIENCE, check=True, text=True, errors="replace",
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    commit = next((line.rpartition(" ")[2] for line in lines if line.startswith("# branch.oid ")), "")
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return {}
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
