"""The rules of the house, as functions from source text to a list of complaints. Pure: they read what they are given.

``test_checkout.py`` holds the checkout to them; ``test_rules.py`` shows that each of them can find something.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Set

FUNCTION_LINES = 50
FILE_LINES = 500

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_BANNED_MODULES = frozenset({"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"})
_BANNED_CALLS = {
    "eval": "eval runs data as code",
    "exec": "exec runs data as code",
    "os.system": "os.system is a shell",
    "os.popen": "os.popen is a shell",
    "yaml.load": "yaml.load builds any object",
}
_BANNED_IN_TESTS = frozenset(
    f"{module}.{name}"
    for module in ("pytest", "pytest.mark", "unittest")
    for name in ("skip", "skipif", "skipIf", "skipUnless", "xfail", "importorskip", "expectedFailure", "SkipTest")
)
_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
_BARE_NOQA = re.compile(r"#\s*noqa(?!\s*:\s*[A-Z]+[0-9]+)", re.IGNORECASE)
_BARE_TYPE_IGNORE = re.compile(r"#\s*type:\s*ignore(?!\[[a-z-]+)")
_FORBIDDEN_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.$}])/(home|Users|root|work)/\w"),
    "a package index": re.compile(r"\b(pypi\.org|pythonhosted\.org)\b"),
    "a merge conflict": re.compile(r"^(<{7}|>{7}) ", re.MULTILINE),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
}
_CLOCKS = re.compile(
    r"\b(now|datetime|date|time|strftime|julianday|unixepoch|timediff|clock_timestamp|timeofday)\s*\("
    r"|\b(current_timestamp|current_date|current_time|localtimestamp|localtime)\b",
    re.IGNORECASE,
)
_STATEMENT = re.compile(r"^-- (name|own):\s*(\S+)\s*$", re.MULTILINE)
_SQL_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)


def too_long(source: str) -> list[str]:
    """Functions over 50 lines, their docstring not counted, and a file over 500."""
    problems = [
        f"line {function.lineno}: {function.name} has {length} lines; {FUNCTION_LINES} are allowed"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, _Function) and (length := function_length(function)) > FUNCTION_LINES
    ]
    if (lines := len(source.splitlines())) > FILE_LINES:
        problems.append(f"the file has {lines} lines; {FILE_LINES} are allowed")
    return problems


def function_length(function: _Function) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    first = function.body[0]
    docstring = _lines(first) if ast.get_docstring(function, clean=False) is not None else 0
    return _lines(function) - docstring


def promised(source: str) -> set[str]:
    """The methods of this file's protocols: their meaning stands there, once, for every class that has them."""
    return {
        method.name
        for protocol in ast.walk(ast.parse(source))
        if isinstance(protocol, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in protocol.bases)
        for method in protocol.body
        if isinstance(method, _Function)
    }


def undocumented(source: str, promises: Set[str] = frozenset()) -> list[str]:
    """The module, its public classes and functions, and the public methods that say nothing about themselves.

    A name with a leading underscore is not public. A method needs no docstring where its meaning is written elsewhere
    (among the ``promises`` of a protocol, or by a base class) or is plain from its name and its one statement.
    """
    module = ast.parse(source)
    problems = [] if ast.get_docstring(module) else ["the module has no docstring"]
    for node in module.body:
        if isinstance(node, _Function | ast.ClassDef) and _is_public(node):
            problems += _without_docstring(node, node.name)
        if isinstance(node, ast.ClassDef) and _is_public(node) and not node.bases:
            methods = [each for each in node.body if isinstance(each, _Function) and each.name not in promises]
            for method in methods:
                if _is_public(method) and len(method.body) > 1:
                    problems += _without_docstring(method, f"{node.name}.{method.name}")
    return problems


