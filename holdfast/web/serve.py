"""The API as a process: its socket, event loop, signals and exit code, with uvicorn between socket and application."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvloop

from holdfast.app import Holdfast
from holdfast.config import Settings
from holdfast.errors import ConfigError, Unavailable
from holdfast.events import ApiStarted, ApiStopping
from holdfast.values import mask_url
from holdfast.web.asgi import asgi

if TYPE_CHECKING:
    from uvicorn import Server

_BACKLOG = 2048  # connections that may wait to be accepted


def serve(app: Holdfast, settings: Settings, *, exposed: bool = False) -> int:
    """Serve the API until told to stop; the process's exit code.

    Without keys only this host's own addresses are served, unless ``exposed`` says that others are wanted.
    """
    server_for = _server_maker(settings)
    if not exposed and not is_loopback(settings.api_host):
        raise ConfigError(
            f"api_host: {settings.api_host} can be reached by others, and without keys anybody may do anything: "
            "listen on 127.0.0.1 behind a proxy that asks who they are, or say --exposed"
        )
    with (
        contextlib.closing(_listening(settings)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        loop.run(_run(app, settings, server_for(app), listener))
    return 0


def is_loopback(host: str) -> bool:
    """Whether only this host can reach that address of its own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _server_maker(settings: Settings) -> Callable[[Holdfast], Server]:
    """What makes uvicorn's server; ConfigError where uvicorn or a file of TLS is missing."""
    try:
        import httptools  # noqa: F401 - without it uvicorn parses in Python, at a third of the speed
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(f"the HTTP server needs {error.name}; pip install 'holdfast[web]'") from None

    class Quiet(uvicorn.Server):
        """Leaves signals to us: its own way ends the process by the signal it got."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise ConfigError("tls_certificate, tls_key: TLS needs both, the certificate and its key")

    def make(app: Holdfast) -> Server:
        config = uvicorn.Config(
            asgi(app),
            http="httptools",
            ws="none",
            lifespan="off",  # the application is held open around the server
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=max(1, round(settings.grace.total_seconds())),
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        try:
            config.load()
        except OSError as error:
            raise ConfigError(f"tls_certificate, tls_key: they cannot be used: {error}") from None
        return Quiet(config)

    return make


def _listening(settings: Settings) -> socket.socket:
    host, port = settings.api_host, settings.api_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"api_host, api_port: cannot listen on {host}:{port}: {error.strerror or error}") from None


async def _run(app: Holdfast, settings: Settings, server: Server, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        server.force_exit = server.should_exit  # the second time: at once
        server.should_exit = True
        app.events.emit(ApiStopping(reason=name))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    async with _held_open(app):
        scheme = "http" if settings.tls_certificate is None else "https"
        host, port = listener.getsockname()[:2]
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        app.events.emit(ApiStarted(address=address, store=mask_url(app.settings.url)))
        await server.serve(sockets=[listener])


@contextlib.asynccontextmanager
async def _held_open(app: Holdfast) -> Any:
    """Around the server: a store that is away is no reason not to start, its requests are answered 503."""
    try:
        await app.__aenter__()
    except Unavailable:
        try:
            yield
        finally:
            await app.close()
        return
    try:
        yield
    finally:
        await app.__aexit__()
