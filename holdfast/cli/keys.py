"""``keys``: callers of the HTTP API, and their scopes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.base import add_group
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_json, print_note, print_table
from holdfast.core.errors import ConfigError, Invalid, NotFound
from holdfast.core.models import to_microseconds
from holdfast.core.validation import did_you_mean, parse_duration, parse_instant
from holdfast.views.formatting import format_timestamp

if TYPE_CHECKING:
    from holdfast.web.keys import Key

_COLUMNS = [
    Column("ID", "id"),
    Column("NAME"),
    Column("SCOPES", "text"),
    Column("QUEUES", "text"),
    Column("STATE"),
    Column("EXPIRES", spare=True),
    Column("LAST USED", spare=True),
]
_FILE = click.option("--file", metavar="FILE", help="The file of keys [keys_file].")
_FILE_NEW = "keys.toml"
_MAX_ID = 20
_WHEN = 'give a time from now ("90d") or an instant to come ("2030-01-31T08:00:00Z")'


@add_group("keys")
def keys() -> None:
    """Make, list, change and revoke keys of the HTTP API.

    Keys live in a file that the setting keys_file names. It holds hashes only, so a key can be seen once: when it is
    made. An API that was started with that setting follows the file at once; one that was not must be restarted.
    """


@keys.command("create", examples=["holdfast keys create shop --scope submit --queue 'mail*' --file keys.toml"])
@click.argument("name", metavar="NAME")
@click.option("--scope", "scopes", metavar="SCOPE", multiple=True, help="submit, read, operate, work or admin; repeat.")
@click.option("--queue", "queues", metavar="PATTERN", multiple=True, help="Queues it is for: mail, mail.* [*]; repeat.")
@click.option("--expires", metavar="WHEN", help="When it ends: in 90d, or at an instant [never].")
@_FILE
@click.pass_obj
def keys_create(
    session: Session,
    *,
    name: str,
    scopes: tuple[str, ...],
    queues: tuple[str, ...],
    expires: str | None,
    file: str | None,
) -> None:
    """Make a key and print it, this once.

    admin stands for every scope. In a pattern, * stands for any letters and ? for one.
    """
    from holdfast.web.keys import new_key
    from holdfast.web.keys_file import change_keys

    path = _path(session, file)
    key_id, key, token = new_key(name, scopes, queues, None if expires is None else _expiry(expires))
    change_keys(path, lambda present: {**present, key_id: key})
    _print_key(session, key_id, key, token)


@keys.command("list", examples=["holdfast keys list --file keys.toml"])
@_FILE
@click.pass_obj
def keys_list(session: Session, *, file: str | None) -> None:
    """List every key, never its secret."""
    from holdfast.web.keys_file import read_keys, read_usage

    path = _path(session, file)
    found, used = read_keys(path), read_usage(path)
    documents = [_document(key_id, key, used.get(key_id)) for key_id, key in found.items()]
    if session.json:
        print_json({"keys": documents})
        return
    names = ("id", "name", "scopes", "queues", "state", "expires_at", "used_at")
    rows = [[_state(each) if name == "state" else each[name] for name in names] for each in documents]
    print_table(_COLUMNS, [[", ".join(c) if isinstance(c, list) else c for c in row] for row in rows], empty="no keys")


@keys.command("rotate", examples=["holdfast keys rotate k3vq7xna --overlap 7d --file keys.toml"])
@click.argument("key_id", metavar="ID")
@click.option("--overlap", metavar="TIME", default="1d", help="How long the old secret is good yet [1d].")
@_FILE
@click.pass_obj
def keys_rotate(session: Session, *, key_id: str, overlap: str, file: str | None) -> None:
    """Give a key another secret and print it, this once. Id, scopes and queues stay."""
    from holdfast.web.keys import id_in, rotate_key
    from holdfast.web.keys_file import change_keys

    key_id = id_in(key_id)
    rotated: list[Any] = []

    def decide_change(present: dict[str, Key]) -> Mapping[str, Key]:
        rotated[:] = rotate_key(key_id, _named(present, key_id), parse_duration(overlap, "overlap"))
        return {**present, key_id: rotated[0]}

    change_keys(_path(session, file), decide_change)
    _print_key(session, key_id, rotated[0], rotated[1])
    until = _dated(rotated[0].former_until)
    print_note("the old secret is good no more" if until is None else f"the old secret is good until {until}")


@keys.command("revoke", examples=["holdfast keys revoke k3vq7xna --file keys.toml"])
@click.argument("key_id", metavar="ID")
@_FILE
@click.pass_obj
def keys_revoke(session: Session, *, key_id: str, file: str | None) -> None:
    """Revoke a key. It stays in the list, for records name it.

    A whole key will do for its id.
    """
    from holdfast.web.keys import id_in, revoke_key
    from holdfast.web.keys_file import change_keys

    key_id = id_in(key_id)
    change_keys(_path(session, file), lambda present: {**present, key_id: revoke_key(_named(present, key_id))})
    if session.json:
        print_json({"id": key_id, "state": "revoked"})
    else:
        click.echo(f"{key_id}: revoked")


def _path(session: Session, file: str | None) -> Path:
    given = file if file is not None else session.settings().keys_file
    if given is None:
        raise ConfigError(
            f"no file of keys is named: give --file {_FILE_NEW}, or write `holdfast config set keys_file {_FILE_NEW}`"
        )
    return Path(given)


def _named(present: Mapping[str, Key], key_id: str) -> Key:
    if key_id in present:
        return present[key_id]
    so_named = [each for each, key in present.items() if key.name == key_id]
    if so_named:
        raise NotFound(f"a name is no id; the id of {key_id} is {' or '.join(so_named)}")
    shown = key_id if len(key_id) <= _MAX_ID else "of that id"  # more could be a secret
    raise NotFound(f"there is no key {shown}; see `holdfast keys list`{did_you_mean(key_id, present)}")


def _expiry(text: str) -> datetime:
    now = datetime.now(UTC)
    is_date = text[:4].isdigit() and text[4:5] == "-"
    at = parse_instant(text, "expires") if is_date else now + _span(text)
    if at <= now:
        raise Invalid("expires", text, _WHEN)
    return at


def _span(text: str) -> timedelta:
    try:
        span = parse_duration(text, "expires")
    except Invalid:
        raise Invalid("expires", text, _WHEN) from None
    if span > timedelta(days=36_500):
        raise Invalid("expires", text, _WHEN)
    return span


def _state(document: Mapping[str, Any]) -> str:
    until = document["former_until"]
    overlaps = (
        until is not None
        and document["state"] == "active"
        and until > format_timestamp(to_microseconds(datetime.now(UTC)))
    )
    return f"{document['state']}, the old secret until {until}" if overlaps else str(document["state"])


def _document(key_id: str, key: Key, used_at: datetime | None) -> dict[str, Any]:
    return {
        "id": key_id,
        "name": key.name,
        "scopes": list(key.scopes),
        "queues": list(key.queues),
        "state": key.state(datetime.now(UTC)),
        "created_at": _dated(key.created_at),
        "expires_at": _dated(key.expires_at),
        "former_until": _dated(key.former_until),
        "used_at": _dated(used_at),
    }


def _dated(at: datetime | None) -> str | None:
    return None if at is None else format_timestamp(to_microseconds(at))


def _print_key(session: Session, key_id: str, key: Key, token: str) -> None:
    if session.json:
        print_json({**_document(key_id, key, None), "key": token})
    else:
        click.echo(token)
        print_note(f"this is key {key_id} ({key.name}); it is not shown again")
