"""Lossy schemes besides the lattices: published ones, and factors of fine-tunes.

Published schemes are implemented after their papers. A scheme of another distribution is an entry point of the group
`ckstore.schemes`. Our own are listed here, so that metadata of installed distributions is read only for a name that is
none of theirs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ckstore.errors import CkstoreError, UsageError

if TYPE_CHECKING:
    from ckstore.codecs.scheme import MatrixScheme, Scheme

#: The name of ckstore's own scheme, which has lattices in place of codebooks.
LATTICE = "lattice"

#: Our other schemes: modules of this package, each with a `SCHEME`.
OWN = ("lc", "dynaquant", "factors")


@cache
def scheme_of(name: str) -> Scheme | MatrixScheme:
    """Return the scheme of a name.

    Raises
    ------
    UsageError
        No installed distribution has such a scheme.
    CkstoreError
        It cannot be imported, or is no scheme of that name.
    """
    from ckstore.codecs.scheme import MatrixScheme, Scheme

    if name in OWN:
        own: Scheme | MatrixScheme = import_module(f"{__name__}.{name}").SCHEME
        return own
    from importlib.metadata import entry_points

    others = {entry.name: entry for entry in entry_points(group="ckstore.schemes")}
    if name not in others:
        raise UsageError(f"Unknown scheme {name}; choose one of {', '.join((LATTICE, *OWN, *sorted(others)))}.")
    try:
        found = others[name].load()
    except Exception as error:
        raise CkstoreError(f"The scheme {name} cannot be imported ({error}); uninstall it.") from error
    if not isinstance(found, Scheme | MatrixScheme) or found.name != name:
        raise CkstoreError(f"The scheme {name} ({others[name].value}) is no `Scheme` of that name.")
    return found
