"""Statistics of a schema's tables as they were at several moments: filling a store takes longer than all its plans."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.support import postgres

_RELATIONS = """select oid from pg_class where relnamespace = '{schema}'::regnamespace and relkind in ('r', 'i')
    and relname not like 'kept_%'"""
_PREPARE = """
set allow_system_table_mods = on;
do $$
declare each regclass;
begin
    for each in select oid from pg_class where relnamespace = '{schema}'::regnamespace and relkind = 'r' loop
        execute format('alter table %s set (autovacuum_enabled = off)', each);
    end loop;
end $$;
create table {schema}.kept_statistic as select ''::text as moment, s.* from pg_statistic s limit 0;
create table {schema}.kept_class (moment text, id oid, pages integer, tuples real, visible integer);
"""
_SAVE = """
delete from {schema}.kept_statistic where moment = '{moment}';
insert into {schema}.kept_statistic select '{moment}', s.* from pg_statistic s where starelid in ({relations});
delete from {schema}.kept_class where moment = '{moment}';
insert into {schema}.kept_class
select '{moment}', oid, relpages, reltuples, relallvisible from pg_class where oid in ({relations});
"""
_RESTORE = """
delete from pg_statistic where starelid in ({relations});
insert into pg_statistic select {columns} from {schema}.kept_statistic where moment = '{moment}';
update pg_class set relpages = pages, reltuples = tuples, relallvisible = visible
from {schema}.kept_class where id = pg_class.oid and moment = '{moment}';
"""


class KeptStatistics:
    """The statistics of one schema by the name of a moment. The server gathers no others by itself."""

    def __init__(self, major: int, schema: str) -> None:
        url = postgres.shared(major).url(user=postgres.SUPERUSER)
        self._connection: psycopg.Connection[Any] = psycopg.connect(url, autocommit=True)
        columns = self._connection.execute(
            "select string_agg(attname, ', ' order by attnum) from pg_attribute "
            "where attrelid = 'pg_statistic'::regclass and attnum > 0"
        ).fetchone()
        assert columns is not None
        self._words = {"schema": schema, "columns": columns[0], "relations": _RELATIONS.format(schema=schema)}
        self._run(_PREPARE)

    def _run(self, statements: str, moment: str = "") -> None:
        self._connection.execute(statements.format(moment=moment, **self._words).encode(), prepare=False)

    def save(self, moment: str) -> None:
        """Keep the statistics that there are, under this name."""
        self._run(_SAVE, moment)

    def restore(self, moment: str) -> None:
        """Make them those of that moment again."""
        self._run(_RESTORE, moment)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
