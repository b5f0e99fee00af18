"""Settings: one frozen object, validated when it is loaded; each value knows its source.

    default  <  holdfast.toml or [tool.holdfast] in pyproject.toml  <  environment HOLDFAST_…  <  argument

The class ``Settings`` is the table from which parsing, ``config list`` and the reference pages are derived. A source
without a value (an argument that is None, an empty environment variable) leaves that of a lower source. All problems
of all sources are reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from holdfast.core.errors import ConfigError, Invalid, quote_value
from holdfast.core.fault_points import FAULTS_VARIABLE
from holdfast.core.retry import Retry
from holdfast.core.validation import MAX_KEY_LENGTH, did_you_mean, peer_option_hint
from holdfast.settings import toml_file
from holdfast.settings.service_settings import ServiceSettings, find_conflicts
from holdfast.settings.types import (
    FLAG,
    FOLDERS,
    LEVEL,
    PATHS,
    PREFIX,
    PROGRAMS,
    QUEUES,
    REDIS_KEY,
    REDIS_URL,
    RETRY,
    TARGET,
    URL,
    VARIABLES,
    VERSION,
    WORKER_ID,
    Setting,
    byte_size,
    duration,
    one_of,
    optional,
    resolve_relative,
    whole_number,
)

FILE_VARIABLE = "HOLDFAST_CONFIG"
"""Environment variable with the path of the settings file; without it the file is searched for."""


class ConfigEntry(NamedTuple):
    """A line of ``config list``."""

    name: str
    text: str  # in the form of a settings file; passwords hidden
    source: str
    form: str
    doc: str


class Loaded(NamedTuple):
    """The parts of a ``Settings``."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]  # of the values that were given
    file: Path
    stamp: toml_file.Stamp
    warnings: tuple[str, ...]
    reload: Callable[[], Settings]


class SourcedValue(NamedTuple):
    """A value from one source."""

    name: str
    value: object
    source: str
    part_locations: Mapping[str, str] = {}  # file and line of each part, by its field


