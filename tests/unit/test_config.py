"""Settings: which source wins, what each place may say, and that every problem is reported with its place."""

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.retry import Retry
from holdfast.settings.settings import SETTINGS, Settings, Watch, file_for, set_value


@pytest.fixture
def folder(tmp_path):
    """A directory whose parents hold no settings."""
    (tmp_path / ".git").mkdir()
    return tmp_path


def load(folder, text=None, environ=None, **arguments):
    if text is not None:
        (folder / "holdfast.toml").write_text(text)
    return Settings.load(directory=folder, environ=environ or {}, **arguments)


def problems(folder, text=None, environ=None, **arguments):
    with pytest.raises(ConfigError) as refused:
        load(folder, text, environ, **arguments)
    return str(refused.value)


# ── values and sources ──────────────────────────────────────────────────────────────────────────────────────────────
def test_defaults_are_those_of_the_design(folder):
    settings = load(folder)
    assert settings.url == "sqlite:///holdfast.db"
    assert (settings.lease, settings.heartbeat) == (timedelta(seconds=30), timedelta(seconds=10))
    assert (settings.sweep, settings.poll, settings.grace) == (*[timedelta(seconds=5)] * 2, timedelta(seconds=30))
    assert settings.retry == Retry()
    assert (settings.max_attempts, settings.max_attempts_limit, settings.timeout) == (5, 25, None)
    assert (settings.commands, settings.command_timeout) == ("off", timedelta(minutes=5))
    assert (settings.payload_limit, settings.result_limit, settings.key_limit) == (256 * 1024, 1024**2, 512)
    assert settings.keep_succeeded == settings.keep_cancelled == timedelta(days=7)
    assert settings.keep_dead is None
    assert settings.queues == {"*": None}
    assert {entry.source for entry in settings.items()} == {"default"}


def test_argument_over_environment_over_file_over_default(folder):
    text = "lease = 60\nsweep = 60\npoll = 60\n"
    environ = {"HOLDFAST_SWEEP": "61", "HOLDFAST_POLL": "61"}
    settings = load(folder, text, environ, poll=62)
    values = [settings.lease, settings.sweep, settings.poll, settings.grace]
    assert [value.total_seconds() for value in values] == [60, 61, 62, 30]
    sources = [settings.source_of(name) for name in ("lease", "sweep", "poll", "grace")]
    assert sources == ["holdfast.toml:1", "HOLDFAST_SWEEP", "argument", "default"]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_defaults_never_overwrite_the_file(folder, name):
    given = {"url": "sqlite:///other.db", "app": "shop:app", "retry": "fixed:1", "queues": "mail"}
    text = given.get(name) or SETTINGS[name].kind.show(SETTINGS[name].default)
    settings = load(folder, f'{name} = "{text}"\n', {SETTINGS[name].variable: " "}, **{name: None})
    assert settings.source_of(name) == "holdfast.toml:1"


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_default_reads_back_from_what_config_list_shows(folder, name):
    text = load(folder).describe_setting(name).text
    environ = {SETTINGS[name].variable: text} if text else {}
    assert load(folder, environ=environ).get_value(name) == SETTINGS[name].default


def test_typed_arguments_are_taken_as_they_are(folder):
    settings = load(
        folder, retry=Retry.fixed(3), lease=timedelta(minutes=1), queues={"mail": 3}, strict_idempotency=True
    )
    assert (settings.retry, settings.lease) == (Retry.fixed(3), timedelta(minutes=1))
    assert (settings.queues, settings.strict_idempotency) == ({"mail": 3}, True)


def test_none_and_unlimited_are_words(folder):
    settings = load(folder, 'timeout = "5m"\nmax_attempts = 3\n', timeout="none", max_attempts="unlimited")
    assert (settings.timeout, settings.max_attempts) == (None, None)


