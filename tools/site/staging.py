"""The source tree of the site: pages of the repository in one folder, with links that lead inside the site."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
DECISIONS = "docs/adr"
README = "README.md"
EXTRA = "_extra"
"""The folder of files that are copied as they are."""
DOWNLOADS = "deploy/"
"""The folder of files that readers copy: links to them are downloads."""
PICTURES = {
    "overview": "The first page: what runs, what needs attention",
    "jobs-state-dead": "Dead jobs, with filters and bulk actions",
    "jobs-dead": "One job: why it failed, its attempts and log lines",
    "errors": "Failures in groups, with counts",
    "queues": "Queues, which can be paused",
    "schedules": "Schedules",
}
"""Pictures of the console that the site shows, by file name, each with its caption."""
THEMES = ("light", "dark")
DEVICES = ("desktop", "phone")

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_DOCUMENTATION = re.compile(r"^## Documentation\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Group:
    """A group of the navigation; its pages are paths relative to the root."""

    title: str
    about: str
    pages: tuple[str, ...]


def read_groups() -> list[Group]:
    """Returns the groups in ``docs/navigation.toml``, in their order."""
    document = tomllib.loads((ROOT / "docs" / "navigation.toml").read_text(encoding="utf-8"))
    return [Group(each["title"], each["about"], tuple(each["pages"])) for each in document["group"]]


def find_decisions() -> list[str]:
    """Returns the paths of the decision records."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / DECISIONS).glob("*.md"))


def staged_name(page: str) -> str:
    """Returns the path of a page in the site's source tree."""
    path = Path(page)
    if page == README:
        return "index.md"
    if page == DECISIONS:
        return "adr/index.md"
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path.name == README:
        return f"{'-'.join(path.parent.parts)}.md".lower().replace("_", "-")
    return page.lower()


def stage(target: Path, pictures: Path | None = None) -> None:
    """Writes the source tree of the site; ``pictures`` is a folder made by ``make screenshots``.

    Raises:
        ValueError: A page links to a file that does not exist.
    """
    groups = read_groups()
    pages = [README, *(page for group in groups for page in group.pages if page != DECISIONS), *find_decisions()]
    names = {page: staged_name(page) for page in [*pages, DECISIONS]}
    for page in pages:
        text = _resolve_links((ROOT / page).read_text(encoding="utf-8"), page, names, target)
        if page == README:
            text = _landing_page(text, groups, with_picture=pictures is not None)
        if page == "docs/console.md" and pictures is not None:
            text += _gallery()
        _write(target / names[page], text)
    _write(target / names[DECISIONS], _decisions_page())
    _write(target / EXTRA / "llms.txt", _llms_index(groups, names))
    _write(target / EXTRA / "llms-full.txt", "\n".join((target / names[page]).read_text() for page in pages))
    if pictures is not None:
        (target / "pictures").mkdir()
        for name, theme, device in product(PICTURES, THEMES, DEVICES):
            shutil.copy(pictures / f"{theme}-{device}" / f"{name}.png", target / _picture_path(name, theme, device))


def title_of(page: str) -> str:
    """Returns the first heading of a page."""
    if page == DECISIONS:
        return "Decisions"
    return (ROOT / page).read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


def _resolve_links(text: str, page: str, names: dict[str, str], target: Path) -> str:
    """Returns the text with links to pages as links of the site.

    A link to a file to copy from (``DOWNLOADS``) is a download; one to any other file becomes its text.
    """

    def resolve(link: re.Match[str]) -> str:
        path, _, anchor = link["target"].partition("#")
        if not path or re.match(r"[a-z]+:", link["target"]):
            return link[0]
        found = os.path.normpath(Path(page).parent / path)
        is_download = found.startswith(DOWNLOADS) and found not in names and (ROOT / found).is_file()
        if link["image"] or is_download:
            copy = target / ("files" if is_download else "images") / Path(found).name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / found, copy)
            return f"{link['image']}[{link['text']}]({_relative(str(copy.relative_to(target)), names[page])})"
        if found in names:
            return f"[{link['text']}]({_relative(names[found], names[page])}{'#' + anchor if anchor else ''})"
        if not (ROOT / found).exists():
            raise ValueError(f"{page}: {link['target']}: no such file; correct the link")
        return link["text"]

    return "".join(part if code else _LINK.sub(resolve, part) for part, code in _split_code(text))


def _split_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the parts of a page, and whether each is a fenced block."""
    end = 0
    for block in _FENCED.finditer(text):
        yield text[end : block.start()], False
        yield block[0], True
        end = block.end()
    yield text[end:], False


def _relative(staged: str, page: str) -> str:
    return os.path.relpath(staged, Path(page).parent)


def _landing_page(readme: str, groups: list[Group], *, with_picture: bool) -> str:
    """Returns the README with a table of groups, a picture and the navigation."""
    first = [f"[{title_of(page)}]({staged_name(page)})" for group in groups for page in group.pages[:1]]
    rows = [f"| **{group.title}** | {group.about} | {link} |" for group, link in zip(groups, first, strict=True)]
    table = "\n".join(["## Documentation", "", "| | | begin with |", "|---|---|---|", *rows, ""])
    picture = _picture("overview") if with_picture else ""
    trees = "\n".join(_toctree(group.title, [staged_name(page) for page in group.pages]) for group in groups)
    return f"{_DOCUMENTATION.sub('', readme)}\n{picture}\n{table}\n{trees}"


def _toctree(caption: str, pages: list[str]) -> str:
    entries = "\n".join(page.removesuffix(".md") for page in pages)
    return f"```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{entries}\n```\n"


def _decisions_page() -> str:
    records = [Path(page).name for page in find_decisions()]
    links = "\n".join(f"- [{title_of(f'{DECISIONS}/{name}')}]({name})" for name in records)
    entries = "\n".join(name.removesuffix(".md") for name in records)
    tree = f"```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    about = "Decisions that the code does not explain by itself, each with its alternatives."
    return f"# Decisions\n\n{about}\n\n{links}\n\n{tree}"


def _picture_path(name: str, theme: str, device: str) -> str:
    return f"pictures/{name}-{theme}-{device}.png"


def _picture(name: str) -> str:
    """Returns a picture in each theme and for each device; ``site.css`` and the theme hide all but one."""
    return "\n".join(
        f"```{{image}} {_picture_path(name, theme, device)}\n"
        f":alt: {PICTURES[name]}\n:class: only-{theme} console on-{device}\n```\n"
        for theme, device in product(THEMES, DEVICES)
    )


def _gallery() -> str:
    shown = "\n".join(f"**{caption}**\n\n{_picture(name)}" for name, caption in PICTURES.items())
    return f"\n## Pictures\n\n{shown}"


def _llms_index(groups: list[Group], names: dict[str, str]) -> str:
    """Returns the index of the site for language models, in the form of llmstxt.org."""
    lines = ["# Holdfast", "", "> A durable job queue for Python, on SQLite, PostgreSQL or Redis.", ""]
    for group in groups:
        lines += [f"## {group.title}", "", group.about, ""]
        lines += [f"- [{title_of(page)}](_sources/{names[page]}.txt)" for page in group.pages]
        lines.append("")
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
