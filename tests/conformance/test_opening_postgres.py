"""Opening a PostgreSQL store: migrations that race, by hand, of the next version; and what cannot be opened."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import psycopg
import pytest

from holdfast.core.dependencies import Dependency
from holdfast.core.errors import ConfigError, HoldfastError, Invalid, StoreMismatch, Unavailable
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter
from holdfast.stores import open_store
from holdfast.stores.base import Store
from holdfast.stores.postgres import store as store_schema
from tests.conformance.support import lengthen_migrations, new_job, put, take_ids
from tests.support import postgres
from tests.support.certificates import Authority
from tests.support.postgres import PASSWORD, USER, Postgres, installed
from tests.support.stores import migrations

NAMES = migrations("postgres")

SOMETHING_ELSE = "create schema {0}; create table {0}.{1} (n int); grant all on schema {0} to " + USER


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.shared().fresh_schema() as schema:
        yield schema


@pytest.fixture(scope="module")
def strict() -> Iterator[Postgres]:
    """A server that asks for passwords."""
    with Postgres(durable=False, authenticated=True) as server:
        yield server


def url(schema: str, **parameters: object) -> str:
    return postgres.shared().url(schema=schema, **parameters)


async def opened(url: str) -> Store:
    store = open_store(url)
    await store.open()
    return store


async def works(url: str) -> bool:
    """Returns True if a store opens there without migrating and takes jobs, with and without a key."""
    store = await opened(url)
    try:
        assert await store.migrate() == []
        return await put(store, new_job(), new_job(key=new_id())) == await take_ids(store)
    finally:
        await store.close()


async def refused(url: str, kind: type[HoldfastError]) -> str:
    """The line that says why there is no store behind this URL; never with the password."""
    with pytest.raises(kind) as caught:
        await (await opened(url)).close()
    message = str(caught.value)
    assert "\n" not in message
    assert PASSWORD not in message
    return message


# ── migrations ────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_ten_starters_migrate_once(schema: str) -> None:
    stores = [open_store(url(schema)) for _ in range(10)]
    await asyncio.gather(*[store.open() for store in stores])
    applied = [name for store in stores for name in await store.migrate()]
    for store in stores:
        await store.close()
    assert sorted(applied) == NAMES


async def test_migration_does_not_block_others_while_a_table_is_read(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = lengthen_migrations(monkeypatch)["postgres"]
    first = open_store(url(schema)).migration_sql("0..1")
    with psycopg.connect(postgres.shared().url()) as reader, psycopg.connect(postgres.shared().url()) as other:
        reader.execute(first.encode())
        reader.commit()
        look = f"select count(*) from {schema}.job".encode()  # noqa: S608 - our own
        reader.execute(look)  # as a report does, or a backup
        store = open_store(url(schema))
        opening = asyncio.create_task(store.open())
        other.execute("set statement_timeout = '10s'")
        ended = time.monotonic() + 3
        while time.monotonic() < ended:
            await asyncio.to_thread(other.execute, look)
            other.rollback()
            await asyncio.sleep(0.05)
        assert not opening.done()
        reader.rollback()
        await opening
    assert await store.migrate() == names[1:]
    await store.close()


async def test_a_migration_that_cannot_have_its_lock_says_why(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_schema, "_TRIES", 2)
    lengthen_migrations(monkeypatch)
    with psycopg.connect(postgres.shared().url()) as reader:
        reader.execute(open_store(url(schema)).migration_sql("0..1").encode())
        reader.commit()
        reader.execute(f"select count(*) from {schema}.job".encode())  # noqa: S608 - our own
        message = await refused(url(schema), Unavailable)
    assert "in an open transaction" in message


@pytest.mark.parametrize("tool", ["psql", "psycopg"])
async def test_what_migrate_prints_makes_the_store(schema: str, tool: str) -> None:
    text = open_store(url(schema)).migration_sql(f"0..{len(NAMES)}")
    if tool == "psql":
        words = ["--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", "--dbname"]
        program = installed(postgres.MAIN) / "bin" / "psql"
        subprocess.run([program, *words, postgres.shared().url()], input=text, text=True, check=True, timeout=60)
    else:
        with psycopg.connect(postgres.shared().url()) as connection:
            connection.execute(text.encode())
    assert await works(url(schema))


@pytest.mark.parametrize("span", ["", "1", "0..", "..1", "1..1", "1..0", "0..99", "0..99999", "-1..1", "0...1", "a..b"])
def test_a_span_that_names_no_migrations_is_refused(schema: str, span: str) -> None:
    with pytest.raises(Invalid, match=rf"give FROM\.\.TO with 0 <= FROM < TO <= {len(NAMES)}"):
        open_store(url(schema)).migration_sql(span)


async def test_the_version_before_works_with_a_schema_that_only_grew(schema: str) -> None:
    await (await opened(url(schema))).close()
    postgres.shared().execute(f"alter table {schema}.job add column colour text")
    postgres.shared().execute(f"insert into {schema}.migration values (9, '0009_colour', true)")  # noqa: S608 - our own
    assert await works(url(schema))


async def test_a_schema_that_was_contracted_since_is_refused(schema: str) -> None:
    await (await opened(url(schema))).close()
    rows = "(8, '0008_colour', true), (9, '0009_no_rank', false)"
    postgres.shared().execute(f"insert into {schema}.migration values {rows}")  # noqa: S608 - our own
    message = await refused(url(schema), StoreMismatch)
    assert f"{schema!r} is at 9, this Holdfast knows {len(NAMES)}; upgrade Holdfast" in message


@pytest.mark.parametrize("table", ["job", "migration"])
async def test_the_schema_of_another_program_is_refused_and_not_touched(schema: str, table: str) -> None:
    postgres.shared().execute(SOMETHING_ELSE.format(schema, table))
    postgres.shared().execute(f"alter table {schema}.{table} owner to {USER}")
    assert "?schema=NAME" in await refused(url(schema), StoreMismatch)
    query = "select tablename from pg_tables where schemaname = %s"
    assert postgres.shared().execute(query, schema) == [(table,)]


# ── roles ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def limited(schema: str) -> Iterator[str]:
    """The name of a role that may create nothing."""
    name = f"r{schema}"
    server = postgres.shared()
    server.execute(f"create role {name} login")
    yield name
    server.execute(f"drop owned by {name}")
    server.execute(f"drop role {name}")


async def test_role_that_may_not_create_the_schema_gets_a_remedy(schema: str, limited: str) -> None:
    message = await refused(postgres.shared().url(user=limited, schema=schema), ConfigError)
    assert "permission denied" in message
    assert "holdfast migrate --sql" in message


async def test_role_without_rights_on_the_schema_is_refused_clearly(schema: str, limited: str) -> None:
    await (await opened(url(schema))).close()
    message = await refused(postgres.shared().url(user=limited, schema=schema), ConfigError)
    assert "permission denied for schema" in message


async def test_doctor_names_the_grants_that_a_role_lacks(schema: str, limited: str) -> None:
    await (await opened(url(schema))).close()
    for grant in (f"grant usage on schema {schema}", f"grant select on all tables in schema {schema}"):
        postgres.shared().execute(f"{grant} to {limited}", user=USER)
    store = await opened(postgres.shared().url(user=limited, schema=schema))
    (before,) = [finding for finding in await store.health.doctor() if finding.name == "rights"]
    assert before.level == "error"
    for name in ("job", "key", "job_seq_seq"):
        assert name in before.text.split(" on ")[1].split(", ")
    for grant in before.remedy.removeprefix("as their owner: ").split("; "):
        postgres.shared().execute(grant, user=USER)
    (after,) = [finding for finding in await store.health.doctor() if finding.name == "rights"]
    assert after.level == "ok"
    await store.close()
    assert await works(postgres.shared().url(user=limited, schema=schema))


async def test_grants_of_the_page_suffice_to_submit(schema: str, limited: str) -> None:
    """First what `holdfast.submit()` needs, then what a program needs."""
    server = postgres.shared()
    await (await opened(url(schema))).close()
    needed = [f"usage on schema {schema}", f"usage on all sequences in schema {schema}"]
    needed += [f"select, insert, update on {schema}.{table}" for table in ("job", "key", "tag")]
    for grant in needed:
        server.execute(f"grant {grant} to {limited}", user=USER)
    jobs = """[{"task": "work", "key": "k", "tags": ["a:1"]}]"""
    assert server.execute(f"select * from {schema}.submit(%s::jsonb)", jobs, user=limited)  # noqa: S608 - our own
    assert "permission denied" in await refused(server.url(user=limited, schema=schema), ConfigError)

    server.execute(f"grant select, insert, update on all tables in schema {schema} to {limited}", user=USER)
    store = await opened(server.url(user=limited, schema=schema))
    (first,) = await put(store, new_job(key="l"))
    await put(store, new_job(after=(Dependency(first),)))
    assert await store.query.count(JobFilter()) == 3
    await store.close()


# ── servers ───────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_a_wrong_password(strict: Postgres) -> None:
    wrong = strict.url().replace(":hunter2", ":wrong-secret")
    message = await refused(wrong, ConfigError)
    assert "password authentication failed" in message
    assert "wrong-secret" not in message


async def test_the_right_password(strict: Postgres) -> None:
    store = await opened(strict.url())
    assert "hunter2" not in store.url
    await store.close()


async def test_a_missing_database(strict: Postgres) -> None:
    assert 'database "nothing" does not exist' in await refused(strict.url("nothing"), ConfigError)


async def test_a_database_that_is_closed_to_connections(strict: Postgres) -> None:
    name = strict.create_database()
    strict.execute(f"alter database {name} allow_connections false")
    assert "not currently accepting connections" in await refused(strict.url(name), Unavailable)


async def test_a_database_in_another_encoding() -> None:
    server = postgres.shared()
    name = f"latin_{id(server)}"
    server.execute(f"create database {name} template template0 encoding 'LATIN1' locale 'C' owner {USER}")
    try:
        message = await refused(server.url(name), ConfigError)
    finally:
        server.execute(f"drop database {name} with (force)")
    assert "LATIN1" in message
    assert "createdb --encoding=UTF8" in message


async def test_a_server_that_is_not_there() -> None:
    with closing(Postgres()) as server:
        message = await refused(server.url(), Unavailable)
    assert f"127.0.0.1:{server.port} cannot be reached" in message


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://app@/app?host=/nowhere&port=5", "/nowhere:5"),
        ("postgresql://app@/app?host=127.0.0.1&port=1", "127.0.0.1:1"),
        ("postgresql://app@/app?port=1", "/nowhere/else:1"),
        ("postgresql://app@/app", "/nowhere/else"),
        ("postgresql://app@[::1]:1/app?port=7", "[::1]:1"),
    ],
)
async def test_a_server_that_is_not_there_is_named_wherever_its_host_is_given(
    monkeypatch: pytest.MonkeyPatch, url: str, place: str
) -> None:
    monkeypatch.setenv("PGHOST", "/nowhere/else")
    assert f"PostgreSQL at {place} cannot be reached" in await refused(url, Unavailable)


async def test_a_service_that_no_file_defines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "services"
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    message = f"url: service='shop': {file} does not define it"
    assert await refused("postgresql://app@/app?service=shop", ConfigError) == message
    file.write_text("[shop_2]\nhost=127.0.0.1\nport=1\n", encoding="utf-8")
    assert await refused("postgresql://app@/app?service=shop", ConfigError) == message
    assert "PostgreSQL at shop_2 cannot be reached" in await refused(
        "postgresql://app@/app?service=shop_2", Unavailable
    )


async def test_a_passfile_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "passfile"
    file.write_text("db.example:hunter2\n", encoding="utf-8")
    file.chmod(0o600)
    message = await refused(f"postgresql://app@127.0.0.1:1/app?passfile={file}", ConfigError)
    assert "passfile: a line is not host:port:database:user:password" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("migrated", [True, False])
async def test_a_server_that_takes_no_writes(strict: Postgres, migrated: bool) -> None:
    with strict.fresh_schema() as schema:
        if migrated:
            await (await opened(strict.url(schema=schema))).close()
        strict.change(default_transaction_read_only="on")
        try:
            message = await refused_at_work(strict.url(schema=schema))
        finally:
            strict.change(default_transaction_read_only="off")
    assert "read-only" in message


async def test_a_pooler_that_the_url_does_not_name() -> None:
    """PgBouncer refuses what a direct connection is opened with."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)  # a request for TLS
        writer.write(b"N")
        await reader.readexactly(int.from_bytes(await reader.readexactly(4)) - 4)
        fields = b"SFATAL\0C08P01\0Munsupported startup parameter: plan_cache_mode\0\0"
        writer.write(b"E" + (len(fields) + 4).to_bytes(4) + fields)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        message = await refused(f"postgresql://app@127.0.0.1:{port}/app", ConfigError)
    assert "add ?pooled=1 to the URL" in message


