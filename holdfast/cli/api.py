"""``api``: the HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from holdfast import Holdfast
from holdfast.cli.base import add_command
from holdfast.cli.context import Session, store_of, url_source
from holdfast.cli.output import print_note
from holdfast.core.errors import Unavailable


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
        yield f"{file} has no key, so that nobody may come in: `holdfast keys create` makes keys"