def banned(source: str) -> list[str]:
    """Constructs that run data as code or hide unfinished work. Text inside ordinary strings is free."""
    module = ast.parse(source)
    problems: list[str] = []
    for node in ast.walk(module):
        problems += [f"line {node.lineno}: {each}" for each in _banned_in(node) if isinstance(node, _LOCATED)]
    for line, text in _remarks(source, module):
        if found := _UNFINISHED.search(text):
            problems.append(f"line {line}: unfinished: {found.group()}")
        if _BARE_NOQA.search(text):
            problems.append(f"line {line}: a noqa names its rule")
        if _BARE_TYPE_IGNORE.search(text):
            problems.append(f"line {line}: an ignored type names its error")
    return problems


def unfinished(text: str) -> list[str]:
    """The marks of unfinished work in a file that is not Python."""
    return [f"line {_line(text, found)}: unfinished: {found.group()}" for found in _UNFINISHED.finditer(text)]


def forbidden_text(text: str) -> list[str]:
    """Text that has no place in a published file, wherever it stands."""
    return [
        f"line {_line(text, found)}: {what}: {found.group()}"
        for what, pattern in _FORBIDDEN_TEXT.items()
        for found in pattern.finditer(text)
    ]


def clocks(sql: str) -> list[str]:
    """Functions that read a clock. Time is a parameter, or comes from the one allowed: ``statement_timestamp``.

    A line that ends in ``-- a clock: after a lock`` is excepted: its statement began before it waited.
    """
    excepted = "\n".join("" if line.endswith("-- a clock: after a lock") else line for line in sql.split("\n"))
    bare = _SQL_COMMENT.sub(lambda comment: "\n" * comment.group().count("\n"), excepted)
    return [f"line {_line(bare, found)}: a clock: {found.group()}" for found in _CLOCKS.finditer(bare)]


def statement_names(sql: str, kind: str = "name") -> list[str]:
    """The names of the statements of one file, in order: each starts with a line ``-- name: claim_ready``, or with
    ``-- own: claim_ready`` if no other store has such a one, which is the other ``kind``."""
    return [name for found, name in _STATEMENT.findall(sql) if found == kind]


def mismatched(shared: Mapping[str, list[str]], own: Mapping[str, list[str]]) -> list[str]:
    """Statement names (by store) that stand twice in a store, that one SQL store shares and another has not, and that
    a store calls its own while another has them too."""
    problems = [
        f"{store}: {name} is defined {count} times"
        for store in shared
        for name, count in sorted(Counter(shared[store] + own[store]).items())
        if count > 1
    ]
    every = {name for names in shared.values() for name in names}
    problems += [f"{store}: {name} is missing" for store in shared for name in sorted(every - set(shared[store]))]
    owners = Counter(name for names in own.values() for name in set(names))
    problems += [f"{name} is no store's own: {count} have it" for name, count in sorted(owners.items()) if count > 1]
    return problems


_LOCATED = (ast.stmt, ast.expr, ast.keyword)


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def _is_public(node: ast.ClassDef | _Function) -> bool:
    return not node.name.startswith("_")


def _without_docstring(node: ast.ClassDef | _Function, name: str) -> list[str]:
    return [] if ast.get_docstring(node) else [f"line {node.lineno}: {name} has no docstring"]


def _banned_in(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (f"{each.name} is banned" for each in names if each.name.split(".")[0] in _BANNED_MODULES)
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in _BANNED_MODULES:
            yield f"{module} is banned"
        case ast.ImportFrom(module="pytest" | "unittest" as module, names=names):
            yield from (f"{each.name}: a test runs" for each in names if f"{module}.{each.name}" in _BANNED_IN_TESTS)
        case ast.Call(func=function) if (name := ast.unparse(function)) in _BANNED_CALLS:
            yield _BANNED_CALLS[name]
        case ast.keyword(arg="shell", value=ast.Constant(value=True)):
            yield "shell=True is a shell"
        case ast.Attribute() if (name := ast.unparse(node)) in _BANNED_IN_TESTS:
            yield f"{name}: a test runs"
        case _:
            return


def _remarks(source: str, module: ast.Module) -> Iterator[tuple[int, str]]:
    """Comments and docstrings with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(module):
        if isinstance(node, _Documented) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring
