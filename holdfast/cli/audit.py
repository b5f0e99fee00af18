"""``audit``: whether the record of changes is whole."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.output import print_json
from holdfast.core.errors import ConfigError
from holdfast.views.formatting import count_noun


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
