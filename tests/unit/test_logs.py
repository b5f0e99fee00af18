"""Log lines: one for each event, whole and parseable, whatever is in it; and no writer ever waits for their reader."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import select
import threading
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.core.errors import HoldfastError
from holdfast.core.events import (
    KINDS,
    Event,
    Events,
    HandlerStart,
    JobCreated,
    JobDead,
    JobFailedEvent,
    JobSucceeded,
    JobUnstartable,
    LoopBlocked,
    PayloadUnfit,
    SettingsChanged,
    StoreTrouble,
    SweepComplete,
    WorkerStopping,
)
from holdfast.core.models import Job
from holdfast.settings.settings import Settings
from holdfast.tasks import CURRENT, Context
from holdfast.telemetry.log_output import LineWriter
from holdfast.telemetry.logs import configure_logs, written_kinds

EVERYTHING = {"log_level": "DEBUG", "log_format": "json"}
SAMPLES: dict[Any, object] = {
    str: "text",
    int: 3,
    bool: True,
    float: 0.5,
    str | None: "text",
    float | None: None,
    datetime: datetime(2031, 1, 1, tzinfo=UTC),
    datetime | None: datetime(2031, 1, 1, tzinfo=UTC),
    dict[str, str]: {"lease": "30s"},
    list[str]: ["text"],
}
RUNNING = Job("job-1", "email.send", "default", "{}", 4, 3, 5, 0, 0, 0, 0)
CREATED = JobCreated(job_id="1", task="email.send", queue="default")


def _settings(**arguments: object) -> Settings:
    return Settings.load(environ={}, directory="/", **arguments)


def _sample(kind: type[Event]) -> Event:
    hints = typing.get_type_hints(kind)
    return kind(**{name: SAMPLES[hints[name]] for name in kind.__struct_fields__})


@contextmanager
def _logging(stream: TextIO, program: str = "holdfast", **arguments: object) -> Iterator[Events]:
    events = Events()
    events.program = program
    stop = configure_logs(_settings(**{**EVERYTHING, **arguments}), events, stream=stream)
    try:
        yield events
    finally:
        stop()


def _written(*emitted: Event, program: str = "holdfast", **arguments: object) -> list[str]:
    stream = io.StringIO()
    with _logging(stream, program, **arguments) as events:
        for event in emitted:
            events.emit(event)
    text = stream.getvalue()
    assert text == "" or text.endswith("\n")
    return text.removesuffix("\n").split("\n") if text else []


def _logged(say: Callable[[], object], **arguments: object) -> list[dict[str, Any]]:
    """The lines that ``say`` makes by logging."""
    stream = io.StringIO()
    with _logging(stream, "holdfast", **arguments):
        say()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_dead_jobs_pretty_line_says_where_its_traceback_is() -> None:
    for program in ("holdfast", "python manage.py holdfast"):
        (line,) = _written(_sample(JobDead), program=program, log_format="pretty")
        assert line.endswith(f"see='{program} show text'")


def test_task_field_setting_names_the_task_in_all_formats() -> None:
    event = JobDead(job_id="1", task="email.send", attempt=1, reason="error", error='"task": \u00e9', seconds=1.0)
    for each, error in ((CREATED, None), (event, event.error)):
        fields = json.loads(_written(each, task_field="job_type")[0])
        assert (fields["job_type"], fields.get("error"), "task" in fields) == ("email.send", error, False)
    assert "job_type=email.send" in _written(CREATED, task_field="job_type", log_format="pretty")[0]


@pytest.mark.parametrize("name", ["", "job-type", "1task", "queue", "le", "error", "t" * 65, 5])
def test_task_field_setting_refuses_taken_and_unusable_names(name: object) -> None:
    with pytest.raises(HoldfastError, match="task_field"):
        _settings(task_field=name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_event_is_one_json_line_with_its_fields(kind: type[Event]) -> None:
    (line,) = _written(_sample(kind))
    fields = json.loads(line)
    assert list(fields) == ["timestamp", "level", "event", *kind.__struct_fields__]
    moment = datetime.fromisoformat(fields.pop("timestamp"))
    assert moment.tzinfo == UTC
    assert abs(moment.timestamp() - datetime.now(UTC).timestamp()) < 60
    instants = dict.fromkeys(("locked_until", "retry_at", "deferred_until", "tick", "until"), "2031-01-01T00:00:00Z")
    assert (fields.pop("level"), fields.pop("event")) == (kind.level, kind.name)
    assert fields == {name: instants.get(name, getattr(_sample(kind), name)) for name in kind.__struct_fields__}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_event_is_one_pretty_line_but_for_a_stack(kind: type[Event]) -> None:
    lines = _written(_sample(kind), log_format="pretty")
    assert kind.name in lines[0]
    assert kind.level in lines[0]
    assert lines[1:] == (["    text"] if kind is LoopBlocked else [])
    assert "\x1b" not in "".join(lines)


def test_only_what_will_be_written_is_listened_to() -> None:
    with _logging(io.StringIO(), log_level="INFO") as events:
        assert not events.has_subscriber(JobSucceeded)
        assert events.has_subscriber(SweepComplete)
    assert not any(events.has_subscriber(kind) for kind in KINDS)
    with _logging(io.StringIO(), log_level="ERROR") as events:
        assert events.has_subscriber(JobDead)
        assert {kind for kind in KINDS if events.has_subscriber(kind)} == {
            kind for kind in KINDS if kind.level == "error"
        }


def test_job_events_are_written_at_their_own_level() -> None:
    (line,) = _written(CREATED, log_level="INFO", job_log_level="INFO")
    assert json.loads(line)["level"] == "info"
    assert JobCreated not in written_kinds(_settings(log_level="WARNING", job_log_level="INFO"))


UGLY = [
    'one\ntwo\r\n{"event":"forged"}',
    "\x1b[2J\x1b]0;title\x07",
    "a\x00b\x7fc\x85d\x9be",
    "para\u2028graph\u2029",
    "user\u202egnp.exe\u2066x\u200f",
    "lone \udc80 surrogate",
    '%s %(x)s {0} ${jndi:ldap://x} "quoted" \\',
]


@pytest.mark.parametrize("text", UGLY)
@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_no_text_breaks_its_line(text: str, log_format: str) -> None:
    (line,) = _written(WorkerStopping(worker_id="w", reason=text), log_format=log_format)
    assert line.splitlines() == [line]
    assert line.isprintable()
    if log_format == "json":
        expected = text.replace("\udc80", "\\udc80")
        assert json.loads(line)["reason"] == expected


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])).filter(lambda text: "=" not in text))
def test_any_text_is_read_back_from_its_json_line(text: str) -> None:
    (line,) = _written(WorkerStopping(worker_id="w", reason=text))
    assert line.splitlines() == [line]
    assert json.loads(line)["reason"] == text


def test_stack_on_a_terminal_cannot_forge_a_log_line() -> None:
    event = LoopBlocked(seconds=1.0, job_id=None, task=None, stack="File x\n2031-01-01 [error] forged\x1b[0m")
    lines = _written(event, log_format="pretty")
    assert lines[1:] == ["    File x", "    2031-01-01 [error] forged\\u001b[0m"]


@pytest.mark.parametrize("log_format", ["json", "pretty"])
@pytest.mark.parametrize(
    "event",
    [
        StoreTrouble(service="keeper", error="no way to postgresql://bob:hunter2@db/jobs, trying", retry_in=1.0),
        StoreTrouble(service="keeper", error="bad DSN host=db password='hunter2 x' user=bob", retry_in=1.0),
        SettingsChanged(changed={"url": "redis://:hunter2@cache/0"}),
    ],
)
def test_passwords_are_hidden(event: Event, log_format: str) -> None:
    lines = _written(event, log_format=log_format)
    assert "hunter2" not in "".join(lines)
    assert "***" in "".join(lines)


@pytest.mark.parametrize("redacted", [["error"], ["payload.card"], ["lines"]], ids=str)
@pytest.mark.parametrize("kind", [JobFailedEvent, JobDead, JobUnstartable, PayloadUnfit], ids=lambda kind: kind.name)
def test_no_error_of_a_job_is_written_where_anything_is_redacted(kind: type[Event], redacted: list[str]) -> None:
    (line,) = _written(replace(_sample(kind), error="ValueError: card 4111-1111"), redacted=redacted)
    assert json.loads(line)["error"] == "[redacted]"


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown() -> str:
        stream = Terminal()
        with _logging(stream, log_format="auto") as events:
            events.emit(CREATED)
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in shown()
    assert "job_created" in shown()
    assert json.loads(_written(CREATED, log_format="auto")[0])["event"] == "job_created"


def test_log_records_are_lines_too() -> None:
    logger = logging.getLogger("shop.mail")
    (provided,) = _logged(lambda: logger.warning("sent %d to\n%s", 3, "bob", extra={"order": 7, "level": "forged"}))
    del provided["timestamp"]
    assert provided == {"level": "warning", "event": "sent 3 to\nbob", "logger": "shop.mail", "order": 7}


def test_records_below_the_level_are_dropped_and_level_restored() -> None:
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    logger = logging.getLogger("shop")
    assert [
        provided["level"] for provided in _logged(lambda: (logger.debug("a"), logger.info("b")), log_level="INFO")
    ] == ["info"]
    assert (logging.getLogger().level, logging.getLogger().handlers) == before


def test_a_line_from_a_handler_names_its_job() -> None:
    def handler() -> None:
        CURRENT.set(Context(RUNNING))
        logging.getLogger("shop").info("by logging")
        structlog.get_logger("shop").bind(order=7).info("by structlog", items=[1, "é"])

    async def run() -> None:
        await asyncio.to_thread(handler)

    first, second = _logged(lambda: asyncio.run(run()), log_level="INFO")
    assert (first["event"], first["job_id"], first["attempt"]) == ("by logging", "job-1", 3)
    assert (second["event"], second["job_id"], second["order"], second["items"]) == (
        "by structlog",
        "job-1",
        7,
        [1, "é"],
    )


def test_a_traceback_is_a_field_and_hides_passwords() -> None:
    def fail() -> None:
        try:
            raise ValueError("redis://:hunter2@cache")
        except ValueError:
            structlog.get_logger().exception("it failed")

    (provided,) = _logged(fail)
    assert provided["level"] == "error"
    assert provided["exception"].startswith("Traceback")
    assert provided["exception"].endswith("ValueError: redis://:***@cache")


def test_values_of_any_kind_are_shown() -> None:
    endless: list[Any] = []
    endless.append(endless)
    extra = {"where": Path("a"), "many": {1, 2}, "endless": endless, "odd": {(1, 2): b"x"}, "big": 2**70}
    (provided,) = _logged(lambda: logging.getLogger("shop").info("odd", extra=extra))
    assert (provided["where"], sorted(provided["many"]), provided["odd"], provided["big"]) == (
        "a",
        [1, 2],
        {"(1, 2)": "b'x'"},
        2**70,
    )


def test_fields_with_secret_names_are_hidden() -> None:
    extra = {"api_token": "hunter2", "login": {"user": "bob", "Password": "hunter2"}, "tokens": 5}
    (provided,) = _logged(lambda: logging.getLogger("shop").info("odd", extra=extra))
    assert (provided["api_token"], provided["login"], provided["tokens"]) == (
        "***",
        {"user": "bob", "Password": "***"},
        5,
    )


@pytest.mark.parametrize("separator", ["_", "-", ""])
def test_keys_and_headers_that_let_someone_in_are_hidden(separator: str) -> None:
    names = ["Authorization", "Set-Cookie", "aws_credentials", "passphrase"]
    names += [f"{word}{separator}key" for word in ("api", "private", "access")]
    (provided,) = _logged(lambda: logging.getLogger("shop").info("odd", extra=dict.fromkeys(names, "hunter2")))
    assert {name: provided[name] for name in names} == dict.fromkeys(names, "***")
    (provided,) = _logged(lambda: logging.getLogger("shop").info("asked https://bank/?%s=hunter2", names[-1]))
    assert provided["event"] == f"asked https://bank/?{names[-1]}=***"


def test_an_application_s_own_structlog_is_left_alone() -> None:
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
    try:
        before = structlog.get_config()["processors"]
        assert _logged(lambda: None) == []
        assert structlog.get_config()["processors"] is before
    finally:
        structlog.reset_defaults()


def test_unprintable_record_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError("cannot be shown")

    assert _logged(lambda: logging.getLogger("shop").info("odd", extra={"broken": Broken()})) == []
    assert "cannot be shown" in capsys.readouterr().err


# ── the writer ────────────────────────────────────────────────────────────────────────────────────────────────────
def _dropped(count: int) -> bytes:
    return b"dropped %d\n" % count


def test_blocked_reader_blocks_no_writer_and_learns_of_gaps() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb") as reader:
        writer = LineWriter(stream, _dropped, buffer=300_000)
        line = b"x" * 999 + b"\n"
        for _ in range(2_000):  # The pipe takes about 64 of these, the buffer 300, the writer holds as many again.
            writer.write(line)
        whole = dropped = 0
        while whole + dropped < 2_000:  # a writer that got its turn in between tells of several gaps
            received = reader.readline()
            if received.startswith(b"dropped"):
                dropped += int(received.split()[1])
            else:
                assert received == line
                whole += 1
        assert (whole + dropped, dropped > 0) == (2_000, True)
        writer.write(b"again\n", urgent=True)
        assert reader.readline() == b"again\n"
        writer.close()


def test_urgent_line_is_flushed_with_the_lines_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.telemetry.log_output.FLUSH_SECONDS", 3600)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb") as reader:
        writer = LineWriter(stream, _dropped)
        writer.write(b"first\n")
        writer.write(b"second\n", urgent=True)
        assert [reader.readline(), reader.readline()] == [b"first\n", b"second\n"]
        writer.write(b"x" * 70_000 + b"\n")
        assert len(reader.readline()) == 70_001
        writer.write(b"last\n")
        writer.close()
        assert reader.readline() == b"last\n"


def test_an_event_that_matters_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    urgencies: list[bool] = []
    monkeypatch.setattr(LineWriter, "write", lambda _writer, _line, *, urgent: urgencies.append(urgent))
    failed = _sample(JobFailedEvent)
    _written(CREATED, failed, _sample(HandlerStart), job_log_level="WARNING")
    assert urgencies == [False, True, False]


def test_closed_reader_blocks_no_writer() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        writer = LineWriter(stream, _dropped)
        os.close(reading)
        for _ in range(10_000):
            writer.write(b"never read\n", urgent=True)
        writer.close()


def test_a_full_disk_loses_lines_and_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, tried, full = os.write, threading.Event(), True

    def os_write(descriptor: int, data: Any) -> int:
        if not full:
            return write(descriptor, data)
        if not tried.is_set():
            tried.set()
            return write(descriptor, data[:3])
        raise OSError(28, "No space left on device")

    with (tmp_path / "log").open("w") as stream:
        writer = LineWriter(stream, _dropped)
        monkeypatch.setattr("holdfast.telemetry.log_output.os.write", os_write)
        writer.write(b"first line\n", urgent=True)
        assert tried.wait(60)
        while not writer._dropped:
            tried.wait(0.001)
        full = False
        writer.write(b"second line\n")
        writer.close()
        monkeypatch.undo()
    assert (tmp_path / "log").read_text() == "fir\nsecond line\ndropped 1\n"


def _pieces(stream: TextIO, lines: list[bytes], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What a writer of these lines hands the system at a time."""
    write, pieces = os.write, list[bytes]()

    def os_write(descriptor: int, data: Any) -> int:
        pieces.append(bytes(data))
        return write(descriptor, data)

    writer = LineWriter(stream, _dropped)
    monkeypatch.setattr("holdfast.telemetry.log_output.os.write", os_write)
    for line in lines:
        writer.write(line)
    writer.close()
    monkeypatch.undo()
    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)
    return pieces


def test_lines_are_written_whole_in_atomic_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b"%0200d\n" % number for number in range(200)]
    lines.insert(7, b"x" * 9000 + b"\n")
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as stream:
        taking = threading.Thread(target=reader.read, args=(sum(map(len, lines)),))
        taking.start()
        pieces = _pieces(stream, lines, monkeypatch)
        taking.join()
    assert [piece for piece in pieces if len(piece) > select.PIPE_BUF] == [lines[7]]


def test_a_file_is_given_many_lines_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b"%0200d\n" % number for number in range(200)]
    monkeypatch.setattr("holdfast.telemetry.log_output.FLUSH_SECONDS", 5.0)  # all of them are there when it begins
    with (tmp_path / "log").open("w") as stream:
        assert len(_pieces(stream, lines, monkeypatch)) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # That forking beside threads is risky is the point.
def test_a_forked_child_writes_its_lines_itself() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb") as reader:
        writer = LineWriter(stream, _dropped)
        with writer._lock:  # As if another thread were writing while this one forks.
            child = os.fork()
            if not child:
                writer.write(b"from the child\n")
                os._exit(0)
        assert reader.readline() == b"from the child\n"
        assert os.waitpid(child, 0)[1] == 0
        writer.close()
