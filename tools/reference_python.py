"""Writes docs/reference/python.md from the docstrings of the public names, so that both are one text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import ckstore
from ckstore.errors import CkstoreError

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "python.md"

#: Classes in the order of the page; other public classes follow under "Reports and records".
_CLASSES = ("Store", "Version", "Run", "LazyTensor", "Saver", "Policy", "Retention", "Search")
_INTEGRATIONS = ("torch", "lightning", "transformers", "accelerate", "dcp", "jax")
_CODECS = (
    ("huffman", "Huffman"),
    ("zarr_huffman", "HuffmanCodec"),
    ("quantized_residual", "QuantizedResidual"),
    ("zarr_quantized_residual", "QuantizedResidualCodec"),
)
_HEAD = """\
# Python

<!-- Written by tools/docs from the docstrings of the public names; edit those. -->

"""


def reference() -> str:
    """The whole page."""
    public = {name: getattr(ckstore, name) for name in ckstore.__all__}
    classes = {name: kind for name, kind in public.items() if inspect.isclass(kind)}
    errors = [name for name, kind in classes.items() if issubclass(kind, CkstoreError)]
    rest = [name for name in classes if name not in {*_CLASSES, *errors}]
    doc = re.sub(r"^(.+)\n-+$", r"## \1\n", inspect.getdoc(ckstore) or "", flags=re.MULTILINE)
    lines = [_HEAD + _text(doc), "", "## Functions", ""]
    for name, function in public.items():
        if inspect.isfunction(function):
            lines += _callable(f"ckstore.{name}", function)
    for name in _CLASSES:
        lines += _class(name, classes[name], 2)
    lines += ["## Reports and records", ""]
    for name in rest:
        lines += _class(name, classes[name], 3)
    lines += ["## Errors", "", f"{', '.join(f'`ckstore.{name}`' for name in errors)}: see [errors](errors.md).", ""]
    lines += ["## Integrations", "", "Modules of `ckstore.integrations`. Each imports its library on first use.", ""]
    for room in _INTEGRATIONS:
        module = import_module(f"ckstore.integrations.{room}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_") and name not in public:
                if inspect.isclass(value):
                    lines += _class(f"{room}.{name}", value, 3)
                else:
                    lines += _callable(f"{room}.{name}", value)
    lines += ["## Codecs", "", "numcodecs and Zarr find these codecs by name wherever ckstore is installed.", ""]
    for room, name in _CODECS:
        module = import_module(f"ckstore.codecs.{room}")
        lines += _class(f"{room}.{name}", getattr(module, name), 3, members=False)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def signature(function: Any) -> str:
    """Parameters with their defaults, without annotations and `self`."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def _class(name: str, kind: type, level: int, *, members: bool = True) -> Iterator[str]:
    shown = name if kind.__name__ in ("Store", "Version", "Run", "LazyTensor", "Saver") else f"{name}{signature(kind)}"
    yield f"{'#' * level} {name}"
    yield ""
    if "(" in shown:
        yield f"`{shown}`"
        yield ""
    yield from _body(inspect.getdoc(kind) or "", hidden=("Parameters",) if shown == name else ())
    if not members or issubclass(kind, Exception):
        return
    own = {key: value for key, value in vars(kind).items() if not key.startswith("_") or key == "__getitem__"}
    attributes = {
        key: value
        for key, value in own.items()
        if isinstance(value, property) or type(value).__name__ == "cached_property"
    }
    if attributes:
        yield from ("| attribute | meaning |", "| --- | --- |")
        for key, value in attributes.items():
            yield f"| `{key}` | {_cell(inspect.getdoc(value) or '')} |"
        yield ""
    for key, value in own.items():
        target = value.__func__ if isinstance(value, classmethod) else value
        if key == "__getitem__":
            [key_name] = [each for each in inspect.signature(target).parameters if each != "self"]
            yield from _callable(f"{name.rpartition('.')[2]}[{key_name}]", target, plain=True)
        elif inspect.isfunction(target) and inspect.getdoc(target):
            yield from _callable(f"{name.rpartition('.')[2]}.{key}", target)


def _callable(name: str, function: Any, *, plain: bool = False) -> Iterator[str]:
    yield f"### `{name}{'' if plain else signature(function)}`"
    yield ""
    yield from _body(inspect.getdoc(function) or "")


def _body(doc: str, hidden: tuple[str, ...] = ()) -> Iterator[str]:
    """A docstring in Markdown: sections with entries as tables, examples as a block that is only shown."""
    sections = re.split(r"^([A-Z][a-z]+)\n-+\n", doc, flags=re.MULTILINE)
    yield _text(sections[0])
    yield ""
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        if title in hidden:
            continue
        if title == "Examples":
            yield from ("```pycon", text.strip(), "```", "")
        elif title in ("Notes", "References"):
            yield from (_text(text), "")
        else:
            heads = {"Raises": "error", "Returns": "result", "Yields": "result", "Attributes": "attribute"}
            yield from (f"| {heads.get(title, 'parameter')} | meaning |", "| --- | --- |")
            for entry in re.split(r"\n(?=\S)", text.strip()):
                head, _, meaning = entry.partition("\n")
                quoted = ", ".join(f"`{part.partition(' : ')[0].strip()}`" for part in head.split(", "))
                yield f"| {quoted} | {_cell(inspect.cleandoc(meaning))} |"
            yield ""


def _text(text: str) -> str:
    return text.strip().replace("``", "`")


def _cell(text: str) -> str:
    return " ".join(_text(text).split()).replace("|", "\\|")
