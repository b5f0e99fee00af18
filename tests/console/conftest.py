"""The console on an empty store, with a file of keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.scene import Scene
from tests.console.visitor import Visitor
from tests.console.world import HOSTILE, World, make_world
from tests.support.browser import BrowserThread
from tests.support.stores import MIGRATED, stores_of
from tests.web.client import Api
from tests.web.keyed import Keys
from tests.web.serving import Served


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "home" in metafunc.fixturenames:
        names = stores_of(metafunc.module.__name__.rpartition(".")[2], older=False)
        metafunc.parametrize("home", names, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test with a browser in the thread of the browser."""
    browser = pyfuncitem.funcargs.get("browser")
    if browser is None:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    browser.run(lambda: pyfuncitem.obj(**given))
    return True


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserThread]:
    """The browser of this test process."""
    browser = BrowserThread()
    yield browser
    browser.close()


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    with MIGRATED[request.param](tmp_path) as url:
        yield url


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def api(home: str, keys: Keys) -> Iterator[Api]:
    """An API with keys."""
    with Api(home, keys_file=str(keys.path)) as api:
        yield api


@pytest.fixture
def visitor(api: Api, keys: Keys) -> Visitor:
    """A visitor who is signed in with a key for everything."""
    visitor = Visitor(api)
    assert visitor.sign_in(keys.spare).status_code == 303
    return visitor


@pytest.fixture
def open_api(api: Api, keys: Keys) -> Api:
    """The same API, whose helper shows a key."""
    api._client.headers["x-api-key"] = keys.spare
    return api


@pytest.fixture
def world(open_api: Api) -> World:
    return make_world(open_api)


@pytest.fixture
def scene(home: str, tmp_path: Path, browser: BrowserThread) -> Iterator[Scene]:
    """The console as a process, on a store with one of everything, whose texts are hostile."""
    keys = Keys(tmp_path)
    with Api(home) as api:
        world = make_world(api, HOSTILE)
    with Served(tmp_path, home, keys_file=str(keys.path)) as served:
        scene = Scene(browser, served, keys.spare, world)
        yield scene
        scene.client.close()
