"""`ckstore completion`: print the script with which a shell completes verbs, options, versions, runs and tags."""

from __future__ import annotations

import click

from ckstore.cli.verb import verb


@verb(
    ('eval "$(ckstore completion bash)"', "in ~/.bashrc"),
    ('eval "$(ckstore completion zsh)"', "in ~/.zshrc"),
    ("ckstore completion fish > ~/.config/fish/completions/ckstore.fish", "once, for fish"),
    opens_store=False,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a completion script for a shell.

    The shell then completes verbs, options, versions, runs and tags.
    """
    from click.shell_completion import get_completion_class

    from ckstore.cli.program import program

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(program, {}, "ckstore", "_CKSTORE_COMPLETE").source())
