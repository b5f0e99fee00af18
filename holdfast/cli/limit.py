"""``limit``: concurrency and rate limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from holdfast import Holdfast
from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_facts, print_heading, print_json, print_table
from holdfast.cli.submission import note_declared, warn_of_unknown_task
from holdfast.core.errors import Invalid
from holdfast.core.limits import MAX_CONCURRENCY, MAX_SHARE, MAX_WEIGHT, BucketUse, Limit
from holdfast.core.validation import format_duration, parse_count, parse_duration
from holdfast.views.documents import to_builtins
from holdfast.views.formatting import safe_text
from holdfast.views.limits import (
    BucketDocument,
    LimitDocument,
    describe_scope,
    describe_values,
    limit_document,
    list_documents,
    parse_key_values,
)

F = TypeVar("F", bound=Callable[..., Any])

_COLUMNS = [
    Column("NAME", "id"),
    Column("SCOPE"),
    Column("BY"),
    Column("VALUES"),
    Column("USED", "number"),
    Column("FREE AT", spare=True),
    Column("OWNER", spare=True),
    Column("CHANGED"),
]
_NONE = "none"


@add_group("limit")
def limit() -> None:
    """List, add, change and pause limits of queues and tasks.

    A limit says how many jobs run at once, how often they start, and how many may wait.
    """


@limit.command("list", examples=["holdfast limit list", "holdfast limit list --json"])
@click.pass_obj
def limit_list(session: Session) -> None:
    """List every limit with its values, and its use if it has no key."""
    with session.open_jobs() as app:
        limits = app.limits.sync.find_all()
        documents = app.run_blocking(_documents(app, limits))
    if session.json:
        print_json({"limits": [to_builtins(each) for each in documents]})
    else:
        rows = map(_row, limits, documents)
        print_table(_COLUMNS, rows, empty="no limits: add one with `holdfast limit add`")


async def _documents(app: Holdfast, limits: Sequence[Limit]) -> list[LimitDocument]:
    return await list_documents(await app.open_store(), limits)


def _row(each: Limit, document: LimitDocument) -> list[object]:
    used = document.buckets[0] if document.buckets else None
    return [
        each.name,
        describe_scope(each),
        each.by,
        describe_values(each.values),
        None if used is None or describe_scope(each) == "handlers" else used.used,
        None if used is None else _free_at(each, used),
        each.owner or "operator",
        "changed" if document.changed else None,
    ]


@limit.command("show", examples=["holdfast limit show mail", "holdfast limit show crm acme globex"])
@click.argument("name", metavar="NAME")
@click.argument("values", metavar="[VALUE]...", nargs=-1)
@click.pass_obj
def limit_show(session: Session, *, name: str, values: tuple[str, ...]) -> None:
    """Show a limit and its use.

    Of a limit with a key, the use of these values of the key.
    """
    with session.open_jobs() as app:
        limits = app.limits.sync
        found = limits.get(name)
        _check_values(found, values)
        uses = [] if found.by is not None and not values else limits.use(name, *parse_key_values(values))
    _print_limit(session, found, uses)


def _check_values(found: Limit, values: Sequence[str], example: str = "") -> None:
    """Raises an error for values that name no bucket; for none, where the ``example`` of the command has one."""
    if values and found.by is None:
        raise Invalid("values", values[0], f"limit {found.name} has one bucket for all jobs: name no value")
    if example and found.by is not None and not values:
        raise click.UsageError(f"limit {found.name} has a bucket for each value of {found.by}; give values: {example}")


def _print_limit(session: Session, each: Limit, uses: Sequence[BucketUse] = ()) -> None:
    document = limit_document(each, uses)
    if session.json:
        print_json(to_builtins(document))
        return
    print_facts(
        [
            ("limit", each.name),
            ("scope", describe_scope(each)),
            ("by", each.by),
            ("values", describe_values(each.values)),
            ("in code", None if each.declared is None else describe_values(each.declared)),
            ("owner", each.owner or "operator"),
        ]
    )
    if uses:
        print_heading("use")
        columns = [Column("VALUE"), Column("USED", "number"), Column("FREE AT")]
        print_table(
            columns, [[each_use.value, each_use.used, _free_at(each, each_use)] for each_use in document.buckets]
        )


def _free_at(each: Limit, use: BucketDocument) -> str:
    """When a job of weight 1 may start."""
    if use.free_at is not None:
        return f"{use.free_at[:19].replace('T', ' ')}Z{' (paused)' if use.paused else ''}"
    most = each.values.concurrency
    return "when a job ends" if most is not None and use.used >= most else "now"


_VALUES = (
    click.option("--concurrency", metavar="N", help="Jobs that may run at once."),
    click.option("--rate", metavar="RATE", help="Starts in a span: 10/s, 90/m, 100/15m, 500/h."),
    click.option("--burst", metavar="N", help="Starts at once [a tenth of a second's worth, at least the weight]."),
    click.option("--weight", metavar="N|PATH", help="Room and tokens of a job, or where its payload says them [1]."),
    click.option("--depth", metavar="N", help="Jobs that may wait; more submissions are refused."),
    click.option("--share", "shares", metavar="VALUE=N", multiple=True, help="Turns of a value of the key [1]."),
)


def _value_options(command: F) -> F:
    for option in reversed(_VALUES):
        command = option(command)
    return command


def _parse_values(given: Mapping[str, str | None], shares: Sequence[str]) -> dict[str, Any]:
    """Parses values by name; None for "none"."""
    values: dict[str, Any] = {}
    for field, text in given.items():
        if text is None:
            continue
        if text == _NONE:
            values[field] = None
        elif field == "rate" or (field == "weight" and text.startswith("args")):
            values[field] = text
        else:
            values[field] = parse_count(text, field, least=1, most=MAX_WEIGHT if field == "weight" else MAX_CONCURRENCY)
    return values | ({"shares": dict(map(_parse_share, shares))} if shares else {})


def _parse_share(text: str) -> tuple[str, int | None]:
    value, separator, share = text.rpartition("=")
    if not separator:
        raise Invalid("share", text, "give VALUE=N, like acme=3")
    return value, None if share == _NONE else parse_count(share, "share", least=1, most=MAX_SHARE)


def _kept_shares(shares: Mapping[str, int | None]) -> dict[str, int]:
    return {value: share for value, share in shares.items() if share is not None}


@limit.command(
    "add",
    examples=[
        "holdfast limit add mail --queue mail --concurrency 20",
        "holdfast limit add mail-depth --queue mail --depth 10000",
        "holdfast limit add quota --queue mail --by args.tenant --depth 1000",
        "holdfast limit add crm --task crm.sync --by args.tenant --concurrency 1 --rate 10/s --share acme=3",
        "holdfast limit add api --rate 100/m --burst 10",
    ],
)
@click.argument("name", metavar="NAME")
@click.option("--queue", "-Q", metavar="NAME", help="It applies to jobs of this queue.")
@click.option("--task", metavar="NAME", help="It applies to jobs of this task, in any queue.")
@click.option("--by", metavar="PATH", help='A place in the payload, like "args.tenant": each value has a bucket.')
@_value_options
@click.option("--replace", is_flag=True, help="Replace a limit of this name.")
@click.pass_obj
def limit_add(
    session: Session,
    /,
    *,
    name: str,
    queue: str | None,
    task: str | None,
    by: str | None,
    shares: tuple[str, ...],
    replace: bool,
    **given: str | None,
) -> None:
    """Add a limit of a queue or a task.

    Of neither: handlers take tokens of it by `context.limit`.
    """
    scope = {field: text for field, text in (("queue", queue), ("task", task), ("by", by)) if text is not None}
    values = {field: value for field, value in _parse_values(given, shares).items() if value is not None}
    if "shares" in values:
        values["shares"] = _kept_shares(values["shares"])
    with session.open_target(creating=True) as app:
        added = app.limits.sync.add(name, replace_existing=replace, **scope, **values)
        if task is not None:
            warn_of_unknown_task(app, task)
    _print_limit(session, added)


@limit.command(
    "set",
    examples=[
        "holdfast limit set mail --concurrency 50",
        "holdfast limit set crm --rate none --share acme=5 --share globex=none",
    ],
)
@click.argument("name", metavar="NAME")
@_value_options
@click.pass_obj
def limit_set(session: Session, /, *, name: str, shares: tuple[str, ...], **given: str | None) -> None:
    """Change values of a limit, while workers obey it. The word none takes a value away.

    They go before the values of the code, until `holdfast limit reset`.
    """
    values = _parse_values(given, shares)
    if not values:
        raise click.UsageError("give a value to change: --concurrency, --rate, --burst, --weight, --depth or --share")
    with session.open_target() as app:
        limits = app.limits.sync
        if "shares" in values:
            values["shares"] = _kept_shares({**limits.get(name).values.shares, **values["shares"]})
        changed = limits.change(name, **values)
    _print_limit(session, changed)


@limit.command("reset", examples=["holdfast limit reset crm"])
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.pass_obj
def limit_reset(session: Session, *, names: tuple[str, ...]) -> None:
    """Take the values of the code again."""
    _each_of(session, names, "reset", lambda app, name: app.limits.sync.reset(name))


@limit.command("remove", examples=["holdfast limit remove crm"])
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.pass_obj
def limit_remove(session: Session, *, names: tuple[str, ...]) -> None:
    """Remove limits; their jobs run without. One that code declares returns when a worker starts."""
    _each_of(session, names, "removed", lambda app, name: app.limits.sync.remove(name))


def _each_of(session: Session, names: tuple[str, ...], done: str, change: Callable[[Holdfast, str], object]) -> None:
    with session.open_jobs() as app:
        found = [app.limits.sync.get(name) for name in names]  # all of them or none
        for name in names:
            change(app, name)
    if done == "removed":
        note_declared(found)
    if session.json:
        print_json({"limits": list(names), "done": done})
    else:
        click.echo(f"{', '.join(names)}: {done}")


@limit.command("pause", examples=["holdfast limit pause mail --for 10m", "holdfast limit pause crm acme --for 1h"])
@click.argument("name", metavar="NAME")
@click.argument("values", metavar="[VALUE]...", nargs=-1)
@click.option("--for", "span", metavar="SPAN", required=True, help="How long: 30, 10m, 2h.")
@click.pass_obj
def limit_pause(session: Session, *, name: str, values: tuple[str, ...], span: str) -> None:
    """Start no job under a limit for so long.

    Of a limit with a key, none of these values of the key.

    Running jobs go on. A pause ends by itself or by `holdfast limit resume`; a later one makes it longer, never
    shorter.
    """
    length = parse_duration(span, "for")
    with session.open_jobs() as app:
        _check_values(app.limits.sync.get(name), values, f"holdfast limit pause {name} VALUE --for {span}")
        app.limits.sync.pause(name, length, *parse_key_values(values))
    if session.json:
        print_json({"limit": name, "values": list(values), "paused_for": length.total_seconds()})
    else:
        click.echo(safe_text(f"{' '.join((name, *values))}: paused for {format_duration(length)}"))


@limit.command("resume", examples=["holdfast limit resume mail", "holdfast limit resume crm acme"])
@click.argument("name", metavar="NAME")
@click.argument("values", metavar="[VALUE]...", nargs=-1)
@click.pass_obj
def limit_resume(session: Session, *, name: str, values: tuple[str, ...]) -> None:
    """End a pause of a limit, also one of `RetryAfter`.

    Of a limit with a key, the pause of these values of the key.
    """
    with session.open_jobs() as app:
        _check_values(app.limits.sync.get(name), values, f"holdfast limit resume {name} VALUE")
        app.limits.sync.resume(name, *parse_key_values(values))
    if session.json:
        print_json({"limit": name, "values": list(values), "done": "resumed"})
    else:
        click.echo(safe_text(f"{' '.join((name, *values))}: resumed"))
