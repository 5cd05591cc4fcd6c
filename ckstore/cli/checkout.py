"""`ckstore checkout`: write a version's files, or its tensors in another format."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click

from ckstore.cli.options import named_options, signed_option
from ckstore.cli.output import counted, error_text, print_failure, print_line, size_text, speed_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import exit_for_failures, note_runs, open_store, option, verb, version_of, with_options
from ckstore.errors import CkstoreError, ConflictError, IntegrityError, NotFoundError, UsageError
from ckstore.storage.names import BETWEEN

if TYPE_CHECKING:
    from ckstore.objects.documents import FileEntry
    from ckstore.reading.subtree import Format
    from ckstore.store import Store
    from ckstore.version import Version

#: Formats by suffix.
_SUFFIXES = {"safetensors": ".safetensors", "pt": ".pt", "npz": ".npz"}
_ORIGINAL: Final = "original"
_STDOUT = "-"


@verb(
    ("ckstore checkout best -o restored.pt", "restore the file byte for byte"),
    ("ckstore checkout gpt@400", "restore it under its own name"),
    ("ckstore checkout gpt@800..gpt@1000 -o dir", "restore several into a directory"),
    ("ckstore checkout --run gpt -o dir", "restore a run; without --run, the whole store"),
    ("ckstore checkout best -o w.safetensors --include 'model/*' --strip", "export the weights alone"),
    ("ckstore checkout hf@500 -o model/ --include '*.safetensors'", "restore some files of a directory"),
    ("ckstore checkout best -o - | sha256sum", "pipe it to another program"),
    ("ckstore checkout best -o rest --salvage", "recover the intact parts of a damaged version"),
    exit_codes=[3, 4, 12, 13],
)
@named_options
@click.option(
    "-o",
    "--output",
    metavar="TARGET",
    type=click.Path(path_type=Path, allow_dash=True),
    help="File or directory to write, - for stdout.  [default: the original name, in the working directory]",
)
@option(
    "--format",
    "Write the original files, or the tensors in another format.  [default: by the suffix of TARGET, else original]",
    name="form",
    type=click.Choice([_ORIGINAL, *_SUFFIXES]),
)
@option("--include GLOB", "Write only matching tensors or files.", multiple=True)
@option("--exclude GLOB", "Skip matching tensors or files.", multiple=True)
@option("--strip", "Write one subtree of tensors, under their names in it.")
@option("--force", "Overwrite TARGET; a directory is replaced as a whole.")
@option("--fallback", "If the version is damaged, write the newest sound one before it in the run.")
@option("--salvage", "Recover a damaged version; exit code 4 if parts are lost.")
@option("--require-exact", "Fail with exit code 4 if the version is coarse.")
@signed_option
@click.pass_context
def command(
    ctx: click.Context,
    versions: tuple[str, ...],
    run: str | None,
    output: Path | None,
    form: Literal["original"] | Format | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    strip: bool,
    force: bool,
    require_exact: bool,
    fallback: bool,
    salvage: bool,
    signed_by: Path | None,
) -> None:
    """Write the files of a version, or of several into a directory.

    Files are restored byte for byte, with their modes and modification times, and compared with the BLAKE3 of the
    originals before they become visible at TARGET.

    --include and --exclude, globs as in `ckstore ls`, select tensors of a file; of a directory files, or tensors in
    another format. stderr lists skipped tensors or files.

    With --strip and --include 'model/*', `model/wte.weight` is written as `wte.weight`, and a .pt holds the subtree
    itself, for `load_state_dict`. Shards in a directory become one file.

    A coarse version is written with a warning; `ckstore show` prints its errors.

    If the version is damaged, the error names the newest sound one before it, which --fallback writes in its place.

    Several VERSIONs, a range, a run or, without any, the whole store go into the directory TARGET: each under its own
    name, with the step if names repeat, and in a directory a run if there are several. Files that are there with the
    same bytes are left alone.

    --salvage restores intact files, and writes the intact tensors of a damaged file to a file with the suffix
    .salvaged.pt. stderr lists the losses.
    """
    to_stdout = str(output) == _STDOUT
    if to_stdout and (strip or form not in (None, _ORIGINAL)):
        raise UsageError("Tensors need a file to write to; name one with -o.")
    if to_stdout and sys.stdout is None:
        raise UsageError("stdout is closed; redirect it, or name a file with -o.")
    if to_stdout and sys.stdout.isatty():
        raise UsageError("A checkpoint cannot be written to a terminal; redirect stdout, or name a file with -o.")
    if to_stdout and fallback:
        raise UsageError("--fallback needs a file, since stdout may have taken part of the version; name one with -o.")
    if salvage and (to_stdout or form or include or exclude or strip or fallback or signed_by):
        raise UsageError("--salvage writes all intact parts, and chooses the format; leave the other options out.")
    with open_store(ctx) as store:
        version = _single(store, versions, run)
        if version is None:
            if output is None or to_stdout:
                raise UsageError("Several versions need a directory to write to; name one with -o.")
            if form not in (None, _ORIGINAL) or include or exclude or strip or fallback or salvage:
                raise UsageError("Several versions are written as they were ingested; leave the other options out.")
            chosen = store.select(list(versions) or None, run=run)
            _restore(ctx, chosen, output, force=force, require_exact=require_exact, signed_by=signed_by)
            return
        found = version_of(store, version) if to_stdout else store[version]
        _check_fidelity(found, require_exact=require_exact)
        if salvage:
            _salvage(found, output or Path(_default_name(found, _ORIGINAL)), force=force)
            return
        try:
            if to_stdout:
                found.write(sys.stdout.buffer, include=include, exclude=exclude, signed_by=signed_by)
            else:
                _write(found, output, form, include, exclude, strip=strip, force=force, signed_by=signed_by)
                note_runs(store, [version], "writes")
        except IntegrityError as error:
            sound = found.fallback()
            if sound is None:
                raise
            name = f"The newest sound version before it is {sound.name}"
            if not fallback:
                raise IntegrityError(f"{error} {name}; --fallback writes it.") from error
            print_line(f"ckstore: {error} {name}.", err=True)
            _check_fidelity(sound, require_exact=require_exact)
            _write(sound, output, form, include, exclude, strip=strip, force=force, signed_by=signed_by)


def _single(store: Store, versions: Sequence[str], run: str | None) -> str | None:
    """Return the name of the only version; None for a range, several versions, a run or all."""
    if run is not None or len(versions) != 1:
        return None
    return None if BETWEEN in versions[0] and versions[0] not in store else versions[0]


def _restore(
    ctx: click.Context,
    versions: Sequence[Version],
    folder: Path,
    *,
    force: bool,
    require_exact: bool,
    signed_by: Path | None,
) -> None:
    """Write several versions into a directory; a failure does not stop the others."""
    from ckstore.reading.restore import is_there, places

    start, written, left = time.perf_counter(), 0, 0
    errors: list[CkstoreError] = []
    targets = zip(versions, places([version._stored for version in versions], folder), strict=True)
    with progress_bar(str(folder), sum(version.original_bytes for version in versions)) as progress:
        for version, target in targets:
            try:
                _check_fidelity(version, require_exact=require_exact)
                if is_there(version._stored, target, force=force):
                    if signed_by is not None:
                        version.require_signed(signed_by)
                    if progress is not None:
                        progress(version.original_bytes)
                    left += 1
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                version.checkout(target, format=_ORIGINAL, force=force, progress=progress, signed_by=signed_by)
            except (ConflictError, IntegrityError, NotFoundError, UsageError) as error:
                print_failure(with_options(str(error)))
                errors.append(error)
                continue
            written += version.original_bytes
            print_line(f"{version.name} (version {version.number}) -> {target}  {size_text(version.original_bytes)}")
    there = f", {left} there already" if left else ""
    size = f", {size_text(written)}  {speed_text(written, time.perf_counter() - start)}" if written else ""
    print_line(f"{counted(len(versions) - left - len(errors), 'version')} written{there}{size}")
    exit_for_failures(ctx, errors, len(versions), "versions", "written")


def _check_fidelity(version: Version, *, require_exact: bool) -> None:
    """Warn of a coarse version, or refuse it."""
    if version.fidelity == "exact":
        return
    if require_exact:
        raise IntegrityError(
            f"Version {version.number} is coarse: it has no exact values; choose another version, or leave"
            " --require-exact out."
        )
    print_line(f"ckstore: {_warning(version)}", err=True)


def _write(
    found: Version,
    output: Path | None,
    form: Literal["original"] | Format | None,
    include: Sequence[str],
    exclude: Sequence[str],
    *,
    strip: bool,
    force: bool,
    signed_by: Path | None,
) -> None:
    """Write a version to a file or directory, and print the result."""
    from ckstore.reading.checkout import place_of_file
    from ckstore.reading.subtree import format_for, left_out_text

    form = format_for(found._stored, output, form, globs=bool(include or exclude), strip=strip)
    was_exact = found.fidelity == "exact"
    target = output or Path(_default_name(found, form))
    name = f"{found.name} (version {found.number})"
    start = time.perf_counter()
    if form == _ORIGINAL:
        if not found._stored.document.is_directory:
            target = place_of_file(found._stored, target)
        entries = _chosen_files(found, include, exclude)
        size = sum(entry.size for entry in entries)
        with progress_bar(name, size) as progress:
            left_out = found.checkout(
                target, format=form, include=include, exclude=exclude, force=force, progress=progress,
                signed_by=signed_by,
            )  # fmt: skip
        result = f"{_proof(found, entries)}  {speed_text(size, time.perf_counter() - start)}"
        total, noun = len(found._stored.document.files) + len(found._stored.document.links), "file"
    else:
        with progress_bar(name, found.original_bytes) as progress:
            left_out = found.checkout(
                target, format=form, include=include, exclude=exclude, strip=strip, force=force, progress=progress,
                signed_by=signed_by,
            )  # fmt: skip
        total, noun = len(found), "tensor"
        result = f"{size_text(target.stat().st_size)}  {counted(total - len(left_out), noun)}"
    if was_exact and found.fidelity != "exact":  # Thinned, or encoded as coarse, by another process.
        print_line(f"ckstore: {_warning(found)}", err=True)
    print_line(f"{name} -> {target}  {result}")
    if left_out:
        print_line(f"ckstore: {left_out_text(left_out, total, noun)}", err=True)


def _salvage(version: Version, target: Path, *, force: bool) -> None:
    with progress_bar(version.name, version.original_bytes) as progress:
        report = version.salvage(target, force=force, progress=progress)
    tensors = sum(map(len, report.tensors.values()))
    for path, why in (report.lost_files | report.lost_tensors).items():
        print_line(f"ckstore: {path} is lost: {why}", err=True)
    whole = f"{counted(len(report.files), 'whole file')}, {counted(tensors, 'tensor')} of others"
    print_line(f"{version.name} (version {version.number}) -> {target}  {whole}")
    dropped = {version._stored.document.files[number].path for number, _ in version._stored.contents.dropped}
    if report.lost_files and not report.lost_tensors and dropped.issuperset(report.lost_files):
        raise IntegrityError(
            f"Version {version.number} is not damaged, but it has dropped "
            f"{', '.join(version.dropped)}; {counted(len(dropped), 'file')} can only be restored in part."
        )
    if report.lost_files:
        lost = f"{counted(len(report.lost_files), 'file')} and {counted(len(report.lost_tensors), 'tensor')}"
        raise IntegrityError(
            f"Of version {version.number} {lost} are not whole; restore the packs that `ckstore verify` names "
            "from a copy."
        )


def _warning(version: Version) -> str:
    from ckstore.reading.deviations import largest_deviations

    number = version.number
    return (
        f"Version {number} is coarse, and differs from the original: "
        f"{error_text(*largest_deviations(version._stored))}; see `ckstore show {number}`."
    )


def _chosen_files(version: Version, include: Sequence[str], exclude: Sequence[str]) -> list[FileEntry]:
    from ckstore.reading.checkout import chosen_entries

    files = version._stored.document.files
    if not version._stored.document.is_directory:
        return list(files)
    chosen = chosen_entries(version._stored, include, exclude)
    return [entry for entry in files if entry.path in chosen]


def _proof(version: Version, files: Sequence[FileEntry]) -> str:
    size = size_text(sum(entry.size for entry in files))
    if version._stored.document.is_directory:
        return f"{size}  {counted(len(files), 'file')}"
    return f"{size}  blake3 {files[0].blake3}" if version.fidelity == "exact" else size


def _default_name(version: Version, form: str) -> str:
    from ckstore.reading.restore import own_name

    name = own_name(version._stored)
    return name if form == _ORIGINAL else Path(name).stem + _SUFFIXES[form]
