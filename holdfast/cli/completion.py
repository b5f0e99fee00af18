"""``completion``: what a shell needs to complete our words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from holdfast.cli.base import add_command
from holdfast.core.errors import Invalid


@add_command(
    "completion",
    examples=[
        "holdfast completion bash >> ~/.bashrc",
        "holdfast completion fish > ~/.config/fish/completions/holdfast.fish",
    ],
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def complete_steps(context: click.Context, *, shell: str) -> None:
    """Print the shell completion script. It completes commands, options, settings and tasks."""
    kind = get_completion_class(shell)
    if kind is None:
        raise Invalid("shell", shell, "give bash, zsh or fish")
    root = context.find_root()
    click.echo(kind(root.command, {}, "holdfast", "_HOLDFAST_COMPLETE").source())