class Settings(ServiceSettings):
    """The settings of the whole program. Made by ``load``; frozen."""

    __slots__ = ("__dict__", "_loaded")
    _loaded: Loaded

    url = Setting(
        URL,
        "sqlite:///holdfast.db",
        "Where jobs are kept. A relative SQLite path starts at the folder of the settings file that says it; "
        "one from elsewhere, at the working directory.",
    )
    transport = Setting(
        one_of("none", "redis_list", "redis_stream"),
        "none",
        "What carries the wake-ups: the store itself, or a Redis that holds the ids of ready jobs (on PostgreSQL).",
    )
    transport_url = Setting(
        optional("none", REDIS_URL), "none", "The Redis of the transport, with the parameters of its driver only."
    )
    transport_key = Setting(
        REDIS_KEY, "{holdfast:transport}:ready", "The transport's key for queue default; :QUEUE is appended for others."
    )
    transport_dead_key = Setting(
        REDIS_KEY, "{holdfast:transport}:dead", "The key of the list, or stream, of dead letters, in the same way."
    )
    app = Setting(optional("none", TARGET), "none", "The application whose tasks commands and workers use.")
    queues = Setting(
        QUEUES, "*", "Queues a worker serves, each with how many of its jobs may run at once there: mail:10,default."
    )
    concurrency = Setting(whole_number(1, 10_000), 10, "Jobs one worker process runs at once.")
    prefetch = Setting(
        FLAG,
        True,
        "Whether a worker claims short jobs a moment before they can start, and writes outcomes together. "
        "If false, it holds no more jobs than run at once and writes each outcome at once: a crash repeats fewer jobs, "
        "and short jobs run slower.",
    )
    allow_faults = Setting(FLAG, False, "Whether `holdfast chaos` may break these workers: for staging alone.")
    processes = Setting(whole_number(1, 256), 1, "Worker processes that one command starts and watches.")
    worker_id = Setting(
        optional("minted", WORKER_ID),
        "minted",
        "What this worker process is called, where jobs say who ran them; minted: a new name at each start. "
        "No two living workers may share one.",
    )
    app_version = Setting(optional("none", VERSION), "none", "The version of your application, shown with workers.")
    lease = Setting(
        duration("30ms", "1d"), "30s", "How long a job stays its worker's without a heartbeat; then others take it."
    )
    heartbeat = Setting(duration("10ms", "8h"), "10s", "How often leases are renewed; at most a third of the lease.")
    sweep = Setting(duration("10ms", "1d"), "5s", "How often a worker looks for expired leases and due jobs.")
    poll = Setting(
        duration("10ms", "1h"), "5s", "How long an idle worker waits at most before it asks the store again."
    )
    grace = Setting(duration("0s", "1d"), "30s", "How long a stopping worker lets running jobs finish.")
    retry = Setting(RETRY, Retry(), "When a failed attempt is tried again, for tasks that do not say.")
    max_attempts = Setting(
        optional("unlimited", whole_number(1, 1_000_000)), 5, "Attempts of a job, for tasks that do not say."
    )
    max_attempts_limit = Setting(
        optional("unlimited", whole_number(1, 1_000_000)),
        25,
        "The highest number of attempts a submission may ask for.",
    )
    timeout = Setting(
        optional("none", duration("1ms", "30d")), "none", "How long one attempt may take, for tasks that do not say."
    )
    command_timeout = Setting(
        optional("none", duration("1ms", "30d")),
        "300s",
        "How long one attempt of a command job may take, for jobs that do not say.",
    )
    commands = Setting(
        one_of("off", "argv", "shell"),
        "off",
        "Whether command jobs run: not at all, as a program with arguments, or also as shell text.",
    )
    command_allow = Setting(
        PROGRAMS, "", "Programs (names or paths) command jobs may start; empty: any, once commands are on."
    )
    command_environment = Setting(
        VARIABLES,
        "LC_ALL",
        "Environment variables passed on to command jobs beside PATH, HOME, LANG and TZ; their payloads may set them.",
    )
    command_roots = Setting(
        FOLDERS, "", "Absolute directories under one of which the cwd of a command job must lie; empty: anywhere."
    )
    output_limit = Setting(
        byte_size("0B", "80KiB"), "64KiB", "How much is kept of a command's output, and of its errors."
    )
    unknown_task = Setting(
        one_of("defer", "retry", "dead"),
        "defer",
        "What becomes of a job whose task is not registered in the worker: given back as long as defer_for says, "
        "failed and retried, or dead at once.",
    )
    defer_for = Setting(
        duration("0s", "30d"),
        "1h",
        "How long a job that its worker cannot run (its task is unknown there, or its payload does not fit) is given "
        "back for another worker. Then it is dead; 0s: at once.",
    )
    payload_limit = Setting(byte_size("1KiB", "64MiB"), "256KiB", "The largest payload of a job.")
    result_limit = Setting(byte_size("1KiB", "64MiB"), "1MiB", "The largest result of a job.")
    key_limit = Setting(whole_number(1, MAX_KEY_LENGTH), MAX_KEY_LENGTH, "Characters of an idempotency key.")
    strict_idempotency = Setting(
        FLAG, False, "Whether the same key (not id) with a different submission is a conflict instead of the first job."
    )
    role = Setting(
        one_of("auto", "leader", "follower"),
        "auto",
        "Whether the worker does maintenance; a follower leaves it to others; leader is the same as auto.",
    )
    schedule_owner = Setting(
        optional("none", WORKER_ID), "none", "Name of this application as the owner of the schedules it declares."
    )
    keep_succeeded = Setting(
        optional("forever", duration("0s", "36500d")), "7d", "How long succeeded jobs and their results are kept."
    )
    keep_cancelled = Setting(optional("forever", duration("0s", "36500d")), "7d", "How long cancelled jobs are kept.")
    keep_dead = Setting(optional("forever", duration("0s", "36500d")), "forever", "How long dead letters are kept.")
    recycle_jobs = Setting(
        optional("none", whole_number(1, 1_000_000_000)),
        "none",
        "Jobs after which a worker process is replaced by a fresh one.",
    )
    recycle_memory = Setting(
        optional("none", byte_size("1MiB", "1024GiB")),
        "none",
        "Memory above which a worker process is replaced by a fresh one.",
    )
    job_lines = Setting(
        whole_number(0, 10_000),
        200,
        "Log lines of one run, by `context.log`, that are stored with its job; 0: none. Each further run, after a "
        "failure, a snooze or a replay, may add as many.",
    )
    job_line_size = Setting(
        byte_size("64B", "64KiB"), "4KiB", "How large such a line may be: its text, and its fields."
    )
    log_level = Setting(LEVEL, "INFO", "The least important log lines that are written.")
    redacted = Setting(
        PATHS,
        "",
        "Fields of payloads that are never shown, by dotted path from payload, result, metadata, lines (fields of log "
        "lines) or error: payload.card.number, payload.*.secret, payload.**.password, result.token, error.",
    )
    traces = Setting(
        FLAG, False, "Whether submissions and attempts are spans of OpenTelemetry, which the extra `otel` installs."
    )
    log_format = Setting(
        one_of("auto", "json", "pretty"), "auto", "How log lines look; auto: pretty on a terminal, else JSON."
    )
    job_log_level = Setting(LEVEL, "DEBUG", "The level of the lines each single job writes.")

    def __init__(self, loaded: Loaded) -> None:
        object.__setattr__(self, "_loaded", loaded)
        self.__dict__.update(loaded.values)  # read for each job: attributes need no call

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"settings are frozen: {name} cannot be set")

    @classmethod
    def load(
        cls,
        *,
        path: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
        **arguments: object,
    ) -> Settings:
        """Reads and validates all sources. ConfigError lists all problems, each with its source and remedy.

        ``path``: the file, which must exist; by default HOLDFAST_CONFIG, or the result of ``file_for``. ``environ`` and
        ``directory``: by default those of the process.
        """
        environ = os.environ if environ is None else environ
        try:
            folder = Path(directory or ".").absolute()
            file = file_for(path=path, environ=environ, directory=folder)
            there = bool(path or environ.get(FILE_VARIABLE)) or file.exists()
        except OSError as error:  # a reload may come after the directory was removed
            place = error.filename or "the working directory"
            problem = f"{place}: cannot be looked at for a settings file ({error.strerror})"
            raise ConfigError(f"{problem}; start in a directory that is there and may be read") from None
        problems: list[str] = []
        document = _read(file, _label(file, folder), problems) if there else None
        given = [
            *_from_document(document, _label(file, folder), file.parent),
            *_from_environment(environ),
            *(SourcedValue(name, value, "argument") for name, value in arguments.items() if value is not None),
        ]
        values, sources = _resolve(given, problems)
        if problems:
            raise ConfigError(_listed(problems))
        return cls(
            Loaded(
                values=MappingProxyType(values),
                sources=MappingProxyType(sources),
                file=file,
                stamp=document.stamp if document else None,
                warnings=tuple(_unknown_variables(environ)),
                reload=lambda: cls.load(path=path, environ=environ, directory=folder, **arguments),
            )
        )

    @property
    def file(self) -> Path:
        """Returns the settings file that was read, or would be written."""
        return self._loaded.file

    @property
    def stamp(self) -> toml_file.Stamp:
        """Returns the version of the file that was read."""
        return self._loaded.stamp

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns warnings about odd but harmless values."""
        return self._loaded.warnings

    @property
    def recycles(self) -> bool:
        """Returns True if worker processes are recycled."""
        return self.recycle_jobs is not None or self.recycle_memory is not None

    def get_value(self, name: str) -> Any:
        """Returns the value of a setting."""
        return self._loaded.values[_known(name)]

    def source_of(self, name: str) -> str:
        """Returns the source of a setting: ``default``, ``holdfast.toml:3``, ``HOLDFAST_LEASE`` or ``argument``."""
        return self._loaded.sources.get(_known(name), "default")

    def describe_setting(self, name: str) -> ConfigEntry:
        """Returns a setting in the form that ``config get`` shows."""
        kind, doc = SETTINGS[_known(name)].kind, SETTINGS[name].doc
        return ConfigEntry(name, kind.show(self.get_value(name)), self.source_of(name), kind.form, doc)

    def items(self) -> Iterator[ConfigEntry]:
        """Returns all settings, in the order of the table."""
        return map(self.describe_setting, SETTINGS)

    def changed_values(self, newer: Settings) -> dict[str, str]:
        """Returns the settings that differ in ``newer``, as text."""
        return {
            name: newer.describe_setting(name).text
            for name in SETTINGS
            if self.get_value(name) != newer.get_value(name)
        }

    def replace_values(self, **arguments: object) -> Settings:
        """Returns a copy with some values replaced, as arguments; raises ConfigError or Invalid like ``load``."""
        values, sources, reload = dict(self._loaded.values), dict(self._loaded.sources), self._loaded.reload
        for name, value in arguments.items():
            values[name], sources[name] = SETTINGS[_known(name)].kind.parse(name, value), "argument"
        if problems := [problem for _, problem in find_conflicts(values, sources)]:
            raise ConfigError(_listed(problems))
        return Settings(
            self._loaded._replace(
                values=MappingProxyType(values),
                sources=MappingProxyType(sources),
                reload=lambda: reload().replace_values(**arguments),
            )
        )

    def reload_settings(self) -> Settings:
        """Loads the settings again from the same sources. ConfigError like ``load``."""
        return self._loaded.reload()


SETTINGS: Mapping[str, Setting[Any]] = MappingProxyType(
    {
        name: setting
        for table in (Settings, *ServiceSettings.__bases__)
        for name, setting in vars(table).items()
        if isinstance(setting, Setting)
    }
)
"""All settings by name."""


class Watch:
    """Detects changes of the settings file."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stamp = settings.stamp

    def poll_changes(self) -> Settings | None:
        """Returns new settings if the file changed and they differ, else None. Cheap while the file is unchanged.

        An invalid file raises ConfigError once per change; the old settings stay.
        """
        stamp = toml_file.file_stamp(self._settings.file)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        newer, older = self._settings.reload_settings(), self._settings
        self._settings, self._stamp = newer, newer.stamp
        return newer if older.changed_values(newer) else None


