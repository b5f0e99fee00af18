"""Who may use the Redis store, and how a connection is secured: RELIABILITY X20."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError, HoldfastError, StoreMismatch, Unavailable
from holdfast.core.ids import new_id
from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.core.schedule import Schedule, ScheduleChange
from holdfast.stores import open_store
from tests.conformance.support import new_job, put, settle, stored, take
from tests.faults.support import finding, opened
from tests.support.certificates import Authority
from tests.support.fault_proxy import FaultProxy
from tests.support.pages import find_block
from tests.support.redis import FLOORS, MAIN, PASSWORD, Redis

# ── rights ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [MAIN, *FLOORS])
async def test_passwords_users_and_rights(kind: str) -> None:
    with Redis(kind, password=PASSWORD) as server:
        async with opened(server.url(namespace="other")) as store:
            await put(store)
        for wrong in (server.url().replace("hunter2", "hunter3"), f"redis://127.0.0.1:{server.port}/0"):
            with pytest.raises(ConfigError, match=r"refuses us: [^;]*[^.;]; check"):
                await open_store(wrong).open()
        server.execute("ACL", "LOG", "RESET")
        server.execute(*find_block("docs/redis.md", "ACL SETUSER").text.split())
        mine = f"redis://queue:secret@127.0.0.1:{server.port}/0"
        async with opened(mine) as store:
            await put(store)
            (job,) = await take(store)
            assert (await settle(store, job)).accepted
            await store.queueing.wait(["queue:default"], timeout=0.2)
            assert (await finding(store, "durability")).level == "ok"
        assert server.execute("ACL", "LOG") == []  # nothing that we call is denied
        with pytest.raises(ConfigError, match="refuses us"):
            await open_store(f"{mine}?namespace=other").open()
        server.execute("ACL", "SETUSER", "queue", "-config")
        async with opened(mine) as store:
            durability = await finding(store, "durability")
            assert (durability.level, "+config|get" in durability.remedy) == ("warning", True)
        server.execute("ACL", "SETUSER", "queue", "-info")
        with pytest.raises(ConfigError, match="refuses us"):
            await open_store(mine).open()


async def test_a_database_that_the_server_does_not_have_is_refused(server: Redis) -> None:
    with pytest.raises(ConfigError, match=r"refuses us: .*DB index is out of range; check the URL"):
        await open_store(server.url().replace("/0", "/99999")).open()


async def test_resp3_and_other_databases(server: Redis) -> None:
    with server.fresh_namespace() as namespace:
        url = server.url(namespace=namespace, protocol="3").replace("/0?", "/3?")
        async with opened(url) as store, opened(url) as other:
            (job_id,) = await put(store, new_job(priority=2, key="k"))
            (job,) = await take(other)
            waiting = asyncio.create_task(store.queueing.wait([f"job:{job_id}"], timeout=50))
            assert (await settle(other, job, result="1")).accepted
            await asyncio.wait_for(waiting, timeout=30)
            assert (await stored(store, job_id)).result == "1"
            assert [each.level for each in await store.health.doctor()].count("error") == 0
            await store.admin.delete([job_id])
            schedule = Schedule(id=new_id(), name="hourly", job=new_job(), every_us=3_600_000_000)
            assert await store.schedules.write_schedule(ScheduleChange(schedule, 0)) is not None
            assert [each.name for each in await store.schedules.read_schedules()] == ["hourly"]
            limit = Limit(name="mail", queue="mail", values=LimitValues(concurrency=1))
            assert await store.limits.write_limit(LimitChange(limit, 0)) is not None
            assert [each.name for each in await store.limits.read_limits()] == ["mail"]


async def test_a_namespace_that_is_not_ours_or_newer_is_refused(server: Redis) -> None:
    with server.fresh_namespace() as namespace:
        url = server.url(namespace=namespace)
        server.execute("SET", f"{{{namespace}}}:meta", "theirs")
        with pytest.raises(StoreMismatch, match="belongs to another program"):
            await open_store(url).open()
        server.execute("DEL", f"{{{namespace}}}:meta")
        server.execute("HSET", f"{{{namespace}}}:meta", "schema", 99)
        with pytest.raises(StoreMismatch, match="upgrade"):
            await open_store(url).open()


async def test_backups_are_the_servers_own_affair(url: str) -> None:
    async with opened(url) as store:
        with pytest.raises(HoldfastError, match="redis-cli"):
            await store.health.backup("/tmp/nowhere")


async def test_a_host_over_ipv6_is_named_as_in_the_url(hurried: None) -> None:
    with pytest.raises(Unavailable, match=r"^Redis at \[::1\]:1 cannot be reached"):
        await open_store("redis://[::1]:1/0").open()


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def secured(server: Redis, proxy: FaultProxy, **parameters: str) -> str:
    """The URL over TLS through the proxy."""
    url = server.url(namespace="tls", **parameters)
    return url.replace("redis://", "rediss://").replace(f":{server.port}/", f":{proxy.port}/")


async def test_a_certificate_that_is_trusted_opens_every_connection(authority: Authority) -> None:
    with Redis(password=PASSWORD) as server, FaultProxy(server.port, tls=authority.server()) as proxy:
        for protocol in ("2", "3"):
            url = secured(server, proxy, ssl_ca_certs=str(authority.file), protocol=protocol)
            async with opened(url) as store, opened(url) as other:
                (job_id,) = await put(store, new_job(payload='"' + "x" * 200_000 + '"'))
                waiting = asyncio.create_task(other.queueing.wait([f"job:{job_id}"], timeout=50))
                (job,) = await take(store)
                await asyncio.sleep(0)
                assert (await settle(store, job)).accepted
                await asyncio.wait_for(waiting, timeout=30)


async def test_a_certificate_that_is_not_trusted_is_refused_by_default(authority: Authority, tmp_path: Path) -> None:
    other_user = Authority(tmp_path, "other_user")
    with (
        Redis() as server,
        FaultProxy(server.port, tls=authority.server()) as proxy,
        FaultProxy(server.port, tls=authority.server("elsewhere.example")) as shared_worker_id,
    ):
        refused = [
            (secured(server, proxy), "unable to get local issuer certificate"),
            (secured(server, proxy, ssl_ca_certs=str(other_user.file)), "unable to get local issuer certificate"),
            (secured(server, shared_worker_id, ssl_ca_certs=str(authority.file)), "not valid for '127.0.0.1'"),
        ]
        for url, why in refused:
            for kind in ("rediss:", "rediss+cluster:", "rediss+sentinel:"):
                path = "/name/0?" if "sentinel" in kind else "/0?"
                with pytest.raises(ConfigError, match=f"certificate is not trusted: .*{why}.*ssl_ca_certs=FILE"):
                    await open_store(url.replace("rediss:", kind).replace("/0?", path)).open()
        unchecked = secured(server, shared_worker_id, ssl_ca_certs=str(authority.file), ssl_check_hostname="no")
        for accepted in (unchecked, secured(server, proxy, ssl_cert_reqs="none")):
            async with opened(accepted) as store:
                await put(store)


async def test_a_certificate_that_has_expired_is_to_be_renewed(authority: Authority) -> None:
    with Redis() as server, FaultProxy(server.port, tls=authority.server(expired=True)) as proxy:
        url = secured(server, proxy, ssl_ca_certs=str(authority.file))
        with pytest.raises(ConfigError, match="is not trusted: certificate has expired; renew it"):
            await open_store(url).open()


async def test_a_key_of_another_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (certificate, _), (_, key) = authority.client(tmp_path), authority.client(tmp_path / "other")
    with Redis() as server, FaultProxy(server.port, tls=authority.server()) as proxy:
        url = secured(server, proxy, ssl_certfile=str(certificate), ssl_keyfile=str(key))
        with pytest.raises(ConfigError, match=r"the files given for TLS cannot be used: .*key values mismatch"):
            await open_store(url).open()


async def test_client_certificate_is_presented_on_request(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.client(tmp_path)
    with Redis() as server, FaultProxy(server.port, tls=authority.server(clients=True)) as proxy:
        url = secured(server, proxy, ssl_ca_certs=str(authority.file))
        with pytest.raises(Unavailable):
            await open_store(url).open()
        async with opened(f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}") as store:
            await put(store)


async def test_tls_mismatch_is_reported_in_both_directions(authority: Authority) -> None:
    with Redis() as server, FaultProxy(server.port, tls=authority.server()) as proxy:
        with pytest.raises((ConfigError, Unavailable), match="speak TLS"):
            await open_store(server.url().replace("redis://", "rediss://")).open()
        with pytest.raises(Unavailable, match=r"cannot be reached: .*; does that port speak TLS \(rediss://\)\?"):
            await open_store(secured(server, proxy).replace("rediss://", "redis://")).open()


def test_files_that_are_not_there_and_passphrases_are_minded() -> None:
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        with pytest.raises(ConfigError, match=f"{name}='/nowhere.pem': there is no such file"):
            open_store(f"rediss://localhost/0?{name}=/nowhere.pem")
    assert "hunter2" not in open_store("rediss://localhost/0?ssl_password=hunter2").url
    assert open_store("redis://:hunter2@localhost/0").url == "redis://localhost/0"
    assert open_store("postgresql://:hunter2@localhost/db").url == "postgresql://localhost/db"
