"""``python -m tests.console.screenshots [FOLDER]``: pictures of all pages of the console, on an example store.

Each page in the light and the dark theme, for a desktop and a phone, below ``build/screenshots``.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from holdfast.core.lifecycle import Failed
from tests.console.scene import PAGES, Scene
from tests.console.world import make_world
from tests.support.browser import BrowserThread
from tests.web.client import Api
from tests.web.keyed import Keys
from tests.web.serving import Served

_WIDTHS = {"desktop": 1280, "phone": 360}
_ERRORS = ("TimeoutError: no answer of the payment service", "ValueError: amount is negative", "KeyError: 'address'")


def main() -> None:
    """Writes the pictures; prints where they are."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/screenshots")
    browser = BrowserThread()
    with tempfile.TemporaryDirectory(prefix="holdfast-screenshots-") as name:
        folder = Path(name)
        url = f"sqlite:///{folder}/jobs.db"
        with Api(url) as api:
            world = make_world(api)
            _add_jobs(api)
        keys = Keys(folder)
        with Served(folder, url, keys_file=str(keys.path)) as served:
            scene = Scene(browser, served, keys.spare, world)
            browser.run(lambda: take_pictures(scene, target))
            scene.client.close()
    browser.close()
    print(f"{len(list(target.rglob('*.png')))} pictures in {target}")


def _add_jobs(api: Api) -> None:
    """Adds jobs to several queues, some of them dead of different errors."""
    for number in range(60):
        queue = ("mail", "reports", "imports")[number % 3]
        job = api.submit(task=f"{queue}.run", queue=queue, payload={"number": number}, tags=[f"customer-{number % 4}"])
        if number % 4 == 0:
            error = _ERRORS[number % len(_ERRORS)]
            api.run(api.end(job["id"], Failed(error=error, traceback=f"Traceback\n{error}", retryable=False)))


def take_pictures(scene: Scene, target: Path) -> None:
    """Opens each page in both themes and widths, and writes a picture of it."""
    for theme in ("light", "dark"):
        for device, width in _WIDTHS.items():
            folder = target / f"{theme}-{device}"
            folder.mkdir(parents=True, exist_ok=True)
            with scene.open_tab(width=width, dark=theme == "dark") as tab:
                for page in PAGES:
                    tab.visit(scene.path(page))
                    name = re.sub(r"[^a-z0-9]+", "-", page).strip("-") or "overview"
                    tab.page.screenshot(path=folder / f"{name}.png", full_page=True)


if __name__ == "__main__":
    main()
