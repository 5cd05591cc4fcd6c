"""Writes docs/reference/python.md from the docstrings of the public names, so that both are one text."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import ckstore
from ckstore.errors import CkstoreError

#: Names and meaning of an entry of a section.
Entry = tuple[str, str]

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "python.md"

#: Classes in the order of the page; other public classes follow under "Reports and records".
_CLASSES = ("Store", "Version", "Run", "LazyTensor", "Saver", "Policy", "Retention", "Search")
#: Modules of integrations, and the how-to pages that show their use.
_INTEGRATIONS = {
    "torch": "torch-names", "lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate",
    "dcp": "distributed", "jax": "jax",
}  # fmt: skip
#: Codecs for numcodecs, each with a twin for Zarr.
_CODECS = (("huffman", "Huffman"), ("levels", "Levels"), ("quantized_residual", "QuantizedResidual"))
_HEAD = """\
# Python

<!-- Written by tools/docs from the docstrings of the public names; edit those. -->

The [core concepts](../index.md#core-concepts) explain the nouns; versions are [named](cli.md#names-of-versions) as on
the command line. In examples, `store` is an open store in `directory`.
"""

_REPORTS_HEAD = "Examples of reports are at the methods that return them; sizes are in bytes."

_CODEC_HEAD = """\
numcodecs and Zarr find these codecs, in `ckstore.codecs`, by name wherever ckstore is installed. `help` has their
parameters, [the format](../format.md#packs-in-plain-zarr) their use."""

#: Members that other rooms of ckstore use; no user needs them.
_INSIDE = frozenset({
    "add", "bits", "catalog", "described", "document", "from_text", "is_bounded", "is_coarse", "kept_hot",
    "kept_whole", "layout", "manifest_length", "manifest_offset", "pack", "packs", "parameters", "paths",
    "reader", "resolver", "to_json", "to_text",
})  # fmt: skip
_INSIDE_OF = {"Search": {"degradation", "reference"}}

#: Lines that make the store of an example.
_IMPORTS = (">>> from tempfile import TemporaryDirectory", ">>> import ckstore, numpy")
_STORE = '>>> with TemporaryDirectory() as directory, ckstore.open(f"{directory}/store", create=True) as store:\n'

#: Sections of entries.
_DETAILS = ("Parameters", "Attributes", "Returns", "Yields", "Raises")

#: Classes whose attributes of the same names are described at another class.
_LIKE = {"VersionRow": "Version"}


def reference() -> str:
    """Return the whole page."""
    public = {name: getattr(ckstore, name) for name in ckstore.__all__}
    classes = {name: kind for name, kind in public.items() if inspect.isclass(kind)}
    errors = [name for name, kind in classes.items() if issubclass(kind, CkstoreError)]
    rest = [name for name in classes if name not in {*_CLASSES, *errors}]
    functions = {name: function for name, function in public.items() if inspect.isfunction(function)}
    use = _text((inspect.getdoc(ckstore) or "").rpartition("\n\n")[2])  # Key types have sections of their own.
    lines = [_HEAD, use, "", "## Functions", ""]
    for name, function in functions.items():
        lines += _function(f"ckstore.{name}{signature(function)}", function)
    for name in _CLASSES:
        lines += _class(name, classes[name], 2, signed=name in ("Policy", "Retention", "Search"))
    lines += ["## Reports and records", "", _REPORTS_HEAD, ""]
    for name in rest:
        made = name == "GradientAccumulator"
        lines += _class(name, classes[name], 3, signed=made, shown=made)
    lines += ["## Errors", "", "`ckstore.CkstoreError` and its kinds, also in `ckstore`: see [errors](errors.md).", ""]
    lines += [
        "## Integrations",
        "",
        "Modules of `ckstore.integrations`, each with a page; `help` has their parameters and errors.",
        "",
    ]
    for room, page in _INTEGRATIONS.items():
        module = import_module(f"ckstore.integrations.{room}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_") and name not in public:
                summary = (inspect.getdoc(value) or "").partition("\n\n")[0]
                lines += [f"* `{room}.{name}{signature(value)}`: {_text(summary)}"]
        lines[-1] += f" ([Page](../how-to/{page}.md))"
    lines += ["", "## Codecs", "", _CODEC_HEAD, ""]
    for room, name in _CODECS:
        kind = getattr(import_module(f"ckstore.codecs.{room}"), name)
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        lines += [f"* `{room}.{name}`, for Zarr `zarr_{room}.{name}Codec`: {_text(summary)}"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def signature(function: Any) -> str:
    """Return the parameters with their defaults, without annotations and `self`."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...").replace("<factory>", "...")


def _function(
    name: str, function: Any, hidden: tuple[str, ...] = (), told: frozenset[Entry] = frozenset()
) -> Iterator[str]:
    yield from (f"### `{name}`", "")
    yield from _body(inspect.getdoc(function) or "", hidden, told=told)


def _class(
    name: str,
    kind: type,
    level: int,
    *,
    signed: bool = False,
    shown: bool = True,
) -> Iterator[str]:
    yield from (f"{'#' * level} {name}", "")
    if signed:
        yield from (f"`{name}{signature(kind)}`", "")
    inside = _INSIDE | _INSIDE_OF.get(name, set())
    if name in _LIKE:
        same = {each for each, _ in _attributes(getattr(ckstore, _LIKE[name]))} - inside
        shared = ", ".join(f"`{each}`" for each, _ in _attributes(kind) if each in same)
        inside |= same
    hidden = () if signed else ("Parameters",)
    yield from _body(inspect.getdoc(kind) or "", hidden if shown else (*hidden, "Examples"), inside)
    yield from (_item(each, meaning) for each, meaning in _properties(kind) if each not in inside)
    yield ""
    if name in _LIKE:
        yield from (f"These are as in `{_LIKE[name]}`: {shared}.", "")
    if common := _common(kind):
        yield from (
            "Parameters, unless a method describes its own:",
            "",
            *(_item(*entry) for entry in sorted(common)),
            "",
        )
    short = name.rpartition(".")[2]
    for key, member in _methods(kind).items():
        if key == "__getitem__":
            [key_name] = [each for each in inspect.signature(member).parameters if each != "self"]
            yield from _function(f"{short}[{key_name}]", member)
        elif key not in inside:
            yield from _function(f"{short}.{key}{signature(member)}", member, told=common)


def _body(
    doc: str, hidden: tuple[str, ...] = (), inside: frozenset[str] = frozenset(), told: frozenset[Entry] = frozenset()
) -> Iterator[str]:
    """Yield a docstring in Markdown, without entries that were told before; examples are only shown."""
    summary, sections = _sections(doc)
    yield from (_text(summary), "")
    for title, text in sections.items():
        if title in hidden:
            continue
        if title == "Examples":
            yield from ("```pycon", _example(text.strip()), "```", "")
        elif title in ("Notes", "References"):
            yield from (_text(text), "")
        elif title == "Raises":
            yield from (f"Raises {' '.join(_item(*entry)[2:] for entry in _entries(text))}", "")
        else:
            verb = f"{title} " if title in ("Returns", "Yields") else ""
            shown = (entry for entry in _entries(text) if not inside.issuperset(entry[0].split(", ")))
            yield from (f"* {verb}{_item(*entry)[2:]}" for entry in shown if entry not in told)
            yield ""


def _example(text: str) -> str:
    """Return an example without the lines that make its store, which the page explains once."""
    setup, made, body = text.partition(_STORE)
    if not made:
        return text
    imports = [line for line in setup.splitlines() if line not in _IMPORTS]
    lines = [
        re.sub(r"^\.\.\. {5}(?=\S)", ">>> ", line).replace("...         ", "...     ") for line in body.splitlines()
    ]
    return "\n".join([*imports, *lines])


def _sections(doc: str) -> tuple[str, dict[str, str]]:
    """Return the text before the sections of a docstring, and the text of each by its title."""
    parts = re.split(r"^([A-Z][a-z]+)\n-+\n", doc, flags=re.MULTILINE)
    return parts[0], dict(zip(parts[1::2], parts[2::2], strict=True))


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and the meaning of each entry of a section."""
    for entry in re.split(r"\n(?=\S)", text.strip()):
        head, _, meaning = entry.partition("\n")
        names = [part.partition(" : ")[0].strip() for part in head.split(", ")]
        yield ", ".join(name for name in names if name != "optional"), inspect.cleandoc(meaning)


def _attributes(kind: type) -> list[tuple[str, str]]:
    """Return the attributes of a class: those in its docstring, and its properties."""
    return [*_entries(_sections(inspect.getdoc(kind) or "")[1].get("Attributes", "")), *_properties(kind)]


def _properties(kind: type) -> list[tuple[str, str]]:
    return [
        (key, inspect.getdoc(value) or "")
        for key, value in vars(kind).items()
        if not key.startswith("_") and (isinstance(value, property) or type(value).__name__ == "cached_property")
    ]


def _common(kind: type) -> frozenset[Entry]:
    """Return the parameters that several methods describe in the same words."""
    docs = (inspect.getdoc(method) or "" for method in _methods(kind).values())
    counts = Counter(entry for doc in docs for entry in _entries(_sections(doc)[1].get("Parameters", "")) if entry[0])
    return frozenset(entry for entry, count in counts.items() if count > 1)


def _methods(kind: type) -> dict[str, Any]:
    """Return the public methods that a class defines itself, and its `__getitem__`."""
    own = {
        key: value.__func__ if isinstance(value, classmethod) else value
        for key, value in vars(kind).items()
        if not key.startswith("_") or key == "__getitem__"
    }
    return {key: value for key, value in own.items() if inspect.isfunction(value) and inspect.getdoc(value)}


def _item(names: str, meaning: str) -> str:
    quoted = ", ".join(f"`{name}`" for name in names.split(", "))
    return f"* {quoted}: {' '.join(_text(meaning).split())}"


def _text(text: str) -> str:
    return text.strip().replace("``", "`")
