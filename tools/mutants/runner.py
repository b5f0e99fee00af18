"""Runs mutants: chooses them and their tests, shares them out to servers, and keeps the results outside git."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from tools.mutants.guards import Mutant, guarded_files, load_mutants
from tools.mutants.python_guards import reach_names, statement_places

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".state" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
TESTS = ("unit", "conformance", "external_tx", "worker", "transports", "faults", "model", "web")
"""Folders of tests that run in the process of pytest."""
NOT_USED = ("test_plans", "test_worker_protocol", "test_generated_clients", "test_js_worker")
"""Beginnings of names of test files: plans change with any predicate; the others run programs."""
BUDGETS = (30.0, 120.0)
"""Seconds of tests, as recorded, that a mutant has to survive: first, and then of others."""
NO_TESTS = 5
"""Exit status of pytest if it has found no test."""
SURVIVED = ("survived", "unreached")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")


class Result(NamedTuple):
    """``verdict``: killed, late (stopped at its time limit), survived, or unreached: no test reaches its place."""

    verdict: str
    killer: str = ""
    seconds: float = 0.0
    error: str = ""


def test_files(root: Path) -> list[str]:
    """Returns the files of tests that may kill mutants."""
    found = sorted(path for folder in TESTS for path in (root / "tests" / folder).rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in found if not path.name.startswith(NOT_USED)]


def copy_tree(root: Path, name: str) -> Path:
    """Returns an up-to-date copy of the checkout; files that have not changed keep their compiled forms."""
    target = STATE / f"tree-{name}"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    kept = {each for each in listed if each and (root / each).is_file()}
    for path in [each for each in target.rglob("*") if each.is_file() and "__pycache__" not in each.parts]:
        if str(path.relative_to(target)) not in kept:
            path.unlink()
    for each in kept:
        (target / each).parent.mkdir(parents=True, exist_ok=True)
        source, copy = root / each, target / each
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            shutil.copy2(source, copy)
    return target


class Reach:
    """Which tests reach a place, the fastest first, from the records of recorder.py."""

    def __init__(self, folder: Path) -> None:
        self._tests: dict[str, list[str]] = defaultdict(list)
        self.seconds: dict[str, float] = {}
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            names = [name for name, _ in record["tests"]]
            self.seconds |= dict(record["tests"])
            for place, numbers in record["places"].items():
                self._tests[place] += [names[number] for number in numbers]
        self._lines: dict[str, dict[int, tuple[str, str]]] = {}

    def tests_of(self, mutant: Mutant, source: bytes) -> list[str]:
        """Returns the tests of its line or guard; those of its function, statement or script if none is known."""
        if mutant.file.endswith(".py") and mutant.file not in self._lines:
            self._lines[mutant.file] = statement_places(source)
        names = reach_names(mutant, source, self._lines.get(mutant.file, {}))
        known = next((self._tests[name] for name in names if name in self._tests), [])
        return sorted(known, key=lambda test: self.seconds[test])


def order_tests(
    tests: Sequence[str], seconds: dict[str, float], killers: Counter[str], budget: float = BUDGETS[0]
) -> list[str]:
    """Returns the tests to run: killers of mutants nearby, then one of each function, then others, in the budget."""
    functions: Counter[str] = Counter()
    ranked = []
    for test in tests:
        function = test.partition("[")[0]
        ranked.append((-killers[test], functions[function], seconds[test], test))
        functions[function] += 1
    chosen, spent = [], 0.0
    for _, _, cost, test in sorted(ranked):
        if chosen and spent + cost > budget:
            continue
        chosen.append(test)
        spent += cost
    return chosen


class Server:
    """A process that runs tests on mutants (server.py), in a copy of the checkout."""

    def __init__(self, tree: Path, files: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        address = f"{self._folder.name}/socket"
        self._log = (tree.parent / f"{tree.name}.log").open("wb")
        with Listener(address, family="AF_UNIX") as listener:
            self._process = subprocess.Popen(
                [sys.executable, *PYTEST, "-p", "no:xdist", "-p", "tools.mutants.server", *files],
                cwd=tree,
                env=_environment(tree, MUTANTS_SOCKET=address),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            threading.Thread(target=self._unblock, args=(address,), daemon=True).start()
            self._connection: Connection = listener.accept()
        self.tests: set[str] = set(self._connection.recv())

    def _unblock(self, address: str) -> None:
        """Connects in place of a server that ends without it."""
        from multiprocessing.connection import Client

        if self._process.wait() and not hasattr(self, "tests"):
            Client(address, family="AF_UNIX").close()

    def run(self, task: Sequence[object]) -> Sequence[Any]:
        """Returns the Outcome of a Task."""
        self._connection.send(task)
        return list(self._connection.recv())

    def close(self) -> None:
        """Ends the process, with its servers."""
        self._connection.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()
        self._folder.cleanup()


def _environment(tree: Path, **values: str) -> dict[str, str]:
    path = os.pathsep.join([str(tree), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", **values}


def run_mutant(server: Server, mutant: Mutant, source: bytes, tests: list[str], budget: float) -> Result:
    """Returns what the tests say. A test that fails on a mutant must fail again, alone."""
    began = time.monotonic()
    mutated = mutant.apply(source)
    while tests:
        killer, is_late, error = server.run((mutant.file, mutated, tests, 20 + 4 * budget))
        if is_late:
            return Result("late", "", time.monotonic() - began)
        if not killer:
            break
        if killer == "the test process" or any(server.run((mutant.file, mutated, [killer], 20 + 4 * budget))[:2]):
            return Result("killed", killer, time.monotonic() - began, error)
        tests = tests[tests.index(killer) + 1 :]
    return Result("survived", "", time.monotonic() - began)


class Run:
    """Runs mutants and keeps their results in a file, so that an interrupted run can be resumed."""

    def __init__(self, root: Path = ROOT, state: Path = STATE) -> None:
        self._root = root
        self._file = state / "results.jsonl"
        self._lock = threading.Lock()
        self._killers: dict[str, Counter[str]] = defaultdict(Counter)
        self._equivalents = load_equivalents()
        self.reach = Reach(state / "reach")
        self.results: dict[str, Result] = {}
        for line in self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else ():
            name, result = json.loads(line)
            self.results[name] = Result(*result)

    def key(self, mutant: Mutant, source: bytes) -> str:
        """Returns the key of a result: it holds as long as the lines around the guard stay the same."""
        near = source[max(0, mutant.start - 200) : mutant.end + 200]
        return f"{mutant.name}::{hashlib.sha1(near, usedforsecurity=False).hexdigest()[:8]}"

    def run(self, mutants: Iterable[Mutant], *, parallel: int, seconds: float, again: bool = False) -> None:
        """Runs those without a result until the time is over; ``again``: those that survived, too."""
        done = ("killed", "late") if again else ("killed", "late", *SURVIVED)
        waiting: SimpleQueue[Mutant] = SimpleQueue()
        for mutant in mutants:
            if self.result_of(mutant).verdict not in done:
                waiting.put(mutant)
        deadline = time.monotonic() + seconds
        threads = [threading.Thread(target=self._work, args=(n, waiting, deadline)) for n in range(parallel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def result_of(self, mutant: Mutant) -> Result:
        """Returns the result of a mutant; its verdict is "not run" if it has none."""
        return self.results.get(self.key(mutant, self._source(mutant)), Result("not run"))

    def _source(self, mutant: Mutant) -> bytes:
        return (self._root / mutant.file).read_bytes()

    def _work(self, number: int, waiting: SimpleQueue[Mutant], deadline: float) -> None:
        tree, files, server = copy_tree(self._root, str(number)), test_files(self._root), None
        try:
            while time.monotonic() < deadline:
                mutant = waiting.get_nowait()
                server = server or Server(tree, files)
                result = self._run_one(server, mutant)
                if result.verdict == "late" or result.killer == "the test process":
                    server.close()  # a script may still run in its Redis
                    server = None
        except Empty:
            pass
        finally:
            if server is not None:
                server.close()

    def _run_one(self, server: Server, mutant: Mutant) -> Result:
        source = self._source(mutant)
        known = [test for test in self.reach.tests_of(mutant, source) if test in server.tests]
        killers = self._killers[f"{mutant.file}::{mutant.place}"]
        result, number = Result("unreached"), 0
        for budget in BUDGETS:
            tests = order_tests(known, self.reach.seconds, killers, budget)
            if tests and result.verdict in SURVIVED:
                number += len(tests)
                result = run_mutant(server, mutant, source, tests, sum(self.reach.seconds[test] for test in tests))
            if mutant.name in self._equivalents:
                break
            known = [test for test in known if test not in tests]
        with self._lock:
            killers[result.killer] += 1
            self.keep(mutant, source, result)
            if result.verdict != "killed":
                print(f"{result.verdict}: {mutant.name} ({number} tests, {result.seconds:.1f} s)", flush=True)
        return result

    def keep(self, mutant: Mutant, source: bytes, result: Result) -> None:
        """Adds a result to the file."""
        key = self.key(mutant, source)
        self.results[key] = result
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            print(json.dumps([key, result]), file=file)

    def count_verdicts(self, mutants: Iterable[Mutant]) -> dict[str, Counter[str]]:
        """Returns the number of mutants by file and verdict."""
        equivalent = load_equivalents()
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for mutant in mutants:
            verdict = self.result_of(mutant).verdict
            is_equivalent = verdict in SURVIVED and mutant.name in equivalent
            counts[mutant.file]["equivalent" if is_equivalent else verdict] += 1
        return counts

    def survivors(self, mutants: Iterable[Mutant]) -> list[Mutant]:
        """Returns the survivors that are not in the list of equivalents."""
        equivalent = load_equivalents()
        left = [each for each in mutants if each.name not in equivalent]
        return sorted(each for each in left if self.result_of(each).verdict in SURVIVED)

    def table(self, mutants: Iterable[Mutant]) -> str:
        """Returns the counts by module."""
        counts = self.count_verdicts(mutants)
        columns = ("killed", "late", *SURVIVED, "equivalent", "not run")
        lines = [f"{'module':50}" + "".join(f"{column:>11}" for column in columns)]
        for file, found in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
            lines.append(f"{file.removeprefix('holdfast/'):50}" + "".join(f"{found[each]:11}" for each in columns))
        return "\n".join(lines)


def load_equivalents(path: Path = EQUIVALENT) -> set[str]:
    """Returns the names of the mutants that change no promise; raises ValueError for one without reason or reader."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    for each in entries:
        if missing := {"mutant", "reason", "reader"} - {name for name, value in each.items() if value}:
            raise ValueError(f"{path.name}: {each.get('mutant', 'an entry')} has no {sorted(missing)[0]}; add it")
    return {each["mutant"] for each in entries}


