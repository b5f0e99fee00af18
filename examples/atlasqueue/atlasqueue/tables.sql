-- AtlasQueue's tables, column by column, as views of Holdfast's.
create or replace view jobs as
select
    j.id,
    j.task as type,
    j.payload::json as payload,
    case when j.state in ('scheduled', 'waiting') then 'queued' else j.state end as status, -- run_at says since when
    j.attempts,
    j.max_attempts,
    j.run_at,
    j.lease_until as locked_until,
    case when j.state = 'running' then j.worker end as lock_owner,
    j.error as last_error,
    j.created_at,
    greatest(j.created_at, j.started_at, j.ended_at, (
        select to_timestamp(max(a.ended_at) / 1000000.0) from holdfast.attempt a where a.job_id = j.id
    )) as updated_at
from holdfast.jobs j;

create or replace view idempotency_keys as
select k.key, k.job_id, j.created_at from holdfast.key k left join holdfast.jobs j on j.id = k.job_id;

-- Without these a change of a view would reach Holdfast's tables. PostgreSQL heeds the second of each pair, which also
-- refuses a change of no row, only where the first is there.
create or replace function refuse_change() returns trigger language plpgsql as $$
begin
    raise exception using errcode = 'feature_not_supported',
        message = format('%s is a view, and %s is refused: change jobs through Holdfast', tg_table_name, tg_op),
        hint = 'Submit jobs over HTTP or with holdfast.submit(), and use "holdfast cancel", "replay" or "delete".';
end $$;

create or replace trigger refuse_row instead of insert or update or delete on jobs
    for each row execute function refuse_change();
create or replace trigger refuse_statement before insert or update or delete on jobs
    for each statement execute function refuse_change();
create or replace trigger refuse_row instead of insert or update or delete on idempotency_keys
    for each row execute function refuse_change();
create or replace trigger refuse_statement before insert or update or delete on idempotency_keys
    for each statement execute function refuse_change();
