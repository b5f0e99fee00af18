"""Findings about a store from its server's settings and statistics, each with its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.models import Finding
from holdfast.stores.common.named_sql import nameless_queue
from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.pool import Connection, PostgresPool
from holdfast.stores.postgres.query import PostgresQuery

_OLD_S = 300
"""Seconds after which a transaction is worth a word."""
_NOTIFY_FULL = 0.5
_DEAD = 100_000
_INDEXES = frozenset(
    {"job_pkey", "job_ready", "job_quarantined", "job_waiting", "job_due", "job_due_any_queue", "job_lease"}
    | {"job_unsuccessful", "job_ended", "tag_pkey", "tag_of", "key_pkey", "key_of", "key_over", "attempt_pkey"}
    | {"line_pkey", "job_dead", "attempt_retried", "job_waiting_any_queue", "dependency_pkey", "dependency_on"}
    | {"receiver_pkey", "receiver_ordinal", "signal_pkey", "signal_kept", "signal_kept_any_job", "signal_sent"}
)
_OLDEST = """
select 'session ' || pid || ' (' || coalesce(nullif(application_name, ''), 'unnamed') || ', ' || state || ')',
    extract(epoch from statement_timestamp() - xact_start)::int, 'select pg_terminate_backend(' || pid || ')'
from pg_stat_activity
where (backend_xmin is not null or backend_xid is not null) and pid <> pg_backend_pid() and xact_start is not null
    and datname = current_database() and backend_type <> 'autovacuum worker'
union all
select 'the prepared transaction ' || quote_literal(gid), extract(epoch from statement_timestamp() - prepared)::int,
    'rollback prepared ' || quote_literal(gid)
from pg_prepared_xacts where database = current_database()
order by 2 desc limit 1
"""
_HIDDEN = """
select count(*) from pg_stat_activity
where usename <> current_user and datname = current_database()
    and not pg_has_role(current_user, 'pg_read_all_stats', 'usage')
"""
_SLOT = "select slot_name from pg_replication_slots where not active and (xmin is not null or restart_lsn is not null)"
_TABLE = """
select coalesce(n_live_tup, 0), coalesce(n_dead_tup, 0), current_setting('autovacuum') = 'on',
    not coalesce('autovacuum_enabled=false' = any(c.reloptions) or 'autovacuum_enabled=off' = any(c.reloptions), false)
from pg_class c join pg_namespace n on n.oid = c.relnamespace left join pg_stat_user_tables s on s.relid = c.oid
where n.nspname = $1 and c.relname = 'job'
"""
_VALID = """
select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and i.indisvalid
"""
_NOT_GRANTED = """
select quote_ident(current_user), string_agg(c.relname, ', ' order by c.relname),
    current_setting('transaction_read_only') = 'on' from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and case c.relkind
    when 'r' then not (has_table_privilege(c.oid, 'select') and has_table_privilege(c.oid, 'insert')
        and has_table_privilege(c.oid, 'update') and has_table_privilege(c.oid, 'delete'))
    when 'S' then not has_sequence_privilege(c.oid, 'usage') end