async def test_pooled_sessions_with_snapshots_of_their_own_are_refused() -> None:
    """Limits are counted in the snapshot of each statement, and a session behind a pooler cannot ask for that."""
    server = postgres.shared()
    database = server.create_database()
    server.execute(f"alter database {database} set default_transaction_isolation = 'repeatable read'")
    message = await refused(server.url(database=database, pooled=1), ConfigError)
    assert "alter role … set default_transaction_isolation = 'read committed'" in message
    store = open_store(server.url(database=database))
    await store.open()
    await store.close()


async def test_a_pooler_whose_sessions_have_snapshots_of_their_own_is_refused() -> None:
    """PgBouncer in session mode leaves out the settings that its configuration names."""
    server = postgres.shared()
    database = server.create_database()
    server.execute(f"alter database {database} set default_transaction_isolation = 'repeatable read'")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)  # a request for TLS
        writer.write(b"N")
        await reader.readexactly(int.from_bytes(await reader.readexactly(4)) - 4)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server.port)
        start = (3 << 16).to_bytes(4) + f"user\0{USER}\0database\0{database}\0\0".encode()
        to_server.write((len(start) + 4).to_bytes(4) + start)
        await asyncio.gather(pump(reader, to_server), pump(from_server, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as pooler:
        port = pooler.sockets[0].getsockname()[1]
        message = await refused(f"postgresql://{USER}@127.0.0.1:{port}/{database}", ConfigError)
    assert "alter role … set default_transaction_isolation = 'read committed'" in message


async def refused_at_work(url: str) -> str:
    store = open_store(url)

    async def work() -> None:
        await store.open()
        await put(store)

    try:
        with pytest.raises(Unavailable) as caught:
            await work()
    finally:
        await store.close()
    return str(caught.value)


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@asynccontextmanager
async def with_certificate(certificate: ssl.SSLContext) -> AsyncIterator[str]:
    """The URL of a server that presents this certificate, and answers nothing over TLS."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            await reader.readexactly(8)  # a request for TLS
            writer.write(b"S")
            await writer.start_tls(certificate)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"postgresql://app@127.0.0.1:{server.sockets[0].getsockname()[1]}/app?sslmode=verify-full"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize(
    ("host", "signer", "expired", "why"),
    [
        ("127.0.0.1", "other", False, "unable to get local issuer certificate; give the file .*sslrootcert=FILE"),
        ("db.example", "authority", False, "not valid for '127.0.0.1'; give .*the host as the certificate has it"),
        ("127.0.0.1", "authority", True, "certificate has expired; renew it"),
    ],
)
async def test_a_certificate_that_is_not_trusted(
    tmp_path: Path, host: str, signer: str, expired: bool, why: str
) -> None:
    signers = {name: Authority(tmp_path, name) for name in ("authority", "other")}
    async with with_certificate(signers[signer].server(host, expired=expired)) as url:
        message = await refused(f"{url}&sslrootcert={signers['authority'].file}", ConfigError)
    assert re.fullmatch(rf"PostgreSQL at 127\.0\.0\.1:\d+: its certificate is not trusted: .*{why}.*", message)


@pytest.mark.parametrize("wrong", ["authority", "no_key", "another_key"])
async def test_files_for_tls_that_cannot_be_used(authority: Authority, tmp_path: Path, wrong: str) -> None:
    (tmp_path / "other").mkdir()
    (certificate, key), (_, other_key) = authority.client(tmp_path), authority.client(tmp_path / "other")
    given = {
        "authority": f"&sslrootcert={key}",
        "no_key": f"&sslrootcert={authority.file}&sslcert={certificate}",
        "another_key": f"&sslrootcert={authority.file}&sslcert={certificate}&sslkey={other_key}",
    }
    async with with_certificate(authority.server()) as url:
        assert "the files given for TLS cannot be used: " in await refused(url + given[wrong], ConfigError)


async def test_certificates_that_nothing_is_there_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    message = await refused("postgresql://app@127.0.0.1:1/app?sslmode=verify-full", ConfigError)
    assert re.search("root certificate file .* does not exist", message)


# ── URLs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:hunter#2@host/db",
        "postgresql://app:hun/ter2@host/db",
        "postgresql://app:12/ter2@host/db",
        "postgresql://app:hunter?2@host/db",
        "postgresql://app:[hunter2@host/db",
        "postgresql://app:hunter2@host:port/db",
        "postgresql://app@host/db?password=hunter2",
        "postgresql://app@host/db?sslpassword=hunter2",
        "postgresql://app:hunter2@host/db?schema=a-b",
        "postgresql://app:hunter2@host/db?pooled=maybe",
        "postgresql://app:hunter2@host/db%00",
    ],
)
def test_unparsable_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url: ") as caught:
        open_store(url)
    assert not re.search(r"hun|ter2|\b12\b", str(caught.value))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://app:hunter2@one:5432,two:5433/db?schema=q", "postgresql://app@one:5432,two:5433/db?schema=q"),
        ("postgres://app:a%40b@[::1]:5432/db?pooled=1", "postgresql://app@[::1]:5432/db?pooled=1"),
        ("postgresql:///db?host=%2Frun%2Fpg", "postgresql:///db?host=%2Frun%2Fpg"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert open_store(url).url == shown