def test_queues_may_be_a_table(folder):
    assert load(folder, "[queues]\nmail = 10\ndefault = 5\n").queues == {"mail": 10, "default": 5}
    assert load(folder).source_of("queues") == "holdfast.toml:1"


def test_lines_are_those_of_the_statements(folder):
    text = '# [lease]\n\nurl = "sqlite:///x\\\n"\n'.replace("\\\n", "") + (
        'command_allow = [\n  "a]",\n  # grace = 1\n  "b",\n]\n"grace" = 5\n  poll=3 # here\n\n[queues]\nmail = 1\n'
    )
    settings = load(folder, text)
    lines = {name: settings.source_of(name) for name in ("url", "command_allow", "grace", "poll", "queues")}
    assert list(lines.values()) == [f"holdfast.toml:{line}" for line in (3, 4, 9, 10, 12)]
    assert settings.command_allow == ("a]", "b")


def test_a_project_file_may_hold_the_settings(folder):
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[tool.holdfast]\nlease = "1m"\n[tool.holdfast.queues]\na = 1\n'
    )
    settings = load(folder)
    assert settings.lease == timedelta(minutes=1)
    assert settings.source_of("lease") == "pyproject.toml:4"
    assert settings.source_of("queues") == "pyproject.toml:5"
    assert load(folder, "lease = 45").source_of("lease") == "holdfast.toml:1"


# ── where the file is ───────────────────────────────────────────────────────────────────────────────────────────────
def test_nearest_file_up_to_the_repository_root_counts(folder):
    inner = folder / "a" / "b"
    inner.mkdir(parents=True)
    (folder / "holdfast.toml").write_text("poll = 1")
    assert load(inner).file == folder / "holdfast.toml"
    assert load(inner).source_of("poll") == f"{folder}/holdfast.toml:1"
    (folder / "a" / "pyproject.toml").write_text("[tool.other]\nholdfast = 1\n")
    assert load(inner).file == folder / "holdfast.toml"
    (folder / "a" / ".git").mkdir()
    assert load(inner).file == inner / "holdfast.toml"
    assert load(inner).source_of("poll") == "default"


def test_file_in_a_world_writable_parent_is_not_trusted(folder):
    inner = folder / "public" / "mine"
    inner.mkdir(parents=True)
    (folder / "public" / "holdfast.toml").write_text('commands = "shell"')
    assert load(inner).commands == "shell"
    (folder / "public").chmod(0o1777)
    assert load(inner).commands == "off"


def test_the_environment_or_an_argument_names_the_file(folder):
    (folder / "one.toml").write_text("poll = 1")
    (folder / "two.toml").write_text("poll = 2")
    environ = {"HOLDFAST_CONFIG": "one.toml"}
    assert load(folder, environ=environ).source_of("poll") == "one.toml:1"
    assert load(folder, environ=environ, path="two.toml").source_of("poll") == "two.toml:1"
    assert file_for(environ=environ, directory=folder) == folder / "one.toml"
    assert file_for(environ={}, directory=folder) == folder / "holdfast.toml"


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_all_problems_of_all_sources_are_listed_at_once(folder):
    text = 'lease = "6x"\nlees = 3\nretry = "exponential:factor=0"\n'
    environ = {"HOLDFAST_HEARTBEAT": "fast", "HOLDFAST_URL": "u:hush@h"}
    heading, *listed = problems(folder, text, environ, poll=-1, nope=1).splitlines()
    assert heading == "7 problems with the settings:"
    expected = [
        ("holdfast.toml:1: lease: '6x'", "5m"),
        ("holdfast.toml:2: 'lees' is not a setting", "did you mean lease?"),
        ("holdfast.toml:3: retry.factor", "more than 0"),
        ("HOLDFAST_URL: url: 'u:***@h'", "sqlite:///holdfast.db"),
        ("HOLDFAST_HEARTBEAT: heartbeat: 'fast'", "30s"),
        ("argument: poll: -1", "175 years"),
        ("argument: 'nope' is not a setting", "remove it"),
    ]
    for line, (beginning, remedy) in zip(listed, expected, strict=True):
        assert line.startswith(f"  {beginning}")
        assert remedy in line


