"""`normkit completion`: the script that lets a shell complete verbs, options, names and paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_HELP = """Print a script that lets SHELL complete verbs, options, names of studies and paths.

\b
bash  add to ~/.bashrc:  eval "$(normkit completion bash)"
zsh   add to ~/.zshrc:   eval "$(normkit completion zsh)"
fish  run once:          normkit completion fish > ~/.config/fish/completions/normkit.fish
"""


@click.command("completion", help=_HELP, short_help="Print a script that lets your shell complete normkit.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def print_completion(ctx: click.Context, shell: str) -> None:
    """Print click's script for a shell."""
    shells = get_completion_class(shell)
    assert shells is not None
    click.echo(shells(ctx.find_root().command, {}, "normkit", "_NORMKIT_COMPLETE").source())
