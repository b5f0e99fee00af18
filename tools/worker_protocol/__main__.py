"""``python -m tools.worker_protocol --command "node worker.js"``: a table, and exit code 0 where all is kept."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click

from holdfast.core.errors import HoldfastError
from tools.worker_protocol.checks import Verdict, judge
from tools.worker_protocol.course import laid_out


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--command", required=True, help="What starts the worker; its environment says where the API is.")
@click.option(
    "--patience", type=click.FloatRange(1, 600), default=20.0, show_default=True, help="Seconds for each step."
)
@click.option("--verbose", is_flag=True, help="Show what the worker wrote, also where nothing is wrong.")
def main(command: str, *, patience: float, verbose: bool) -> None:
    """Try whether a worker in any language keeps the worker protocol.

    The worker needs handlers for the jobs conformance.echo, .flaky, .later, .snooze, .dead and .sleep:
    docs/worker-protocol.md says what each does. It is started twice, with HOLDFAST_API_URL, HOLDFAST_API_KEY,
    HOLDFAST_LEASE, HOLDFAST_GRACE and HOLDFAST_CONCURRENCY in its environment.
    """
    try:
        verdicts, output = asyncio.run(tried(command, patience))
    except HoldfastError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    for name, complaint in verdicts:
        click.echo(f"{'kept' if complaint is None else 'BROKEN':<8}{name}" + (f": {complaint}" if complaint else ""))
    broken = sum(verdict.complaint is not None for verdict in verdicts)
    if output and (broken or verbose):
        click.echo(f"\nThe worker wrote:\n{output}")
    click.echo(f"\n{len(verdicts) - broken} of {len(verdicts)} kept")
    sys.exit(1 if broken else 0)


async def tried(command: str, patience: float) -> tuple[list[Verdict], str]:
    """What every check came to, and what the worker wrote."""
    with tempfile.TemporaryDirectory(prefix="holdfast-conformance-") as folder:
        async with laid_out(Path(folder), command, patience) as course:
            verdicts = await judge(course)
            return verdicts, course.output.decode(errors="replace")


if __name__ == "__main__":
    main()
