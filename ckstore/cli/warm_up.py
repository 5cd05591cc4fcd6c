"""`ckstore warm-up`: compile all kernels."""

from __future__ import annotations

import time

from ckstore.cli.output import print_line
from ckstore.cli.verb import verb


@verb(
    ("ckstore warm-up", "in a Dockerfile after RUN: no container of the image has anything to compile"),
    opens_store=False,
)
def command() -> None:
    """Compile all kernels that are not compiled yet.

    The first use of ckstore compiles what it needs, which takes half a minute or more; later ones load it. After this
    verb nothing is left to compile for this user, this kind of processor and this installation.
    """
    import ckstore

    start = time.perf_counter()
    ckstore.warm_up()
    print_line(f"All kernels are compiled ({time.perf_counter() - start:.1f} s).")
