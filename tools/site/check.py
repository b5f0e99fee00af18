"""``python -m tools.site.check [SITE]``: opens a built site by ``file://`` in Chromium, as its readers do.

Each page on a desktop and on a phone: no request leaves the site, no picture is missing, nothing is wider than the
window, no script complains. The search is used from the menu of a phone. Pages in ``PICTURED`` have enough contrast in
both themes; pictures of them are written to ``site-pictures`` beside the site. Exit status 1 if there is a problem.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from playwright import sync_api as playwright

from tests.support.browser import BrowserThread, Tab
from tools.site.staging import ROOT, THEMES

PICTURED = ("index", "quickstart", "settings", "cli", "comparisons", "benchmarks", "guarantees", "console")
"""Pages of which pictures are taken, and whose contrast is checked."""
WORD = "schedule"
"""The word to search for."""

_WIDTHS = {"desktop": 1280, "phone": 360}
_PICTURE_HEIGHT = 3000
_MISSING = "[...document.images].filter(image => !image.naturalWidth).map(image => image.getAttribute('src'))"
_MENU = ".mobile-header .nav-overlay-icon"
_SEARCH = ".sidebar-search"
_RESULTS = "#search-results li a"
_PATIENCE_MS = 20_000


def check_site(site: Path, pictured: Sequence[str], pictures: Path) -> list[str]:
    """Returns the problems of the site; writes pictures of the pages in ``pictured``."""
    browser = BrowserThread()
    problems: list[str] = []
    try:
        browser.run(lambda: problems.extend(_find_problems(browser, site, pictured, pictures)))
    finally:
        browser.close()
    return problems


def _find_problems(browser: BrowserThread, site: Path, pictured: Sequence[str], pictures: Path) -> Iterator[str]:
    with Tab(browser, site.as_uri()) as tab:
        for page in sorted(site.rglob("*.html")):
            name = str(page.relative_to(site))
            yield from (f"{name}: {problem}" for problem in _check_page(tab, name))
    with Tab(browser, site.as_uri(), width=_WIDTHS["phone"]) as tab:
        yield from (f"search: {problem}" for problem in _check_search(tab, site))
        tab.page.screenshot(path=pictures / "search-light-phone.png")
    for theme in THEMES:
        with Tab(browser, site.as_uri(), dark=theme == "dark") as tab:
            for name in pictured:
                _open(tab, f"{name}.html")
                yield from (f"{name}.html: {theme}: {each}" for each in tab.violations("color-contrast"))
                for device, width in _WIDTHS.items():
                    _take_picture(tab, width, pictures / f"{name}-{theme}-{device}.png")


def _take_picture(tab: Tab, width: int, target: Path) -> None:
    """Writes a picture of the first part of the open page."""
    tab.page.set_viewport_size({"width": width, "height": 900})
    part: playwright.FloatRect = {"x": 0, "y": 0, "width": width, "height": _PICTURE_HEIGHT}
    tab.page.screenshot(path=target, full_page=True, clip=part)


def _open(tab: Tab, name: str) -> None:
    tab.page.set_viewport_size({"width": _WIDTHS["desktop"], "height": 900})
    tab.page.goto(f"{tab.address}/{name}")


def _check_page(tab: Tab, name: str) -> Iterator[str]:
    """Opens a page in both widths; yields its problems."""
    tab.asked.clear()
    tab.problems.clear()
    _open(tab, name)
    for device, width in _WIDTHS.items():
        tab.page.set_viewport_size({"width": width, "height": 900})
        if tab.has_horizontal_scroll():
            yield f"wider than the window of a {device}, {width} px; let the wide part scroll in a box of its own"
    yield from (f"{source}: the picture is missing" for source in tab.page.evaluate(_MISSING))
    yield from (f"{address}: the request leaves the site" for address in tab.foreign_requests)
    yield from tab.problems


def _check_search(tab: Tab, site: Path) -> Iterator[str]:
    """Searches from the menu of a phone; yields the problems, such as results that lead nowhere."""
    page = tab.page
    page.set_default_timeout(_PATIENCE_MS)
    page.goto(f"{tab.address}/index.html")
    try:
        page.locator(_MENU).click()
        page.locator(_SEARCH).click()  # only if it is inside the window now
        page.keyboard.type(WORD)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Search Results").wait_for()  # Sphinx writes it at the end
    except playwright.Error as error:
        yield f"failed on a phone: {error.message}"
        return
    targets = [link.get_attribute("href") or "" for link in page.locator(_RESULTS).all()]
    if not targets:
        yield f"{WORD!r} has no results"
    yield from (f"{target}: no such page" for target in targets if not (site / target.partition("#")[0]).is_file())
    yield from tab.problems


def main() -> int:
    """Checks the site; returns the exit status."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()
    pictures = site.with_name("site-pictures")
    problems = check_site(site, PICTURED, pictures)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} problems; pictures of pages are in {pictures}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
