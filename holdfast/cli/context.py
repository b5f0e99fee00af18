"""Context of a call of the program: application, store, settings file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from holdfast import Holdfast, Settings
from holdfast.cli.output import print_note
from holdfast.core.errors import ConfigError, NotFound
from holdfast.core.validation import mask_url
from holdfast.settings.settings import SETTINGS


class Session:
    """The common options of a call, and the application that they select."""

    def __init__(self) -> None:
        self.app: str | None = None
        self.url: str | None = None
        self.config: str | None = None
        self.json = False

    def settings(self, **arguments: Any) -> Settings:
        """Loads the settings without an application. ``arguments``: options of the command; None: not given."""
        try:
            return Settings.load(path=self.config, url=self.url, app=self.app, **arguments)
        except ConfigError as error:
            for name, value in {"url": self.url, "app": self.app, **arguments}.items():
                start, provided, wrong = str(error).partition(f"argument: {name}")
                if value is not None and provided and not start and wrong[0] in ":.":  # a part of it: queues.mail
                    raise click.UsageError(f"{_option(name)}: {wrong[1:].strip()}") from None
            raise

    @contextmanager
    def open_target(self, *, creating: bool = False, needs_tasks: bool = True) -> Iterator[Holdfast]:
        """Opens the named application, or one without tasks; closes it at the end.

        ``creating``: creates a missing database; otherwise it raises NotFound. ``needs_tasks``: False if the command
        also makes sense without the application; the error about a broken one says how.
        """
        with open_application(self.load() if needs_tasks else self._load_optional(), creating=creating) as app:
            yield app

    @contextmanager
    def open_jobs(self, *, creating: bool = False) -> Iterator[Holdfast]:
        """Opens an application for commands that need no tasks: with ``--url`` the target is not imported."""
        app = self._load_optional() if self.url is None else Holdfast(settings=self.settings())
        with open_application(app, creating=creating):
            yield app

    def load(self, **arguments: Any) -> Holdfast:
        """Loads the application, not opened. Arguments of this call override the settings of its code."""
        settings = self.settings(**arguments)
        if settings.app is None:
            return Holdfast(settings=settings)
        from holdfast.cli.loading import load_application

        app = load_application(settings.app, settings.source_of("app"))
        given = {name: value for name, value in {"url": self.url, **arguments}.items() if value is not None}
        if given or self.config:
            provided = _settings_in_code(app.settings)
            file = self.config or (app.settings.file if app.settings.stamp else None)
            app.settings = Settings.load(path=file, **{**provided, **given, "app": settings.app})
        return app

    def _load_optional(self) -> Holdfast:
        """Loads the application for commands that need no tasks: ConfigError says how to do without a broken one.

        They do not go on by themselves: its code may name another store than the settings.
        """
        settings = self.settings()
        try:
            return self.load()
        except ConfigError as error:
            if settings.app is None:
                raise
            problem, line_end, trace = str(error).partition("\n")
            source = settings.source_of("url")
            known = source != "default" and self.url is None
            options = f"--app none, and the url from {source}," if known else "--app none --url URL"
            remedy = f"this command needs no tasks: with {options} it goes on without the application"
            raise ConfigError(f"{problem}; {remedy}{line_end}{trace}") from None

    def with_tasks(self, purpose: str, **arguments: Any) -> Holdfast:
        """Loads the application for commands that need tasks; ConfigError if none is named.

        Command jobs need no task: if the settings enable them, no application is required.
        """
        settings = self.settings(**arguments)
        if settings.app is None and settings.commands == "off":
            raise ConfigError(
                f"{purpose} needs an application: give --app module:name, set HOLDFAST_APP, "
                "or write `holdfast config set app module:name`"
            )
        return self.load(**arguments)


def _option(name: str) -> str:
    """Returns the command-line spelling of an argument: ``--port`` for ``api_port``."""
    for parameter in click.get_current_context().command.params:
        if parameter.name == name:
            return parameter.opts[0]
    return f"--{name}"


@contextmanager
def open_application(app: Holdfast, *, creating: bool = False) -> Iterator[Holdfast]:
    """Closes the application at the end; raises NotFound for a missing database unless ``creating``."""
    app.new_store()  # refuses an invalid URL before the first call
    try:
        absent = None if creating else missing_database(app)
        if absent is not None:
            raise NotFound("; ".join(absent))
        yield app
    finally:
        app.sync.close()


def url_source(app: Holdfast) -> str:
    """Returns the source of the store's URL, for a message: ``--url``, a setting, or the application's code."""
    source = app.settings.source_of("url")
    session = click.get_current_context().find_object(Session)
    if source != "argument" or session is None or session.url is not None:
        return source
    return f"the code of {session.settings().app}"


def store_of(app: Holdfast) -> str:
    """Returns the store's URL without its password."""
    return mask_url(app.new_store().url)


@contextmanager
def note_if_created(app: Holdfast) -> Iterator[None]:
    """Wraps the first submission: reports a new database, which a wrong directory would cause."""
    is_new = app.run_blocking(app.new_store().missing()) is not None
    yield
    if is_new:
        print_note(f"made a new database: {store_of(app)} (url from {url_source(app)})")


def missing_database(app: Holdfast) -> tuple[str, str] | None:
    """Returns a message and a remedy if the application's database does not exist, else None."""
    absent = app.run_blocking(app.new_store().missing())
    if absent is None:
        return None
    remedy = (
        "`holdfast migrate` makes it, as do the first job and the first worker (`holdfast enqueue`, "
        "`holdfast worker start`); if it should be there, correct the url or the directory, "
        "or name the application: --app module:app"
    )
    if click.get_current_context().find_root().info_name == "holdfast" and Path("manage.py").is_file():
        remedy += "; in a Django project: python manage.py holdfast ..."
    return f"{absent} (url from {url_source(app)})", remedy


def _settings_in_code(settings: Settings) -> dict[str, Any]:
    """Returns the settings of the application's code, as arguments that load them again."""
    provided: dict[str, Any] = {}
    for name in SETTINGS:
        if settings.source_of(name) == "argument":
            value = settings.get_value(name)  # text that is shown may hide a password: of text, the value is used
            provided[name] = value if isinstance(value, str) else settings.describe_setting(name).text
    return provided