def test_a_broken_file_does_not_hide_a_broken_environment(folder):
    listed = problems(folder, "lease = \n", {"HOLDFAST_POLL": "x"})
    assert "holdfast.toml:1: not valid TOML" in listed
    assert "HOLDFAST_POLL: poll: 'x'" in listed


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            b"poll = 1\npoll = 2\n",
            "holdfast.toml:2: not valid TOML: Cannot overwrite a value; it stands twice: keep one",
        ),
        (b"[queues]\na = 1\n[queues]\n", "holdfast.toml:3: not valid TOML: Cannot declare ('queues',) twice"),
        (b"\xef\xbb\xbfpoll = 1\n", "holdfast.toml:1: begins with a byte order mark"),
        (b"# fine\npoll = '\xff'\n", "holdfast.toml:2: not UTF-8"),
        ("poll = 1".encode("utf-16"), "holdfast.toml:1: not UTF-8"),
        (b"a: &a [*a,*a]\n", "holdfast.toml:1: not valid TOML"),
        (b"poll = 1\nx = [\n", "not valid TOML"),
        (b"poll\t=\t1\n\tlease = 'x'\n", "holdfast.toml:2: lease: 'x'"),
        (b"poll = true\n", "holdfast.toml:1: poll: True"),
        (b"poll = 2030-01-01\n", "holdfast.toml:1: poll"),
        (b"poll = nan\n", "holdfast.toml:1: poll: nan"),
        (b"concurrency = '1e3'\n", "holdfast.toml:1: concurrency"),
        (b"concurrency = 0\n", "from 1 to 10000"),
        (b"strict_idempotency = 1\n", "write true or false"),
        (b"commands = false\n", "write one of off, argv, shell"),
        (b"commands = 'shel'\n", "did you mean shell?"),
        (b"app = 'shop'\n", "module:attribute"),
        (b"app = 'os.system(1):x'\n", "module:attribute"),
        (b"payload_limit = '1KB'\n", "256KiB"),
        (b"command_allow = [1]\n", "a program's name or path"),
        (b"command_allow = 1\n", "write a list of names"),
        (b'command_roots = ["jobs"]\n', "an absolute directory"),
        (b"command_environment = ['A=B']\n", "a variable's name"),
        (b"retry = 5\n", "write a policy as text"),
        (b"timeout = '31d'\n", 'or "none"'),
        (b"[queues]\nMail = 1\n", "holdfast.toml:1: queues: 'Mail'"),
        (b"[lease]\nx = 1\n", "holdfast.toml:1: lease: {'x': 1}"),
        (b"#" * (1024 * 1024 + 1), "under 1 MiB"),
    ],
    ids=lambda value: value[:24].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_a_bad_file_is_refused_with_its_line(folder, content, problem):
    (folder / "holdfast.toml").write_bytes(content)
    assert problem in problems(folder)


@pytest.mark.parametrize("content", [b"", b"\n", b"# only this", b"poll = 5\r\nlease = 30\r\n"])
def test_empty_files_and_windows_line_ends_are_fine(folder, content):
    (folder / "holdfast.toml").write_bytes(content)
    assert load(folder).poll == timedelta(seconds=5)


def test_a_file_named_must_exist_and_be_a_readable_file(folder, monkeypatch):
    assert "none.toml: no such file" in problems(folder, path="none.toml")
    (folder / "directory").mkdir()
    assert "directory: this is a directory" in problems(folder, environ={"HOLDFAST_CONFIG": "directory"})
    os.mkfifo(folder / "pipe")
    assert "pipe: this is not a regular file" in problems(folder, path=folder / "pipe")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    (folder / "secret.toml").write_text("")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "secret.toml: cannot be read (Permission denied)" in problems(folder, path="secret.toml")


