"""Reports of what a crash of the store would lose, while it runs: the server may be another one than was opened."""

from __future__ import annotations

from tests.support.redis import Redis
from tests.web.client import Api


def test_readiness_says_how_durable_the_store_is_now() -> None:
    with Redis(settings={"appendfsync": "always"}) as server, Api(server.url(durability="always")) as api:
        sound = api.get("/health/ready")
        server.execute("CONFIG", "SET", "appendfsync", "everysec")
        weaker = api.get("/health/ready")

        assert "survives a kill and a power cut" in sound["durability"]
        assert "warnings" not in sound
        assert "a power cut loses the last 1 to 2 seconds" in weaker["durability"]
        assert weaker["warnings"] == [f"durability: {weaker['durability']}; config set appendfsync always"]
        assert weaker["status"] == "ready"


def test_readiness_warns_of_a_server_that_evicts() -> None:
    with Redis() as server, Api(server.url()) as api:
        server.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        (warning,) = api.get("/health/ready")["warnings"]
        assert "maxmemory-policy=allkeys-lru: a full Redis drops jobs" in warning
        assert warning.endswith("config set maxmemory-policy noeviction")
