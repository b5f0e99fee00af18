"""The input: every source file of the running Python's own library, and twenty broken ones."""

from __future__ import annotations

import gzip
import shutil
import sysconfig
from pathlib import Path

_NOT_STANDARD = frozenset({"site-packages", "dist-packages"})
_MISTAKES = (
    "def f(:\n    pass\n",
    "class\n",
    "x = = 1\n",
    "print 'hello'\n",
    "if True:\nx = 1\n",
    "for in range(3): pass\n",
    "return return\n",
    "'never closed\n",
    "(1, 2\n",
    "def f():\n\tx = 1\n        y = 2\n",
)


def library(most: int | None) -> list[Path]:
    """The library's files in a fixed order; at most ``most`` of them, spread over all."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if path.is_file() and not _NOT_STANDARD & set(path.parts))
    if most is None or most >= len(files):
        return files
    return [files[index * len(files) // most] for index in range(most)]


def write_broken(folder: Path) -> list[Path]:
    """Write twenty files that no Python accepts."""
    folder.mkdir()
    broken = []
    for number in range(20):
        path = folder / f"broken_{number:02}.py"
        path.write_text(f"# mistake {number}\n{_MISTAKES[number % len(_MISTAKES)]}", encoding="utf-8")
        broken.append(path)
    return broken


def copy_for_gzip(files: list[Path], folder: Path, most: int) -> list[Path]:
    """Copies of up to ``most`` of the files, for gzip to work on; none where there is no gzip."""
    folder.mkdir()
    if shutil.which("gzip") is None:
        return []
    copies = []
    for number, path in enumerate(files[:most]):
        copies.append(folder / f"{number:04}_{path.name}")
        shutil.copyfile(path, copies[-1])
    return copies


def unpacked(copies: list[Path]) -> tuple[int, int]:
    """How many of the copies have a gzip file that unpacks to exactly them, and the bytes of those."""
    files = size = 0
    for copy in copies:
        packed = copy.with_name(copy.name + ".gz")
        if packed.exists() and gzip.decompress(packed.read_bytes()) == copy.read_bytes():
            files += 1
            size += copy.stat().st_size
    return files, size
