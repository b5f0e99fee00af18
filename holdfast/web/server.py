"""The API as a process: its socket, event loop, signals and exit code, with uvicorn between socket and application."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import uvloop

from holdfast.app import Holdfast
from holdfast.app.alerts import watch_alerts
from holdfast.core.clock import run_first
from holdfast.core.errors import ConfigError, HoldfastError, StoreReplaced
from holdfast.core.events import ApiStarted, ApiStopping, SettingsChanged, SettingsRefused
from holdfast.core.validation import is_loopback, mask_url
from holdfast.settings.settings import Settings, Watch
from holdfast.telemetry.metrics import watched_loop
from holdfast.web import create_app
from holdfast.worker.stop_signals import StopRequest, StopRequests, handle_stop_signals, ignore_rest_of_burst

if TYPE_CHECKING:
    from uvicorn import Config, Server

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""Any ASGI application."""

_CHECK_EVERY = 2.0  # seconds
_BACKLOG = 2048  # connections that may wait to be accepted


def serve(
    app: Holdfast,
    settings: Settings,
    *,
    exposed: bool = False,
    site: Application | None = None,
    local_console: bool = False,
) -> int:
    """Serve the API until stopped; returns the process's exit code.

    ``site``: another ASGI application to serve, which has the API among its parts. Without keys only this host's own
    addresses are served, unless ``exposed`` asks for more. ``local_console``: show the console without keys where only
    this host can reach it.
    """
    _check_exposure(settings, exposed=exposed)
    gc.freeze()  # The modules of the application too: no collection need visit them.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        try:
            loop.run(_until_stopped(app, settings, site, local_console=local_console))
        finally:
            ignore_rest_of_burst()
    return 0


def _check_exposure(settings: Settings, *, exposed: bool) -> None:
    if not exposed and settings.keys_file is None and not is_loopback(settings.api_host):
        raise ConfigError(
            f"api_host: {settings.api_host} can be reached by others, and without keys anybody may do anything: "
            "name a keys_file (`holdfast keys create`), listen on 127.0.0.1 behind a proxy that asks who they are, "
            "or say --exposed"
        )


async def _until_stopped(app: Holdfast, settings: Settings, site: Application | None, *, local_console: bool) -> None:
    async with serve_in_loop(app, settings, site=site, exposed=True, local_console=local_console) as served:

        def stop(name: str) -> None:
            if served.stop() is not StopRequest.DUPLICATE:
                app.events.emit(ApiStopping(reason=name))

        handle_stop_signals(stop)
        try:
            await run_first(served.wait_ended(), _check_store_files(served.app))
        except StoreReplaced:
            app.events.emit(ApiStopping(reason="store_replaced"))
            raise


async def _check_store_files(app: Holdfast) -> None:
    """Raises ``StoreReplaced`` once the files of a SQLite store were removed or replaced."""
    is_file = app.new_store().url.startswith("sqlite:")
    while True:
        await asyncio.sleep(_CHECK_EVERY)
        if not is_file:
            continue
        try:
            await (await app.open_store()).health.durability()
        except StoreReplaced:
            raise
        except HoldfastError:
            continue  # requests tell of it


@contextlib.asynccontextmanager
async def serve_in_loop(
    app: Holdfast,
    settings: Settings,
    *,
    site: Application | None = None,
    exposed: bool = False,
    local_console: bool = False,
) -> AsyncIterator[Serving]:
    """Serve the API in this event loop while the body runs; then let requests under way finish.

    ``local_console``: show the console without keys where only this host can reach it.
    """
    _check_exposure(settings, exposed=exposed)
    server_for = _server_maker(settings, lifespan="off" if site is None else "auto")
    from holdfast.web.asgi import hold_open  # Starlette: its absence is a ConfigError by now

    with contextlib.closing(_listening(settings)) as listener:
        if site is None:
            is_local = local_console and settings.keys_file is None and is_loopback(settings.api_host)
            site = api = create_app(app, checks_hosts=True, local_console=is_local)
            app = api.app
        server = server_for(site)
        async with watched_loop(app.events), hold_open(app), watched_by_api(app):
            serving = Serving(app, server, _address(settings, listener), listener)
            app.events.emit(
                ApiStarted(
                    address=serving.address, store=mask_url(app.new_store().url), keys=settings.keys_file is not None
                )
            )
            try:
                yield serving
            finally:
                await serving.finish()