"""


class PostgresHealth:
    """Family ``health`` of PostgreSQL."""

    def __init__(self, pool: PostgresPool, statements: Mapping[str, NumberedStatement], query: PostgresQuery) -> None:
        self._pool = pool
        self._sql = statements
        self._query = query

    async def doctor(self) -> list[Finding]:
        address = self._pool.address

        async def run_once(connection: Connection) -> list[Finding]:
            through = connection.get_server_pid() != await connection.fetchval("select pg_backend_pid()")
            return [
                await durability(connection),
                Finding("version", "ok", f"PostgreSQL {await connection.fetchval('show server_version')}"),
                await _rights(connection, address.schema),
                await _transactions(connection),
                await _slots(connection),
                _vacuum(address.schema, await connection.fetchrow(_TABLE, address.schema)),
                await _indexes(connection, address.schema),
                await _notifications(connection),
                check_pooler(pooled=address.pooled, through=through),
            ]

        findings = await self._pool.call(run_once)
        ((stuck,),) = await self._pool.fetch(self._sql["stuck"])
        ((nameless,),) = await self._pool.fetch(self._sql["nameless_queue_jobs"])
        return [*findings, _leases(stuck), nameless_queue(nameless, f"{address.schema}.job")]

    async def durability(self) -> Finding:
        return await self._pool.call(durability)

    async def repair(self) -> list[Finding]:
        return []  # the database's own constraints hold

    async def backup(self, path: str) -> None:
        address = self._pool.address
        raise ConfigError(
            "PostgreSQL is backed up by its own tools; for the queue alone: pg_dump --format=custom "
            f"--schema={address.schema} --file={path} '{address.libpq}'"
        )

    async def server_time_us(self) -> int:
        return await self._query.server_time_us()


async def durability(connection: Connection) -> Finding:
    """Returns the durability in effect on a connection."""
    fsync, commit, pages, standbys = [
        await connection.fetchval("select current_setting($1)", name)
        for name in ("fsync", "synchronous_commit", "full_page_writes", "synchronous_standby_names")
    ]
    text = f"fsync={fsync} synchronous_commit={commit} full_page_writes={pages}"
    if fsync == "off" or pages == "off":
        wrong = " and ".join(name for name, value in (("fsync", fsync), ("full_page_writes", pages)) if value == "off")
        remedy = f"set {wrong} = on in the server's configuration"
        return Finding("durability", "error", f"{text}: a crash of the host can lose everything", remedy)
    if commit == "off":
        remedy = "alter role … set synchronous_commit = on, and start the programs anew"
        return Finding("durability", "error", f"{text}: a crash loses the last acknowledged jobs", remedy)
    if commit == "local" and standbys:
        remedy = "set synchronous_commit = on for this role"
        return Finding("durability", "warning", f"{text}: a failover can lose acknowledged jobs", remedy)
    return Finding("durability", "ok", f"{text}{', with synchronous standbys' if standbys else ''}")


async def _rights(connection: Connection, schema: str) -> Finding:
    role, names, read_only = await connection.fetchrow(_NOT_GRANTED, schema)
    if read_only:
        remedy = "name the primary in the URL, or set default_transaction_read_only = off"
        return Finding("rights", "error", "the server takes no writes", remedy)
    if names is None:
        return Finding("rights", "ok", f"the role {role} may do what workers and submitters do")
    remedy = (
        f"as their owner: grant select, insert, update, delete on all tables in schema {schema} to {role}; "
        f"grant select, usage on all sequences in schema {schema} to {role}"
    )
    text = f"the role {role} lacks select, insert, update or delete, or usage of a sequence, on {names}"
    return Finding("rights", "error", text, remedy)


async def _transactions(connection: Connection) -> Finding:
    """Finding about transactions that keep dead rows from being removed."""
    row = await connection.fetchrow(_OLDEST)
    if row is not None and row[1] >= _OLD_S:
        who, age, remedy = row
        text = f"{who} holds a transaction open for {age} s: no vacuum can clear what ended since"
        return Finding("transactions", "warning", text, f"end it, or: {remedy}")
    hidden = await connection.fetchval(_HIDDEN)
    if hidden:
        text = f"none of this role's is old; those of {hidden} other sessions cannot be seen"
        return Finding("transactions", "ok", text, "to see them: grant pg_read_all_stats to this role")
    return Finding("transactions", "ok", "none is old")


async def _slots(connection: Connection) -> Finding:
    name = await connection.fetchval(_SLOT)
    if name is None:
        return Finding("replication", "ok", "no replication slot is left behind")
    text = f"no client reads the replication slot {name}: the server keeps everything for it until its disk is full"
    return Finding("replication", "warning", text, f"start its reader, or: select pg_drop_replication_slot('{name}')")


def _vacuum(schema: str, row: Any) -> Finding:
    live, dead, server, table = row
    text = f"autovacuum of the job table is {'on' if server and table else 'off'}; {live:,} live rows, {dead:,} dead"
    if not server:
        return Finding("vacuum", "error", text, "set autovacuum = on in the server's configuration")
    if not table:
        return Finding("vacuum", "error", text, f"alter table {schema}.job reset (autovacuum_enabled)")
    if dead > _DEAD and dead > 2 * live:
        return Finding("vacuum", "warning", text, f"vacuum {schema}.job, and look for old transactions")
    return Finding("vacuum", "ok", text)


async def _indexes(connection: Connection, schema: str) -> Finding:
    missing = sorted(_INDEXES - {name for (name,) in await connection.fetch(_VALID, schema)})
    if not missing:
        return Finding("indexes", "ok", "all there and valid")
    remedy = "create them again (drop an invalid one first): holdfast migrate --sql FROM..TO prints how"
    return Finding("indexes", "error", f"missing or invalid: {', '.join(missing)}", remedy)


async def _notifications(connection: Connection) -> Finding:
    usage = float(await connection.fetchval("select pg_notification_queue_usage()"))
    text = f"the server's notification queue is {usage:.0%} full"
    if usage < _NOTIFY_FULL:
        return Finding("notifications", "ok", text)
    return Finding("notifications", "warning", text, "end the oldest transaction of the sessions that listen")


def check_pooler(*, pooled: bool, through: bool) -> Finding:
    """``through``: something between us and the server answers in its place."""
    if through and not pooled:
        text = "there is a pooler in between, and the URL does not say so"
        return Finding("pooler", "warning", text, "in transaction mode add ?pooled=1 to the URL; session mode is fine")
    if pooled and not through:
        text = "pooled=1, but nothing is in between: workers poll without need"
        return Finding("pooler", "warning", text, "leave pooled=1 out of the URL: workers are woken then")
    return Finding("pooler", "ok", "pooled=1: workers poll" if pooled else "a direct connection: workers are woken")


def _leases(stuck: int) -> Finding:
    if not stuck:
        return Finding("leases", "ok", "no job runs under a lease that expired over a minute ago")
    return Finding("leases", "warning", f"{stuck} jobs run under expired leases", "start a worker: it recovers them")
