"""Guards are found in Python, SQL and Lua, and a test that does not notice that a guard is gone is reported."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.mutants.guards import Mutant, mutants_of
from tools.mutants.lua_guards import lua_guards
from tools.mutants.python_guards import python_guards
from tools.mutants.runner import Result, Run, Server, changed_mutants, load_equivalents, order_tests, run_mutant
from tools.mutants.sql_guards import sql_guards

PYTHON = b"""
def settle(job, now):
    if job.state != "running" or not job.lease > now:
        raise ValueError(job)
    for each in job.waiters:
        if each.ended:
            each.count += 1
            return None
    return job.claims == 1
"""
SQL = b"""-- name: settle
with locked as (select id from job where id = any(:ids) and lease_until > :now for no key update skip locked)
update job set state = case when cancelling then 7 else 5 end, attempts = case kind when 1 then 2 end
from locked l join other o on o.id = l.id
where job.id = l.id and (claims = :claims or :anyone) and job.at between 1 and 2
    and not exists (select 1 from dead where x);

-- fragment: unexpired
(expires_at is null or expires_at > :now)
"""
FUNCTION = b"""create table t (x int check (x > 0));
create function holdfast.take(wanted int) returns int language plpgsql as $$
begin
    if wanted < 1 then return null; end if;
    loop exit when wanted > 9; end loop;
    return (select n from t where n = wanted);
end $$;
"""
LUA = b"""-- name: settle
local function held(v)
    if not v or v[1] ~= 'running' then
        return false
    end
    if v[2] then
        count(v)
        return v[2] == claims and 1 or 2
    end
    while more() do next_one() end
    return v
end
"""


def changes(source: bytes, suffix: str) -> dict[str, list[str]]:
    """Returns the changes of each guard."""
    parser = {".py": python_guards, ".sql": sql_guards, ".lua": lua_guards}[suffix]
    found: dict[str, list[str]] = {}
    for mutant in mutants_of(f"file{suffix}", source, parser(source)):
        found.setdefault(f"{mutant.place}: {mutant.guard}", []).append(mutant.change)
    return found


def test_python_guards_are_conditions_comparisons_raise_and_early_return() -> None:
    assert changes(PYTHON, ".py") == {
        'settle: job.state != "running"': ["false"],
        "settle: job.lease > now": ["true", ">="],
        "settle: each.ended": ["true", "false"],
        "settle: return None": ["removed"],
        "settle: job.claims == 1": ["true", "false"],
    }


def test_python_mutants_compile_and_keep_operands() -> None:
    for mutant in mutants_of("file.py", PYTHON, python_guards(PYTHON)):
        mutated = mutant.apply(PYTHON)
        compile(mutated, "file.py", "exec")
        assert mutant.change not in ("true", "false") or mutant.guard.encode() in mutated


def test_sql_guards_are_predicates_and_locks() -> None:
    assert changes(SQL, ".sql") == {
        "settle: id = any(:ids)": ["true"],
        "settle: lease_until > :now": ["true", ">="],
        "settle: for no key update skip locked": ["removed"],
        "settle: cancelling": ["true", "false"],
        "settle: o.id = l.id": ["true"],
        "settle: job.id = l.id": ["true"],
        "settle: claims = :claims": ["false"],
        "settle: :anyone": ["false"],
        "settle: job.at between 1 and 2": ["true"],
        "settle: not exists (select 1 from dead where x)": ["true"],
        "settle: x": ["true"],
        "unexpired: expires_at is null": ["false"],
        "unexpired: expires_at > :now": ["false", ">="],
    }
    assert changes(FUNCTION, ".sql") == {
        "take: wanted < 1": ["true", "false", "<="],
        "take: wanted > 9": ["true", "false", ">="],
        "take: n = wanted": ["true"],
    }


def test_lua_guards_are_conditions_comparisons_and_returns() -> None:
    assert changes(LUA, ".lua") == {
        "settle.held: v": ["true"],
        "settle.held: v[1] ~= 'running'": ["false"],
        "settle.held: v[2]": ["true", "false"],
        "settle.held: return v[2] == claims and 1 or 2": ["removed"],
        "settle.held: v[2] == claims": ["true"],
        "settle.held: more()": ["false"],
        "settle.held: return v": ["nil"],
    }


def test_killers_nearby_run_first_then_one_test_of_each_function() -> None:
    seconds = {"a[sqlite]": 0.1, "a[redis]": 0.2, "b[sqlite]": 0.3, "c": 40.0, "d": 1.0}

    assert order_tests(list(seconds), seconds, Counter({"d": 1})) == ["d", "a[sqlite]", "b[sqlite]", "a[redis]"]
    assert order_tests(list(seconds), seconds, Counter(), 50.0)[-1] == "a[redis]"
    assert "c" in order_tests(list(seconds), seconds, Counter(), 50.0)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module with a guard, a strong test and a weak one."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "door.py").write_text("def may_enter(age):\n    if age < 18:\n        return False\n    return True\n")
    tests = "from door import may_enter\ndef test_strong():\n    assert not may_enter(17)\n    assert may_enter(18)\n"
    (folder / "test_door.py").write_text(f"{tests}def test_weak():\n    assert may_enter(40)\n")
    return folder


@pytest.fixture(scope="module")
def server(tree: Path) -> Iterator[Server]:
    server = Server(tree, ["test_door.py"])
    yield server
    server.close()


@pytest.mark.parametrize("change", ["false", "<="])
def test_strong_test_kills_and_weak_test_leaves_a_survivor(server: Server, tree: Path, change: str) -> None:
    source = (tree / "door.py").read_bytes()
    [mutant] = [each for each in mutants_of("door.py", source, python_guards(source)) if each.change == change]

    weak = run_mutant(server, mutant, source, ["test_door.py::test_weak"], budget=10.0)
    strong = run_mutant(server, mutant, source, ["test_door.py::test_weak", "test_door.py::test_strong"], budget=10.0)

    assert (weak.verdict, strong.verdict, strong.killer) == ("survived", "killed", "test_door.py::test_strong")
    assert (tree / "door.py").read_bytes() == source


def test_mutant_without_end_is_late(server: Server, tree: Path) -> None:
    source = (tree / "door.py").read_bytes()
    endless = Mutant(
        "door.py", "may_enter", "age < 18", 1, "endless", 0, len(source), b"def may_enter(age):\n    while 1: 0\n"
    )

    assert run_mutant(server, endless, source, ["test_door.py::test_weak"], budget=-4.5).verdict == "late"


def test_only_guards_on_changed_lines_are_chosen_and_results_are_kept(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    file = tmp_path / "file.py"
    file.write_bytes(PYTHON)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    file.write_bytes(PYTHON.replace(b"claims == 1", b"claims == 2"))
    source = file.read_bytes()
    mutants = list(mutants_of("file.py", source, python_guards(source)))

    chosen = list(changed_mutants(mutants, tmp_path, "HEAD"))
    Run(tmp_path, tmp_path).keep(chosen[0], source, Result("killed", "test_x"))

    assert [each.guard for each in chosen] == ["job.claims == 2"] * 2
    assert [Run(tmp_path, tmp_path).result_of(each).verdict for each in chosen] == ["killed", "not run"]


def test_equivalent_needs_a_reason_and_a_second_reader(tmp_path: Path) -> None:
    entries = tmp_path / "equivalent.toml"
    entries.write_text('[[equivalent]]\nmutant = "a"\nreason = "no state has it"\nreader = ""\n')

    with pytest.raises(ValueError, match="a has no reader"):
        load_equivalents(entries)