def file_for(
    *, path: str | Path | None = None, environ: Mapping[str, str] | None = None, directory: str | Path | None = None
) -> Path:
    """Returns the settings file: the given one, the nearest one found, or the path of a new one."""
    environ = os.environ if environ is None else environ
    folder = Path(directory or ".").absolute()
    named = path or environ.get(FILE_VARIABLE)
    return folder / named if named else toml_file.find_file(folder) or folder / toml_file.FILE_NAME


def set_value(path: str | Path, name: str, text: str) -> None:
    """Writes one setting into the file and keeps the rest of it.

    Invalid if the name or the value is wrong, ConfigError if the file would not be valid; then it is not written.
    """
    setting = SETTINGS[_known(name)]
    value = setting.kind.parse(name, text)

    def check_fresh(fresh: Path) -> None:
        problems: list[str] = []
        document = _read(fresh, Path(path).name, problems)
        _resolve(_from_document(document, Path(path).name, Path(path).parent), problems)
        if problems:
            raise ConfigError(f"the file was left as it is; with this value: {_listed(problems)}")

    toml_file.write(Path(path), name, _for_toml(value, text), check_fresh)


def _for_toml(value: object, text: str) -> object:
    """Returns the value to write: numbers, booleans and lists as such, anything else as its text."""
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, bool) or (isinstance(value, int) and text.strip().isdigit()) else text


