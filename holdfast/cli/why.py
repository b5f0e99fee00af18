"""``why``: the reasons why a job is not running."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace

from holdfast.cli.base import add_command
from holdfast.cli.context import Session
from holdfast.cli.output import name_program, print_json
from holdfast.core.redaction import Redaction
from holdfast.views.documents import to_builtins
from holdfast.views.explain import explain_job, job_facts
from holdfast.views.formatting import safe_text


@add_command(
    "why", examples=["holdfast why 0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77", "holdfast why key:nightly-report --json"]
)
@click.argument("job_id", metavar="ID")
@click.pass_obj
def why(session: Session, *, job_id: str) -> None:
    """Say why a job is not running, and what to do about it."""
    with session.open_target(needs_tasks=False) as app:
        job = app.sync.get(job_id)
        shown = Redaction(app.settings.redacted).redact_job(job)
        reasons = [
            replace(each, remedy=name_program(each.remedy))
            for each in explain_job(shown, app.run_blocking(job_facts(app, job)))
        ]
    if session.json:
        document: dict[str, Any] = {"id": job.id, "state": job.state.value}
        print_json(document | {"reasons": [to_builtins(each) for each in reasons]})
        return
    click.echo(f"job {job.id} ({safe_text(job.task)} in {job.queue}) is {job.state}")
    for each in reasons:
        click.echo(f"- {safe_text(each.text)}")
        if each.remedy:
            click.echo(f"  remedy: {safe_text(each.remedy)}")
