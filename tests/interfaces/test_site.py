"""The documentation site: its navigation has every page, and its links lead inside it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.pages import ROOT
from tools.site import staging
from tools.site.check import check_site
from tools.site.staging import DECISIONS, DEVICES, PICTURES, THEMES, read_groups, stage

_LINK = re.compile(r"\]\(([^)\s#]+\.(?:md|svg|png|txt))(?:#[^)\s]*)?\)")

_PICTURE = re.compile(
    r"^```\{image\} pictures/([\w-]+)-(\w+)-(\w+)\.png\n:alt: (.+)\n:class: only-(\w+) console on-(\w+)$", re.MULTILINE
)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = Counter(page for group in read_groups() for page in group.pages)
    written = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/*/README.md"), ROOT / DECISIONS]
    pages = {str(path.relative_to(ROOT)) for path in written} - {"README.md"} | {"deploy/README.md"}
    assert listed == Counter(dict.fromkeys(pages, 1))


def test_links_of_the_site_lead_to_its_files(tmp_path: Path) -> None:
    stage(tmp_path)
    pages = sorted(tmp_path.rglob("*.md"))
    broken = [
        f"{page.relative_to(tmp_path)}: {target}"
        for page in pages
        for target in _LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
    index = (tmp_path / "_extra" / "llms.txt").read_text(encoding="utf-8")
    sources = {f"_sources/{page.relative_to(tmp_path)}.txt" for page in pages if page.parent == tmp_path}
    assert sources - set(_LINK.findall(index)) == {"_sources/index.md.txt"}
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8")
    assert (tmp_path / "files" / "rules.yml").read_text(encoding="utf-8") == rules
    assert "](files/rules.yml)" in (tmp_path / "deploy.md").read_text(encoding="utf-8")
    assert "](tasks.md)" in (tmp_path / "quickstart.md").read_text(encoding="utf-8")
    assert "](changelog.md)" not in (tmp_path / "index.md").read_text(encoding="utf-8")


def test_pictures_are_staged_for_both_themes_and_devices(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "screenshots"
    for theme in THEMES:
        for device in DEVICES:
            (folder / f"{theme}-{device}").mkdir(parents=True)
            for name in PICTURES:
                (folder / f"{theme}-{device}" / f"{name}.png").write_text(f"{name} {theme} {device}")
    stage(site, folder)
    shown = {page: _PICTURE.findall((site / page).read_text(encoding="utf-8")) for page in ("index.md", "console.md")}
    kinds = [(theme, device) for theme in THEMES for device in DEVICES]
    assert shown == {
        "index.md": [("overview", theme, device, PICTURES["overview"], theme, device) for theme, device in kinds],
        "console.md": [
            (name, theme, device, caption, theme, device)
            for name, caption in PICTURES.items()
            for theme, device in kinds
        ],
    }
    staged = {path.stem: path.read_text(encoding="utf-8").replace(" ", "-") for path in (site / "pictures").iterdir()}
    assert staged == {
        f"{name}-{theme}-{device}": f"{name}-{theme}-{device}" for name, theme, device, *_ in shown["console.md"]
    }


_START = """\
<!doctype html><html lang="en"><title>Start</title><meta name="viewport" content="width=device-width">
<header class="mobile-header"><label class="nav-overlay-icon" for="menu">Menu</label></header>
<style>form { position: absolute; left: -300px } input:checked + form { left: 0; top: 60px }</style>
<input type="checkbox" id="menu"><form action="search.html"><input class="sidebar-search" name="q"></form>
<p style="color: #ccc">pale</p>
"""
_SEARCH = """\
<!doctype html><html lang="en"><title>Search</title><h2>Search Results</h2>
<div id="search-results"><ul><li><a href="index.html#top">Start</a><li><a href="gone.html#top">Gone</a></ul></div>
"""
_WIDE = """\
<!doctype html><html lang="en"><title>Wide</title><meta name="viewport" content="width=device-width">
<div style="width: 700px">wide</div><img src="gone.png" alt=""><img src="http://counter.invalid/1.png" alt="">
<script>throw new Error("wrong")</script>
"""


def test_check_finds_what_a_reader_would_complain_of(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "more").mkdir(parents=True)
    for name, text in {"index": _START, "search": _SEARCH, "more/wide": _WIDE}.items():
        (site / f"{name}.html").write_text(text, encoding="utf-8")
    assert sorted(check_site(site, ["index"], tmp_path)) == [
        "index.html: dark: color-contrast: ['<p style=\"color: #ccc\">pale</p>']",
        "index.html: light: color-contrast: ['<p style=\"color: #ccc\">pale</p>']",
        "more/wide.html: Failed to load resource: net::ERR_FILE_NOT_FOUND",
        "more/wide.html: Failed to load resource: net::ERR_NAME_NOT_RESOLVED",
        "more/wide.html: gone.png: the picture is missing",
        "more/wide.html: http://counter.invalid/1.png: the picture is missing",
        "more/wide.html: http://counter.invalid/1.png: the request leaves the site",
        "more/wide.html: wider than the window of a phone, 360 px; let the wide part scroll in a box of its own",
        "more/wide.html: wrong",
        "search: gone.html#top: no such page",
    ]
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "search-light-phone.png",
        *(f"index-{theme}-{device}.png" for theme in THEMES for device in DEVICES),
    }


def test_a_link_to_a_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "adr").mkdir(parents=True)
    (tmp_path / "docs" / "navigation.toml").write_text("group = []\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("# Name\n\n[a page](docs/none.md)\n", encoding="utf-8")
    monkeypatch.setattr(staging, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"README\.md: docs/none\.md: no such file; correct the link"):
        stage(tmp_path / "staged")
