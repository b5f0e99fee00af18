"""Chromium, driven by Playwright: one for each test process, which its tests share. No name resolves in it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Playwright, sync_playwright

from tests.support.node import SOURCES, chromium_environment, install_packages, run_node

_NO_NAMES = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--font-render-hinting=none", _NO_NAMES)
"""Not the package's own, which run all in one process and switch the same-origin policy off."""
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
AXE = "node_modules/axe-core/axe.min.js"


class BrowserThread:
    """The browser of a test process, and the thread that drives it: Playwright keeps an event loop running there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "browser")
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None

    def run(self, test: Callable[[], object]) -> None:
        """Runs a test in the thread of the browser."""
        self._thread.submit(test).result()

    def close(self) -> None:
        """Ends the browser."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    def _close(self) -> None:
        if self._browser is not None and self._playwright is not None:
            self._browser.close()
            self._playwright.stop()

    def new_context(self, **options: Any) -> BrowserContext:
        """Returns a new profile; starts the browser with the first one."""
        if self._browser is None:
            path, environ = unpack_chromium()
            self._playwright = sync_playwright().start()
            self._browser = self._playwright.chromium.launch(executable_path=path, args=_ARGUMENTS, env=environ)
        return self._browser.new_context(**options)


def unpack_chromium() -> tuple[str, dict[str, str | float | bool]]:
    """Returns the path of Chromium, unpacked once for all test processes, and its environment."""
    packages = install_packages()
    folder = packages / "browser"
    folder.mkdir(exist_ok=True)
    with (packages / "browser.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environ = chromium_environment(folder)
        shutil.copy(SOURCES / "chromium.mjs", packages)
        path = run_node("chromium.mjs", cwd=packages, environ=environ).strip()
    return path, {**environ}


class Tab:
    """A page with an own profile, and all that it asked for and complained about."""

    def __init__(self, browser: BrowserThread, address: str, *, width: int = 1280, dark: bool = False) -> None:
        self.address = address
        self._context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self.page: Page = self._context.new_page()
        self.asked: list[str] = []
        self.problems: list[str] = []
        self.page.set_default_timeout(60_000)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def visit(self, path: str) -> None:
        """Opens a page of the console."""
        self.page.goto(f"{self.address}/console{path}")

    def violations(self, rule: str | None = None) -> list[str]:
        """Returns the violations of WCAG 2.2 AA, or of one rule, that axe-core finds, each with its elements."""
        if not self.page.evaluate("typeof window.axe === 'object'"):
            self._inject()
        chosen = {"type": "tag", "values": _TAGS} if rule is None else {"type": "rule", "values": [rule]}
        found = self.page.evaluate("chosen => axe.run({runOnly: chosen})", chosen)
        return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found["violations"]]

    def _inject(self) -> None:
        """Loads axe-core past the policy of the page, which runs no foreign script."""
        session = self._context.new_cdp_session(self.page)
        script = (Path(install_packages()) / AXE).read_text(encoding="utf-8")
        session.send("Runtime.evaluate", {"expression": script})
        session.detach()

    @property
    def foreign_requests(self) -> list[str]:
        """Requests to other hosts."""
        return [each for each in self.asked if not each.startswith((self.address, "data:"))]

    def has_horizontal_scroll(self) -> bool:
        """Returns True if the page is wider than the window."""
        wide: bool = self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        return wide