def test_unreadable_settings_directory_is_a_config_error(folder):
    (folder / "release" / "shop").mkdir(parents=True)
    watch = Watch(load(folder / "release" / "shop", "poll = 1\n"))
    shutil.rmtree(folder / "release")
    with pytest.raises(ConfigError, match=r"release: cannot be looked at for a settings file \(No such file"):
        watch.poll_changes()


def test_broken_project_file_is_reported_only_with_settings_inside(folder):
    (folder / "pyproject.toml").write_text("[tool.other\n")
    assert load(folder).file == folder / "holdfast.toml"
    (folder / "pyproject.toml").write_text("[tool.holdfast]\nlease = \n")
    assert "pyproject.toml:2: not valid TOML" in problems(folder)
    (folder / "pyproject.toml").write_text("[tool]\nholdfast = 3\n")
    assert "tool.holdfast is not a table" in problems(folder)


@pytest.mark.parametrize(
    ("text", "arguments", "problem"),
    [
        (
            "lease = 20\nheartbeat = 10\n",
            {},
            "holdfast.toml:1: heartbeat: 10s is more than a third of the lease of 20s; set heartbeat to at most 6666ms",
        ),
        ("", {"heartbeat": 11}, "argument: heartbeat: 11s is more than a third of the lease of 30s"),
        ("max_attempts = 26\n", {}, "holdfast.toml:1: max_attempts: 26 is over max_attempts_limit, 25"),
        (
            "processes = 2\n",
            {"url": "sqlite:///:memory:"},
            "holdfast.toml:1, argument: processes: 2: several processes cannot share",
        ),
        (
            "processes = 2\n",
            {"worker_id": "mail-1"},
            "holdfast.toml:1, argument: worker_id: mail-1 names one worker, but processes is 2; set processes to 1",
        ),
        (
            "processes = 4\n",
            {"metrics_port": 65_533},
            "argument, holdfast.toml:1: metrics_port: 4 processes take the ports from 65533 on, past the last one",
        ),
    ],
)
def test_values_that_cannot_stand_together_are_refused(folder, text, arguments, problem):
    assert problem in problems(folder, text, **arguments)


def test_a_third_of_the_lease_is_enough(folder):
    assert load(folder, heartbeat="10s", lease="30s").heartbeat * 3 == timedelta(seconds=30)
    assert load(folder, max_attempts="unlimited").max_attempts is None


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sqlite:///jobs.db", "sqlite:///{}/jobs.db"),
        ("sqlite:///../data/a%20b.db", "sqlite:///{}/../data/a%20b.db"),
        ("sqlite:////var/jobs.db", "sqlite:////var/jobs.db"),
        ("sqlite:///%2Fvar/jobs.db", "sqlite:///%2Fvar/jobs.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("sqlite:///", "sqlite:///"),
        ("sqlite:///a.db?x=1", "sqlite:///a.db?x=1"),
        ("postgresql://host/jobs.db", "postgresql://host/jobs.db"),
    ],
)
def test_relative_sqlite_url_starts_at_the_folder_of_its_file(folder, given, meant):
    project = folder / "a project #1"
    (project / "deep" / "er").mkdir(parents=True)
    (project / "holdfast.toml").write_text(f'url = "{given}"\n')
    expected = meant.format(f"{folder}/a%20project%20%231")
    assert load(project).url == load(project / "deep" / "er").url == expected
    assert load(folder, path="a project #1/holdfast.toml").url == expected
    assert load(project, environ={"HOLDFAST_URL": given}).url == load(project, url=given).url == given


def test_unknown_variables_are_warned_of_without_their_values(folder):
    settings = load(
        folder, environ={"HOLDFAST_LEESE": "hush", "HOLDFAST_CONFIG": "", "HOLDFAST_POLL": "1", "OTHER": ""}
    )
    (warning,) = settings.warnings
    assert "HOLDFAST_LEESE" in warning
    assert "did you mean lease?" in warning
    assert "hush" not in warning


