"""``chaos``: faults that are injected into workers on purpose."""

from __future__ import annotations

import asyncio
import signal
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_facts, print_heading, print_json, print_note, print_table
from holdfast.cli.submission import parse_object
from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.faults import Fault, FaultPlan, parse_fault
from holdfast.views.documents import plan_document, to_builtins
from holdfast.views.formatting import count_noun, format_timestamp, safe_text

if TYPE_CHECKING:
    from holdfast import Holdfast
    from holdfast.testing.chaos import ChaosReport
    from holdfast.testing.scenario import Scenario

_BAR = 50  # characters of the longest bar
_ROWS = 30
_NUMBERS = ("probability", "attempts", "seconds")


@add_group("chaos")
def chaos() -> None:
    """Break workers on purpose: errors, latency, crashes.

    It works where the setting allow_faults is true, in the workers and here: in staging, never in production.
    """


@chaos.command(
    "run",
    examples=[
        'holdfast chaos run retry-storm --task mail.send --payload \'{"to": "{n}@example.com"}\'',
        "holdfast chaos run worker-crash --task order.charge --effects shop.checks:count_charges",
        "holdfast chaos run ./staging.toml --seed 7 --json",
    ],
)
@click.argument("scenario", metavar="SCENARIO")
@click.option("--task", metavar="NAME", help="The task of its jobs; not needed if there is only one.")
@click.option("--payload", metavar="JSON", help="Arguments of each job; {n} in their text is its number.")
@click.option("--jobs", type=int, metavar="N", help="How many jobs.")
@click.option("--workers", type=int, metavar="N", help="How many worker processes.")
@click.option("--span", metavar="SPAN", help="How long the faults are on.")
@click.option("--deadline", metavar="SPAN", help="By when every job must have ended.")
@click.option("--seed", type=int, metavar="N", help="Seed of the draws: the same one draws the same faults.")
@click.option("--effects", metavar="MODULE:FUNCTION", help="Counts the effects of jobs: takes ids, returns numbers.")
@click.option("--exactly-once", is_flag=True, default=None, help="No effect may be repeated, whatever happens.")
@click.pass_obj
def chaos_run(session: Session, /, *, scenario: str, payload: str | None, **given: Any) -> int:
    """Run a scenario on your application, and balance the books.

    Ready ones are duplicate-delivery, worker-crash, partial-execution and retry-storm; a TOML file is another. It
    starts worker processes on the store of the settings, and exits with 1 if the books do not balance.
    """
    from holdfast.testing.scenario import load_scenario

    given["payload"] = None if payload is None else parse_object("payload", payload)
    loaded = load_scenario(scenario).with_values(**given)
    app, target = session.with_tasks("chaos run"), session.settings().app
    if target is None:
        raise ConfigError("chaos run starts workers, which import the application: give --app module:name")
    report = asyncio.run(_run_until_signal(app, loaded, target))
    if isinstance(report, signal.Signals):
        print_note(f"{report.name}: the workers and the faults are gone; jobs that have not ended stay in the store")
        return 128 + report
    if session.json:
        print_json(to_builtins(report) | {"balanced": report.balanced})
    else:
        _print_report(loaded, report)
    return 0 if report.balanced else 1


async def _run_until_signal(app: Holdfast, scenario: Scenario, target: str) -> ChaosReport | signal.Signals:
    """Runs a scenario. Returns the signal that has ended it, if one has; further ones do not hinder the clean-up."""
    from holdfast.testing.chaos import run_chaos

    loop, running = asyncio.get_running_loop(), asyncio.create_task(run_chaos(app, scenario, target=target))
    received: list[signal.Signals] = []

    def end_once(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end_once, number)
    try:
        return await running
    except asyncio.CancelledError:
        return received[0]


def _print_report(scenario: Scenario, report: ChaosReport) -> None:
    click.secho(report.scenario, bold=True, nl=False)
    click.echo(f": {safe_text(scenario.description)}")
    print_heading("Injected")
    rows = [[kind, number] for kind, number in report.injected.items()]
    print_table([Column("FAULT"), Column("TIMES", "number")], rows, empty="no fault happened")
    print_heading("What happened")
    copies = report.submitted - report.accepted
    print_facts(
        [
            ("accepted", f"{report.accepted:,}" + (f" ({copies:,} further submissions were copies)" if copies else "")),
            ("succeeded", f"{report.succeeded:,}"),
            ("dead", f"{report.dead:,}"),
            ("cancelled", f"{report.cancelled:,}"),
            ("executions", f"{report.executions:,}, {report.lost:,} of them lost with their workers"),
            ("workers killed", f"{report.killed_workers:,}"),
            ("effects", _describe_effects(report)),
            ("seconds", f"{report.seconds:g}"),
            ("seed", report.seed),
        ]
    )
    if report.retries:
        print_heading("Retries over time")
        _print_bars(report.retries)
    print_heading("Books")
    ended = report.succeeded + report.dead + report.cancelled
    sign = "=" if ended == report.accepted else "≠"
    click.echo(
        f"accepted {report.accepted:,} {sign} succeeded {report.succeeded:,} + dead {report.dead:,} "
        f"+ cancelled {report.cancelled:,}"
    )
    if not report.injected:
        print_note("no fault happened, so this run has shown nothing: more jobs, or a higher probability?")
    for problem in report.problems:
        click.secho(safe_text(problem), fg="red")
    click.secho("balanced" if report.balanced else "not balanced", fg="green" if report.balanced else "red", bold=True)


