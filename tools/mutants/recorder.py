"""pytest plugin: which test reaches which place. The runner loads it in a copy whose Lua scripts log each guard.

Writes for each test file the tests with their seconds, and for each place, named as in ``Mutant.site`` or by its first
parts, its tests, up to ``MAX_TESTS`` of the fastest. Failed tests are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coverage
import pytest

from tools.mutants.guards import guarded_files, load_mutants
from tools.mutants.python_guards import reach_names, statement_places
from tools.mutants.server import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]  # the same tests are chosen

MAX_TESTS = 400
LUA_SITES = "lua.sites"
"""File with the names of the guards of each script, in the order of the numbers that they log."""
_LOGGED = re.compile(rb"guard (\d+) of (\S+)")
_INCLUDED = re.compile(r"-- include: (\w+)$|\bholdfast\.(\w+)\(", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Starts the recording in each process that runs tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Recorder(Path(os.environ["MUTANTS_REACH"])), "mutants-recorder")


def record_file_name(root: Path, test_file: str) -> str:
    """Returns the name of the file in which the places of a test file are recorded: another one once it has changed."""
    digest = hashlib.sha1((root / test_file).read_bytes(), usedforsecurity=False).hexdigest()
    return f"{test_file.replace('/', '+')}.{digest[:8]}.json"


def log_guards(source: bytes, file: str, spans: list[tuple[int, int]]) -> bytes:
    """Returns a Lua file that logs the number of each guard at these spans when it is reached."""
    inserted: list[tuple[int, int, bytes]] = []
    for number, (start, end) in enumerate(spans):
        call = b"redis.log(redis.LOG_WARNING, 'guard %d of %s')" % (number, file.encode())
        if source[start:end].startswith(b"return"):
            inserted.append((start, -end, call + b" "))
        else:
            inserted += [(start, -end, b"(" + call + b" or "), (end, -start, b")")]
    for at, _, text in sorted(inserted, reverse=True):
        source = source[:at] + text + source[at:]
    return source


class _Statements(dict[str, Any]):
    """Statements of a store that notes the names of those it gives."""

    def __init__(self, statements: Mapping[str, Any], used: set[str], file: str) -> None:
        super().__init__(statements)
        self._used, self._file = used, file

    def __getitem__(self, name: str) -> Any:
        self._used.add(f"{self._file}::{name}")
        return super().__getitem__(name)


class _Recorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root = Path.cwd()
        self._coverage = coverage.Coverage(
            data_file=None, include=[f"{self._root}/holdfast/*"], config_file=False, messages=False
        )
        self._coverage.start()
        self._used: set[str] = set()
        self._reached: dict[str, set[str]] = {}
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._logs: dict[Path, int] = {}
        self._watch_stores()

    def _watch_stores(self) -> None:
        from holdfast.stores.postgres import store as postgres
        from holdfast.stores.sqlite import store as sqlite
        from tests.support.redis import Redis

        load, number, start, close = sqlite.load_statements, postgres.number_parameters, Redis.start, Redis.close
        files = {kind: f"holdfast/stores/{kind}/queries.sql" for kind in ("sqlite", "postgres")}
        sqlite.load_statements = lambda source: _Statements(load(source), self._used, files["sqlite"])
        postgres.number_parameters = lambda *given: _Statements(number(*given), self._used, files["postgres"])

        def watched_start(server: Redis) -> None:
            start(server)
            self._logs.setdefault(server.folder / "log", 0)

        def watched_close(server: Redis) -> None:
            self._read_logs()
            close(server)

        Redis.start, Redis.close = watched_start, watched_close

    def _read_logs(self) -> None:
        for log, offset in list(self._logs.items()):
            if not log.exists():
                del self._logs[log]
                continue
            with log.open("rb") as file:
                file.seek(offset)
                for number, name in set(_LOGGED.findall(file.read())):
                    self._used.add(f"{name.decode()}#{int(number)}")
                self._logs[log] = file.tell()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._coverage.switch_context(item.nodeid)
        self._used.clear()
        done = yield
        self._read_logs()
        self._reached[item.nodeid] = set(self._used)
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        places = self._places()
        tests = sorted(set(self._reached) - self._failed, key=lambda test: self._seconds[test])
        for file in {test.partition("::")[0] for test in self._reached}:
            own = [test for test in tests if test.startswith(f"{file}::")]
            reached: dict[str, list[int]] = defaultdict(list)
            for number, test in enumerate(own):
                for place in places.get(test, ()):
                    if len(reached[place]) < MAX_TESTS:
                        reached[place].append(number)
            record = {"tests": [[test, round(self._seconds[test], 3)] for test in own], "places": reached}
            (self._folder / record_file_name(self._root, file)).write_text(json.dumps(record), encoding="utf-8")

    def _places(self) -> dict[str, set[str]]:
        """Returns the places that each test reached."""
        files = guarded_files(self._root / "holdfast")
        sites = json.loads((self._folder / LUA_SITES).read_text(encoding="utf-8"))
        wanted = {name for each in sites.values() for site in each for name in (site, _place(site))}
        for path in files:
            lines = statement_places(path.read_bytes()) if path.suffix == ".py" else {}
            for mutant in load_mutants(self._root, [path] if path.suffix != ".lua" else []):
                wanted |= set(reach_names(mutant, path.read_bytes(), lines))
        closure = _statement_parts(self._root)
        found: dict[str, set[str]] = defaultdict(set)
        for test, used in self._reached.items():
            for each in used:
                file, _, number = each.partition("#")
                if number:
                    site = sites[file][int(number)]
                    found[test] |= {site, _place(site)}
                else:
                    found[test] |= closure.get(each, {each})
        data = self._coverage.get_data()
        for path in files:
            if path.suffix == ".py" and str(path) in data.measured_files():
                names = statement_places(path.read_bytes())
                prefix = str(path.relative_to(self._root))
                for line, tests in data.contexts_by_lineno(str(path)).items():
                    for test in tests if line in names else ():
                        found[test] |= {f"{prefix}::{name}" for name in names[line]}
        return {test: names & wanted for test, names in found.items()}


def _place(site: str) -> str:
    return "::".join(site.split("::")[:2])


def _statement_parts(root: Path) -> dict[str, set[str]]:
    """Returns for each statement of a store itself, the fragments in it, and the functions that it calls."""
    from tools.mutants.sql_guards import parts_of

    closure: dict[str, set[str]] = {}
    for queries in sorted((root / "holdfast/stores").glob("*/queries.sql")):
        texts = {}
        for path in [*queries.parent.glob("migrations/*.sql"), queries]:
            prefix = "" if path == queries else "holdfast."  # a statement and a function may have one name
            for name, _, text in parts_of(path.read_text(encoding="utf-8")):
                texts[prefix + name] = (f"{path.relative_to(root)}::{name}", text)
        for name in texts:
            open_names, known = [name], {name}
            while open_names:
                for groups in _INCLUDED.findall(texts[open_names.pop()][1]):
                    inner = groups[0] or f"holdfast.{groups[1]}"
                    if inner in texts and inner not in known:
                        known.add(inner)
                        open_names.append(inner)
            closure[texts[name][0]] = {texts[each][0] for each in known}
    return closure