class Serving:
    """A server at work."""

    def __init__(self, app: Holdfast, server: Server, address: str, listener: socket.socket) -> None:
        self.app = app
        """The application whose store is open while it serves."""
        self.address = address
        self._server = server
        self._stop_requests = StopRequests()
        self._task = asyncio.create_task(server.serve(sockets=[listener]))

    def stop(self) -> StopRequest:
        """Lets requests under way finish. A second call more than a second later ends them at once."""
        request = self._stop_requests.record_signal()
        self._server.force_exit = self._server.force_exit or request is StopRequest.REPEATED
        self._server.should_exit = True
        return request

    async def wait_ended(self) -> None:
        """Returns when it was stopped; a server that ends by itself raises, and one whose site does not start."""
        await asyncio.shield(self._task)
        if not self._server.should_exit or self._server.lifespan.should_exit:
            raise HoldfastError("the HTTP server ended by itself")

    async def finish(self) -> None:
        """Requests a stop unless that was done, and waits for it."""
        if not self._server.should_exit:
            self.stop()
        await asyncio.gather(self._task, return_exceptions=True)
        for each in getattr(self._server, "servers", ()):  # one that ended by itself has not closed them
            each.close()


def _server_maker(settings: Settings, *, lifespan: Literal["auto", "off"]) -> Callable[[Application], Server]:
    """Returns the maker of uvicorn's server; raises ConfigError if uvicorn or a TLS file is missing."""
    try:
        import httptools  # noqa: F401 - without it uvicorn parses in Python, at a third of the speed
        import uvicorn

        from holdfast.web.connection_limits import ConnectionLimits, TlsListener, bounded_protocol
    except ModuleNotFoundError as error:
        raise ConfigError(f"the HTTP server needs {error.name}; pip install 'holdfast[web]'") from None

    protocol = bounded_protocol(ConnectionLimits.from_settings(settings))

    class Quiet(uvicorn.Server):
        """Leaves signals to us: its own way ends the process by the signal it got. Bounds TLS handshakes too."""

        servers: list[Any]

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            context = self.config.ssl
            await super().startup(sockets if context is None else [])
            if context is not None:
                connection = functools.partial(protocol, self.config, self.server_state, self.lifespan.state)
                self.servers = [TlsListener(each, connection, context) for each in sockets or ()]

    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise ConfigError("tls_certificate, tls_key: TLS needs both, the certificate and its key")

    return lambda site: Quiet(_configure(site, settings, protocol, lifespan))


def _configure(
    site: Application, settings: Settings, protocol: type[asyncio.Protocol], lifespan: Literal["auto", "off"]
) -> Config:
    import uvicorn

    config = uvicorn.Config(
        site,
        http=protocol,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=max(1, round(settings.keep_alive.total_seconds())),
        timeout_graceful_shutdown=max(1, round(settings.grace.total_seconds())),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"tls_certificate, tls_key: they cannot be used: {error}") from None
    return config


def _listening(settings: Settings) -> socket.socket:
    host, port = settings.api_host, settings.api_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"api_host, api_port: cannot listen on {host}:{port}: {error.strerror or error}") from None


def _address(settings: Settings, listener: socket.socket) -> str:
    scheme = "http" if settings.tls_certificate is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


_EVERY = 2.0  # seconds


@asynccontextmanager
async def watched_by_api(app: Holdfast) -> AsyncIterator[None]:
    """While entered, alerts are evaluated, and changes of the settings logged: the API goes on as it was started, open
    to all if it was so."""
    watching = [
        asyncio.create_task(_watch(app), name="holdfast-settings"),
        asyncio.create_task(watch_alerts(app, lambda: app.settings, service="api"), name="holdfast-alerts"),
    ]
    try:
        yield
    finally:
        for each in watching:
            each.cancel()


async def _watch(app: Holdfast) -> None:
    watch = Watch(app.settings)
    while True:
        await asyncio.sleep(_EVERY)
        try:
            newer = watch.poll_changes()
        except ConfigError as error:
            app.events.emit(SettingsRefused(problem=str(error)))
            continue
        if newer is not None:
            changed = app.settings.changed_values(newer)
            app.events.emit(SettingsChanged(changed=changed, remedy="restart the API: it goes on as it was started"))
