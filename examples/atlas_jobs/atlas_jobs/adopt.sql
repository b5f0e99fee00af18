-- The rows of the original's own table, as any of its migrations V1 to V5 left it: what a version does not have is null.
-- Its instances must not run any more; what they were running is run again. The old table stays, under another name.
set local timezone to 'UTC';
lock table jobs in access exclusive mode;

with given as (
    select
        (r ->> 'job_id')::uuid as id, upper(r ->> 'status') as status, r ->> 'job_type' as task,
        json_build_object('payload', r #>> '{payload}')::text as payload, -- JSONB until V2, TEXT since
        (r ->> 'attempt_count')::bigint as failures, (r ->> 'max_attempts')::bigint as max_attempts,
        r ->> 'idempotency_key' as key, r ->> 'worker_id' as worker,
        'Error: ' || (r ->> 'last_error') as error, -- Holdfast says the type of an exception first; the view leaves it out
        (extract(epoch from (r ->> 'next_run_at')::timestamptz) * 1000000)::bigint as run_at,
        (extract(epoch from (r ->> 'created_at')::timestamptz) * 1000000)::bigint as created_at,
        (extract(epoch from (r ->> 'updated_at')::timestamptz) * 1000000)::bigint as updated_at,
        (extract(epoch from statement_timestamp()) * 1000000)::bigint as now
    from (select to_jsonb(t) as r from jobs t) each
), old as materialized (
    select *, failures + case status when 'SUCCEEDED' then 1 else 0 end as attempts,
        case status
            when 'SUCCEEDED' then 5
            when 'DEAD_LETTERED' then 6
            when 'RUNNING' then 0
            else case when coalesce(run_at, 0) <= now then 0 when failures > 0 then 3 else 1 end
        end as state
    from given
), jobs_taken as (
    insert into holdfast.job (id, queue, task, payload, state, rank, run_at, created_at, ended_at, attempts, claims,
        max_attempts, has_key, worker, reason, error)
    select id, 'default', task, payload, state, 0, coalesce(run_at, created_at), created_at,
        case when state >= 5 then updated_at end, attempts, attempts, max_attempts, key is not null, worker,
        case when state = 6 then 'max_attempts' end, error
    from old order by created_at, id
), keys_taken as (
    insert into holdfast.key (key, job_id) select key, id from old where key is not null
)
insert into holdfast.attempt (job_id, claims, attempt, ended_at, state, worker, reason, error)
select id, attempts, attempts, updated_at, state, worker, 'error', error from old where failures > 0 and state <> 5;

alter table jobs rename to jobs_before_holdfast;