def _describe_effects(report: ChaosReport) -> str | None:
    if report.effects is None:
        return None
    each = report.effects
    none = f", {each.none:,} of jobs that did not succeed are not there" if each.none else ""
    return f"{each.once:,} once, {each.repeated:,} repeated, {each.missing:,} missing{none}"


def _print_bars(retries: dict[int, int]) -> None:
    """Prints how many retries began in each second, or in each of ``_ROWS`` equal parts of the time."""
    width = max(retries) // _ROWS + 1
    counts: dict[int, int] = {}
    for second, number in retries.items():
        counts[second // width] = counts.get(second // width, 0) + number
    most = max(counts.values())
    for row in range(max(counts) + 1):
        number = counts.get(row, 0)
        bar = "█" * max(round(number * _BAR / most), 1 if number else 0)
        click.echo(f"{f'{row * width} s':>8}  {bar} {number or ''}".rstrip())


# ── faults on and off ───────────────────────────────────────────────────────────────────────────────────────────────
@chaos.command(
    "start",
    examples=[
        "holdfast chaos start --fault kind=error,task=mail.send,probability=0.3 --span 5m",
        "holdfast chaos start faults.toml --span 10m --seed 7",
    ],
)
@click.argument("file", metavar="[FILE]", required=False)
@click.option("--fault", "texts", metavar="FIELD=VALUE,...", multiple=True, help="A fault; may be given repeatedly.")
@click.option("--span", required=True, metavar="SPAN", help="How long they are on, up to a day.")
@click.option("--seed", type=int, metavar="N", help="Seed of the draws.")
@click.pass_obj
def chaos_start(session: Session, *, file: str | None, texts: Sequence[str], span: str, seed: int | None) -> None:
    """Switch faults on, in place of those that are on.

    A FILE has a table [[fault]] for each. Fields: kind, task, queue, step, probability, attempts, seconds, when.
    """
    faults = [*([] if file is None else _read_faults(file)), *map(_parse_text, texts)]
    with session.open_jobs() as app:
        plan = app.faults.sync.start(faults, span=span, seed=seed)
    _print_plan(session, plan)


def _read_faults(file: str) -> list[Any]:
    try:
        given = tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from None
    faults = given.pop("fault", [])
    if given:
        raise ConfigError(f"{file}: {next(iter(given))} is for `chaos run`; here a file has tables [[fault]] only")
    if not isinstance(faults, list) or not faults:
        raise ConfigError(f"{file}: it has no table [[fault]]")
    return faults


def _parse_text(text: str) -> Fault:
    """Makes a fault of ``kind=error,probability=0.3``."""
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise Invalid("fault", text, "write field=value,field=value")
        if name in fields:
            raise Invalid("fault", text, f"give {name} once")
        fields[name] = _number(value) if name in _NUMBERS else value
    return parse_fault(fields)


def _number(text: str) -> float | int | str:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


@chaos.command("show", examples=["holdfast chaos show", "holdfast chaos show --json"])
@click.pass_obj
def chaos_show(session: Session) -> None:
    """Show the faults that are on."""
    with session.open_jobs() as app:
        plan = app.faults.sync.read()
    _print_plan(session, plan)


@chaos.command("stop", examples=["holdfast chaos stop"])
@click.pass_obj
def chaos_stop(session: Session) -> None:
    """Switch every fault off. Workers obey within seconds."""
    with session.open_jobs() as app:
        stopped = app.faults.sync.stop()
    if session.json:
        print_json({"stopped": stopped})
    else:
        click.echo("faults are off" if stopped else "no faults were on")


def _print_plan(session: Session, plan: FaultPlan | None) -> None:
    if session.json:
        print_json(to_builtins(plan_document(plan)))
        return
    if plan is None:
        click.echo("no faults are on")
        return
    click.echo(f"{count_noun(len(plan.faults), 'fault')} until {format_timestamp(plan.until_us)}, seed {plan.seed}")
    columns = [Column(name) for name in ("KIND", "TASK", "QUEUE", "STEP", "PROBABILITY", "ATTEMPTS", "SECONDS", "WHEN")]
    rows = [
        [each.kind, each.task, each.queue, each.step, each.probability, each.attempts, each.seconds, each.when]
        for each in plan.faults
    ]
    print_table(columns, rows)