# ── the value ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_settings_are_frozen(folder):
    settings = load(folder)
    for name in ("lease", "file", "other"):
        with pytest.raises(AttributeError, match="frozen"):
            setattr(settings, name, 1)
    with pytest.raises(TypeError):
        settings.queues["mail"] = 1


def test_a_password_is_not_listed(folder):
    settings = load(folder, url="postgresql://u:hush@h/d")
    assert "hush" not in str(list(settings.items()))
    assert settings.url == "postgresql://u:hush@h/d"


def test_a_name_that_is_none_is_refused(folder):
    for ask in (load(folder).source_of, load(folder).get_value, load(folder).describe_setting):
        with pytest.raises(Invalid, match=r"did you mean lease\?"):
            ask("leas")


def test_every_setting_is_documented():
    for setting in SETTINGS.values():
        assert setting.doc.endswith(".")
        assert setting.kind.form
    assert SETTINGS["lease"] is Settings.lease


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_setting_a_value_keeps_the_rest_of_the_file(folder):
    file = folder / "holdfast.toml"
    file.write_bytes(b"# mine\r\nlease = '60s' # long\r\n\r\n[queues]\r\nmail = 1 # one\r\n")
    file.chmod(0o640)
    set_value(file, "lease", "2m")
    set_value(file, "concurrency", "20")
    content = file.read_bytes()
    assert b'# mine\r\nlease = "2m" # long\r\n' in content
    assert b"concurrency = 20\n" in content
    assert content.endswith(b"[queues]\r\nmail = 1 # one\r\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert (load(folder).lease, load(folder).concurrency) == (timedelta(minutes=2), 20)
    assert sorted(entry.name for entry in folder.iterdir()) == [".git", "holdfast.toml"]


@pytest.mark.parametrize(
    ("name", "text", "written"),
    [
        ("strict_idempotency", "true", "strict_idempotency = true"),
        ("max_attempts", "unlimited", 'max_attempts = "unlimited"'),
        ("payload_limit", "1MiB", 'payload_limit = "1MiB"'),
        ("poll", "1", 'poll = "1"'),
        ("command_allow", "git, tar", 'command_allow = ["git", "tar"]'),
        ("queues", "mail:1", 'queues = "mail:1"'),
    ],
)
def test_a_file_is_made_where_there_is_none(folder, name, text, written):
    set_value(folder / "holdfast.toml", name, text)
    assert (folder / "holdfast.toml").read_text() == written + "\n"
    assert load(folder).source_of(name) == "holdfast.toml:1"


def test_text_takes_the_place_of_a_table(folder):
    (folder / "holdfast.toml").write_text("[queues]\nmail = 1\n")
    set_value(folder / "holdfast.toml", "queues", "other:2")
    assert load(folder).queues == {"other": 2}


def test_a_project_file_is_edited_in_its_table(folder):
    file = folder / "pyproject.toml"
    file.write_text('[project]\nname = "x"\n\n[tool.other]\na = 1\n')
    set_value(file, "lease", "1m")
    assert load(folder).source_of("lease") == "pyproject.toml:8"
    assert file.read_text().startswith('[project]\nname = "x"\n\n[tool.other]\na = 1\n')


def test_a_link_stays_a_link(folder):
    (folder / "real.toml").write_text("poll = 1\n")
    (folder / "holdfast.toml").symlink_to("real.toml")
    set_value(folder / "holdfast.toml", "poll", "2s")
    assert (folder / "holdfast.toml").is_symlink()
    assert (folder / "real.toml").read_text() == 'poll = "2s"\n'


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("leas", "1m", Invalid),
        ("lease", "fast", Invalid),
        ("heartbeat", "15s", ConfigError),  # more than a third of the lease
    ],
)
def test_a_value_that_is_wrong_is_not_written(folder, name, text, error):
    file = folder / "holdfast.toml"
    file.write_text("poll = 1\n")
    with pytest.raises(error, match=name):
        set_value(file, name, text)
    assert file.read_text() == "poll = 1\n"
    assert sorted(entry.name for entry in folder.iterdir()) == [".git", "holdfast.toml"]


