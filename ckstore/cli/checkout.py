"""`ckstore checkout`: write a version's files, or its tensors in another format."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from ckstore.cli.output import counted, error_text, name_of, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import VersionName, open_store, verb, version_of
from ckstore.errors import IntegrityError, UsageError
from ckstore.formats.directory import is_relative
from ckstore.policy import FIDELITIES, Fidelity

if TYPE_CHECKING:
    from ckstore.reading.export import Format
    from ckstore.version import Version

#: File name endings of the formats.
_SUFFIXES = {"safetensors": ".safetensors", "pt": ".pt", "npz": ".npz"}
_ORIGINAL = "original"
_STDOUT = "-"


@verb(
    ("ckstore checkout best -o restored.pt", "the file that went in, byte for byte"),
    ("ckstore checkout gpt@400", "under its own name, in the working directory"),
    ("ckstore checkout best -o w.safetensors --format safetensors --include 'model/*'", "the weights alone"),
    ("ckstore checkout best -o - | sha256sum", "to another program"),
    ("ckstore checkout gpt@300 --fidelity coarse -o approx.pt", "the coarse values of an exact version"),
    exit_codes=[4, 12, 13],
)
@click.argument("version", type=VersionName())
@click.option(
    "-o",
    "--output",
    metavar="TARGET",
    type=click.Path(path_type=Path, allow_dash=True),
    help="File or directory to write, - for stdout.  [default: the original name, in the working directory]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice([_ORIGINAL, *_SUFFIXES]),
    default=_ORIGINAL,
    show_default=True,
    help="What to write: the files that went in, or their tensors.",
)
@click.option("--include", metavar="GLOB", multiple=True, help="Only tensors whose path matches; for other formats.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="No tensors whose path matches; for other formats.")
@click.option("--force", is_flag=True, help="Overwrite what is at TARGET; a directory is replaced whole.")
@click.option(
    "--fidelity",
    type=click.Choice(FIDELITIES),
    help="Exact values, or those of the coarse layers.  [default: the best]",
)
@click.option("--require-exact", is_flag=True, help="Refuse a version that has no exact values: exit code 4.")
@click.pass_context
def command(
    ctx: click.Context,
    version: str,
    output: Path | None,
    form: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    force: bool,
    fidelity: Fidelity | None,
    require_exact: bool,
) -> None:
    """Write the files of a version.

    As they went in, byte for byte, or the tensors of VERSION as a file of another format. Everything is written
    beside TARGET, compared with the SHA-256 of what went in, and renamed when it is whole. Modes and modification
    times are the original ones.

    A coarse version comes back with coarse values, and stderr says so; `ckstore show` says how far they are off.
    """
    from ckstore.reading.checkout import checkout
    from ckstore.reading.export import export

    if form == _ORIGINAL and (include or exclude):
        raise UsageError("--include and --exclude choose tensors; add --format safetensors, pt or npz.")
    if require_exact and fidelity == "coarse":
        raise UsageError("--require-exact and --fidelity coarse contradict each other; leave one of them out.")
    to_stdout = str(output) == _STDOUT
    if to_stdout and form != _ORIGINAL:
        raise UsageError(f"--format {form} needs a file to write to; name one with -o.")
    if to_stdout and sys.stdout.isatty():
        raise UsageError("A checkpoint does not go to a terminal; redirect stdout, or name a file with -o.")
    with open_store(ctx) as store:
        found = version_of(store, version) if to_stdout else store[version]
        if found.row.fidelity != "exact" and (require_exact or fidelity == "exact"):
            raise IntegrityError(
                f"Version {found.row.number} is coarse: it has no exact values; choose another version, or leave "
                f"{'--require-exact' if require_exact else '--fidelity exact'} out."
            )
        if fidelity is not None:
            found = found.at_fidelity(fidelity)
        if found.fidelity != "exact":
            click.echo(f"ckstore: {_warning(found)}", err=True)
        if to_stdout:
            _to_stdout(found)
            return
        target = output or Path(_default_name(found, form))
        name = f"{name_of(found.row)} (version {found.row.number})"
        start = time.perf_counter()
        with progress_bar(name, found.row.original_bytes) as progress:
            if form == _ORIGINAL:
                checkout(found.stored, target, force=force, progress=progress)
                result = _proof(found) if found.fidelity == "exact" else size_text(found.row.original_bytes)
            else:
                written = export(
                    found.stored, target, cast("Format", form), include, exclude, force=force, progress=progress
                )
                result = f"{size_text(target.stat().st_size)}  {counted(written, 'tensor')}"
        rate = found.row.original_bytes / (time.perf_counter() - start) / 1e9
        click.echo(f"{name} -> {target}  {result}" + (f"  {rate:.2g} GB/s" if form == _ORIGINAL else ""))


def _warning(version: Version) -> str:
    from ckstore.objects.units import role_of

    number = version.row.number
    if version.row.fidelity == "exact":
        return f"These are the coarse values of version {number}, which also has exact ones."
    off = {path: item.relative for path, item in version.deviations().items()}
    weights = max((part for path, part in off.items() if not role_of(version.paths[path][1].path)), default=0.0)
    return (
        f"Version {number} is coarse, and differs from the original: "
        f"{error_text(weights, max(off.values(), default=0.0))}; see `ckstore show {number}`."
    )


def _proof(version: Version) -> str:
    files = version.document.files
    size = size_text(version.row.original_bytes)
    if version.document.is_directory:
        return f"{size}  {counted(len(files), 'file')}"
    return f"{size}  sha256 {files[0].sha256}"


def _default_name(version: Version, form: str) -> str:
    document = version.document
    name = Path(version.row.source or "").name if document.is_directory else Path(document.files[0].path).name
    name = name if is_relative(name) else f"version-{version.row.number}"
    return name if form == _ORIGINAL else Path(name).stem + _SUFFIXES[form]


def _to_stdout(version: Version) -> None:
    """Write the bytes of a version of one file to stdout; what was written before an error is found stays written."""
    from ckstore.reading.checkout import file_blocks

    if version.document.is_directory:
        raise UsageError(f"Version {version.row.number} is a directory; name one to write with -o.")
    if version.stored.is_changed(0):
        _spooled_to_stdout(version)
        return
    sha = hashlib.sha256()
    for block in file_blocks(version.stored, 0):
        sha.update(block)
        sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    if sha.hexdigest() != version.document.files[0].sha256:
        raise IntegrityError(f"Version {version.row.number} does not come back as it went in; run `ckstore verify`.")


def _spooled_to_stdout(version: Version) -> None:
    """Write a file with coarse values to stdout: its checksums are known only when all of it was decoded."""
    import shutil
    import tempfile

    from ckstore.reading.checkout import coarse_blocks, write_all

    with tempfile.TemporaryFile(buffering=0) as spool:
        for block in coarse_blocks(version.stored, 0, spool):
            write_all(spool, block)
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout.buffer, 1 << 20)
    sys.stdout.buffer.flush()