def changed_mutants(mutants: Iterable[Mutant], root: Path, base: str) -> Iterator[Mutant]:
    """Yields the mutants on lines that differ from a commit."""
    changed: dict[str, set[int]] = {}
    for mutant in mutants:
        if mutant.file not in changed:
            changed[mutant.file] = set(_changed_lines(root, base, mutant.file))
        source = (root / mutant.file).read_bytes()
        first = source.count(b"\n", 0, mutant.start) + 1
        if not changed[mutant.file].isdisjoint(range(first, first + source.count(b"\n", mutant.start, mutant.end) + 1)):
            yield mutant


def _changed_lines(root: Path, base: str, file: str) -> Iterator[int]:
    command = ["git", "diff", "-U0", "--no-color", base, "--", file]
    text = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for line in text.splitlines():
        if line.startswith("@@"):
            start, _, length = line.split()[2].removeprefix("+").partition(",")
            yield from range(int(start), int(start) + int(length or 1))


def all_mutants(root: Path = ROOT, seed: int = 1) -> list[Mutant]:
    """Returns all mutants in an order in which each beginning is a sample, which stays the same as code is added."""

    def draw(mutant: Mutant) -> bytes:
        return hashlib.sha1(f"{seed} {mutant.name}".encode(), usedforsecurity=False).digest()

    return sorted(load_mutants(root, guarded_files(root / "holdfast")), key=draw)


