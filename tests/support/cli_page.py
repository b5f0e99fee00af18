"""The reference page of the command line, made from the commands themselves: ``python -m tests.support.cli_page``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from holdfast.cli.base import COMMON, ExampleCommand, common_options
from holdfast.cli.main import main

_HEAD = """\
# Command line

<!-- Made by `python -m tests.support.cli_page > docs/cli.md`, and compared by a test. Edit the commands instead. -->

"""
_RULES = """\
Results go to stdout, remarks and errors to stderr. An error is one line, `holdfast: what is wrong; what to do`; with
`--json` a line of JSON follows it: `{"error": {"type", "message", "exit_code", …}}`. Times in JSON are RFC 3339 in UTC.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed: no such job, no database there yet, its state does not allow it, the job did not succeed |
| 2 | usage: an option or a value that is refused; nothing was done |
| 75 | try again later: the store is busy, full, away or replaced; a worker has that name or port; a wait ran out |
| 78 | configuration: settings, URL, the application's module |
| 130 | interrupted by Ctrl-C |
| 141 | the reader of the output went away |

"""


def list_commands(group: click.Group = main, path: str = "holdfast") -> Iterator[tuple[str, ExampleCommand]]:
    """Every command with its full name, in the order of the tree."""
    context = click.Context(group)
    for name in group.list_commands(context):
        each = group.get_command(context, name)
        if isinstance(each, click.Group):
            yield from list_commands(each, f"{path} {name}")
        elif isinstance(each, ExampleCommand):
            yield f"{path} {name}", each


def page() -> str:
    """The whole page."""
    summary = "".join(
        f"| [`{name}`](#{name.replace(' ', '-')}) | {each.get_short_help_str(200)} |\n"
        for name, each in list_commands()
    )
    parts = [
        _HEAD,
        _text(main),
        "\n\n",
        _RULES,
        "| command | what it does |\n|---|---|\n",
        summary,
        "\n## Common options\n\n",
        _options(common_options()),
        *(_section(name, each) for name, each in list_commands()),
    ]
    return "".join(parts).rstrip() + "\n"


def _section(name: str, each: ExampleCommand) -> str:
    context = click.Context(each, info_name=name)
    usage = " ".join([name, *each.collect_usage_pieces(context)])
    own = [
        parameter for parameter in each.params if isinstance(parameter, click.Option) and parameter.name not in COMMON
    ]
    examples = "\n".join(each.examples)
    return (
        f"\n## {name}\n\n```text\n{usage}\n```\n\n{_text(each)}\n\n{_options(own)}"
        f"{chr(10) if own else ''}```sh\n{examples}\n```\n"
    )


def _text(each: click.Command) -> str:
    return inspect.cleandoc(each.help or "").replace("\n\n\b\n", "\n\n")


def _options(options: list[click.Option]) -> str:
    if not options:
        return ""
    rows = []
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        value = "" if option.is_flag else f" {option.make_metavar(click.Context(main))}"
        again = " May be given several times." if option.multiple else ""
        default = f" Default: {option.default}." if option.show_default and not option.is_flag else ""
        cells = f"{names}{value} | {option.help}{default}{again}"
        rows.append(f"| {cells} |\n")
    return "| option | |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    click.echo(page(), nl=False)
