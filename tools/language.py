"""Measures of the package's language and size, as ``make check`` prints them: ``python -m tools.language [--show]``.

Each measure has a limit and a ceiling. The limit is where the package has to arrive; the ceiling is where it stands,
and may only fall: lower it with the measure. Those of size grow with a feature, in its commits.
Exit status 1 if a ceiling is exceeded, or if the subject of a commit after ``RULE_SINCE`` is not ``area: imperative
summary`` in at most 72 characters. ``--show`` lists the places.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULE_SINCE = "7b25b33"
"""The last commit before the rule for subjects."""
OPENING = re.compile(
    r"(what|whatever|whether|who|whoever|whose|one|ones|these|those|so|where|wherever|how|somebody|nobody|everybody"
    r"|others?|that)\b",
    re.IGNORECASE,
)
PRONOUN = re.compile(
    r"\b(who|whoever|whom|nobody|somebody|everybody|anybody|others|what|whatever|those|ones)\b", re.IGNORECASE
)
BANNED = re.compile(
    r"(?<![A-Za-z])(whoever|nobody|somebody|everybody|told|ghosts?|graves?|bury|buried|deaf|ears?|halls?|desks?|deeds?|crowds?"
    r"|strangers?|in vain|in peace|let go of|lays? to rest)(?![A-Za-z])",
    re.IGNORECASE,
)
"""Metaphors and pronouns that name no thing."""
GLOSSARY_TERM = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \|", re.MULTILINE)
SMALL_MODULE = 60
SUBJECT = re.compile(r"[a-z0-9_./+-]+: [a-z]")
MAX_SUBJECT = 72


@dataclass
class Measure:
    """One measure: its value, where it has to arrive, where it stands, and the places behind it."""

    name: str
    limit: float
    ceiling: float
    value: float = 0.0
    places: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Returns the line that is printed."""
        exceeded = "  EXCEEDED" if self.value > self.ceiling else ""
        return f"{self.name:45}{self.value:9.2f}  limit {self.limit:,g}, ceiling {self.ceiling:,g}{exceeded}"


def docstrings(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, str]]:
    """Yields every docstring with its file."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield path, text


def one_word_functions(trees: dict[Path, ast.Module]) -> set[str]:
    """Returns the names without an underscore of public functions and methods; properties do not count."""
    names = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and "_" not in node.name:
                decorators = {ast.unparse(each) for each in node.decorator_list}
                if not any("property" in each or each.endswith(".setter") for each in decorators):
                    names.add(node.name)
    return names


def shared_class_names(trees: dict[Path, ast.Module]) -> list[str]:
    """Returns the class names that stand in modules of different names."""
    modules = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules[node.name].add(path.name)
    return sorted(name for name, files in modules.items() if len(files) > 1)


def subjects() -> list[str]:
    """Returns the subjects of the commits since the rule; none where this is no clone, or one without that commit."""
    command = ["git", "log", "--no-merges", "--format=%s", f"{RULE_SINCE}..HEAD"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.splitlines() if ran.returncode == 0 else []


def size_measures(package: Path, trees: dict[Path, ast.Module]) -> list[Measure]:
    """Returns the measures of size and of banned words."""
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    sources = [path for path in files if path.suffix in (".py", ".sql", ".lua")]
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    top = [path for path in package.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"]
    small = [path for path in trees if path.name != "__init__.py" and len(texts[path].splitlines()) < SMALL_MODULE]
    statements = sum(isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree))
    banned = [f"{path}: {found.group()}" for path, text in texts.items() for found in BANNED.finditer(text)]
    return [
        Measure("files", 220, 390, len([path for path in files if "static" not in path.parts])),
        Measure("lines of code", 36_000, 78_122, sum(len(text.splitlines()) for text in texts.values())),
        Measure(
            "packages and modules at the top", 14, 14, len([path for path in top if not path.name.startswith("__")])
        ),
        Measure("modules under 60 lines", 25, 16, len(small), [str(path) for path in small]),
        Measure("statements", 24_217, 42_865, statements),
        Measure("banned words", 0, 0, len(banned), banned),
    ]


def measure(package: Path) -> list[Measure]:
    """Returns all measures of a package."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    opening = Measure("docstrings opening with a pronoun, %", 3.0, 0.5)
    pronouns = Measure("pronouns per 100 docstring words", 0.7, 0.65)
    one_word = Measure("distinct one-word public functions", 160, 158)
    unexplained = Measure("one-word functions not in the glossary", 0, 0)
    classes = Measure("class names in modules of different names", 3, 3)
    commits = Measure("commit subjects out of form", 0, 0)
    count = words = found = 0
    for path, text in docstrings(trees):
        count += 1
        words += len(re.findall(r"[A-Za-z']+", text))
        found += len(PRONOUN.findall(text))
        if OPENING.match(text.strip()):
            opening.places.append(f"{path}: {text.splitlines()[0][:100]}")
    opening.value = 100 * len(opening.places) / max(count, 1)
    pronouns.value = 100 * found / max(words, 1)
    one_word.places = sorted(one_word_functions(trees))
    glossary = (package.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    unexplained.places = sorted(
        set(one_word.places) - set(re.findall(r"\w+", " ".join(GLOSSARY_TERM.findall(glossary))))
    )
    classes.places = shared_class_names(trees)
    commits.places = [each for each in subjects() if len(each) > MAX_SUBJECT or not SUBJECT.match(each)]
    for each in (one_word, unexplained, classes, commits):
        each.value = len(each.places)
    return [opening, pronouns, one_word, unexplained, classes, *size_measures(package, trees), commits]


def main() -> int:
    """Print the measures; 1 if one exceeds its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m tools.language", description=__doc__)
    parser.add_argument("--show", action="store_true", help="list the places behind each measure")
    show = parser.parse_args().show
    measures = measure(ROOT / "holdfast")
    for each in measures:
        print(each.line())
        if show:
            print(*(f"    {place}" for place in each.places), sep="\n")
    return any(each.value > each.ceiling for each in measures)


if __name__ == "__main__":
    sys.exit(main())
