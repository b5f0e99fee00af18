"""The HTTP API: the whole queue for any language, as an ASGI application on Starlette.

asgi.py               the application: its middlewares, its router, the call of an operation
routing.py            operations, the table of them, and the router over it
messages.py           a request and its body, answers, errors as RFC 9457 problem documents
fields.py             fields of queries and bodies: schema, example and check of each
submissions.py jobs.py bulk.py queues.py claims.py monitoring.py …   the operations
long_poll.py          claims that wait for jobs
openapi.py            the table as an OpenAPI document
server.py             the program: uvicorn around it
console/              the web console: pages over the operations
connection_limits.py  the program's connections: how many, and how long they may take
authentication.py     before the router: hosts and rates of addresses; at the operation: origins, keys, scopes
keys.py keys_file.py  API keys, their file, and the caller of a request with its scopes and queues
rate_limit.py         rates of addresses and keys
lease_tokens.py remote_workers.py   leases and settlements of workers over HTTP
audit.py request_records.py         the record of changes, and of requests
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.app import Holdfast
from holdfast.web.keys import ConsoleUser, FindUser

if TYPE_CHECKING:
    from holdfast.web.asgi import Api

__all__ = ["ConsoleUser", "create_app"]

_OPEN_TO_ALL = (
    "keys_file is not set, so every client that reaches this API may do anything: name a file of keys by an absolute "
    "path (`holdfast keys create` makes it), or guard the mount yourself and say create_app(app, exposed=True)"
)


def create_app(
    app: Holdfast,
    *,
    checks_hosts: bool = False,
    local_console: bool = False,
    console_user: FindUser | None = None,
    exposed: bool = False,
) -> Api:
    """Returns the HTTP API of this application, to be served, or mounted in any ASGI application.

    It has a store of its own, whose calls have a deadline; the application stays as it is. Served by itself it opens
    this store at the start and closes it at the end. Mounted, it opens the store with the first request; closing the
    application closes it. ``checks_hosts``: refuse names that a page of another site could have made up.
    ``local_console``: show the console without keys; only for a server that other hosts cannot reach.
    ``console_user``: returns the ``ConsoleUser`` whom the application around it has signed in, from the ASGI scope of a
    request, or None; a function or a coroutine function.

    Without ``keys_file`` every client that reaches it may do anything; a warning of the logger ``holdfast`` says so.
    ``exposed``: omit it, because something around the API authenticates clients.
    """
    from holdfast.web.asgi import Api  # Starlette: `holdfast keys` works without the extra

    if app.settings.keys_file is None and not (exposed or checks_hosts or local_console):
        logging.getLogger("holdfast").warning(_OPEN_TO_ALL)
    return Api(app, checks_hosts=checks_hosts, local_console=local_console, console_user=console_user)
