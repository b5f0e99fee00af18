"""``manage.py holdfast``: the command line of Holdfast, with the application of the project."""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from holdfast.cli import main
from holdfast.integrations.django.application import PROGRAM, TARGET

_OF_DJANGO = ("--settings", "--pythonpath")


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Passes its arguments on to the command line of Holdfast."""

    help = "Runs a command of Holdfast with this project: worker start, status, list, show … See: holdfast --help"
    requires_system_checks: Sequence[str] = ()

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """Runs the command of the command line. Its options are Holdfast's own."""
        # Several worker processes are programs of their own, which have to find the project and --pythonpath.
        paths = [sys.path[0], str(Path(argv[0]).resolve().parent)]
        if given := os.environ.get("PYTHONPATH"):
            paths += given.split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        words = ["--app", TARGET, *without_django_options(argv[2:])]
        name = Path(argv[0]).name
        main.main(words, prog_name=f"{'python ' if name.endswith('.py') else ''}{name} {argv[1]}")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Takes any arguments."""
        parser.add_argument("arguments", nargs=REMAINDER, metavar="COMMAND …")

    def handle(self, *_: Any, arguments: Sequence[str], **options: Any) -> None:
        """Runs the command for ``call_command``; raises CommandError if it fails."""
        try:
            main.main(["--app", TARGET, *arguments], prog_name=PROGRAM)
        except SystemExit as exit:
            if exit.code:
                code = exit.code if isinstance(exit.code, int) else 1
                raise CommandError(f"holdfast {' '.join(arguments)} failed", returncode=code) from exit


def without_django_options(words: Sequence[str]) -> Iterator[str]:
    """Yields the arguments without those that manage.py itself has used already."""
    given = iter(words)
    for word in given:
        if word == "--":
            yield word
            yield from given
        elif word in _OF_DJANGO:
            next(given, None)
        elif not word.startswith(tuple(f"{name}=" for name in _OF_DJANGO)):
            yield word