def record_reach(root: Path = ROOT, *, parallel: int, chunk: int = 12) -> None:
    """Records which test reaches which place, for the test files that are new or changed since."""
    from tools.mutants.recorder import LUA_SITES, log_guards, record_file_name

    folder = STATE / "reach"
    folder.mkdir(parents=True, exist_ok=True)
    records = {file: folder / record_file_name(root, file) for file in test_files(root)}
    for outdated in set(folder.glob("*.json")) - set(records.values()):
        outdated.unlink()
    left = [file for file, record in records.items() if not record.exists()]
    if not left:
        return
    tree = copy_tree(root, "recorded")
    sites: dict[str, list[str]] = {}
    for path in guarded_files(tree / "holdfast"):
        if path.suffix == ".lua":
            file = str(path.relative_to(tree))
            guards = {(each.start, each.end): each.site for each in load_mutants(tree, [path])}
            sites[file] = [*guards.values()]
            path.write_bytes(log_guards(path.read_bytes(), file, [*guards]))
    (folder / LUA_SITES).write_text(json.dumps(sites), encoding="utf-8")
    environment = _environment(tree, MUTANTS_REACH=str(folder))
    for at in range(0, len(left), chunk):
        print(f"records {at + 1} to {min(at + chunk, len(left))} of {len(left)} test files …", flush=True)
        options = ["-p", "tools.mutants.recorder", "-n", str(parallel), "--dist=loadfile"]
        files = left[at : at + chunk]
        ran = subprocess.run([sys.executable, *PYTEST, *options, *files], cwd=tree, env=environment, check=False)
        if ran.returncode > 1 and ran.returncode != NO_TESTS:
            raise RuntimeError(f"pytest ended with {ran.returncode} while the tests of {files[0]} … were recorded")
        for file in files:
            if not records[file].exists():  # it has no test for these stores
                records[file].write_text('{"tests": [], "places": {}}', encoding="utf-8")
