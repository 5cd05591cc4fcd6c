"""`ckstore patch`: write the difference between two versions as the delta directory that inference engines pull."""

from __future__ import annotations

from pathlib import Path

import click

from ckstore.cli.output import print_line, size_text
from ckstore.cli.verb import VersionName, open_store, option, verb


@verb(
    ("ckstore patch policy@1100 policy@1200 -o weight_v000012", "write the twelfth delta"),
    exit_codes=[12, 13],
)
@click.argument("base", type=VersionName())
@click.argument("version", type=VersionName())
@click.option(
    "-o", "--output", metavar="TARGET", type=click.Path(path_type=Path), required=True, help="Directory to write."
)
@option("--force", "Overwrite TARGET.")
@click.pass_context
def command(ctx: click.Context, base: str, version: str, output: Path, force: bool) -> None:
    """Write the changes from BASE to VERSION as a delta directory.

    It has the form that slime, miles and the endpoint pull_weights of SGLang read: a Hugging Face directory with the
    changed bytes of each tensor (`overwrite`), compressed with zstd, and with a BLAKE3 for each new tensor. SGLang
    applies weight_v000001, weight_v000002 and so on, one by one: such a TARGET is the delta's version, the number
    before it the base_version. Under other names they are the steps.
    """
    with open_store(ctx) as store:
        found = store[version]
        nbytes = found.write_patch(base, output, force=force)
        print_line(f"{store[base].name} .. {found.name} -> {output}  {size_text(nbytes)}")
