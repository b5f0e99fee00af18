"""What a crash of the store would lose is told while it runs: the server may be another one than was opened."""

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