def _known(name: str) -> str:
    if name not in SETTINGS:
        raise Invalid("setting", name, f"see `holdfast config list` for the names{did_you_mean(name, SETTINGS)}")
    return name


def _read(file: Path, label: str, problems: list[str]) -> toml_file.Document | None:
    try:
        return toml_file.read(file, label)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _label(file: Path, folder: Path) -> str:
    """Returns the file's name for messages: short if it lies in the working directory."""
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file)


def _from_document(document: toml_file.Document | None, label: str, folder: Path) -> list[SourcedValue]:
    if document is None:
        return []
    lines = {name: f"{label}:{line}" for name, line in document.lines.items()}
    urls = {name: resolve_relative(document.values[name], folder) for name in document.values if name == "url"}
    return [
        SourcedValue(name, value, lines.get(name, label), lines) for name, value in (document.values | urls).items()
    ]


def _from_environment(environ: Mapping[str, str]) -> list[SourcedValue]:
    return [
        SourcedValue(name, environ[setting.variable], setting.variable)
        for name, setting in SETTINGS.items()
        if environ.get(setting.variable, "").strip()
    ]


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    known = {setting.variable: name for name, setting in SETTINGS.items()} | {FILE_VARIABLE: "", FAULTS_VARIABLE: ""}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            name = variable.removeprefix(PREFIX)
            close = peer_option_hint(name.lower()) or did_you_mean(name, SETTINGS)
            yield f"environment variable {variable} is not a setting and has no effect{close}"


def _resolve(given: list[SourcedValue], problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the value of every setting, and the source of the given ones. Errors are added to ``problems``."""
    values = {name: setting.default for name, setting in SETTINGS.items()}
    sources: dict[str, str] = {}
    wrong: set[str] = set()
    for name, value, source, locations in given:
        if name not in SETTINGS:
            hint = peer_option_hint(name) or did_you_mean(name, SETTINGS) or "; remove it"
            problems.append(f"{source}: {quote_value(name)} is not a setting{hint}")
            continue
        try:
            values[name], sources[name] = SETTINGS[name].kind.parse(name, value), source
        except Invalid as error:
            wrong.add(name)
            part = max((each for each in locations if f"{error.field}.".startswith(f"{each}.")), key=len, default=name)
            problems.append(f"{locations.get(part, source)}: {error}")
    if "heartbeat" not in sources:  # derived from the lease unless given
        third = timedelta(microseconds=values["lease"] // timedelta(microseconds=3))
        values["heartbeat"] = min(values["heartbeat"], third)
    for involved, problem in find_conflicts(values, sources):
        if wrong.isdisjoint(involved):
            named = ", ".join(dict.fromkeys(sources[name] for name in involved if name in sources))
            problems.append(f"{named}: {problem}")
    return values, sources


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems with the settings:", *(f"  {problem}" for problem in problems)])
