"""`ckstore warm-up`: compile all kernels."""

from __future__ import annotations

import time

from ckstore.cli.output import print_line
from ckstore.cli.verb import verb


@verb(
    ("ckstore warm-up", "in a Dockerfile, after RUN"),
    opens_store=False,
)
def command() -> None:
    """Compile all kernels now.

    The first use of ckstore compiles its kernels, which takes half a minute or more; later uses load them. This verb
    compiles all of them for this user, processor and installation.
    """
    import ckstore

    start = time.perf_counter()
    ckstore.warm_up()
    print_line(f"All kernels are compiled ({time.perf_counter() - start:.1f} s).")
