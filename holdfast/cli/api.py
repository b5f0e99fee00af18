"""``api``: the HTTP API. ``audit``: whether its record of changes is whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from holdfast import Holdfast
from holdfast.cli.base import add_command, add_group
from holdfast.cli.context import Session, store_of, url_source
from holdfast.cli.output import print_json, print_note
from holdfast.core.errors import ConfigError, Unavailable
from holdfast.views.formatting import count_noun


@add_command("api", examples=["holdfast api", "holdfast api --app shop.jobs:app --port 8080"])
@click.option("--host", "api_host", metavar="ADDRESS", help="The address to listen on [127.0.0.1].")
@click.option("--port", "api_port", metavar="N", help="The port; 0 takes a free one [8000].")
@click.option("--exposed", is_flag=True, help="Serve other hosts without keys: who reaches the port may do anything.")
@click.pass_obj
def api(session: Session, *, api_host: str | None, api_port: str | None, exposed: bool) -> int:
    """Serve the HTTP API until stopped.

    An application is not needed; where one is named, its tasks check payloads before they are stored. SIGTERM and
    Ctrl-C let requests under way finish within the grace, a second signal more than a second later ends at once.
    """
    from holdfast.telemetry.logs import configure_logs
    from holdfast.web.server import serve

    app = session.load(api_host=api_host, api_port=api_port)
    for warning in (*app.settings.warnings, *_warnings(app)):
        print_note(f"warning: {warning}")
    finish_logs = configure_logs(app.settings, app.events)
    try:
        return serve(app, app.settings, exposed=exposed)
    finally:
        finish_logs()


def _warnings(app: Holdfast) -> Iterator[str]:
    """Yields a warning for each risky setting."""
    from holdfast.web.keys_file import read_keys

    with contextlib.suppress(Unavailable):  # that is no reason not to start
        if asyncio.run(app.new_store().missing()) is not None:
            yield f"this makes a new database: {store_of(app)} (url from {url_source(app)})"
    file = app.settings.keys_file
    if file is not None and not read_keys(Path(file)):
        yield f"{file} has no key, so no caller is let in: `holdfast keys create` makes keys"


@add_group("audit")
def audit() -> None:
    """Check the file of changes made over the HTTP API."""


@audit.command(
    "verify",
    examples=["holdfast audit verify audit.jsonl", "holdfast audit verify audit.2.jsonl --after HASH_OF_AUDIT_1"],
)
@click.argument("file", metavar="FILE", required=False)
@click.option("--expect", "expected", metavar="HASH", help="A hash noted earlier that must be in the chain.")
@click.option("--after", metavar="HASH", default="", help="The last hash of the file that was put aside before.")
@click.pass_obj
def audit_verify(session: Session, *, file: str | None, expected: str | None, after: str) -> int:
    """Check the file's chain of hashes [audit_file]. Prints how many lines it has, and the last hash.

    Note that hash elsewhere: later, --expect HASH shows that nothing up to there was cut off or written anew. A file
    that is not whole ends with exit code 1.
    """
    from holdfast.telemetry.audit_file import AuditBroken, verify

    path = file if file is not None else session.settings().audit_file
    if path is None:
        raise ConfigError("no audit file is named: give its path, or set audit_file")
    found = verify(Path(path), expected, after)
    if not found.found:
        raise AuditBroken(f"{path}: no entry has the hash {str(expected)[:64]}: entries are missing")
    if session.json:
        print_json({"entries": found.entries, "last": found.last})
    else:
        click.echo(f"{count_noun(found.entries, 'line')}, whole; the last hash is {found.last or '-'}")
    return 0