def test_writers_at_the_same_time_lose_nothing_of_each_other(folder):
    names = ["poll", "sweep", "grace", "timeout", "keep_dead", "keep_cancelled", "command_timeout", "keep_succeeded"]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: set_value(folder / "holdfast.toml", name, "7s"), names))
    settings = load(folder)
    assert {name: settings.get_value(name) for name in names} == dict.fromkeys(names, timedelta(seconds=7))


def test_broken_file_or_missing_directory_is_not_written(folder):
    (folder / "holdfast.toml").write_text("poll = \n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        set_value(folder / "holdfast.toml", "poll", "1s")
    assert (folder / "holdfast.toml").read_text() == "poll = \n"
    with pytest.raises(ConfigError, match="make the directory first"):
        set_value(folder / "none" / "holdfast.toml", "poll", "1s")


# ── watching ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_watch_sees_a_changed_file_once(folder):
    settings = load(folder, "poll = 1\n", grace=1)
    watch = Watch(settings)
    assert watch.poll_changes() is None
    set_value(folder / "holdfast.toml", "poll", "2s")
    newer = watch.poll_changes()
    assert (newer.poll, newer.grace) == (timedelta(seconds=2), timedelta(seconds=1))
    assert settings.changed_values(newer) == {"poll": "2s"}
    assert watch.poll_changes() is None


def test_a_watch_says_nothing_of_a_new_comment(folder):
    watch = Watch(load(folder, "poll = 1\n"))
    (folder / "holdfast.toml").write_text("poll = 1 # second\n")
    assert watch.poll_changes() is None


def test_a_watch_sees_a_file_made_and_one_removed(folder):
    watch = Watch(load(folder))
    (folder / "holdfast.toml").write_text("poll = 1\n")
    assert watch.poll_changes().poll == timedelta(seconds=1)
    (folder / "holdfast.toml").unlink()
    assert watch.poll_changes().poll == timedelta(seconds=5)


def test_a_change_before_the_watch_began_is_seen(folder):
    settings = load(folder, "poll = 1\n")
    (folder / "holdfast.toml").write_text("poll = 22\n")
    assert Watch(settings).poll_changes().poll == timedelta(seconds=22)


def test_broken_file_is_reported_once_and_reloaded_when_repaired(folder):
    watch = Watch(load(folder, "poll = 1\n"))
    (folder / "holdfast.toml").write_text("poll = fast\n")
    with pytest.raises(ConfigError, match=r"holdfast\.toml:1"):
        watch.poll_changes()
    assert watch.poll_changes() is None
    (folder / "holdfast.toml").write_text("poll = 3\n")
    assert watch.poll_changes().poll == timedelta(seconds=3)


def test_default_heartbeat_follows_the_lease(folder):
    assert Settings.load(directory=folder, environ={}, lease="6s").heartbeat == timedelta(seconds=2)
    assert Settings.load(directory=folder, environ={}, lease="10m").heartbeat == timedelta(seconds=10)


def test_default_policy_refuses_a_path_variable_from_a_command(folder):
    app = Holdfast(settings=Settings.load(directory=folder, environ={}, commands="argv", command_allow="gzip"))
    with pytest.raises(Invalid, match="PATH"):
        app.command_policy().parse_command({"argv": ["gzip"], "env": {"PATH": "/tmp/elsewhere"}})


def test_output_limits_of_settings_and_commands_agree(folder):
    settings = Settings.load(directory=folder, environ={}, output_limit="80KiB")
    assert Holdfast(settings=settings).command_policy().output_limit == 80 * 1024
    with pytest.raises(ConfigError, match="output_limit"):
        Settings.load(directory=folder, environ={}, output_limit="81KiB")
