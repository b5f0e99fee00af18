"""The packages of the examples are found as if they were installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.examples import atlas_support, atlasqueue_support, delayed_support, queuectl_support, streams_support
from tests.examples.atlas_support import Atlas
from tests.support import redis
from tests.support.postgres import FLOOR, Postgres, shared

EXAMPLES = (queuectl_support, atlas_support, delayed_support, atlasqueue_support, streams_support)
sys.path[:0] = [str(each.EXAMPLE) for each in EXAMPLES]


@pytest.fixture
def delayed(tmp_path: Path) -> Iterator[delayed_support.Delayed]:
    """Delayed Queue, empty, on the Redis that the tests of this process share."""
    delayed = delayed_support.Delayed(redis.shared(), tmp_path)
    yield delayed
    delayed.close()


@pytest.fixture
def atlas(postgres: Postgres, tmp_path: Path) -> Iterator[Atlas]:
    """Atlas Jobs in a database of its own, on the PostgreSQL that the tests of this process share."""
    with closing(Atlas(postgres, tmp_path)) as atlas:
        yield atlas


@pytest.fixture
def atlasqueue(tmp_path: Path) -> Iterator[atlasqueue_support.Atlasqueue]:
    """AtlasQueue on the PostgreSQL of its document, 16, and on the servers that the tests of this process share."""
    queue = atlasqueue_support.Atlasqueue(shared(FLOOR), redis.shared(), tmp_path)
    yield queue
    queue.close()


@pytest.fixture(scope="session")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[streams_support.Streams]:
    """The `streams` example with a worker of each service, on the servers that the tests of this process share."""
    servers = dict.fromkeys(streams_support.SERVICES, shared())
    folder = tmp_path_factory.mktemp("streams")
    with (
        streams_support.Streams(folder, servers, redis.shared(), database=5) as system,
        system.worker("users"),
        system.worker("notifications"),
    ):
        yield system
