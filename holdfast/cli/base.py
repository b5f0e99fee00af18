"""Commands and groups with the common options, examples, and shell completion."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import get_completion_class

from holdfast.cli.context import Session
from holdfast.cli.peer_words import explain_command
from holdfast.core.errors import Invalid
from holdfast.settings.settings import SETTINGS

F = TypeVar("F", bound=Callable[..., Any])

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def common_options() -> list[click.Option]:
    """Returns the options that are accepted before and after the command's name."""

    def remember_value(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value == "":
            raise click.BadParameter("give a value, or leave it out")
        if value and parameter.name:
            setattr(context.ensure_object(Session), parameter.name, value)

    def make_option(*names: str, **attributes: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=remember_value, **attributes)

    return [
        make_option("--app", "-A", metavar="MODULE:NAME", help="The application whose tasks are used [HOLDFAST_APP]."),
        make_option("--url", metavar="URL", help="Where the jobs are kept [HOLDFAST_URL]."),
        make_option(
            "--config", metavar="FILE", help="The settings file, instead of looking for one [HOLDFAST_CONFIG]."
        ),
        make_option("--json", is_flag=True, help="Print one JSON document (JSON lines where there is no end)."),
    ]


COMMON = tuple(option.name for option in common_options())
"""Names of the common options."""


class ExampleCommand(click.Command):
    """A command with examples, for its help and the reference page."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        attributes.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)
        self.params = [*self.params, *common_options()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        common: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                (common if parameter.name in (*COMMON, "help") else own).append(record)
        for title, records in (("Options", own), ("Common options", common)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    # Not write_text, which wraps: a wrapped command cannot be copied.
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def add_command(
    name: str, *, examples: Sequence[str], **attributes: Any
) -> Callable[[Callable[..., Any]], ExampleCommand]:
    """Decorates a function as a command: its docstring is the help text, its return value (an int) the exit code."""
    return click.command(name, cls=ExampleCommand, examples=examples, **attributes)


class ExampleGroup(click.Group):
    """A group of ``ExampleCommand``, listed as they stand; suggests the nearest command for a misspelt one."""

    command_class = ExampleCommand
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from holdfast.core.validation import did_you_mean

        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            hint = explain_command(args[0], ctx.info_name) or did_you_mean(args[0], self.list_commands(ctx))
            ctx.fail(f"There is no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


def add_group(name: str) -> Callable[[Callable[..., Any]], ExampleGroup]:
    """Decorates a function as a group of commands: its docstring is the help text."""
    return click.group(name, cls=ExampleGroup, context_settings=CONTEXT, params=common_options())


def setting_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Completes names of settings."""
    return [name for name in SETTINGS if name.startswith(begun)]


def setting_values(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Completes the words that a setting accepts, if it accepts a fixed list."""
    setting = SETTINGS.get(context.params.get("name") or "")
    words = setting.kind.form.split(" or ") if setting is not None else []
    return [word for word in words if word.isalpha() and word.lower().startswith(begun.lower())]


def task_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Completes the tasks of the application; suppresses output and errors of its code."""
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
def print_completion(context: click.Context, *, shell: str) -> None:
    """Print the shell completion script. It completes commands, options, settings and tasks."""
    kind = get_completion_class(shell)
    if kind is None:
        raise Invalid("shell", shell, "give bash, zsh or fish")
    root = context.find_root()
    click.echo(kind(root.command, {}, "holdfast", "_HOLDFAST_COMPLETE").source())
