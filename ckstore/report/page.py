"""The page of a report: one HTML document that requests nothing, and runs only the scripts that it came with."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

import numpy as np

_SCRIPTS = ("uPlot.iife.min.js", "report.js")
_STYLES = ("uPlot.min.css", "report.css")

#: HTML ends a script at `</script` and changes how it reads one at `<!--`: JSON has another way to write these.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def page(contents: Mapping[str, Any]) -> str:
    """Return a report as one HTML document.

    Text of the store is in a block of JSON alone, from which the script writes it as text. The policy of the page
    forbids requests, scripts other than its own, and text as markup.

    Examples
    --------
    >>> document = page(store.report("gpt").contents)
    >>> document[:15], "://" in document.partition("<script>")[0]
    ('<!doctype html>', False)
    """
    data = json.dumps({**contents, "runs": [_compact(run) for run in contents["runs"]]}, allow_nan=False)
    styles, scripts = ([_asset(name) for name in names] for names in (_STYLES, _SCRIPTS))
    policy = "; ".join([
        "default-src 'none'", "base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'",
        f"style-src {_digests(*styles)}", f"script-src {_digests(*scripts)}",
    ])  # fmt: skip
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        "<title>ckstore report</title>",
        *(f"<style>{style}</style>" for style in styles),
        '</head>\n<body>\n<main id="report"><noscript>This report is drawn by a script.</noscript></main>',
        f'<script type="application/json" id="contents">{data.translate(_ESCAPES)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>\n</html>\n",
    ])  # fmt: skip


def _compact(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run with its measures as one text: deflated planes of bytes, all of the first byte, then the next.

    Numbers lose the last of their four bytes, rounded: five significant digits are more than the page shows.
    """
    values = np.concatenate([np.empty(0, np.float32), *(array.ravel() for array in run["values"].values())])
    rounded = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32)) + np.uint32(0x80)
    planes = rounded.astype("<u4").view(np.uint8).reshape(-1, 4).T[1:]
    packed = b64encode(zlib.compress(planes.tobytes(), 9)).decode()
    return {**run, "values": {"keys": list(run["values"]), "packed": packed}}


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digests(*texts: str) -> str:
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
