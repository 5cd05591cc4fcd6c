"""`ckstore mount`: show versions as read-only files until it is stopped."""

from __future__ import annotations

import importlib
import sys

import click

from ckstore.cli.output import print_line
from ckstore.cli.verb import store_path, verb
from ckstore.errors import UsageError


@verb(("ckstore mount versions", "show every version as a directory in the directory versions"))
@click.argument("directory", metavar="DIRECTORY", type=click.Path(exists=True, file_okay=False))
@click.pass_context
def command(ctx: click.Context, directory: str) -> None:
    """Mount the store in an empty directory, read-only, until an interrupt or `umount`.

    DIRECTORY then has a directory for each version, with its files. Read them; a program that maps them into memory may
    hang. It needs FUSE, and ckstore[mount].
    """
    try:
        # fsspec imports this library by the name of the one that it replaces.
        sys.modules.setdefault("fuse", importlib.import_module("mfusepy"))
        from fsspec.fuse import FUSE, FUSEr

        from ckstore.integrations.fsspec import CkstoreFileSystem
    except ImportError as error:
        raise UsageError("`ckstore mount` needs fsspec and mfusepy: pip install 'ckstore[mount]'.") from error
    except OSError as error:
        raise UsageError("`ckstore mount` needs the library of FUSE; install the system's package fuse3.") from error
    operations = FUSEr(CkstoreFileSystem(str(store_path(ctx))), "")
    operations.root = ""  # Paths in the store have no slash in front.
    print_line(f"Mounting at {directory}; end with an interrupt or `umount`.")
    try:
        FUSE(operations, directory, foreground=True, nothreads=True, ro=True, fsname="ckstore")
    except RuntimeError as error:
        raise UsageError(f"{directory} could not be mounted; FUSE says why above.") from error
