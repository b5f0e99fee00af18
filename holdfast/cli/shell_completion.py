"""Shell completion of names that are known without a store."""

from __future__ import annotations

import contextlib
import io

import click
from click.shell_completion import get_completion_class

from holdfast.cli.base import add_command
from holdfast.cli.context import Session
from holdfast.core.errors import Invalid
from holdfast.settings.settings import SETTINGS


def setting_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The settings."""
    return [name for name in SETTINGS if name.startswith(begun)]


def setting_values(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The words the setting that was named may be; none where it may be anything."""
    setting = SETTINGS.get(context.params.get("name") or "")
    words = setting.kind.form.split(" or ") if setting is not None else []
    return [word for word in words if word.isalpha() and word.lower().startswith(begun.lower())]


def task_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The tasks of the application the command would load; output and errors of its code are kept quiet."""
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(Exception):
        tasks = context.ensure_object(Session).load().registry.task_names()
        return [name for name in tasks if name.startswith(begun)]
    return []


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
